"""A problem in the library's terms: rounds, library experts, and where each id goes.

Three things differ between the two:

- The library corrupts rows without a word when a rank sends more tokens than its GPU has
  multiprocessors (its send loop reuses shared memory without a barrier). So a call is cut into
  *rounds* of at most 128 tokens, each through an object of its own. The library counts on from what
  an expert already has, so the rounds' rows follow each other in one slab.
- Each rank has the same number of experts there: a rank that holds fewer has a few unused ones.
- Each of a token's K slots must name an expert, and no expert twice. So each rank gets *spare*
  experts behind its own. Slot k's -1 goes to a spare expert that no other slot of this rank uses,
  hence no spare ever gets more than one row a token. Experts never see these slabs; on the way
  back they are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moekit.plugin import MoEProblem, partition

TOKENS_PER_ROUND = 128
MAX_TOKENS = 1024


@dataclass(frozen=True)
class Wire:
    """What travels of a token: bytes of values, and fp32 scales (0: none, else a multiple of 4)."""

    row_bytes: int
    scales: int


@dataclass(frozen=True)
class Layout:
    """ranks, rank: of the group. experts: most that a rank holds. spares: behind them, per rank.
    rounds of ``tokens`` tokens each; ``slab_rows``: C.
    """

    ranks: int
    rank: int
    experts: int
    spares: int
    rounds: int
    tokens: int
    slab_rows: int
    top_k: int
    hidden_size: int

    @classmethod
    def of(cls, problem: MoEProblem, multiprocessors: int) -> Layout:
        capacity, ranks = problem.max_num_tokens, problem.parallel.ep_size
        assert capacity is not None
        rounds = -(-capacity // min(TOKENS_PER_ROUND, multiprocessors))
        return cls(
            ranks=ranks,
            rank=problem.parallel.ep_rank,
            experts=-(-problem.num_physical_experts // ranks),
            spares=-(-problem.top_k // ranks),
            rounds=rounds,
            tokens=-(-capacity // rounds),
            slab_rows=ranks * capacity,
            top_k=problem.top_k,
            hidden_size=problem.hidden_size,
        )

    @property
    def slabs(self) -> int:
        """Library experts on a rank."""
        return self.experts + self.spares

    def parts(self, num_tokens: int) -> list[slice]:
        """Each round's tokens; a round without any is a round still, for the other ranks' sake."""
        ends = [min(num_tokens, (i + 1) * self.tokens) for i in range(self.rounds)]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def destinations(self, problem: MoEProblem) -> Tensor:
        """(P + K,) int32: library expert of each physical id, then of -1 in each slot."""
        table = []
        for rank in range(self.ranks):
            held = partition(problem.num_physical_experts, self.ranks, rank)
            table += [rank * self.slabs + local for local in range(len(held))]
        for slot in range(self.top_k):  # this rank's own spare first
            other = (self.rank + slot) % self.ranks
            table.append(other * self.slabs + self.experts + slot // self.ranks)
        return torch.tensor(table, dtype=torch.int32)

    def library_bytes(self, wire: Wire) -> int:
        """Device memory of the library's objects for one call (`AllToAllIntraNode`)."""
        per_peer = 16 + _up(4 * self.slabs)
        sent = _up(wire.row_bytes + 4 * wire.scales + 4)
        rows = self.tokens * self.slabs
        peer = per_peer + rows * max(sent, _up(4 * self.hidden_size))
        indices = 6 * 4 * rows * self.ranks + 4 * self.slabs * self.ranks * 2 + 4 * self.tokens
        return self.rounds * (self.ranks * peer + indices)

    def lane_bytes(self, wire: Wire, dtype: torch.dtype) -> int:
        """Device memory that one call in flight keeps."""
        y = self.slabs * self.slab_rows * self.hidden_size * dtype.itemsize
        return self.library_bytes(wire) + y

    def transient_bytes(self, problem: MoEProblem, num_tokens: int) -> int:
        """Bytes that a call allocates and frees."""
        p, rows, groups = problem, self.slabs * self.slab_rows, 0
        if p.quant.activation is not None:
            groups = p.quant.activation.scale_shape(1, p.hidden_size)[1]
        slabs = rows * (self.hidden_size * p.dtype.itemsize + 2 * 4 * scale_columns(groups))
        tokens = self.top_k * (4 + 4 + 8) + 4 * scale_columns(groups) + 2 * self.hidden_size
        return slabs + num_tokens * tokens + 4 * self.slabs


def scale_columns(groups: int) -> int:
    """fp32 scales of a row as they lie in the slab: one, or a multiple of 16 bytes."""
    return groups if groups < 2 else -(-groups // 4) * 4


def _up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
