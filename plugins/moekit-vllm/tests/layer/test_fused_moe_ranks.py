"""vLLM's FusedMoE over two processes: slices, whole experts, token batches, replicas."""

from __future__ import annotations

import fused_moe_ranks
import pytest
from rank_pools import rank_pool

ranks = rank_pool(2)


EPLB = {"enable_eplb": True, "num_redundant_experts": 3}
CASES = [
    ({"tp_size": 2}, False),
    ({"tp_size": 2, "reduce_results": True}, True),
    ({"ep_size": 2}, False),
    ({"tp_size": 2, "ep_size": 2, **EPLB}, False),
    ({"dp_size": 2, "ep_size": 2}, True),
    ({"tp_size": 2, "ep_size": 2, "expert_placement_strategy": "round_robin"}, False),
]


@pytest.mark.parametrize(("sizes", "complete"), CASES, ids=str)
def test_ranks_compute_the_whole_layer(ranks, sizes: dict, complete: bool) -> None:
    """Partial outputs are summed by the model, complete ones are left as they are."""
    for said in ranks.run(fused_moe_ranks.run, sizes, False):
        assert said["error"] < 1e-5 and said["complete"] == complete


@pytest.mark.parametrize("sizes", [sizes for sizes, _ in CASES if "dp_size" not in sizes], ids=str)
def test_shared_experts_that_are_sliced(ranks, sizes: dict) -> None:
    """Their partial outputs are summed with the routed ones: by the model, or by the layer."""
    for said in ranks.run(fused_moe_ranks.run, sizes, True):
        assert said["error"] < 1e-5
