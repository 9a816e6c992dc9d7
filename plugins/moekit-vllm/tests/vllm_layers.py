"""Layers of the stand-in for vLLM, and what they compute, written out."""

from __future__ import annotations

import sys

import pytest
import torch
import vllm_standin as standin
from moekit_vllm import settings, versions

import moekit
from moekit.engines import kernels
from moekit.problem.activation import apply_activation

E, K, H, INNER = 6, 2, 64, 32


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """Put the stand-in where vLLM would be, in a process that has said nothing yet."""
    for name, module in standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(versions, "installed", lambda: "0.33.0")
    monkeypatch.setattr(kernels, "exchange", lambda what, mine, *_: [mine])
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "_warmed", {})
    settings.VLLM.said.clear()
    monkeypatch.setattr(standin, "prepared", False)
    monkeypatch.delenv(settings.VLLM.variable, raising=False)
    standin.op_registry_oot.clear()
    yield
    standin.op_registry_oot.clear()


def drawn(seed=0, local=E, halves=2, inner=INNER, **more):
    draw = torch.Generator().manual_seed(seed)
    return {
        "w13_weight": torch.randn(local, halves * inner, H, generator=draw) / H**0.5,
        "w2_weight": torch.randn(local, H, inner, generator=draw) / inner**0.5,
        **more,
    }


def calls(tokens=9, seed=5):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=draw)
    ids = torch.rand(tokens, E, generator=draw).topk(K, dim=1).indices.int()
    return x, torch.rand(tokens, K, generator=draw) + 0.5, ids


def want(weights, x, topk_weights, ids, activation=None, interleaved=False):
    """Return the sum over experts, written out in fp32."""
    out, activation = torch.zeros_like(x), activation or moekit.Activation("silu")
    w13, w2 = weights["w13_weight"], weights["w2_weight"]
    for token in range(len(x)):
        for weight, expert in zip(topk_weights[token], ids[token].tolist(), strict=True):
            if expert < 0:
                continue
            h = x[token] @ w13[expert].T
            h += weights["w13_bias"][expert] if "w13_bias" in weights else 0
            if interleaved:
                h = torch.cat([h[0::2], h[1::2]])
            y = apply_activation(h, activation) @ w2[expert].T
            y += weights["w2_bias"][expert] if "w2_bias" in weights else 0
            out[token] += weight * y
    return out


def error(got, expected):
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def made(config=None, weights=None, cls=standin.RoutedExperts, **more):
    """Return a loaded layer of vLLM, as its model runner calls it."""
    layer = cls(config or standin.config(E, K, H, INNER), weights, **more)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def share(held, order=(0, 1, 2), **more):
    """Return the layer of the first of two ranks, and where it has its three experts."""
    where = torch.full((E,), -1, dtype=torch.int32)
    where[list(order)] = torch.arange(3, dtype=torch.int32)
    config = standin.config(E, K, H, INNER, ep_size=2, ep_rank=0, use_ep=True)
    return made(config, held, expert_map=where, **more), where


def applied(layer, x, topk_weights, ids):
    return layer.quant_method.apply(
        layer=layer, x=x, topk_weights=topk_weights, topk_ids=ids, shared_experts=None,
        shared_experts_input=None,
    )  # fmt: skip
