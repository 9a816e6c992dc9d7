"""`moekit.testing.interpreter` patches kernels and their device functions, and restores triton."""

import pytest
import torch
import triton
import triton.language as tl
from moekit_kernels.numerics import INTERPRETED
from triton.runtime import interpreter

from moekit.testing.interpreter import prepare_once

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
def _wrong(x):
    return x + "no number"


@triton.jit
def _failing(x):
    _wrong(tl.load(x))


def run() -> None:
    x = torch.arange(64, dtype=torch.int32)
    y = torch.empty_like(x)
    _kernel[(4,)](x, y, 16)
    assert torch.equal(y, 2 * x + 4)


def language():
    return tl.load, tl.sum, tl.tensor.__add__, tl.core.load


def test_the_language_is_as_it_was(device):
    prepare_once()
    wrapped = interpreter._patch_lang
    assert hasattr(wrapped, "every_time")
    prepare_once()
    assert interpreter._patch_lang is wrapped
    before = language()
    for _ in range(2):
        run()
        assert language() == before
    with pytest.raises(interpreter.InterpreterError, match="'str.*has no attribute"):
        _failing[(1,)](torch.zeros(1))
    assert language() == before
    run()


def test_functions_prepare_nothing(device, monkeypatch):
    """The interpreter searches once for what it patches, however many kernels run."""
    calls = []
    every_time = interpreter._patch_lang_core
    monkeypatch.setattr(
        interpreter, "_patch_lang_core", lambda *args: calls.append(args) or every_time(*args)
    )
    prepare_once()
    run()
    assert len(calls) in (0, 2)  # triton.language, and its core; none if a kernel ran before
    calls.clear()
    run()
    assert not calls


def test_a_function_without_a_kernel(device):
    """Triton's own functions are restored, and later kernels are right."""
    prepare_once()
    assert _plus(1, 2) == 3
    run()


def test_no_answer_is_computed_that_nobody_reads(device):
    """Whether integers overflow is asserted in Triton's debug mode only."""
    prepare_once()
    options = interpreter.interpreter_builder.options
    assert options.sanitize_overflow == options.debug


def test_a_type_is_made_once(device):
    prepare_once()
    pointer, const = tl.pointer_type(tl.int8), tl.pointer_type(tl.int8, const=True)
    elements = (tl.int8, tl.uint8, tl.bfloat16, pointer, const, tl.pointer_type(tl.int8, 3))
    made = [tl.block_type(e, shape) for e in elements for shape in ([4], [4, 1], [8])]
    for i, one in enumerate(made):
        again = tl.block_type(one.element_ty, [tl.constexpr(n) for n in one.shape])
        assert again is one and [one == other for other in made].index(True) == i
