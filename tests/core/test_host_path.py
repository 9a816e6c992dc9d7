"""The host's work in a call in addition to the experts' launches: torch operators cost the most."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moekit

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 48}


class Operators(TorchDispatchMode):
    """The names of operators that do not merely alias their input."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not (func.is_view and out.data_ptr() == args[0].data_ptr()):
            self.names.append(func.overloadpacket.__name__)
        return out


@torch.no_grad()
def operators(call: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Return the operators of the second call, which is like all later ones."""
    call(*args, **kwargs)
    with Operators() as seen:
        call(*args, **kwargs)
    return seen.names


def silenced(kernel: moekit.ModularKernel, monkeypatch: pytest.MonkeyPatch) -> moekit.ModularKernel:
    monkeypatch.setattr(kernel.experts, "apply", lambda y, *rest: None)
    monkeypatch.setattr(kernel, "checked", False)
    return kernel


def given(tokens: int = 1) -> tuple[torch.Tensor, moekit.Routing]:
    return torch.randn(tokens, 64), moekit.route(torch.randn(tokens, 8), 2)


def random_weights() -> moekit.ExpertWeights:
    return moekit.ExpertWeights(torch.randn(8, 96, 64), torch.randn(8, 64, 48))


def test_a_kernel_only_makes_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = moekit.MoEProblem(**SIZES, dtype=torch.float32, device="cpu")
    kernel = silenced(moekit.compose(problem, experts="torch"), monkeypatch)
    packed, (x, routing) = kernel.pack(random_weights()), given()
    assert operators(kernel, x, packed, routing) == ["empty_like"]
    assert operators(kernel, x, packed, routing, out=torch.empty_like(x)) == []
    narrow = moekit.Routing(routing.topk_weights, routing.topk_ids.int())
    assert operators(kernel, x, packed, narrow) == ["empty_like"]
    strided = torch.randn(1, 128)[:, ::2]
    assert "clone" in operators(kernel, strided, packed, routing), "a copy would not be counted"


def python_calls(call: Any) -> int:
    """Return the number of Python functions that run in a call; a paused one counts each time."""
    seen = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal seen
        seen += event == "call"

    with torch.no_grad():
        call()
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
    return seen


def test_a_kernel_that_moves_nothing_pays_for_no_collective_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = moekit.MoEProblem(**SIZES, dtype=torch.float32, device="cpu")
    kernel = silenced(moekit.compose(problem, experts="torch"), monkeypatch)
    packed, (x, routing) = kernel.pack(random_weights()), given()
    # Before the flow of a call was one generator, these were 22 and 52.
    assert python_calls(lambda: kernel(x, packed, routing)) <= 23
    assert python_calls(lambda: kernel.start(x, packed, routing).result()) <= 40


def test_a_layer_adds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = moekit.FusedMoE(**SIZES, params_dtype=torch.float32, experts="torch", device="cpu")
    layer.load_weights(random_weights())
    silenced(layer.kernel, monkeypatch)
    x, routing = given()
    ids = {"topk_weights": routing.topk_weights, "topk_ids": routing.topk_ids}
    assert operators(layer, x, **ids) == ["empty_like"]
    routed = operators(layer, x, torch.randn(1, 8))
    assert routed == ["sort", "_softmax", "empty_like"]


def test_a_module_of_transformers_adds_a_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    import moekit.integrations.transformers as integration
    from moekit.integrations.packed_layer import Layer

    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = SimpleNamespace(
        num_experts=8, hidden_size=64, moe_intermediate_size=48, hidden_act="silu",
        _experts_implementation="moekit",
    )  # fmt: skip
    integration.install(experts="torch")
    try:
        module = modeling.Qwen3MoeExperts(config).to(torch.bfloat16).requires_grad_(False)
        (x, routing), bf16 = given(), torch.bfloat16
        call = x.to(bf16), routing.topk_ids, routing.topk_weights.to(bf16)
        module(*call)
        kernel = Layer.of(module).kernel
        assert kernel is not None
        silenced(kernel, monkeypatch)
        assert operators(module, *call) == ["_to_copy", "empty_like"]
    finally:
        integration.uninstall()
