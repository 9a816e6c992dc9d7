"""Layers for tests, and their expected outputs: route, oracle, shared and identity experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import moekit
from moekit import ExpertWeights, FusedMoE, MoEProblem, Routing
from moekit.backends.reference import oracle
from moekit.testing import assert_close
from moekit.testing.cases import generator, random_weights, random_x, whole

E, K, H, I = 6, 3, 64, 96
SIZES = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I}


def make_layer(**arguments: Any) -> FusedMoE:
    """Return a layer on the CPU without weights, by default fp32."""
    arguments = {**SIZES, "params_dtype": torch.float32, "device": "cpu", **arguments}
    return FusedMoE(**arguments)


def loaded_layer(**arguments: Any) -> tuple[FusedMoE, ExpertWeights]:
    """Return a layer on one rank, and its weights."""
    layer = make_layer(**arguments)
    weights = random_weights(layer.problem)
    layer.load_weights(weights)
    return layer, weights


def logits_for(layer_or_width: FusedMoE | int, tokens: int, key: object = 0) -> Tensor:
    """Return router logits (T, E + identity experts), fp32, on the CPU."""
    width = layer_or_width if isinstance(layer_or_width, int) else layer_or_width.router.width
    return torch.randn(tokens, width, generator=generator("logits", key)) * 2


def expected(
    problem: MoEProblem,
    weights: ExpertWeights,
    x: Tensor,
    routing: Routing,
    shared: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the expected output (T, H) fp32 of the layer on one rank.

    ``weights`` are the E logical experts; ids from E on are identity experts.
    """
    problem = whole(problem).replace(num_redundant_experts=0, max_num_tokens=None)
    identity = routing.topk_ids >= problem.num_experts
    real = Routing(routing.topk_weights, routing.topk_ids.masked_fill(identity, -1))
    out = oracle(x, weights, real, problem)
    for token, slot in identity.nonzero().tolist():
        out[token] += routing.topk_weights[token, slot] * x[token].float()
    return out if shared is None else out + shared(x).float()


def check_routed(layer: FusedMoE, weights: ExpertWeights, routing: Routing, x: Tensor) -> None:
    """Compare the layer, given ids and weights, with `expected`."""
    out = layer(x, topk_weights=routing.topk_weights, topk_ids=routing.topk_ids)
    assert_close(out, expected(layer.problem, weights, x, routing), layer.problem)


def check_logits(
    layer: FusedMoE,
    weights: ExpertWeights,
    tokens: int = 13,
    shared: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> None:
    """Compare the layer, given logits, with `moekit.route` with ``options`` and `expected`."""
    x, logits = random_x(layer.problem, tokens), logits_for(layer, tokens)
    routing = moekit.route(logits, layer.problem.top_k, **options)
    assert_close(
        layer(x, logits), expected(layer.problem, weights, x, routing, shared), layer.problem
    )
