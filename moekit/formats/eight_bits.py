"""fp8 and int8 with scales in the layout of the weight, as several quantizers write them.

Called fp8 in transformers' and DeepSeek's configs (``weight``, ``weight_scale_inv``), fbgemm_fp8,
and fp8 or int8 by compressed-tensors and ModelOpt (``weight``, ``weight_scale``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import Any

import torch

from moekit.errors import WeightsError
from moekit.formats.format import FLOATS, SCALES, Format, Grid, Part
from moekit.formats.method import BLOCKS, Matrix, Method
from moekit.problem.quant import OperandQuant
from moekit.untrusted.arguments import shown

FP8 = torch.float8_e4m3fn
SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale_inv", "scale")
_INPUTS = ("input_scale", "activation_scale")


class Fp8(Method):
    """transformers' FineGrainedFP8Config and FbgemmFp8Config, and DeepSeek's files."""

    names = ("fp8", "fbgemm_fp8")
    # expert_dtype: the tensors show it. scale_fmt: activations' scales are powers of two.
    fields = frozenset({
        "activation_scheme", "activation_scale_ub", "weight_block_size", "fmt", "scale_fmt",
        "expert_dtype", "dequantize", "is_checkpoint_fp8_serialized", "modules_to_convert",
    })  # fmt: skip

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        if (fmt := config.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise WeightsError(f"quantization_config.fmt is {shown(fmt)}, expected 'e4m3'")

    def read(self, matrix: Matrix) -> Format | None:
        if not is_eight_bits(matrix) or matrix.method not in ("", *self.names):
            return None
        return eight_bits_of(matrix, matrix.config.get("weight_block_size"), by_convention)

    def declare(self, config: Mapping[str, Any], module: str) -> Format:
        if config["quant_method"] == "fbgemm_fp8":
            return eight_bits("", FP8, (1, -1), "weight_scale", None)
        if blocks := config.get("weight_block_size"):
            return eight_bits("", FP8, tuple(blocks), "weight_scale_inv", None)
        static = _INPUTS[0] if config.get("activation_scheme") == "static" else ""
        return eight_bits("", FP8, (-1, -1), "weight_scale", None, input_scale=static)


def is_eight_bits(matrix: Matrix) -> bool:
    return matrix.has("weight") and matrix.dtype("weight") in (FP8, torch.int8)


def by_convention(matrix: Matrix, operand: OperandQuant) -> OperandQuant:
    """Return the quantization of activations that a config without a word about it means."""
    said = matrix.config.get("activation_scheme")
    static = said == "static" or (said is None and matrix.inputs)
    if operand.group == (-1, -1):
        return OperandQuant(dtype=operand.dtype, group=(-1, -1), static=static)
    return operand


def eight_bits_of(
    matrix: Matrix,
    blocks: Sequence[int] | None,
    activation: Any,
) -> Format:
    """Return the format of an 8-bit matrix.

    Args:
        blocks: The rows and columns of a block, if the config says them.
        activation: How activations are quantized: an OperandQuant, None, or a function of the
            matrix and of the operand that has the weights' groups of columns.
    """
    dtype = matrix.dtype("weight")
    assert isinstance(dtype, torch.dtype)
    scale = next((name for name in SCALE_NAMES if matrix.has(name)), "weight_scale")
    group = _grid(matrix, scale, blocks) if matrix.has(scale) else (-1, -1)
    exponents = (torch.uint8, torch.float8_e8m0fnu)
    powers = group == (1, 32) and matrix.has(scale) and matrix.dtype(scale) in exponents
    scale_dtype = "float8_e8m0fnu" if powers else "float32"
    if callable(activation):
        columns = (-1, -1) if group == (-1, -1) else (1, group[1])
        kind = str(dtype).removeprefix("torch.")
        usual = OperandQuant(dtype=kind, group=columns, scale_dtype=scale_dtype)
        activation = activation(matrix, usual)
    label = "fp8" if dtype == FP8 else "int8"
    static = activation is not None and activation.static
    return eight_bits(
        f"{matrix.method or label} {label}".replace("fp8 fp8", "fp8"),
        dtype,
        group,
        scale,
        activation,
        scale_dtype=scale_dtype,
        input_scale=_INPUTS[matrix.has(_INPUTS[1])] if static else "",
    )


def _grid(matrix: Matrix, scale: str, blocks: Sequence[int] | None) -> Grid:
    """Return the rows and columns of a scale."""
    shape = matrix.shape(scale)
    if blocks is not None and len(shape) > 1:
        return blocks[0], blocks[1]
    if prod(shape) == 1:
        blocks_by_name = scale.endswith("_inv") and len(shape) > 1 and not matrix.method
        return (128, 128) if blocks_by_name else (-1, -1)
    if len(shape) > 2:  # (rows, 1, columns, 1)
        shape = tuple(n for n in shape if n != 1)
    if len(shape) > 1 and matrix.transposed:
        shape = shape[::-1]
    rows, columns = (*shape, 1)[:2]
    for size in BLOCKS if rows < matrix.n else ():
        if (ceil(matrix.n / size), ceil(matrix.k / size)) == (rows, columns):
            return size, size
    row_group = next((g for g in (1, *BLOCKS) if ceil(matrix.n / g) == rows), -1)
    return row_group, matrix.group(columns)


def eight_bits(
    name: str,
    dtype: torch.dtype,
    group: Grid,
    scale: str,
    activation: OperandQuant | None,
    *,
    scale_dtype: str = "float32",
    input_scale: str = "",
) -> Format:
    """Return a format of fp8 or int8 with scales in the same layout, and of inputs if asked for."""
    parts = {"weight": Part("weight", (dtype,)), "scale": Part(scale, SCALES, group)}
    if input_scale:
        parts["input_scale"] = Part(input_scale, FLOATS, (-1, -1))
    return Format(
        name=name,
        dtype=str(dtype).removeprefix("torch."),
        scale_dtype=scale_dtype,
        activation=activation,
        parts=parts,
        ignored=_INPUTS,
    )
