"""FusedMoE's records, and vLLM's keyword names for their fields."""

from __future__ import annotations

import pytest
import torch
from layer_cases import E, logits_for, make_layer

from moekit import LayerParallelism, ParallelConfig, RoutingConfig
from moekit.errors import InvalidProblem
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


def test_records_and_keywords_make_the_same_layer() -> None:
    outs, layers = [], []
    for arguments in (
        {"routing": RoutingConfig(**ROUTING), "parallelism": LayerParallelism(**PARALLELISM),
         "shared_experts": torch.sin},
        {**ROUTING, **PARALLELISM, "shared_experts": torch.sin},
    ):  # fmt: skip
        layer = make_layer(**arguments)
        layer.load_weights(random_weights(layer.problem))
        outs.append(layer(random_x(layer.problem, 9), logits_for(layer, 9)))
        layers.append(layer)
    assert torch.equal(*outs)
    one, other = ((v.problem, v.placement, v.partial, v.flow.shared) for v in layers)
    assert one == other and one[3] is torch.sin
    assert "routing: sigmoid, best 2 of 3 groups, correction bias, scaled by 2.5" in repr(layers[0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"routing": RoutingConfig(), "renormalize": True, "topk_group": 1},
            "routing and renormalize, topk_group are both given: set them in the RoutingConfig",
        ),
        (
            {"parallelism": LayerParallelism(), "tp_size": 1},
            "parallelism and tp_size are both given",
        ),
    ],
)
def test_contradicting_arguments_are_refused(arguments, said) -> None:
    with pytest.raises(InvalidProblem, match=said):
        make_layer(**arguments)


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'renormalise'"):
        make_layer(renormalise=True)
