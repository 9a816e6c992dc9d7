"""The parameters of a trainable layer: this rank's experts, in `ExpertWeights.canonical` form."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moekit.errors import InvalidProblem
from moekit.layer.parallelism import LayerParallelism
from moekit.problem import MoEProblem
from moekit.problem.weights import ExpertWeights

NAMES = ("w13", "w2", "w13_bias", "w2_bias")


def check(problem: MoEProblem, parallelism: LayerParallelism) -> None:
    """Raise InvalidProblem for layers whose gradients this module would leave incomplete."""
    parallel, reasons = problem.parallel, []
    if problem.quant.weight is not None:
        reasons.append(f"weights of {problem.quant.name} have no gradient: leave quant out")
    if problem.num_redundant_experts:
        reasons.append("replicas of an expert would drift apart: leave num_redundant_experts out")
    if parallelism.is_sequence_parallel:
        reasons.append("sequence parallelism gathers outputs without a backward: leave it out")
    if parallel.num_ranks > 1 and not parallel.moves_tokens and parallelism.reduce_results:
        reasons.append(
            "ranks with the same tokens add up outputs without a backward: give each rank its own "
            "tokens (dp_size), or pass reduce_results=False and sum outputs and the gradients of x "
            "yourself"
        )
    if reasons:
        raise InvalidProblem(f"trainable=True: {'; '.join(reasons)}")


def add(module: nn.Module, problem: MoEProblem, device: torch.device) -> None:
    """Register parameters with the values that `torch.nn.Linear` begins with."""
    p = problem
    L, H, inner = p.num_local_experts, p.hidden_size, p.local_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"w13": (L, p.w13_rows, H), "w2": (L, H, inner)}
    if p.has_bias:
        shapes |= {"w13_bias": (L, p.w13_rows), "w2_bias": (L, H)}
    for name in NAMES:
        made = None
        if name in shapes:
            bound = 1 / math.sqrt(H if name.startswith("w13") else p.intermediate_size)
            values = torch.empty(shapes[name], dtype=p.dtype, device=device)
            made = nn.Parameter(values.uniform_(-bound, bound))
        module.register_parameter(name, made)


def fill(module: nn.Module, weights: ExpertWeights, problem: MoEProblem) -> None:
    """Copy ``weights`` into the parameters. Raises WeightsError, which lists what does not fit."""
    weights.check(problem)
    made = replace(weights.canonical(problem), w2_bias=weights.w2_bias)  # on every TP rank
    for name, value in made.tensors().items():
        getattr(module, name).copy_(value)


def of(module: nn.Module, dtype: torch.dtype | None = None) -> ExpertWeights:
    """Return the parameters as weights, in a dtype; gradients flow through them."""
    held = {name: getattr(module, name) for name in NAMES}
    named: dict[str, Any] = {name: t for name, t in held.items() if t is not None}
    return ExpertWeights(**{name: t.to(dtype or t.dtype) for name, t in named.items()})
