"""Translate a problem to the library's terms: rounds, library experts, and destinations of ids.

The library differs from moekit in three ways:

- It silently corrupts rows when a rank sends more tokens than its GPU has multiprocessors, since
  its send loop reuses shared memory without a barrier. A call is therefore divided into *rounds* of
  at most 128 tokens, each with its own object. The library continues an expert's count, so the rows
  of all rounds follow each other in the batched layout.
- Each rank has the same number of experts; a rank that holds fewer has unused ones.
- Each of a token's K assignments must name a different expert. So each rank gets *spare* experts
  behind its own. The k-th assignment's -1 goes to a spare expert that no other assignment of this
  rank uses, so a spare gets at most one row per token. Experts never see rows of spares, and
  `finalize` reads zeros for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moekit.plugin import MoEProblem, partition

TOKENS_PER_ROUND = 128
MAX_TOKENS = 1024


@dataclass(frozen=True)
class Wire:
    """The bytes of a sent token's values, and its fp32 scales (0, or a multiple of 4)."""

    row_bytes: int
    scales: int


@dataclass(frozen=True)
class Layout:
    """The library's sizes."""

    ranks: int
    rank: int
    experts: int  # the most experts of a rank
    spares: int  # spare experts of each rank, behind its experts
    rounds: int
    tokens: int  # of a round, at most
    slab_rows: int  # the capacity C
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

    def of_call(self, most: int) -> Layout:
        """Return the layout of a call of at most ``most`` tokens: fewer rounds and rows."""
        return replace(self, rounds=-(-most // self.tokens), slab_rows=self.ranks * most)

    def output(self, y_SCH: Tensor) -> Tensor:
        """Return memory (slabs, this call's C, H) in the lane's, with the same spare rows."""
        rows_NH, each = y_SCH.flatten(0, 1), y_SCH.shape[1]
        start = self.experts * (each - self.slab_rows)
        part = rows_NH[start : start + self.slabs * self.slab_rows]
        return part.view(self.slabs, self.slab_rows, self.hidden_size)

    @property
    def slabs(self) -> int:
        """The library experts of a rank."""
        return self.experts + self.spares

    def parts(self, num_tokens: int) -> list[slice]:
        """Return each round's tokens; a round without tokens still runs, for the other ranks."""
        ends = [min(num_tokens, (i + 1) * self.tokens) for i in range(self.rounds)]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def destinations(self, problem: MoEProblem) -> Tensor:
        """Return (P + K,) int32: the library expert of each physical id, then of each -1."""
        table = []
        for rank in range(self.ranks):
            held = partition(problem.num_physical_experts, self.ranks, rank)
            table += [rank * self.slabs + local for local in range(len(held))]
        for slot in range(self.top_k):  # this rank's own spare first
            other = (self.rank + slot) % self.ranks
            table.append(other * self.slabs + self.experts + slot // self.ranks)
        return torch.tensor(table, dtype=torch.int32)
