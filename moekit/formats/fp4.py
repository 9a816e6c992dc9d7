"""Two fp4 values a byte: mxfp4 of gpt-oss and DeepSeek, and what nvfp4's quantizers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moekit.formats.eight_bits import SCALE_NAMES
from moekit.formats.format import FLOATS, SCALES, Format, Part
from moekit.formats.method import Matrix, Method
from moekit.problem.quant import OperandQuant

_BYTES = (torch.uint8, torch.int8)


class Mxfp4(Method):
    """transformers' Mxfp4Config: blocks and scales in gpt-oss; weight and a scale elsewhere.

    DeepSeek-V4 stores pairs in int8 with an e8m0 ``scale`` for 32 columns, under a config that
    describes the fp8 of its other layers.
    """

    names = ("mxfp4",)
    fields = frozenset({"dequantize"})

    def read(self, matrix: Matrix) -> Format | None:
        if matrix.has("blocks"):
            return blocks()
        scale = next((name for name in SCALE_NAMES if matrix.has(name)), "")
        if not scale or not matrix.has("weight") or matrix.dtype("weight") not in _BYTES:
            return None
        powers = matrix.dtype(scale) in (torch.uint8, torch.float8_e8m0fnu)
        shapes = matrix.shape("weight"), matrix.shape(scale)
        if powers and shapes == ((matrix.n, matrix.k // 2), (matrix.n, matrix.k // 32)):
            return pairs("mxfp4", "weight", 32, scale=scale)
        return None

    def declare(self, config: Mapping[str, Any], module: str) -> Format:
        return pairs("mxfp4", "weight", 32)


def blocks() -> Format:
    """Return gpt-oss's: blocks (N, K / 32, 16), scales (N, K / 32), whatever the plain layout."""
    parts = {
        "weight": Part("blocks", _BYTES[:1], (1, 32), tail=(16,), fixed=True),
        "scale": Part("scales", SCALES, (1, 32), fixed=True),
    }
    return Format(name="mxfp4", dtype="float4_e2m1", scale_dtype="float8_e8m0fnu", parts=parts)


def pairs(
    name: str,
    weight: str,
    group: int,
    global_scale: str = "",
    activation: OperandQuant | None = None,
    scale: str = "weight_scale",
) -> Format:
    """Return the format of mxfp4 or nvfp4: values (N, K / 2), scales (N, K / group)."""
    dtypes = (*FLOATS, torch.float8_e4m3fn) if global_scale else SCALES
    parts = {"weight": Part(weight, _BYTES, (1, 2)), "scale": Part(scale, dtypes, (1, group))}
    if global_scale:
        parts["global_scale"] = Part(global_scale, FLOATS, (-1, -1))
    return Format(
        name=name,
        dtype="float4_e2m1",
        scale_dtype="float8_e4m3fn" if global_scale else "float8_e8m0fnu",
        activation=activation,
        parts=parts,
        ignored=("input_scale", "input_global_scale"),
    )
