"""Backends that keep scratch between calls: the kit's threads must find them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from moekit import Registry, registry
from moekit.backends.torch_experts import TorchExperts
from moekit.testing import ExpertsConformance, threads


class OwnScratch(TorchExperts):
    """One buffer for all calls of this object."""

    def __init__(self, spec, problem):
        super().__init__(spec, problem)
        self._own = torch.empty(1 << 22, dtype=torch.uint8)

    def apply(self, y, tokens, weights, workspace):
        assert workspace[0].nbytes <= self._own.nbytes
        super().apply(y, tokens, weights, [self._own])


class TokensInAttribute(TorchExperts):
    """A call's own state on the object."""

    def apply(self, y, tokens, weights, workspace):
        self._y, self._tokens = y, tokens
        scratch = [torch.empty_like(workspace[0])]
        super().apply(self._y, self._tokens, weights, scratch)


@cache
def _buffer(power: int) -> torch.Tensor:
    return torch.empty(1 << power, dtype=torch.uint8)


class CachedScratch(TorchExperts):
    """A module's buffers, by their size."""

    def apply(self, y, tokens, weights, workspace):
        own = _buffer(max(22, workspace[0].nbytes.bit_length()))
        super().apply(y, tokens, weights, [own])


def suite(experts: type[TorchExperts]) -> Any:
    """The kit for ``experts``, declared as `torch` is."""
    target = f"{__name__}:{experts.__name__}"
    backends = Registry(plugins=registry().plugins)
    backends.register(replace(registry().expert("torch"), name="suspect", target=target))
    body = {"backend": "suspect", "backends": backends, "device": "cpu", "__module__": __name__}
    return type(f"Test{experts.__name__}", (ExpertsConformance,), body)()


class Right(TorchExperts):
    """The control."""


def test_the_right_backend_passes() -> None:
    suite(Right).test_threads()


@pytest.mark.parametrize("mutant", [OwnScratch, TokensInAttribute, CachedScratch])
def test_state_between_calls_is_caught(
    mutant: type[TorchExperts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_PATIENCE", 10.0)  # also on a machine that is busy
    with pytest.raises(Exception, match=r"thread [01] of two|promised too little"):
        suite(mutant).test_threads()
    suite(mutant).test_repeated_calls()  # which no other test would find
