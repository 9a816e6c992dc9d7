"""FusedMoE's records, and vLLM's keyword names for their fields."""

from __future__ import annotations

import pytest
import torch
from layer_cases import E, H, logits_for, make_layer

from moekit import ParallelConfig
from moekit.testing.cases import random_weights, random_x

ROUTING = {
    "scoring_func": "sigmoid",
    "renormalize": False,
    "e_score_correction_bias": torch.linspace(0, 1, E),
    "num_expert_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
PARALLELISM = {
    "parallel": ParallelConfig(ep_size=2, ep_rank=1, dp_size=1),
    "reduce_results": False,
    "expert_placement_strategy": "round_robin",
}


def test_keywords_of_routing_and_parallelism() -> None:
    layer = make_layer(**ROUTING, **PARALLELISM, shared_experts=torch.sin)
    layer.load_weights(random_weights(layer.problem))
    assert layer(random_x(layer.problem, 9), logits_for(layer, 9)).shape == (9, H)
    assert layer.partial and layer.flow.shared is torch.sin
    assert layer.placement.on_rank(1) == tuple(range(1, E, 2))
    assert "routing: sigmoid, best 2 of 3 groups, correction bias, scaled by 2.5" in repr(layer)


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'renormalise'"):
        make_layer(renormalise=True)
