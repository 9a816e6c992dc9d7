"""Kernels with gradients: what is composed, refused and accumulated. The kit proves the numbers."""

from __future__ import annotations

import pytest
import torch

import moekit
from moekit.errors import InvalidInput, InvalidProblem, Unsupported, WeightsError
from moekit.problem.weights import ExpertWeights
from moekit.training import TrainableKernel

PROBLEM = moekit.MoEProblem(
    num_experts=6, top_k=2, hidden_size=32, intermediate_size=16, device="cpu", training=True
)


def parameters(dtype=torch.bfloat16, **kept) -> ExpertWeights:
    made = ExpertWeights(torch.randn(6, 32, 32).to(dtype) / 6, torch.randn(6, 32, 16).to(dtype) / 4)
    return made._map(lambda t: t.requires_grad_(kept.get("requires_grad", True)))


def call(tokens=9) -> tuple[torch.Tensor, moekit.Routing]:
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(tokens)])
    x = torch.randn(tokens, 32, dtype=torch.bfloat16, requires_grad=True)
    return x, moekit.Routing(torch.rand(tokens, 2, requires_grad=True), ids)


def test_compose_makes_a_trainable_kernel_and_explain_says_who_has_no_backward() -> None:
    assert isinstance(moekit.compose(PROBLEM), TrainableKernel)
    assert "training" in repr(PROBLEM)
    rejected = moekit.explain(PROBLEM, "local").text(every=True)
    assert "has no backward: it computes no gradients (training=True)" in rejected
    with pytest.raises(Unsupported, match="batched_reference.*has no backward"):
        moekit.compose(PROBLEM, "batched_reference")
    with pytest.raises(InvalidProblem, match="exclude each other"):
        PROBLEM.replace(batch_invariant=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_added_to_given_buffers(dtype) -> None:
    """Twice, to what they hold; the parameters' own gradients stay empty."""
    kernel, weights, (x, routing) = moekit.compose(PROBLEM), parameters(), call()
    kernel(x, weights, routing).sum().backward()
    wanted = {name: t.grad.float() for name, t in weights.tensors().items()}
    for t in weights.tensors().values():
        t.grad = None
    buffers = ExpertWeights(torch.ones(6, 32, 32, dtype=dtype), torch.ones(6, 32, 16, dtype=dtype))
    for _ in range(2):
        kernel(x, weights, routing, add_to=buffers).sum().backward()
    for name, into in buffers.tensors().items():
        torch.testing.assert_close(into.float(), 1 + 2 * wanted[name], rtol=2e-2, atol=2e-2)
        assert weights.tensors()[name].grad is None


def test_wrong_arguments_are_refused() -> None:
    kernel, weights, (x, routing) = moekit.compose(PROBLEM), parameters(), call()
    with pytest.raises(InvalidInput, match="out is given, and gradients are enabled"):
        kernel(x, weights, routing, out=torch.empty_like(x))
    small = ExpertWeights(torch.ones(6, 32, 32), torch.ones(6, 32, 15))
    with pytest.raises(WeightsError, match=r"add_to.w2 is \(6, 32, 15\) on cpu, expected \(6, 32"):
        kernel(x, weights, routing, add_to=small)
    whole = small._map(lambda t: torch.ones(6, 32, 32 if t.shape[2] == 32 else 16).half())
    with pytest.raises(WeightsError, match=r"add_to.w13 is torch.float16, expected torch.bfloat16"):
        kernel(x, weights, routing, add_to=whole)
    with pytest.raises(WeightsError, match=r"w13 is torch.float32, expected torch.bfloat16"):
        kernel(x, parameters(torch.float32), routing)
    with pytest.raises(InvalidInput, match="x requires a gradient"):
        kernel.start(x, kernel.pack(weights.detach()), routing)
    out = kernel(x, weights, routing)
    (again,) = torch.autograd.grad(out, x, torch.ones_like(out).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        again.sum().backward()


def test_quantized_experts_pass_gradients_to_x_and_have_none() -> None:
    frozen = parameters(requires_grad=False)
    problem = PROBLEM.replace(quant="int8_w8a16")
    kernel, (x, routing) = moekit.compose(problem), call()
    made = frozen.quantize(problem.quant)
    kernel(x, kernel.pack(made), routing).sum().backward()
    assert x.grad.isfinite().all() and x.grad.any()
    assert routing.topk_weights.grad.any()
    made.w13_scale.requires_grad_()
    with pytest.raises(WeightsError, match="w13_scale require a gradient.*int8_w8a16"):
        kernel(x, made, routing)


def test_memory_counts_what_a_call_saves() -> None:
    saved = (
        16 * 2 * (32 * 2 + 8) + 4 * 6
    )  # h and the order of 32 assignments, and each expert's end
    kernel = moekit.compose(PROBLEM)
    assert kernel.experts.saved_bytes(16) == saved
    assert kernel.memory(16).total >= saved
