"""`moekit.testing.interpreter`: kernels of device functions, and the language after them."""

import pytest
import torch
import triton
import triton.language as tl
from moekit_triton.numerics import INTERPRETED

from moekit.testing.interpreter import _Once, prepare_once

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="compiled")


@triton.jit
def _plus(x, n):
    return x + n


@triton.jit
def _double_plus(x, n):
    return _plus(x, n) + _plus(x, 0)


@triton.jit
def _kernel(x, y, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, _double_plus(tl.load(x + at), tl.sum(tl.full((4,), 1, tl.int32))))


@triton.jit
def _failing(x):
    _plus(tl.load(x + "no offset"), 1)


def run() -> None:
    x = torch.arange(64, dtype=torch.int32)
    y = torch.empty_like(x)
    _kernel[(4,)](x, y, 16)
    assert torch.equal(y, 2 * x + 4)


def test_the_language_is_as_it_was(device):
    from triton.runtime import interpreter

    prepare_once()
    once = interpreter._patch_lang
    assert isinstance(once, _Once)
    prepare_once()
    assert interpreter._patch_lang is once
    before = tl.load, tl.sum, tl.tensor.__add__, tl.core.load
    for _ in range(2):
        run()
        assert (tl.load, tl.sum, tl.tensor.__add__, tl.core.load) == before
    with pytest.raises(Exception, match="no offset|pointer|str"):
        _failing[(1,)](torch.zeros(1))
    assert (tl.load, tl.sum, tl.tensor.__add__, tl.core.load) == before
    run()


def test_functions_prepare_nothing(device, monkeypatch):
    """Once for each launch, however many functions its programs call."""
    from triton.runtime import interpreter

    prepare_once()
    calls, once = [], interpreter._patch_lang
    original = once._original
    monkeypatch.setattr(once, "_original", lambda fn: calls.append(fn) or original(fn))
    run()
    assert len(calls) == 1
