"""Adapters (LoRA) that vLLM's manager loads into layers that moekit computes."""

from __future__ import annotations

from types import SimpleNamespace

import moekit_vllm
import pytest
import torch
import vllm_standin as standin
from engine_layers import INNER, E, H, K, calls, drawn, error, want
from moekit_vllm import lora
from vllm_layers import applied, made
from vllm_layers import vllm as vllm  # a fixture
from vllm_memory import Allocated

SLOTS, RANK = 2, 4


def stacked(shared: bool, slices: int) -> SimpleNamespace:
    """Return a context as vLLM's wrapper of a layer makes it."""
    one = 1 if shared else E
    return SimpleNamespace(
        w13_lora_a_stacked=tuple(torch.zeros(SLOTS, one, RANK, H) for _ in range(slices)),
        w13_lora_b_stacked=tuple(
            torch.zeros(SLOTS, E, 2 * INNER // slices, RANK) for _ in range(slices)
        ),
        w2_lora_a_stacked=(torch.zeros(SLOTS, E, RANK, INNER),),
        w2_lora_b_stacked=(torch.zeros(SLOTS, one, H, RANK),),
        punica_wrapper=SimpleNamespace(_token_lora_indices=torch.full((64,), 10**6)),
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("slices", [1, 2])
def test_adapters_load_and_drop(shared, slices) -> None:
    """vLLM fills its tensors, or clears them, and says which token has which slot."""
    moekit_vllm.register()
    layer = made(standin.config(E, K, H, INNER, is_lora_enabled=True), drawn())
    method = layer.quant_method
    assert method.supports_internal_mk and not method.is_monolithic
    assert error(applied(layer, *calls()), want(drawn(), *calls())) < 1e-5
    kernel, context = method.moe_kernel, stacked(shared, slices)
    assert kernel.supports_lora() and isinstance(kernel.impl, standin.FusedMoEKernelModularImpl)
    assert isinstance(kernel.fused_experts, standin.LoRAExpertsMixin)
    layer._replace_quant_method("vLLM's for its own kernel")
    assert layer.quant_method is method
    before = context.w2_lora_a_stacked[0].untyped_storage()
    kernel.fused_experts.set_lora_context(context)
    assert before.nbytes() == 0
    assert error(applied(layer, *calls()), want(drawn(), *calls())) < 1e-5

    draw = torch.Generator().manual_seed(1)
    a13, b13 = context.w13_lora_a_stacked, context.w13_lora_b_stacked
    (a2,), (b2,) = context.w2_lora_a_stacked, context.w2_lora_b_stacked
    for t in (*a13, *b13, a2, b2):
        t[1] = torch.randn(t[1].shape, generator=draw) / t.shape[-1] ** 0.5
    merged = drawn()
    delta = torch.cat([b[1] @ a[1] for a, b in zip(a13, b13, strict=True)], dim=1)
    merged["w13_weight"] = merged["w13_weight"] + delta
    merged["w2_weight"] = merged["w2_weight"] + b2[1] @ a2[1]
    x, topk_weights, ids = calls()
    context.punica_wrapper._token_lora_indices[: len(x)] = torch.arange(len(x)) % 2 * 2 - 1
    out, mine = applied(layer, x, topk_weights, ids), torch.arange(len(x)) % 2 == 1
    for rows, weights in ((mine, merged), (~mine, drawn())):
        assert error(out[rows], want(weights, x, topk_weights, ids)[rows]) < 1e-5
    for t in (*a13, *b13, a2, b2):
        t[1] = 0
    assert error(applied(layer, x, topk_weights, ids), want(drawn(), *calls())) < 1e-5


def test_weights_change_beside_adapters(monkeypatch) -> None:
    """vLLM may have no config of an engine then. Sleep of level 2 discards vLLM's memory."""
    moekit_vllm.register()
    with Allocated() as memory:
        layer = made(standin.config(E, K, H, INNER, is_lora_enabled=True), drawn())
        layer.quant_method.moe_kernel.fused_experts.set_lora_context(context := stacked(False, 2))
    x, topk_weights, ids = calls()
    context.punica_wrapper._token_lora_indices[: len(x)] = 1
    memory.discard([])
    monkeypatch.setattr(standin, "engine", None)
    for name, value in drawn(1).items():
        setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
    layer.quant_method.process_weights_after_loading(layer)
    parts = (context.w13_lora_a_stacked, context.w13_lora_b_stacked, context.w2_lora_a_stacked)
    for t in (*parts[0], *parts[1], *parts[2], *context.w2_lora_b_stacked):
        t.fill_(0.01)
    merged = drawn(1)
    merged["w13_weight"] = merged["w13_weight"] + RANK * 1e-4
    merged["w2_weight"] = merged["w2_weight"] + RANK * 1e-4
    context.punica_wrapper._token_lora_indices[: len(x)] = 1
    assert error(applied(layer, x, topk_weights, ids), want(merged, x, topk_weights, ids)) < 1e-5


@pytest.mark.parametrize(
    ("engine", "split", "said"),
    [
        ({"fully_sharded_loras": True}, {"tp_size": 2}, "--fully-sharded-loras"),
        ({"lora_dtype": torch.bfloat16}, {}, "torch.bfloat16, and moekit's are torch.float32"),
        ({"max_lora_rank": 512}, {}, "ranks up to 512"),
        ({}, {"enable_eplb": True}, "EPLB"),
    ],
)
def test_reasons(monkeypatch, engine, split, said) -> None:
    config = standin.config(E, K, H, INNER, is_lora_enabled=True)
    layer = SimpleNamespace(moe_config=config)
    assert not any(lora.refusals(SimpleNamespace(moe_config=config), False, False).values())
    vars(config.moe_parallel_config).update(split)
    settings = SimpleNamespace(**vars(standin.engine.lora_config) | engine)
    monkeypatch.setattr(standin.engine, "lora_config", settings)
    (reason,) = [why for why, holds in lora.refusals(layer, False, False).items() if holds]
    assert said in reason
