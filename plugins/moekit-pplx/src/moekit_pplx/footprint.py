"""The bytes that the dispatcher takes on a rank."""

from __future__ import annotations

from moekit.plugin import Footprint, MoEProblem

from .layout import TOKENS_PER_ROUND, Layout, Wire


def footprint(problem: MoEProblem) -> Footprint:
    tokens = problem.max_num_tokens
    assert tokens is not None
    at = Layout.of(problem, TOKENS_PER_ROUND)
    lane = at.lane_bytes(Wire(problem.hidden_size * problem.dtype.itemsize, 0), problem.dtype)
    return Footprint(
        rows=at.slab_rows,
        buffers={"library objects and output, for each in-flight call": lane},
        transient=at.transient_bytes(problem, tokens),
        source="the dispatcher's function, from the library's intranode sizes",
    )
