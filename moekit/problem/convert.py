"""Quantize and dequantize whole stacks of expert matrices by the reference arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.problem.quant import OperandQuant
from moekit.problem.quantize import SMALLEST_AMAX, dequantize, expand, pack, quantize

# Elements of weights that are converted at once: temporaries take up to 32 bytes each.
_AT_ONCE = 2**24


def quantized(weight: Tensor, quant: OperandQuant) -> Sequence[Tensor]:
    """Return the quantized (L, N, K) weight, its scale, and its zero points if there are any."""
    convert = quantize_with_zeros if quant.zero_points else quantize
    return _few_experts_at_a_time(lambda part: convert(part, quant), weight)


def dequantized(
    weight: Tensor,
    quant: OperandQuant,
    dtype: torch.dtype,
    *,
    scale: Tensor,
    zero_points: Tensor | None,
    g_idx: Tensor | None,
) -> Tensor:
    """Return the (L, N, K) weight in ``dtype``."""

    def convert(w: Tensor, s: Tensor, zeros: Tensor | None, order: Tensor | None) -> list[Tensor]:
        return [dequantize(w, s, quant, dtype, zero_points=zeros, g_idx=order)]

    return _few_experts_at_a_time(convert, weight, scale, zero_points, g_idx)[0]


def quantize_with_zeros(x: Tensor, quant: OperandQuant) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``x`` (..., rows, columns) to (packed codes, scale, zero points).

    Each group's range, extended to include zero, is spread over all codes.
    """
    rows, columns = x.shape[-2:]
    group = columns if quant.group[1] < 0 else quant.group[1]
    x = x.float()
    # Padding with zeros does not change a group's range, which includes zero.
    grouped = torch.unflatten(F.pad(x, (0, -columns % group)), -1, (-1, group))
    low, high = grouped.amin(-1).clamp(max=0.0), grouped.amax(-1).clamp(min=0.0)
    most = 2**quant.codes.bits - 1
    scale = (high - low).clamp(min=SMALLEST_AMAX) / most
    zeros = (-low / scale).round().clamp(0, most)
    q = x / expand(scale, quant.group, rows, columns)
    q = (q.round() + expand(zeros, quant.group, rows, columns)).clamp(0, most)
    return pack(q.to(torch.uint8), quant.codes.bits), scale, zeros.to(torch.uint8)


def _few_experts_at_a_time(
    convert: Callable[..., Sequence[Tensor]], weight: Tensor, *more: Tensor | None
) -> Sequence[Tensor]:
    """Return what ``convert`` makes of the (L, ...) stacks, with little memory beside the results.

    Args:
        convert: takes the same experts of each stack, and returns (experts, ...) tensors, which do
            not depend on the other experts.
        more: scales, zero points and so on, or None.
    """
    L = len(weight)
    step = max(1, _AT_ONCE // max(1, weight[:1].numel()))
    whole: list[Tensor] = []
    for first in range(0, max(1, L), step):
        part = convert(*(None if s is None else s[first : first + step] for s in (weight, *more)))
        if step >= L:
            return part
        whole = whole or [made.new_empty((L, *made.shape[1:])) for made in part]
        for all_experts, made in zip(whole, part, strict=True):
            all_experts[first : first + step] = made
    return whole
