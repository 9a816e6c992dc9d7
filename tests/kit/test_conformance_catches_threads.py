"""Backends that keep scratch between calls: the kit's threads must find them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from conformance_catches import killed_by, mutants_of, suite

from moekit.backends.torch_experts import TorchExperts
from moekit.testing import threads
from moekit.testing.cases import SEED_VARIABLE

caught = killed_by("test_threads", says=r"thread [01] of two|promised too little|size of tensor")


class Right(TorchExperts):
    """The control."""

    BASE = "torch"


@caught
class OwnScratch(Right):
    """Keeps one buffer for all calls of its object."""

    def __init__(self, spec, problem):
        super().__init__(spec, problem)
        self._own = torch.empty(1 << 22, dtype=torch.uint8)

    def apply(self, y, tokens, weights, workspace):
        assert workspace[0].nbytes <= self._own.nbytes
        super().apply(y, tokens, weights, [self._own])


@caught
class TokensInAttribute(Right):
    """Keeps a call's state on the object."""

    def apply(self, y, tokens, weights, workspace):
        self._y, self._tokens = y, tokens
        scratch = [torch.empty_like(workspace[0])]
        super().apply(self._y, self._tokens, weights, scratch)


@cache
def _buffer(power: int) -> torch.Tensor:
    return torch.empty(1 << power, dtype=torch.uint8)


@caught
class CachedScratch(Right):
    """Keeps buffers of its module, by their size."""

    def apply(self, y, tokens, weights, workspace):
        own = _buffer(max(22, workspace[0].nbytes.bit_length()))
        super().apply(y, tokens, weights, [own])


@pytest.mark.parametrize("mutant", mutants_of(__name__))
def test_killed(mutant, monkeypatch):
    # With some seeds (22) the chosen methods keep nothing in scratch when the threads switch.
    monkeypatch.setenv(SEED_VARIABLE, "7")
    mutant.check_right()
    monkeypatch.setattr(threads, "_PATIENCE", 10.0)  # also on a machine that is busy
    mutant.check()
    suite(mutant.wrong, "torch").test_repeated_calls()  # which no other test would find
