"""Convert a layer's parameters, as engines name and pack them, to `moekit.ExpertWeights`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moekit.errors import Unsupported
from moekit.problem import ExpertWeights, int4

_GROUPS = (128, 64, 32)


class Pair(NamedTuple):
    """A tensor of w13, and the corresponding tensor of w2."""

    w13: Tensor
    w2: Tensor

    def map(self, convert: Callable[[Tensor], Tensor]) -> Pair:
        """Apply ``convert`` to both tensors."""
        return Pair(convert(self.w13), convert(self.w2))


def refusal(*reasons: str) -> Unsupported:
    """Return the error for a layer that stays with the engine."""
    return Unsupported("; ".join(reasons), reasons)


def pair(layer: Any, suffix: str) -> Pair:
    """Return the parameters ``w13_<suffix>`` and ``w2_<suffix>``."""
    return Pair(*(getattr(layer, f"{name}_{suffix}").detach() for name in ("w13", "w2")))


def made(weights: Pair, interleaved: bool, **more: Pair | None) -> ExpertWeights:
    """Return weights with both matrices' ``scale``, ``bias`` and so on, unless they are None.

    interleaved: Rows of gate and up alternate.
    """
    fields: dict[str, Tensor] = {}
    for name, both in more.items():
        if both is not None:
            fields[f"w13_{name}"], fields[f"w2_{name}"] = both
    return ExpertWeights(*weights, **fields, interleaved=interleaved)


def per_row(numbers: Tensor, rows: int) -> Tensor:
    """Repeat numbers of matrices, (L,) or (L, gate and up), for each row: (L, rows, 1)."""
    parts = numbers.view(len(numbers), -1)
    return parts.repeat_interleave(rows // parts.shape[1], dim=1).unsqueeze(2)


def each_row(weights: ExpertWeights) -> ExpertWeights:
    """Repeat scales per tensor for each channel."""
    assert weights.w13_scale is not None and weights.w2_scale is not None
    return replace(
        weights,
        w13_scale=per_row(weights.w13_scale, weights.w13.shape[1]),
        w2_scale=per_row(weights.w2_scale, weights.w2.shape[1]),
    )


def e8m0(exponents: Tensor) -> Tensor:
    """Decode bytes of e8m0 to fp32 scales."""
    return exponents.view(torch.float8_e8m0fnu).float()


# -- integers in groups of columns -------------------------------------------------------


def flip(tensor: Tensor) -> Tensor:
    """Transpose (L, a, b) to contiguous (L, b, a)."""
    return tensor.transpose(1, 2).contiguous()


def awq_words(words: Tensor) -> Tensor:
    """Unpack AWQ's words (L, K, N / 8) to (L, N, K / 2), with the rows in order."""
    return int4.repack_rows(flip(words), int4.AWQ_ORDER)


def awq_zeros(zeros: Tensor) -> Tensor:
    """Unpack AWQ's zero points (L, G, N / 8) to (L, N, G) uint8."""
    return int4.unpack_rows(flip(zeros), int4.AWQ_ORDER)


def halves(packed: Tensor) -> Tensor:
    """Unpack (L, N / 2, G), which has the even row in the lower half, to (L, N, G)."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1, 2)


def grouped(
    columns: tuple[int, int],
    bits: int,
    words: Pair,
    scales: Pair,
    zeros: Pair | None,
    g_idx: Pair | None = None,
) -> tuple[str, Pair, dict[str, Pair | None]]:
    """Return the scheme of integers with a scale per group of columns, the codes, and the rest.

    Args:
        columns: The numbers of columns of w13 and w2.
        words: (L, N, .) of int32 or uint8; their bytes are the columns in order.
        scales: (L, N, G).
        zeros: (L, N, G) uint8.
        g_idx: (L, K) int32, the group of each column.
    """
    codes = words.map(lambda words: words.view(torch.uint8))
    by_channel = scales.w13.shape[2] == scales.w2.shape[2] == 1
    if bits == 8 and by_channel and zeros is None:
        # The checkpoint stores the integers plus 128.
        codes = codes.map(lambda codes: codes.bitwise_xor(128).view(torch.int8))
        return "int8_w8a16", codes, {"scale": scales}
    if bits != 4:
        raise refusal(
            f"moekit has no scheme for {bits}-bit integers in groups, or with zero points"
        )
    kind = "channel"
    if by_channel:
        g_idx = None
    else:
        group = _group(columns, scales)
        if group not in _GROUPS:
            raise refusal(f"moekit has int4 groups of {', '.join(map(str, _GROUPS))} (got {group})")
        if g_idx is not None and all(_in_order(each, group) for each in g_idx):
            g_idx = None
        kind = f"g{group}"
    kind += "_zp" * (zeros is not None) + "_act_order" * (g_idx is not None)
    return f"int4_w4a16_{kind}", codes, {"scale": scales, "zero_points": zeros, "g_idx": g_idx}


def _group(columns: tuple[int, int], scales: Pair) -> int:
    """Return how many columns share a scale of ``scales`` (L, N, G)."""
    counts = scales.w13.shape[2], scales.w2.shape[2]
    group = columns[0] // counts[0]
    if (group * counts[0], group * counts[1]) != columns:
        raise refusal(
            f"w13 has {counts[0]} groups in {columns[0]} columns and w2 {counts[1]} in "
            f"{columns[1]}; tensor parallelism must not cut the groups of act-order"
        )
    return group


def _in_order(g_idx: Tensor, group: int) -> bool:
    """Return whether the groups that ``g_idx`` (L, K) names are runs of ``group`` columns."""
    return bool((g_idx == torch.arange(g_idx.shape[1], device=g_idx.device) // group).all())
