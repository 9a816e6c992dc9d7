"""Layers of the stand-in for SGLang, and their results in plain torch."""

from __future__ import annotations

import sys

import moekit_sglang
import pytest
import sglang_standin as standin
import torch
from moekit_sglang import hooks, settings, versions

import moekit
from moekit.engines import kernels
from moekit.problem.activation import apply_activation

E, K, H, INNER = 6, 2, 64, 32


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    """Put the stand-in in SGLang's place, and clear the memory of logged lines."""
    for name, module in standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    standin.reset()
    monkeypatch.setattr(standin.HookRegistry, "hooks", {})
    monkeypatch.setattr(versions, "installed", lambda: "0.5.15")
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "_warmed", {})
    monkeypatch.setattr(hooks, "_installed", [])
    settings.SGLANG.said.clear()
    monkeypatch.delenv(settings.SGLANG.variable, raising=False)


def started() -> None:
    """Start a process of SGLang: it calls its plugins, and then applies their hooks."""
    moekit_sglang.register()
    standin.HookRegistry.apply_hooks()


def drawn(seed=0, local=E, halves=2, **more):
    draw = torch.Generator().manual_seed(seed)
    return {
        "w13_weight": torch.randn(local, halves * INNER, H, generator=draw) / H**0.5,
        "w2_weight": torch.randn(local, H, INNER, generator=draw) / INNER**0.5,
        **more,
    }


def calls(tokens=9, seed=5):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=draw)
    ids = torch.rand(tokens, E, generator=draw).topk(K, dim=1).indices.int()
    return x, standin.TopK(torch.rand(tokens, K, generator=draw) + 0.5, ids)


def want(weights, x, topk, activation=None, interleaved=False, first=0):
    """Return the sum over this rank's experts, which begin at ``first``, in fp32."""
    out, activation = torch.zeros_like(x), activation or moekit.Activation("silu")
    w13, w2 = weights["w13_weight"].float(), weights["w2_weight"].float()
    for token in range(len(x)):
        for weight, expert in zip(
            topk.topk_weights[token], topk.topk_ids[token].tolist(), strict=True
        ):
            if not 0 <= (own := expert - first) < len(w13):
                continue
            h = x[token] @ w13[own].T
            h += weights["w13_weight_bias"][own] if "w13_weight_bias" in weights else 0
            if interleaved:
                h = torch.cat([h[0::2], h[1::2]])
            y = apply_activation(h, activation) @ w2[own].T
            y += weights["w2_weight_bias"][own] if "w2_weight_bias" in weights else 0
            out[token] += weight * y
    return out


def error(got, expected):
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def made(weights=None, method="UnquantizedFusedMoEMethod", fields=None, **config):
    """Return a loaded layer of SGLang, made as its model loader does."""
    cls = sys.modules["sglang.srt.layers.moe.fused_moe_triton.layer"].FusedMoE
    named = standin.method(method, **(fields or {}))
    layer = cls(weights or drawn(), named, **{"hidden": H, "inner": INNER} | config)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def taken(layer) -> bool:
    """Return whether moekit computes a layer; SGLang has prepared the weights of the others."""
    ours = getattr(layer.quant_method, "moekit_experts", None) is not None
    assert ours != hasattr(layer, "prepared_by_sglang")
    return ours
