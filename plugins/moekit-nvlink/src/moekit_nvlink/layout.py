"""The layout of a call's data in a rank's buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from moekit.plugin import MoEProblem, round_up

_ALIGN = 256
_PHASES = 2  # of a call before its combine: see `kernels.flags`
# From this many tokens of a rank on, experts may leave the sum to the combine (`kernels.reduce`),
# which takes them in _CHUNKS chunks. Layers of 1024 tokens gain nothing between two H100.
REDUCED_FROM, _CHUNKS = 2048, 8
# A program's step has code for each rank; two and four ranks were measured.
_REDUCED_RANKS = 8


@dataclass(frozen=True)
class Ranks:
    """This rank's place, and how experts and tokens lie on the ranks.

    rank: its place in the group of ``count`` ranks; ``copies`` consecutive ranks hold the same
    tokens. ``shares`` ranks share the experts: ``share`` each, and one more for ``larger`` of them;
    ``tp`` consecutive ranks slice them.
    """

    rank: int
    count: int
    copies: int
    shares: int
    tp: int
    share: int
    larger: int
    experts: int  # on this rank

    @classmethod
    def of(cls, problem: MoEProblem) -> Ranks:
        parallel = problem.parallel
        count, shares = parallel.num_ranks, parallel.ep_size
        share, larger = divmod(problem.num_physical_experts, shares)
        copies = max(1, count // parallel.dp_size)
        return cls(parallel.rank, count, copies, shares, parallel.tp_size, share, larger,
                   problem.num_local_experts)  # fmt: skip

    @property
    def batches(self) -> int:
        return self.count // self.copies

    @property
    def count_2(self) -> int:
        """Return ``count`` rounded up to a power of 2."""
        return 1 << (self.count - 1).bit_length()


@dataclass(frozen=True)
class Layout:
    """Byte offsets in a buffer, which every rank has.

    Standard: ``rows`` are (slot, batch), with ids and weights for each, so that a call of few
    tokens takes the first ones. Batched: they are (local expert, slot), with ``slots`` for each
    expert. ``entries`` is the number of rows that a token
    gets back from other ranks: one for each share of the experts, or one for each assignment.
    ``top_k``: layers with another one must not share a buffer, even if all offsets are equal. A
    row's ids lie elsewhere then, and ids of an earlier call would be taken for this one's.

    x: rows as they travel, at most hidden_size * itemsize bytes; scale: fp32; ids: int32 local
    experts; weights: fp32; y: the experts' output; grads: fp32, router gradients, in layers that
    train; counts: int32, by batch and expert; flags: int64. Only the rank itself uses places, int32
    `Call.places`, and received, int32, the used rows of its experts. chunks: parts of a call that
    are combined as they come, each with a flag.
    """

    batched: bool
    capacity: int
    top_k: int
    slots: int
    rows: int
    entries: int
    x: int
    scale: int
    ids: int
    weights: int
    y: int
    grads: int
    counts: int
    places: int
    received: int
    flags: int
    chunks: int
    nbytes: int

    @classmethod
    def of(cls, problem: MoEProblem, batched: bool) -> Layout:
        p, ranks, capacity = problem, Ranks.of(problem), problem.max_num_tokens
        assert capacity is not None
        slots = ranks.batches * capacity
        experts = ranks.share + bool(ranks.larger)
        rows = slots * experts if batched else slots
        entries = p.top_k if batched else ranks.shares
        row, each = p.hidden_size * p.dtype.itemsize, 0 if batched else p.top_k
        sizes = [
            rows * row,
            rows * 4 * p.scales_per_row,
            rows * 4 * each,
            rows * 4 * each,
            rows * row,
            rows * 4 * each * p.training,
            ranks.batches * p.num_physical_experts * 4 * batched,
            capacity * 4 * (2 * p.top_k if batched else ranks.shares),
            experts * 4 * batched,
        ]
        padded = (round_up(size, _ALIGN) for size in sizes)
        x, scale, ids, weights, y, grads, counts, places, received, flags = accumulate(
            padded, initial=0
        )
        reduced = not batched and ranks.copies == 1 and capacity >= REDUCED_FROM
        chunks = _CHUNKS if reduced and 1 < ranks.count <= _REDUCED_RANKS else 1
        nbytes = flags + (_PHASES + chunks) * 8 * ranks.count
        return cls(
            batched, capacity, p.top_k, slots, rows, entries, x, scale, ids, weights, y, grads,
            counts, places, received, flags, chunks, nbytes,
        )  # fmt: skip

    def of_call(self, tokens: int) -> Layout:
        """Return the layout of a call in which no rank passes more than ``tokens``: fewer rows."""
        slots = self.slots // self.capacity * tokens
        return replace(self, slots=slots, rows=self.rows // self.slots * slots)

    @property
    def chunk(self) -> int:
        """Return the tokens of a chunk."""
        return -(-self.capacity // self.chunks)
