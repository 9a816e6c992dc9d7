"""The bytes that the dispatcher takes on a rank."""

from __future__ import annotations

import torch

from moekit.plugin import Footprint, MoEProblem, round_up

from .layout import TOKENS_PER_ROUND, Layout, Wire


def footprint(problem: MoEProblem) -> Footprint:
    tokens = problem.max_num_tokens
    assert tokens is not None
    at = Layout.of(problem, TOKENS_PER_ROUND)
    wire = Wire(problem.hidden_size * problem.dtype.itemsize, 0)
    lane = lane_bytes(at, wire, problem.dtype)
    return Footprint(
        rows=at.slab_rows,
        buffers={"library objects and output, for each in-flight call": lane},
        transient=transient_bytes(at, problem, tokens),
        source="the dispatcher's function, from the library's intranode sizes",
    )


def library_bytes(at: Layout, wire: Wire) -> int:
    """Return the device memory of the library's objects (`AllToAllIntraNode`) for one call."""
    sent = round_up(wire.row_bytes + 4 * wire.scales + 4, 16)
    rows = at.tokens * at.slabs
    returned = round_up(4 * at.hidden_size, 16)
    peer = 16 + round_up(4 * at.slabs, 16) + rows * max(sent, returned)
    indices = 6 * 4 * rows * at.ranks + 4 * at.slabs * at.ranks * 2 + 4 * at.tokens
    return at.rounds * (at.ranks * peer + indices)


def lane_bytes(at: Layout, wire: Wire, dtype: torch.dtype) -> int:
    """Return the device memory of one in-flight call."""
    y = at.slabs * at.slab_rows * at.hidden_size * dtype.itemsize
    return library_bytes(at, wire) + y


def transient_bytes(at: Layout, problem: MoEProblem, num_tokens: int) -> int:
    """Return the bytes that a call allocates and frees."""
    rows, scales = at.slabs * at.slab_rows, scale_columns(problem.scales_per_row)
    slabs = rows * (at.hidden_size * problem.dtype.itemsize + 2 * 4 * scales)
    tokens = at.top_k * (4 + 4 + 8) + 4 * scales + 2 * at.hidden_size
    return slabs + num_tokens * tokens + 4 * at.slabs


def scale_columns(groups: int) -> int:
    """Return the fp32 scales of a stored row: one, or a multiple of 16 bytes."""
    return groups if groups < 2 else round_up(groups, 4)
