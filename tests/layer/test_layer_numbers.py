"""Every option of FusedMoE against the oracle, on one rank."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from layer_cases import (
    E,
    H,
    I,
    K,
    check_logits,
    check_routed,
    expected,
    loaded_layer,
    logits_for,
    make_layer,
)
from torch import nn

import moekit
from moekit import Activation, ParallelConfig, Routing
from moekit.testing import assert_close
from moekit.testing.cases import random_routing, random_weights, random_x

BIAS = torch.randn(E)


def custom(hidden_states, router_logits, top_k, renormalize):
    """Choose the experts after the one that a token's first element names; weights from x."""
    first = (hidden_states[:, :1].abs() * 10).long() % E
    ids = (first + torch.arange(top_k)) % E
    weights = router_logits.gather(1, ids).sigmoid() * (2.0 if renormalize else 1.0)
    return weights, ids


# vLLM's keywords, and route's where they have another name.
ROUTE_NAMES = {"scoring_func": "scoring", "e_score_correction_bias": "correction_bias"}


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"renormalize": False},
        {"scoring_func": "sigmoid", "renormalize": False},
        {"scoring_func": "sqrtsoftplus"},
        {"scoring_func": "sigmoid", "e_score_correction_bias": BIAS},
        {"num_expert_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
        {
            "scoring_func": "sigmoid",
            "e_score_correction_bias": BIAS,
            "num_expert_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 0.5,
            "renormalize": False,
        },
    ],
)
def test_routing(knobs) -> None:
    options = {ROUTE_NAMES.get(name, name): value for name, value in knobs.items()}
    check_logits(*loaded_layer(**knobs), **{"renormalize": True, **options})


@pytest.mark.parametrize("renormalize", [False, True])
def test_custom_routing_gets_the_arguments_of_vllm(renormalize) -> None:
    layer, weights = loaded_layer(custom_routing_function=custom, renormalize=renormalize)
    x, logits = random_x(layer.problem, 9), logits_for(layer, 9).bfloat16()
    routing = Routing(*custom(x, logits.float(), K, renormalize))
    assert_close(layer(x, logits), expected(layer.problem, weights, x, routing), layer.problem)


def test_a_correction_bias_may_be_filled_later() -> None:
    for bias in (torch.zeros(E), nn.Parameter(torch.zeros(E))):
        layer, weights = loaded_layer(e_score_correction_bias=bias)
        with torch.no_grad():
            bias.copy_(BIAS * 3)
        check_logits(layer, weights, correction_bias=BIAS * 3, renormalize=True)
        assert not list(layer.parameters()) and not layer.state_dict()


@pytest.mark.parametrize(
    "knobs",
    [
        {"activation": "gelu_tanh", "has_bias": True},
        {"activation": Activation("silu", limit=0.7)},
        {"activation": "swigluoai", "has_bias": True},
        {"activation": "silu_no_mul", "has_bias": True},
        {"top_k": 1, "apply_router_weight_on_input": True, "renormalize": False},
        {"params_dtype": torch.bfloat16},
        {"params_dtype": torch.float16, "has_bias": True},
        {"params_dtype": torch.bfloat16, "quant": "fp8_block", "hidden_size": 256},
        {"params_dtype": torch.bfloat16, "quant": "fp8_tensor_static"},
        {"params_dtype": torch.bfloat16, "quant": "int4_w4a16_g32_zp"},
        {"quant": moekit.SCHEMES["fp8_channel_token"], "params_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_experts(knobs) -> None:
    layer, weights = loaded_layer(**knobs)
    check_logits(layer, weights, renormalize=knobs.get("renormalize", True))


@pytest.mark.parametrize("kind", ["random", "one_expert", "hot", "masked", "rows", "none"])
@pytest.mark.parametrize("tokens", [1, 12])
def test_given_ids(kind, tokens) -> None:
    """Ids of -1 have NaN weights; tokens without an expert are NaN, and their outputs zero."""
    layer, weights = loaded_layer()
    x, routing = random_x(layer.problem, tokens), random_routing(layer.problem, tokens, kind)
    x[(routing.topk_ids < 0).all(dim=1)] = float("nan")
    for ids in (routing.topk_ids, routing.topk_ids.int()):
        check_routed(layer, weights, Routing(routing.topk_weights, ids), x)


def test_all_experts_chosen_and_no_tokens() -> None:
    layer, weights = loaded_layer(top_k=E)
    check_logits(layer, weights, renormalize=True)
    assert layer(torch.empty(0, H), torch.empty(0, E)).shape == (0, H)
    assert layer(torch.empty(2, 0, H), torch.empty(2, 0, E)).shape == (2, 0, H)
    for knobs in ({"zero_expert_num": 2}, {"num_redundant_experts": 1}):
        layer = make_layer(**knobs)
        layer.load_weights(random_weights(layer.problem))
        assert layer(torch.empty(0, H), torch.empty(0, layer.router.width)).shape == (0, H)


def test_batch_and_sequence_and_strides() -> None:
    layer, _ = loaded_layer(shared_experts=lambda x: 2 * x)
    x, logits = random_x(layer.problem, 12), logits_for(layer, 12)
    want = layer(x, logits)
    got = layer(x.view(3, 4, H), logits.view(3, 4, E))
    assert got.shape == (3, 4, H) and torch.equal(got.view(12, H), want)
    strided = x.view(4, 3, H).clone().transpose(0, 1)
    turned = logits.view(4, 3, E).transpose(0, 1)
    other = layer(strided, turned)
    assert torch.equal(other, layer(strided.contiguous(), turned.contiguous()))
    back = other.transpose(0, 1).reshape(12, H)  # in another order tokens may have other bits
    assert_close(back, want.float(), layer.problem)
    routing = moekit.route(logits, K, renormalize=True)
    given = layer(
        x.view(3, 4, H),
        topk_weights=routing.topk_weights.view(3, 4, K),
        topk_ids=routing.topk_ids.view(3, 4, K),
    )
    assert torch.equal(given.view(12, H), want)


def test_padding_goes_nowhere() -> None:
    layer, weights = loaded_layer()
    x, logits = random_x(layer.problem, 12), logits_for(layer, 12)
    padding = torch.arange(12) % 3 == 0
    routing = moekit.route(logits, K, renormalize=True, is_padding=padding)
    x[padding] = logits[padding] = float("nan")
    want = expected(layer.problem, weights, x, routing)
    out = layer(x.view(2, 6, H), logits.view(2, 6, E), is_padding=padding.view(2, 6))
    assert_close(out.view(12, H), want, layer.problem)
    assert not out.view(12, H)[padding].any()
    ids = moekit.route(logits.nan_to_num(), K, renormalize=True)
    out = layer(x, topk_weights=ids.topk_weights, topk_ids=ids.topk_ids, is_padding=padding)
    assert_close(out, want, layer.problem)


def test_inputs_are_not_modified_and_outputs_are_new() -> None:
    layer, _ = loaded_layer(shared_experts=nn.Identity(), zero_expert_num=2)
    x, logits = random_x(layer.problem, 7), logits_for(layer, 7)
    before = x.clone(), logits.clone()
    out = layer(x, logits)
    again = layer(x, logits)
    assert torch.equal(x, before[0]) and torch.equal(logits, before[1])
    assert len({t.untyped_storage().data_ptr() for t in (x, out, again)}) == 3
    assert torch.equal(out, again)


def test_shared_experts_are_added_and_are_no_submodule() -> None:
    module = nn.Linear(H, H, bias=False)
    layer, weights = loaded_layer(shared_experts=module)
    with torch.no_grad():
        check_logits(layer, weights, shared=module, renormalize=True)
    assert not list(layer.modules())[1:] and not layer.state_dict()


@pytest.mark.parametrize("knobs", [{}, {"top_k": 1, "apply_router_weight_on_input": True}])
def test_zero_experts_return_the_token(knobs) -> None:
    shared = torch.sin
    knobs = {"zero_expert_num": 3, "renormalize": False, "shared_experts": shared, **knobs}
    layer, weights = loaded_layer(**knobs)
    check_logits(layer, weights, tokens=40, shared=shared)
    # Alone, and with another token that has no expert and is NaN.
    layer, weights = loaded_layer(zero_expert_num=3)
    ids = torch.tensor([[E, E + 1, E + 2], [E + 2, -1, 0], [-1, -1, -1]])
    topk_weights = torch.tensor([[0.5, 0.25, 2.0], [1.5, float("nan"), 0.3], [float("nan")] * 3])
    x = random_x(layer.problem, 3)
    x[2] = float("nan")
    check_routed(layer, weights, Routing(topk_weights, ids), x)


def test_more_tokens_than_the_kernel_takes(monkeypatch) -> None:
    shared_sizes = []

    def shared(x):
        shared_sizes.append(x.shape[0])
        return torch.sin(x)

    layer, weights = loaded_layer(max_num_tokens=4, shared_experts=shared)
    sizes = []
    start = layer.kernel.start

    def counting(x, **rest):
        sizes.append(x.shape[0])
        return start(x, **rest)

    monkeypatch.setattr(layer.kernel, "start", counting)
    for tokens, chunks in ((0, [0]), (4, [4]), (5, [3, 2]), (13, [4, 3, 3, 3])):
        sizes.clear()
        check_logits(layer, weights, tokens=tokens, shared=torch.sin, renormalize=True)
        assert sizes == chunks and shared_sizes.pop() == tokens and not shared_sizes


def test_replicas_compute_the_same_as_their_expert() -> None:
    layer = make_layer(num_redundant_experts=3)
    weights = random_weights(make_layer().problem)
    layer.load_weights(weights.select(layer.local_experts))
    assert layer.local_experts == (0, 1, 2, 3, 4, 5, 0, 1, 2)
    check_logits(layer, weights, tokens=40, renormalize=True)

    # Experts trade places, and the table changes with them.
    order = torch.randperm(9)
    held = torch.tensor(layer.local_experts)[order].tolist()
    table = torch.full((E, 4), -1)
    for slot, expert in enumerate(held):
        table[expert, int((table[expert] >= 0).sum())] = slot
    counted = []
    layer.set_replicas(table, record=lambda ids: counted.append(ids))
    assert layer.packed is not None
    moved = {name: t[order].clone() for name, t in layer.packed.experts.items()}
    layer.packed = replace(layer.packed, experts=moved)
    check_logits(layer, weights, tokens=40, renormalize=True)
    logits = logits_for(layer, 40)
    assert torch.equal(counted[0], moekit.route(logits, K).topk_ids)

    # Calls read the table in place: with all experts at place 0, all tokens go there.
    # Each token has one assignment, because it may name a physical expert only once.
    table.copy_(torch.tensor([0, -1, -1, -1]))
    x = random_x(layer.problem, 5)
    routing = Routing(torch.ones(5, K), torch.tensor([[e] + [-1] * (K - 1) for e in range(5)]))
    out = layer(x, topk_weights=routing.topk_weights, topk_ids=routing.topk_ids)
    only = Routing(torch.ones(5, 1), torch.full((5, 1), held[0]))
    problem = make_layer(top_k=1).problem
    assert_close(out, expected(problem, weights, x, only), problem)


def test_round_robin_gives_the_first_ranks_the_remainder() -> None:
    def of(experts, ranks, **knobs):
        made = []
        for rank in range(ranks):
            parallel = ParallelConfig(ep_size=ranks, ep_rank=rank, dp_size=1)
            knobs = {"expert_placement_strategy": "round_robin", **knobs}
            layer = make_layer(
                num_experts=experts, parallel=parallel, reduce_results=False, **knobs
            )
            made.append(layer.local_experts)
        return made

    assert of(7, 3) == [(0, 3, 6), (1, 4), (2, 5)]
    assert of(8, 2) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert of(7, 3, expert_placement_strategy="linear") == [(0, 1, 2), (3, 4), (5, 6)]
    assert of(6, 1) == [tuple(range(6))]


def test_from_checkpoint(tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights = random_weights(make_layer(params_dtype=torch.bfloat16).problem)
    tensors = {}
    for expert in range(E):
        stem = f"model.layers.5.mlp.experts.{expert}."
        gate, up = weights.w13[expert].chunk(2)
        tensors[f"{stem}gate_proj.weight"] = gate.contiguous()
        tensors[f"{stem}up_proj.weight"] = up.contiguous()
        tensors[f"{stem}down_proj.weight"] = weights.w2[expert].contiguous()
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    config = dict(
        model_type="qwen3_moe", num_experts=E, num_experts_per_tok=K, hidden_size=H,
        moe_intermediate_size=I, hidden_act="silu", dtype="bfloat16", norm_topk_prob=True,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    total = 0
    for rank in range(2):
        layer = moekit.FusedMoE.from_checkpoint(
            tmp_path,
            5,
            device="cpu",
            parallel=ParallelConfig(ep_size=2, ep_rank=rank, dp_size=1),
            reduce_results=False,
            expert_placement_strategy="round_robin",
        )
        x, logits = random_x(layer.problem, 9), logits_for(layer, 9)
        total = total + layer(x, logits).float()
    routing = moekit.route(logits, K, renormalize=True)
    want = expected(layer.problem, weights, x, routing)
    assert_close(total.bfloat16(), want, layer.problem)
