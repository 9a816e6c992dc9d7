"""Both backends through moekit.compose, beyond what the conformance kit draws."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import moekit
from moekit.problem.quant import quantize
from moekit.runtime.workspace import Workspace


def make_problem(device: torch.device, **changes) -> moekit.MoEProblem:
    sizes = dict(num_experts=5, top_k=2, hidden_size=136, intermediate_size=72)
    return moekit.MoEProblem(**{**sizes, "device": device, **changes})


def make_weights(problem: moekit.MoEProblem) -> moekit.ExpertWeights:
    p = problem
    experts, inner = p.num_local_experts, p.local_intermediate_size

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape) * scale).to(p.dtype)

    weights = moekit.ExpertWeights(
        randn(experts, p.w13_rows, p.hidden_size, scale=p.hidden_size**-0.5),
        randn(experts, p.hidden_size, inner, scale=inner**-0.5),
        w13_bias=randn(experts, p.w13_rows) if p.has_bias else None,
        w2_bias=randn(experts, p.hidden_size) if p.has_bias else None,
    ).quantize(p.quant)
    if p.quant.activation is not None and p.quant.activation.static:
        scales = dict(w13_input_scale=torch.tensor(0.01), w2_input_scale=torch.tensor(0.02))
        weights = dataclasses.replace(weights, **scales)
    return weights.to(p.device.type)


def make_inputs(problem, tokens: int, device) -> tuple[torch.Tensor, moekit.Routing]:
    x = torch.randn(tokens, problem.hidden_size).to(problem.dtype)
    ids = torch.stack([torch.randperm(problem.num_experts)[: problem.top_k] for _ in range(tokens)])
    ids[torch.rand(ids.shape) < 0.2] = -1
    ids[-1] = -1
    weights = torch.rand(ids.shape) * 2 + 0.1
    return x.to(device), moekit.Routing(weights.to(device), ids.to(device))


class NaNWorkspace(Workspace):
    """A workspace filled with NaN (all ones), so that reading unwritten memory fails."""

    def take(self, specs, device):
        views = super().take(specs, device)
        for view in views:
            view.view(-1).view(torch.uint8).fill_(255)
        return views


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel_token", "fp8_block"])
def test_quantize_matches_the_reference_bit_for_bit(device, scheme):
    problem = make_problem(device, quant=scheme)
    kernel = moekit.compose(problem, "local", "triton")
    packed = kernel.pack(make_weights(problem))
    x = torch.randn(6, problem.hidden_size).to(problem.dtype).to(device)
    valid = torch.tensor([True, True, False, True, False, True], device=device)
    x[~valid] = float("nan")
    q, scale = kernel.experts.quantize(x, packed, valid)
    # a GPU's torch divides by a number as by its reciprocal, so the reference is the CPU's
    q, scale, valid = q.cpu(), scale.cpu(), valid.cpu()
    q_ref, scale_ref = quantize(x.cpu(), problem.quant.activation, None, valid)
    assert q.shape == q_ref.shape and scale.shape == scale_ref.shape
    assert torch.equal(q[valid].float(), q_ref[valid].float())
    rows = slice(None) if scale.shape[0] == 1 else valid
    assert torch.equal(scale[rows], scale_ref[rows])


def test_workspace_for_more_rows_serves_fewer(device):
    problem = make_problem(device, num_experts=4, top_k=2, hidden_size=32, intermediate_size=32)
    kernel = moekit.compose(problem, "local", "triton")
    experts, many = kernel.experts, 200
    packed = kernel.pack(make_weights(problem))
    for rows in (1, 30, 130):
        scratch = NaNWorkspace().take(experts.workspace(many), device)
        x, routing = make_inputs(problem, rows, device)
        tokens = moekit.Dispatched(x, None, routing.topk_ids, routing.topk_weights)
        y = torch.empty_like(x)
        experts.apply(y, tokens, packed, scratch)
        assert torch.equal(y, kernel(x, packed, routing))


def test_interpreter_asked_for_too_late():
    code = """
        import os, triton.language
        os.environ["TRITON_INTERPRET"] = "1"
        import moekit
        problem = moekit.MoEProblem(
            num_experts=2, top_k=1, hidden_size=8, intermediate_size=8, device="cpu"
        )
        (reason,) = moekit.registry().expert("triton").unsupported(problem)
        assert "after triton had been imported" in reason
    """
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environ)


def test_unsupported_says_why(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    backends = moekit.Registry.discover({})
    spec = backends.expert("triton")
    (reason,) = spec.unsupported(make_problem("cpu"))
    assert "TRITON_INTERPRET=1" in reason
    assert spec.unsupported(make_problem("sm90", quant="fp8_block")) == []
    (reason,) = spec.unsupported(make_problem("sm80", quant="fp8_block"))
    assert "8.9" in reason
    assert spec.unsupported(make_problem("sm80")) == []
    assert spec.priority > 0
