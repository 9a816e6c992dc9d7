"""Batch-invariant layers: routing, chunks, transformers, and ranks against one rank."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

import moekit
from moekit import FusedMoE
from moekit.testing.cases import generator, random_weights, random_x

E, K, H, INNER = 10, 4, 48, 32


def logits_for(tokens: int, width: int = E) -> Tensor:
    return torch.randn(tokens, width, generator=generator("logits")) * 4


def same(one: moekit.Routing, other: moekit.Routing) -> bool:
    weights = torch.equal(one.topk_weights, other.topk_weights)
    return weights and torch.equal(one.topk_ids, other.topk_ids)


# -- routing ------------------------------------------------------------------------------------

OPTIONS = {
    "softmax": {},
    "renormalized": {"renormalize": True},
    "sigmoid": {"scoring": "sigmoid", "renormalize": True},
    "softplus": {"scoring": "sqrtsoftplus"},
    "groups": {"scoring": "sigmoid", "num_expert_group": 2, "topk_group": 1},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("width", [8, 10, 60, 130, 256, 514])
def test_routing_does_not_depend_on_other_tokens(options, width) -> None:
    logits = logits_for(1100, width)

    def routed(rows: slice) -> moekit.Routing:
        return moekit.route(logits[rows], K, **OPTIONS[options], batch_invariant=True)

    every, default = routed(slice(None)), moekit.route(logits, K, **OPTIONS[options])
    assert torch.equal(every.topk_ids, default.topk_ids)
    torch.testing.assert_close(every.topk_weights, default.topk_weights, rtol=1e-6, atol=0)
    for tokens in (1, 2, 3, 7, 8, 9, 63, 64, 65, 200, 1000):
        for start in (0, 5, 100):
            rows = slice(start, start + tokens)
            part = moekit.Routing(every.topk_weights[rows], every.topk_ids[rows])
            assert same(routed(rows), part), f"{tokens} tokens from {start}"
    assert routed(slice(0, 0)).topk_ids.shape == (0, K)


# -- layers -------------------------------------------------------------------------------------


def layer(**changes) -> FusedMoE:
    arguments = {"device": "cpu", "batch_invariant": True, "scoring_func": "sigmoid"}
    return FusedMoE(E, K, H, INNER, **{**arguments, **changes})


@pytest.mark.parametrize("knobs", [{}, {"max_num_tokens": 7}, {"zero_expert_num": 2}])
def test_a_layer_gives_a_token_the_same_bits_in_every_call(knobs) -> None:
    made = layer(**knobs, shared_experts=lambda x: x * 2)
    made.load_weights(random_weights(made.problem))
    x, logits = random_x(made.problem, 70), logits_for(70, made.router.width)
    every = made(x, logits)
    for tokens in (1, 2, 7, 17, 33):
        for start in (0, 3, 37):
            rows = slice(start, start + tokens)
            assert torch.equal(made(x[rows], logits[rows]), every[rows])
    made.destroy()


# -- transformers -------------------------------------------------------------------------------


def test_the_transformers_integration_passes_it_on() -> None:
    pytest.importorskip("transformers")
    integration = importlib.import_module("moekit.integrations.transformers")
    packed_layer = importlib.import_module("moekit.integrations.packed_layer")
    models = importlib.import_module("transformers")
    config = models.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, moe_intermediate_size=32, num_experts=8,
        num_experts_per_tok=4, head_dim=16,
    )  # fmt: skip
    integration.install(batch_invariant=True)
    try:
        model = models.AutoModelForCausalLM.from_config(config, experts_implementation="moekit")
        experts = model.eval().model.layers[0].mlp.experts
        x, r = torch.randn(40, 64), moekit.route(torch.randn(40, 8), 4)
        every = experts(x, r.topk_ids, r.topk_weights)
        (kernel,) = integration.kernels(model).values()
        assert kernel.problem.batch_invariant and packed_layer.Layer.options.batch_invariant
        for token in range(40):
            row = slice(token, token + 1)
            assert torch.equal(experts(x[row], r.topk_ids[row], r.topk_weights[row]), every[row])
    finally:
        integration.uninstall()
