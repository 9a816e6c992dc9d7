"""Gradients of every experts module of the installed transformers, against its eager backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_transformers_every_module import EXPERTS, HIDDEN, REFUSED, classes, made
from test_transformers_layer import installed  # noqa: F401 (an autouse fixture)
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install moekit[hf]")

BF16, FP32 = torch.bfloat16, torch.float32
Gradients = dict[str, Tensor]


def inputs(module: Any, dtype: torch.dtype = FP32, tokens: int = 9, top_k: int = 2) -> list[Tensor]:
    """Return x, ids, the router's weights and the gradient of the output. One expert is idle."""
    generator = torch.Generator().manual_seed(tokens)
    experts = getattr(module, "total_experts", EXPERTS)
    hidden = getattr(module, "hidden_dim", HIDDEN)
    ids = torch.rand(tokens, experts - 1, generator=generator).topk(top_k).indices + 1
    x, grad = torch.randn(2, tokens, hidden, generator=generator).to(dtype)
    weights = torch.rand(tokens, top_k, generator=generator).to(dtype)
    return [x, ids, weights, grad]


def gradients(
    module: Any, how: str, x: Tensor, ids: Tensor, weights: Tensor, grad: Tensor
) -> Gradients:
    """Return the gradients of x, of the router's weights and of all parameters."""
    module.config._experts_implementation = how
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    named = {"x": x, "weights": weights, **dict(module.requires_grad_().named_parameters())}
    out = module(x, ids, weights)
    return dict(zip(named, torch.autograd.grad(out, [*named.values()], grad), strict=True))


def error(got: Tensor, want: Tensor) -> float:
    """Return the relative RMS error."""
    got, want = got.detach().float(), want.detach().float()
    return float((got - want).norm() / want.norm().clamp(min=1e-9))


def worst(got: Gradients, want: Gradients) -> float:
    assert got.keys() == want.keys() and all(got[n].dtype == want[n].dtype for n in want)
    return max(error(got[name], want[name]) for name in want)


def runnable() -> Iterator[type[nn.Module]]:
    torch.manual_seed(0)  # of the parameters
    seen = set()
    for cls in classes():
        if cls.__name__ not in REFUSED | seen:
            seen.add(cls.__name__)
            yield cls


def test_every_module_in_fp32() -> None:
    found = {}
    for cls in runnable():
        module = made(cls)
        args = inputs(module)
        found[cls.__name__] = worst(
            gradients(module, "moekit", *args), gradients(module, "eager", *args)
        )
    assert max(found.values()) < 2e-5
    assert len(found) > 20


def test_every_module_in_bf16() -> None:
    """moekit is as close to fp32 arithmetic on the same numbers as transformers is.

    Some modules of transformers compute in fp32 inside, which bf16 rounding need not equal.
    """
    found = {}
    for cls in runnable():
        module = made(cls).bfloat16()
        args = inputs(module, BF16)
        ours, theirs = (gradients(module, how, *args) for how in ("moekit", "eager"))
        x, ids, weights, grad = args
        exact = gradients(module.float(), "eager", x.float(), ids, weights.float(), grad.float())
        for name, want in exact.items():
            assert ours[name].dtype == BF16
            found[cls.__name__, name] = error(ours[name], want), error(theirs[name], want)
    bad = {k: v for k, v in found.items() if v[0] > 1.3 * max(v[1], 6e-3)}
    assert not bad
