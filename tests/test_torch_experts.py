"""The torch experts' several paths, each against the oracle: which one runs depends on sizes."""

from __future__ import annotations

import pytest
import torch

import moekit
from moekit import ExpertWeights, MoEProblem, torch_experts
from moekit.reference import oracle
from moekit.torch_experts import _CpuCall, _on_any_device

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def case(dtype: torch.dtype, experts: int, top_k: int, tokens: int, **changes):
    p = MoEProblem(
        num_experts=experts, top_k=top_k, hidden_size=64, intermediate_size=80, dtype=dtype,
        device="cpu", **changes,
    )  # fmt: skip
    bias = (
        (torch.randn(experts, p.w13_rows), torch.randn(experts, 64)) if p.has_bias else (None,) * 2
    )
    w = ExpertWeights(
        torch.randn(experts, p.w13_rows, 64, dtype=dtype) / 8,
        torch.randn(experts, 64, 80, dtype=dtype) / 8,
        *(None if b is None else b.to(dtype) for b in bias),
    )
    x = torch.randn(tokens, 64, dtype=dtype)
    routing = moekit.route(torch.randn(tokens, experts), top_k)
    skipped = torch.rand(tokens, top_k) < 0.2
    skipped[0, 0] = False
    ids = routing.topk_ids.masked_fill(skipped, -1)
    return p, w, x, moekit.Routing(routing.topk_weights, ids)


def rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("path", ["slab", "grouped", "loop"])
@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(4, 2, 3), (4, 2, 33), (16, 4, 7)])
def test_every_cpu_path(
    monkeypatch: pytest.MonkeyPatch, dtype, bias, path, experts, top_k, tokens
) -> None:
    if path != "loop" and (path == "grouped") != (dtype == torch.float32):
        pytest.skip("grouped is for fp32, slabs are for 16 bits")
    p, w, x, routing = case(dtype, experts, top_k, tokens, has_bias=bias)
    monkeypatch.setattr(torch_experts, "SLAB_ROWS_PER_PAIR", experts)
    taken = []
    for name, wanted in (("_slab_pays", path == "slab"), ("_grouped_pays", path == "grouped")):

        def forced(self, *args, name=name, wanted=wanted) -> bool:
            taken.append(name)
            return wanted and not (name == "_grouped_pays" and p.has_bias)

        monkeypatch.setattr(_CpuCall, name, forced)
    kernel = moekit.compose(p, "local", "torch")
    out = kernel(x, kernel.pack(w), routing)
    assert rms(out, oracle(x, w, routing, p)) < LIMIT[dtype] and taken


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("tokens", [1, 2])
def test_few_rows(dtype, tokens) -> None:
    p, w, x, routing = case(dtype, 8, 2, tokens)
    kernel = moekit.compose(p, "local", "torch")
    out = kernel(x, kernel.pack(w), routing)
    assert rms(out, oracle(x, w, routing, p)) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
@pytest.mark.parametrize("bias", [False, True])
def test_accelerator_path_on_the_cpu(dtype, activation, bias) -> None:
    """The GPU's code, run by the CPU: bf16 through grouped_mm, the others through the loop."""
    p, w, x, routing = case(dtype, 8, 3, 21, has_bias=bias, activation=activation)
    packed = moekit.compose(p, "local", "torch").pack(w)
    y = torch.full_like(x, float("nan"))
    _on_any_device(p.replace(device="sm90"), packed, y, x, routing.topk_ids, routing.topk_weights)
    assert rms(y, oracle(x, w, routing, p)) < LIMIT[dtype]
