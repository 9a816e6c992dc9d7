"""`triton_interpreter` patches kernels and their device functions, and restores triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
import triton_interpreter
from moekit_kernels.numerics import INTERPRETED
from triton.runtime import interpreter
from triton_interpreter import prepare_once

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


@triton.jit
def _product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    product = tl.dot(tl.load(a + m[:, None] * K + k), tl.load(b + k[:, None] * N + n))
    tl.store(out + m[:, None] * N + n, product)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.full((a.shape[0], b.shape[1]), torch.nan)
    _product[(1,)](a.contiguous(), b.contiguous(), out, *a.shape[:1], *b.shape[::-1])
    return out


def check_products() -> None:
    """Compare the bits of a product where its rows and columns change their positions."""
    prepare_once()
    for m, n, k in ((16, 32, 64), (64, 16, 128), (128, 64, 32)):
        a, b = torch.randn(m, k), torch.randn(k, n)
        places_m, places_n = torch.randperm(m), torch.randperm(n)
        whole = product(a, b)
        torch.testing.assert_close(whole, a @ b, rtol=1e-5, atol=1e-4)
        assert torch.equal(product(a[places_m], b), whole[places_m])
        assert torch.equal(product(a, b[:, places_n]), whole[:, places_n])


def test_a_product_has_the_same_bits_everywhere():
    check_products()


def test_a_product_has_the_same_bits_on_cpus_with_avx2_alone():
    """numpy's BLAS chooses its kernels when it is imported."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("needs AVX2")
    code = "import test_triton_interpreter as tests; tests.check_products()"
    folders = Path(__file__).parent, Path(triton_interpreter.__file__).parent
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    environ["OPENBLAS_CORETYPE"] = "HASWELL"
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=300)
