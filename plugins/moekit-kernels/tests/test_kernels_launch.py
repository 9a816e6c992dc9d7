"""The key of a launch tells apart what Triton compiles apart."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
from moekit_kernels.launch import _passed, cdiv, next_power_of_2

BYTES = torch.empty(64, dtype=torch.uint8)
ALIGNED = BYTES[-BYTES.data_ptr() % 16 :]


def key(*values: object) -> tuple[object, ...]:
    kinds: list[object] = []
    _passed(values, kinds)
    return tuple(kinds)


def test_kinds_of_arguments_differ() -> None:
    ints = (1, 16, 17, 1 << 31, (1 << 31) + 1)
    tensors = ALIGNED, ALIGNED[1:], ALIGNED[:16].view(torch.int32)
    for a, b in itertools.combinations((*ints, *tensors, None, 1.5, (16, 17), (16,)), 2):
        assert key(a) != key(b), f"{a} {b}"


@pytest.mark.parametrize(
    ("a", "b"),
    [(32, 1 << 30), (17, -3), (1 << 40, 1 << 31), (2.5, 1.0), (ALIGNED, ALIGNED[16:])],
)
def test_values_of_one_kind_share_a_kernel(a: object, b: object) -> None:
    assert key(a) == key(b)


def test_parameters_are_tensors() -> None:
    whole = torch.nn.Parameter(torch.empty(64))
    part = whole.detach()
    kinds: list[object] = []
    assert _passed((whole, (part, None, 3)), kinds) == (
        whole.data_ptr(),
        (part.data_ptr(), None, 3),
    )


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 1000])
def test_sizes_are_those_of_triton(n: int) -> None:
    assert next_power_of_2(n) == triton.next_power_of_2(n)
    assert cdiv(n, 16) == triton.cdiv(n, 16)
