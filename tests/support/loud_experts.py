"""fp16 calls of experts whose outputs are above 65504, under small router weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moekit import ExpertWeights, MoEProblem, Routing
from moekit.backends.reference import oracle
from moekit.testing.cases import random_weights


def loud(problem: MoEProblem) -> ExpertWeights:
    """Return weights of experts whose output has a root mean square of about 60000."""
    whole = problem.local_intermediate_size  # of blocks
    plain = problem.replace(quant="none", intermediate_size=whole, top_k=1)
    weights = random_weights(plain)
    weights = replace(weights, w13=4 * weights.w13)
    device = weights.w2.device
    x = torch.randn(64, problem.hidden_size, device=device).half()
    first = Routing(torch.ones(64, 1, device=device), torch.zeros(64, 1, device=device).long())
    by = 6e4 / float(oracle(x, weights, first, plain).square().mean().sqrt())
    return replace(weights, w2=(weights.w2.float() * by).half()).quantize(problem.quant)


def loud_call(problem: MoEProblem, tokens: int) -> tuple[Tensor, Routing]:
    """Return tokens and their routing: two of three are loud, with router weights below 0.01.

    The third is quiet, with weights above 1, one of them negative.
    """
    x = torch.randn(tokens, problem.hidden_size)
    ids = torch.rand(tokens, problem.num_experts).topk(problem.top_k, dim=1).indices
    topk_weights = 0.003 + 0.007 * torch.rand(ids.shape)
    x[2::3] *= 0.05
    topk_weights[2::3] = 1.5 + torch.rand(topk_weights[2::3].shape)
    topk_weights[2::3, 0] *= -1
    topk_weights[1::3, 1] = 0.0
    device = problem.device.type
    return x.half().to(device), Routing(topk_weights.to(device), ids.to(device))


def check_overflows(problem: MoEProblem, weights: ExpertWeights, x: Tensor, r: Routing) -> None:
    raw = oracle(x, weights, replace(r, topk_weights=torch.ones_like(r.topk_weights)), problem)
    assert float(raw.abs().max()) > 65504, "no output overflows: the test tells nothing"


def check_tokens(out: Tensor, want: Tensor, limit: float) -> None:
    """Check each token alone, without those whose result itself is above the range."""
    held = want.abs().amax(dim=1) < 65000
    assert float(held.float().mean()) > 0.9
    out, want = out[held].float(), want[held]
    error = (out - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-9)
    assert bool(out.isfinite().all()) and float(error.max()) < limit, error.max()
