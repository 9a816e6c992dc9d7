"""Where a call's data lies in a rank's buffer, and what the dispatcher takes on a rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from moekit.plugin import Footprint, MoEProblem

_ALIGN = 256


@dataclass(frozen=True)
class Layout:
    """Byte offsets in a buffer that every rank has, for rows (source rank, slot).

    x: rows as they travel, at most hidden_size * itemsize bytes; scale: fp32; ids: int32 local
    experts; weights: fp32; y: the experts' output; flags: int64, two for each rank.
    """

    ranks: int
    capacity: int
    groups: int
    x: int
    scale: int
    ids: int
    weights: int
    y: int
    flags: int
    nbytes: int

    @classmethod
    def of(cls, problem: MoEProblem) -> Layout:
        p, capacity = problem, problem.max_num_tokens
        assert capacity is not None
        ranks, groups = p.parallel.num_ranks, 0
        if p.quant.activation is not None:
            groups = p.quant.activation.scale_shape(1, p.hidden_size)[1]
        row = p.hidden_size * p.dtype.itemsize
        sizes = [row, 4 * groups, 4 * p.top_k, 4 * p.top_k, row]
        padded = [-(-ranks * capacity * size // _ALIGN) * _ALIGN for size in sizes]
        x, scale, ids, weights, y, flags = accumulate(padded, initial=0)
        nbytes = flags + 2 * 8 * ranks
        return cls(ranks, capacity, groups, x, scale, ids, weights, y, flags, nbytes)


def transient_bytes(problem: MoEProblem, num_tokens: int) -> int:
    """Return the bytes of a call of ``num_tokens``: slots, and the quantized row with its scale."""
    p = problem
    slots = 4 * num_tokens * p.parallel.ep_size
    if p.quant.activation is None:
        return slots
    groups = p.quant.activation.scale_shape(1, p.hidden_size)[1]
    return slots + num_tokens * (p.hidden_size * 10 + 8 * groups)


def footprint(problem: MoEProblem) -> Footprint:
    """Return what a rank takes when every rank passes ``max_num_tokens``."""
    layout = Layout.of(problem)
    return Footprint(
        rows=layout.ranks * layout.capacity,
        buffers={"symmetric memory": layout.nbytes},
        transient=transient_bytes(problem, layout.capacity),
        source="its own layout; a second buffer where two calls are in flight",
        across=("all ranks must be on one host, whose GPUs reach each other's memory",),
    )
