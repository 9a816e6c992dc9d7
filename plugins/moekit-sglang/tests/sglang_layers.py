"""Layers of the stand-in for SGLang."""

from __future__ import annotations

import sys

import engine_layers
import moekit_sglang
import pytest
import sglang_standin as standin
from engine_layers import INNER, H, drawn, put
from moekit_sglang import hooks, settings, versions


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    put(monkeypatch, settings.SGLANG, standin.modules())
    standin.reset()
    monkeypatch.setattr(standin.HookRegistry, "hooks", {})
    monkeypatch.setattr(versions, "installed", lambda: "0.5.15")
    monkeypatch.setattr(hooks, "_installed", [])


def started() -> None:
    """Start a process of SGLang: it calls its plugins, and then applies their hooks."""
    moekit_sglang.register()
    standin.HookRegistry.apply_hooks()


def calls(*of):
    """Return tokens, and what SGLang's router chooses for them."""
    x, weights, ids = engine_layers.calls(*of)
    return x, standin.TopK(weights, ids)


def want(weights, x, topk, *more):
    named = {name.replace("weight_bias", "bias"): tensor for name, tensor in weights.items()}
    return engine_layers.want(named, x, *topk[:2], *more)


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
