"""Values of every wrong type, for `fuzz_surface`, and the sizes of the layer that it calls."""

from __future__ import annotations

import decimal
import fractions
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import moekit

E, K, H, I, T = 4, 2, 8, 4, 3


class Hostile:
    """Raises wherever it is looked at."""

    def _raise(self, *args: object) -> Any:
        raise ZeroDivisionError("hostile")

    __repr__ = __eq__ = __bool__ = __len__ = __index__ = __float__ = __iter__ = _raise
    __lt__ = __gt__ = __le__ = __ge__ = __int__ = __contains__ = _raise
    __hash__ = object.__hash__


def _inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(T, H)


JUNK: tuple[Callable[[], Any], ...] = tuple(
    (lambda value=value: value)
    for value in (
        None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**40, 2**63, 2**200, -(2**70), 10**5000,
        0.0, 1.5, -0.5, float("nan"), float("inf"), -float("inf"), 1e308, 1 + 2j,
        "", "x", "8", "silu", "none", "cpu", "cuda", "cuda:99", "meta", "sm90", "\ud800", "a\0b",
        b"x", (), (1,), (9, 0), (9.0, 0), range(3), Ellipsis, int, torch, len,
        fractions.Fraction(3, 2), decimal.Decimal(2), np.int64(2), np.float32(1.5), np.bool_(True),
        np.str_("silu"), np.float64("nan"), torch.float32, torch.int8, torch.strided,
        torch.device("cpu"), torch.device("meta"), torch.device("cuda"), torch.device("xpu"),
        torch.device("hpu"), torch.device("mps"), torch.Size([2]),
    )
) + (
    lambda: [], lambda: [1], lambda: [[0]], lambda: [[0, 1], [1]], dict, lambda: {"a": 1}, set,
    lambda: iter(()), object, Hostile, lambda: [Hostile()], lambda: Hostile, lambda: np.arange(3),
    lambda: torch.tensor(2), lambda: torch.tensor(True), lambda: torch.tensor(1.5),
    lambda: torch.ones(0), lambda: torch.ones(T, H), lambda: torch.ones(T, E),
    lambda: torch.ones(T, H).double(), lambda: torch.ones(T, K, dtype=torch.int64),
    lambda: torch.ones(T, H, dtype=torch.complex64), lambda: torch.ones(T, H).to_sparse(),
    lambda: torch.ones(T, H).to_sparse_csr(), lambda: torch.ones(1, H).expand(T, H),
    lambda: torch.ones(T, H, device="meta"), lambda: torch.ones(T, H, requires_grad=True),
    lambda: torch.full((T, E), float("nan")), lambda: torch.full((T, K), 2**62),
    lambda: torch.ones(T, E, dtype=torch.float8_e4m3fn), lambda: torch.ones(T, dtype=torch.bool),
    lambda: torch.quantize_per_tensor(torch.ones(T, H), 0.1, 0, torch.quint8),
    lambda: torch.ones(T, H).to_mkldnn(), _inference_tensor, lambda: moekit.SCHEMES["fp8_block"],
    lambda: moekit.Activation("gelu"), lambda: moekit.ParallelConfig(ep_size=2, dp_size=1),
    lambda: moekit.QuantScheme(name="fp8_block"), lambda: moekit.DeviceSpec("cuda", (9, 0)),
    lambda: torch.nn.Linear(2, 2), lambda: moekit.Routing(None, None),
)  # fmt: skip
