"""The error of an output against the fp32 oracle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moekit.plugin import ExpertWeights, MoEProblem, Routing

from .internals import oracle


def sampled_rows(tokens: int, most: int, device: torch.device) -> Tensor:
    """Return the indices of up to ``most`` tokens, evenly spread."""
    return torch.linspace(0, max(0, tokens - 1), min(most, tokens), device=device).long()


def oracle_rows(
    problem: MoEProblem, weights: ExpertWeights, x_TH: Tensor, routing: Routing, rows: Tensor
) -> Tensor:
    """Return the fp32 oracle's output (n, H) for the n tokens that ``rows`` (n,) names."""
    chosen = Routing(routing.topk_weights[rows], routing.topk_ids[rows])
    return oracle(x_TH[rows], weights, chosen, problem)


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
