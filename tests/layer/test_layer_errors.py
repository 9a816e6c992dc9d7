"""The errors of FusedMoE."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from layer_cases import E, H, I, K, check_logits, loaded_layer, logits_for, make_layer
from torch import nn

import moekit
from moekit import ParallelConfig
from moekit.errors import (
    GroupMismatch,
    InvalidInput,
    InvalidProblem,
    MoekitError,
    WeightsError,
)
from moekit.testing.cases import random_weights, random_x

ROUTING = moekit.route(torch.randn(5, E), K)


def given(ids=ROUTING.topk_ids, weights=ROUTING.topk_weights) -> dict:
    return {"router_logits": None, "topk_ids": ids, "topk_weights": weights}


@pytest.mark.parametrize(
    ("knobs", "error", "said"),
    [
        ({"scoring_func": "tanh"}, InvalidProblem, "scoring='tanh': it must be one of"),
        ({"num_expert_group": 3, "topk_group": 1}, InvalidProblem, "top_k=3 exceeds the 2"),
        (
            {"e_score_correction_bias": torch.zeros(E), "zero_expert_num": 2},
            InvalidInput,
            r"correction_bias must be \(8,\) of a float dtype",
        ),
        (
            {"custom_routing_function": lambda *a: a, "routed_scaling_factor": 2.0},
            InvalidProblem,
            "would ignore routed_scaling_factor",
        ),
        (
            {"custom_routing_function": lambda *a: a, "scoring_func": "sigmoid", "topk_group": 1},
            InvalidProblem,
            "would ignore scoring_func, topk_group",
        ),
        (
            {"expert_placement_strategy": "random"},
            InvalidProblem,
            "must be linear or round_robin",
        ),
        (
            {"expert_placement_strategy": "round_robin", "num_redundant_experts": 2},
            InvalidProblem,
            "places no replicas",
        ),
        (
            {"tp_size": 2, "parallel": ParallelConfig()},
            InvalidProblem,
            "tp_size, dp_size and enable_expert_parallel must not be",
        ),
        (
            {"parallel": ParallelConfig(ep_size=2, dp_size=1)},
            GroupMismatch,
            "torch.distributed is not initialized",
        ),
        (
            {"experts": "torch", "dispatcher": "local", "parallel": ParallelConfig(ep_size=2)},
            GroupMismatch,
            "not initialized",
        ),
    ],
)
def test_wrong_arguments(knobs, error, said) -> None:
    with pytest.raises(error, match=said) as caught:
        make_layer(**knobs)
    assert isinstance(caught.value, MoekitError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_this_machine_lacks() -> None:
    with pytest.raises(InvalidProblem, match="device 'cuda' was asked for, but torch sees none"):
        make_layer(device="cuda")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.randn(5, H + 1)}, r"x must have shape \(\.\.\., 64\) \(got \(5, 65\)\)"),
        ({"x": torch.randn(H)}, r"x must have shape .* \(got \(64,\)\)"),
        ({"x": torch.randn(5, H).bfloat16()}, "x is torch.bfloat16, expected torch"),
        (
            {"router_logits": torch.randn(4, E)},
            r"router_logits must have shape \(5, 6\) .*got \(4, 6\)",
        ),
        ({"router_logits": torch.randn(5, E + 1)}, r"router_logits must have .*got \(5, 7\)"),
        ({"router_logits": torch.full((5, E), float("nan"))}, "NaN or infinity, .*first token 0"),
        ({"router_logits": torch.zeros(5, E, dtype=torch.long)}, "must be .* float dtype"),
        ({"router_logits": None}, "give router_logits, or both topk_weights and topk_ids"),
        ({"topk_ids": ROUTING.topk_ids}, "not both"),
        (given(weights=None), "or both topk_weights and topk_ids"),
        (given(ids=ROUTING.topk_ids[:, :2]), r"topk_ids must have shape \(5, 3\) .*got \(5, 2\)"),
        (given(ids=ROUTING.topk_ids + E), r"topk_ids span .* 0\.\.5"),
        (given(weights=ROUTING.topk_weights.half()), "topk_weights are torch.float16, expected"),
        ({"is_padding": torch.zeros(4, dtype=torch.bool)}, r"is_padding must have .*got \(4,\)"),
        ({"is_padding": torch.zeros(5)}, "must be .* bool"),
        ({"max_tokens": 3}, "max_tokens=3 is less than this rank's 5 tokens"),
    ],
)
def test_wrong_calls(change, said) -> None:
    layer, weights = loaded_layer()
    call = {"x": torch.randn(5, H), "router_logits": torch.randn(5, E), **change}
    with pytest.raises(InvalidInput, match=said):
        layer(call.pop("x"), **call)
    check_logits(layer, weights, renormalize=True)  # the next call is right


@pytest.mark.parametrize("knobs", [{"zero_expert_num": 2}, {"num_redundant_experts": 1}], ids=str)
def test_ids_beyond_all_experts(knobs) -> None:
    layer = make_layer(**knobs)
    layer.load_weights(random_weights(layer.problem))
    last = E + knobs.get("zero_expert_num", 0)
    x, weights = torch.randn(1, H), torch.ones(1, K)
    for bad in (last, -2):
        with pytest.raises(InvalidInput, match=rf"topk_ids span .*0\.\.{last - 1}"):
            layer(x, topk_weights=weights, topk_ids=torch.full((1, K), bad))


def test_shared_experts_of_another_shape() -> None:
    for function in (lambda x: x[:, :3], lambda x: x.double()):
        layer, _ = loaded_layer(shared_experts=function)
        with pytest.raises(InvalidInput, match="shared experts returned .* expected"):
            layer(torch.randn(5, H), torch.randn(5, E))


@pytest.mark.parametrize("function", [lambda x: x.mul_(2), lambda x: x.relu_().clone()])
def test_shared_experts_that_change_x(function) -> None:
    """They run while tokens are in flight: `local` hands x itself to the routed experts."""
    layer, _ = loaded_layer(shared_experts=function)
    with pytest.raises(InvalidInput, match="changed their input in place, .*: return a new tensor"):
        layer(torch.randn(5, H), torch.randn(5, E))


def test_a_layer_does_not_run_after_loading_failed() -> None:
    layer, weights = loaded_layer()
    x, logits = random_x(layer.problem, 5), logits_for(layer, 5)
    layer(x, logits)
    wrong = weights.select([0, 1, 2, 3, 4])
    with pytest.raises(WeightsError, match=r"w13 has shape \(5, 192, 64\).*w2 has shape \(5, 64"):
        layer.load_weights(wrong)
    with pytest.raises(WeightsError, match="has no packed weights: call load_weights"):
        layer(x, logits)
    with pytest.raises(WeightsError, match="has no packed weights"):
        layer.warmup(4)
    assert "weights: not loaded" in repr(layer)
    layer.load_weights(weights)
    layer.warmup(4)
    check_logits(layer, weights, renormalize=True)
    layer.destroy()
    layer.destroy()
    with pytest.raises(WeightsError, match="has no packed weights"):
        layer(x, logits)


def test_a_checkpoint_that_fails_leaves_no_weights(tmp_path) -> None:
    layer, weights = loaded_layer()
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(WeightsError):
        layer.load_checkpoint(tmp_path / "model.safetensors", "qwen3_moe", 0)
    assert layer.packed is None


def test_replicas_of_another_shape() -> None:
    layer, _ = loaded_layer()
    for table in (torch.zeros(E + 1, 2, dtype=torch.long), torch.zeros(E, dtype=torch.long)):
        with pytest.raises(InvalidInput, match=r"must be \(6, M\)"):
            layer.set_replicas(table)
    with pytest.raises(InvalidInput, match=r"must be on cpu \(got meta\)"):
        layer.set_replicas(torch.zeros(E, 1, dtype=torch.long, device="meta"))


def test_a_layer_cannot_be_copied() -> None:
    layer, weights = loaded_layer(shared_experts=nn.Linear(H, H))
    assert layer.to("cpu") is layer and layer.to(torch.float32) is layer and layer.eval() is layer
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(MoekitError, match="cannot be copied or pickled"):
            duplicate(layer)
    linear = layer.flow.shared.requires_grad_(False)
    check_logits(layer, weights, shared=linear, renormalize=True)


def test_repr() -> None:
    layer, _ = loaded_layer(prefix="mlp", zero_expert_num=2, experts="torch")
    text = repr(layer)
    assert "mlp: 6 experts, top 3, hidden 64, intermediate 96, float32" in text
    assert "kernel: local + torch (dispatcher by priority" in text
    assert "routing: softmax, renormalized, 2 zero experts" in text
    assert "weights: 0.4 MiB" in text
    parallel = ParallelConfig(ep_size=3, ep_rank=1, dp_size=1)
    layer = make_layer(
        parallel=parallel, reduce_results=False, expert_placement_strategy="round_robin"
    )
    assert "rank 1 of 3 (ep_size=3, tp_size=1), 1 token batch, experts 1, 4;" in repr(layer)
    assert "outputs are partial sums" in repr(layer)
    assert layer.problem.intermediate_size == I
