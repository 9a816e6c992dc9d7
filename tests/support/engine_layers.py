"""Modules, random layers and their results in fp32, for the stand-ins of inference engines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import moekit
from moekit.engines import experts, kernels
from moekit.engines.mode import Engine
from moekit.problem.activation import apply_activation

E, K, H, INNER = 6, 2, 64, 32


def modules(contents: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Return modules with these contents, and their packages, as `sys.modules` holds them."""
    made: dict[str, ModuleType] = {}
    for name, attributes in contents.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            made.setdefault(path, ModuleType(path)).__path__ = []
        vars(made[name]).update(attributes)
    return made


def put(monkeypatch: pytest.MonkeyPatch, engine: Engine, stand_in: Mapping[str, Any]) -> None:
    """Put modules where an engine would be, in a process that has said nothing yet."""
    for name, module in stand_in.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(experts, "_warmed", {})
    engine.said.clear()
    monkeypatch.delenv(engine.variable, raising=False)


def drawn(seed: int = 0, local: int = E, halves: int = 2, inner: int = INNER, **more: Tensor):
    draw = torch.Generator().manual_seed(seed)
    return {
        "w13_weight": torch.randn(local, halves * inner, H, generator=draw) / H**0.5,
        "w2_weight": torch.randn(local, H, inner, generator=draw) / inner**0.5,
        **more,
    }


def calls(tokens: int = 9, seed: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, weights and ids."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=draw)
    ids = torch.rand(tokens, E, generator=draw).topk(K, dim=1).indices.int()
    return x, torch.rand(tokens, K, generator=draw) + 0.5, ids


def want(
    weights: Mapping[str, Tensor], x: Tensor, topk_weights: Tensor, ids: Tensor,
    activation: moekit.Activation | None = None, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Return the sum over experts, written out in fp32."""
    out, activation = torch.zeros_like(x), activation or moekit.Activation("silu")
    w13, w2 = weights["w13_weight"], weights["w2_weight"]
    for token in range(len(x)):
        for weight, expert in zip(topk_weights[token], ids[token].tolist(), strict=True):
            if expert < 0:
                continue
            h = x[token] @ w13[expert].T
            h += weights["w13_bias"][expert] if "w13_bias" in weights else 0
            if interleaved:
                h = torch.cat([h[0::2], h[1::2]])
            y = apply_activation(h, activation) @ w2[expert].T
            y += weights["w2_bias"][expert] if "w2_bias" in weights else 0
            out[token] += weight * y
    return out


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())
