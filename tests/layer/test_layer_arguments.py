"""FusedMoE's records, and vLLM's keyword names for their fields."""

from __future__ import annotations

import pytest
import torch
from layer_cases import E, H, logits_for, make_layer

from moekit import LayerParallelism, ParallelConfig, RoutingConfig, SharedExperts
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
         "shared_experts": SharedExperts(torch.sin, partial=True)},
        {**ROUTING, **PARALLELISM, "shared_experts": torch.sin, "shared_experts_partial": True,
         "use_grouped_topk": True},
    ):  # fmt: skip
        layer = make_layer(**arguments)
        layer.load_weights(random_weights(layer.problem))
        outs.append(layer(random_x(layer.problem, 9), logits_for(layer, 9)))
        layers.append(layer)
    assert torch.equal(*outs)
    one, other = ((v.problem, v.placement, v.partial, v.flow.shared) for v in layers)
    assert one == other and one[3] == SharedExperts(torch.sin, partial=True)
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
        (
            {"shared_experts": SharedExperts(torch.sin), "shared_experts_partial": False},
            "shared_experts and shared_experts_partial are both given",
        ),
        ({"routing": {"renormalize": True}}, "routing=.* must be a RoutingConfig, or None"),
        ({"parallelism": ParallelConfig()}, "parallelism=.* must be a LayerParallelism, or None"),
        (
            {"use_grouped_topk": True},
            r"^use_grouped_topk=True needs num_expert_group and topk_group \(got neither\)$",
        ),
        (
            {"use_grouped_topk": False, "num_expert_group": 3, "topk_group": 1},
            "^use_grouped_topk=False contradicts num_expert_group=3 and topk_group=1: leave both",
        ),
        ({"use_grouped_topk": "yes"}, "use_grouped_topk='yes': it must be True or False"),
    ],
)
def test_contradicting_arguments_are_refused(arguments, said) -> None:
    with pytest.raises(InvalidProblem, match=said):
        make_layer(**arguments)


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'renormalise'"):
        make_layer(renormalise=True)


def test_a_correction_bias_may_be_filled_later() -> None:
    bias = torch.zeros(E)
    layer = make_layer(routing=RoutingConfig(e_score_correction_bias=bias))
    layer.load_weights(random_weights(layer.problem))
    x, logits = random_x(layer.problem, 5), torch.zeros(5, E)
    before = layer(x, logits)
    bias[E - 1] = 1.0
    assert not torch.equal(before, layer(x, logits)) and x.shape == (5, H)
