"""Layers of the stand-in for vLLM."""

from __future__ import annotations

import pytest
import torch
import vllm_standin as standin
from engine_layers import INNER, E, H, K, put
from moekit_vllm import settings, versions

from moekit.engines import kernels


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    put(monkeypatch, settings.VLLM, standin.modules())
    monkeypatch.setattr(versions, "installed", lambda: "0.33.0")
    monkeypatch.setattr(kernels, "exchange", lambda what, mine, *_: [mine])
    monkeypatch.setattr(standin, "prepared", False)
    standin.op_registry_oot.clear()
    yield
    standin.op_registry_oot.clear()


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
