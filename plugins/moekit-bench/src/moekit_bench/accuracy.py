"""The error of an output against the fp32 oracle."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moekit.plugin import ExpertWeights, MoEProblem, Routing

from .internals import expert_mlp


def sampled_rows(tokens: int, most: int, device: torch.device) -> Tensor:
    """Return the indices of up to ``most`` tokens, evenly spread."""
    return torch.linspace(0, max(0, tokens - 1), min(most, tokens), device=device).long()


def oracle_rows(
    problem: MoEProblem, weights: ExpertWeights, x_TH: Tensor, routing: Routing, rows: Tensor
) -> Tensor:
    """Return the fp32 oracle's output (n, H) for the n tokens that ``rows`` (n,) names.

    Only the experts that these tokens use are dequantized, one at a time.
    """
    x, ids, router_weights = x_TH[rows].float(), routing.topk_ids[rows], routing.topk_weights[rows]
    out = torch.zeros_like(x)
    local = problem.local_experts
    for physical in sorted(set(ids.flatten().tolist())):
        if physical not in local:
            continue
        token, slot = (ids == physical).nonzero(as_tuple=True)
        expert = _one_expert(weights, physical - local.start).dequantize(problem.quant)
        weight = router_weights[token, slot, None]
        if problem.apply_router_weight_on_input:
            y = expert_mlp(x[token] * weight, expert, 0, problem)
        else:
            y = weight * expert_mlp(x[token], expert, 0, problem)
        out.index_add_(0, token, y)
    return out


def _one_expert(weights: ExpertWeights, expert: int) -> ExpertWeights:
    """Return views of one expert's tensors."""
    views: dict[str, Any] = {
        name: tensor[expert : expert + 1]
        for name, tensor in weights.tensors().items()
        if not name.endswith("input_scale")  # all experts share it, and dequantizing needs none
    }
    return ExpertWeights(**views)


def relative_error(got: Tensor, rows: Tensor, want: Tensor) -> float:
    """Return ||got - want|| / ||want|| over ``rows``, or NaN if ``got`` has an element that is not
    finite.

    Where ``want`` is zero, because no choice of these tokens is on this rank, the error is 0 for an
    output of zeros and infinite for any other.
    """
    if got.shape[1:] != want.shape[1:] or not bool(torch.isfinite(got).all()):
        return math.nan
    difference = (got[rows].float() - want).norm()
    if not bool(want.any()):
        return math.inf if bool(difference) else 0.0
    return float(difference / want.norm())
