"""After sleep of level 2, vLLM loads the weights anew, and a layer still has the rest."""

from __future__ import annotations

from dataclasses import replace

import moekit_vllm
import torch
from engine_layers import calls, drawn, error, want
from torch import nn
from vllm_layers import applied, share
from vllm_layers import vllm as vllm  # a fixture
from vllm_memory import Allocated

import moekit
from moekit.backends.local import LocalDispatcher
from moekit.discovery import registry


class Stateful(LocalDispatcher):
    """Keeps a tensor, as dispatchers that move tokens keep counters and addresses."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ones = torch.ones(1)

    def prepare(self, x_TH, routing, quantize):
        return super().prepare(x_TH * self.ones, routing, quantize)


def test_a_dispatcher_keeps_its_memory(monkeypatch) -> None:
    known = moekit.registry().copy()
    target = f"{__name__}:Stateful"
    known.register(replace(known.dispatcher("local"), name="stateful", target=target))
    monkeypatch.setattr(registry, "_registry", known)
    monkeypatch.setenv("MOEKIT_DISPATCHER", "stateful")
    monkeypatch.setenv("MOEKIT_VLLM", "require")
    moekit_vllm.register()
    # A table has the order of the experts, which is not moekit's.
    with Allocated() as weights:
        layer, where = share(drawn(seed=0, local=3), (1, 3, 5))
    x, topk_weights, ids = calls()
    own = where[ids.long()]
    assert layer.quant_method.moekit_experts.kernel.dispatcher.spec.name == "stateful"
    first, second = (want(drawn(seed, local=3), x, topk_weights, own) for seed in (0, 1))
    assert error(applied(layer, x, topk_weights, ids), first) < 1e-5
    weights.discard([*layer.buffers(), where])
    assert layer.w13_weight.abs().max() < 1e-10
    for name, value in drawn(seed=1, local=3).items():
        setattr(layer, name, nn.Parameter(value, requires_grad=False))
    layer.quant_method.process_weights_after_loading(layer)
    assert error(applied(layer, x, topk_weights, ids), second) < 1e-5
