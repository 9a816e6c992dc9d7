"""Tell what the dispatcher takes on a rank, without creating it."""

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
        buffers={"objects and slabs, for each call in flight": lane},
        transient=at.transient_bytes(problem, tokens),
        source="the dispatcher's own function, over the library's intranode sizes",
        across=(
            "needs the library's internode kernels, over NVSHMEM with IBGDA and a network card per "
            "GPU (RDMA); this adapter drives the intranode ones, which map memory of one host",
            "layout: any order; every rank writes to every other one",
        ),
    )
