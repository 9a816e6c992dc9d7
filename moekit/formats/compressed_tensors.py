"""compressed-tensors: packed integers, fp8, int8, mxfp4 and nvfp4 by config groups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moekit.errors import WeightsError
from moekit.formats.eight_bits import FP8, eight_bits, eight_bits_of, is_eight_bits
from moekit.formats.format import Format, Grid
from moekit.formats.fp4 import pairs
from moekit.formats.method import Matrix, Method, matches, words
from moekit.problem.quant import OperandQuant
from moekit.untrusted.arguments import shown

# Dtypes of activations by bits and type, and of their scales by group size.
_DTYPES = {
    (8, "float"): "float8_e4m3fn", (8, "int"): "int8", (4, "float"): "float4_e2m1"
}  # fmt: skip
_SCALE_DTYPES = {
    ("float8_e4m3fn", 32): "float8_e8m0fnu",
    ("float4_e2m1", 32): "float8_e8m0fnu",
    ("float4_e2m1", 16): "float8_e4m3fn",
}
_DENSE = ("", "dense")


class CompressedTensors(Method):
    """Each Linear belongs to the config group whose targets name it most closely."""

    names = ("compressed-tensors", "compressed_tensors")
    fields = frozenset({
        "config_groups", "format", "quantization_status", "global_compression_ratio", "version",
        "run_compressed", "dequantize", "use_optimized_inference", "sparsity_config",
    })  # fmt: skip

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        sparse = (config.get("sparsity_config") or {}).get("format") or ""
        if sparse not in _DENSE:
            raise WeightsError(
                f"quantization_config.sparsity_config.format is {shown(sparse)}, and moekit reads "
                "dense weights: save the checkpoint without compressing its zeros"
            )

    def of_module(self, config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
        if super().of_module(config, module) is None:
            return None
        group = nearest_group(config, module)[1]
        return {"format": group.get("format") or config.get("format") or "", **group}

    def read(self, matrix: Matrix) -> Format | None:
        weights = matrix.config.get("weights") or {}
        activation = operand(matrix.config.get("input_activations"))
        if matrix.has("weight_packed"):
            return _packed(matrix, weights, activation)
        if matrix.method in self.names and is_eight_bits(matrix):
            return eight_bits_of(matrix, _blocks(weights), activation)
        return None

    def declare(self, config: Mapping[str, Any], module: str) -> Format:
        said, inputs = config.get("weights"), config.get("input_activations") or {}
        if not said:
            raise WeightsError("quantization_config has no config_groups with weights: add them")
        bits, kind, grid = said.get("num_bits"), said.get("type") or "int", _grid(said)
        if kind == "float" and bits == 8:
            static = "input_scale" if inputs and not inputs.get("dynamic") else ""
            powers = "float8_e8m0fnu" if grid == (1, 32) else "float32"
            return eight_bits(
                "", FP8, grid, "weight_scale", None, scale_dtype=powers, input_scale=static
            )
        if kind == "float" and bits == 4:
            nv = said.get("group_size") == 16
            return pairs("", "weight_packed", 16 if nv else 32, "weight_global_scale" * nv)
        if kind == "int" and bits == 8 and not str(config.get("format") or "").startswith("pack"):
            return eight_bits("", torch.int8, grid, "weight_scale", None)
        if kind == "int" and bits in (4, 8):
            zeros = said.get("symmetric") is False
            order = said.get("actorder") in ("group", "GROUP", True)
            return integers(bits, grid[1], None, zero_points=zeros, act_order=order)
        raise WeightsError(
            f"quantization_config describes weights of {shown(bits)} bits of type "
            f"{shown(kind)}, expected 4 or 8 bits of type int or float"
        )


def _packed(matrix: Matrix, weights: Mapping[str, Any], activation: OperandQuant | None) -> Format:
    if matrix.dtype("weight_packed") == torch.uint8:
        nv = matrix.has("weight_global_scale")
        label = f"compressed-tensors {'nvfp4' if nv else 'mxfp4'}"
        columns, scale = (16, "weight_global_scale") if nv else (32, "")
        return pairs(label, "weight_packed", columns, scale, activation)
    groups = matrix.sides("weight_scale")[1] if matrix.has("weight_scale") else 1
    bits = round(32 * matrix.sides("weight_packed")[1] / matrix.k)
    zero_points = matrix.has("weight_zero_point")
    if bits not in (4, 8) or (bits == 8 and zero_points):
        raise WeightsError(
            f"{matrix.called('weight_packed')}: {bits} bits"
            f"{' with zero points' if zero_points else ''} are not supported; use 4 bits, or "
            "8 bits without zero points"
        )
    said = -1 if weights.get("strategy") == "channel" else weights.get("group_size")
    group, order = matrix.group(groups, said), matrix.has("weight_g_idx")
    return integers(bits, group, activation, zero_points=zero_points, act_order=order)


def integers(
    bits: int, group: int, activation: OperandQuant | None, *, zero_points: bool, act_order: bool
) -> Format:
    """Return the format of packed integers. weight_shape holds (N, K), which config.json says."""
    names = "weight_zero_point" * zero_points, "weight_g_idx" * act_order
    return words(
        "compressed-tensors pack-quantized",
        bits,
        group,
        ("weight_packed", "weight_scale", *names),
        zero_points=zero_points,
        act_order=act_order,
        activation=activation,
        ignored=("weight_shape", "weight_g_idx", "input_scale"),
    )


def nearest_group(config: Mapping[str, Any], module: str) -> tuple[int, Mapping[str, Any]]:
    """Return how closely a target names a Linear, and its config group."""
    found = (-1, dict[str, Any]())
    for group in (config.get("config_groups") or {}).values():
        near = [_nearness(target, module) for target in group.get("targets") or ()]
        found = max(found, (max(near, default=0), group), key=lambda each: each[0])
    return found


def _nearness(target: str, module: str) -> int:
    """Return how closely a config group's target names the module; 0 if it does not."""
    if target.startswith("re:"):
        return 2 if matches(target[3:], module) else 0
    return 2 if module.endswith(target) else int(target == "Linear")


def operand(args: Mapping[str, Any] | None) -> OperandQuant | None:
    """Convert QuantizationArgs of activations."""
    if not args:
        return None
    bits, kind = args.get("num_bits") or 8, args.get("type") or "int"
    dtype = _DTYPES.get((bits, kind), f"{kind}{bits}")
    dynamic, columns = bool(args.get("dynamic")), args.get("group_size") or -1
    group = {
        "token": (1, -1),
        "channel": (1, -1),
        "group": (1, columns),
        "tensor_group": (1, columns),
    }.get(args.get("strategy") or ("token" if dynamic else "tensor"), (-1, -1))
    scale_dtype = _SCALE_DTYPES.get((dtype, group[1]), "float32")
    return OperandQuant(dtype=dtype, group=group, static=not dynamic, scale_dtype=scale_dtype)


def _blocks(weights: Mapping[str, Any]) -> Sequence[int] | None:
    """Return block_structure, which is [128, 128] or "128x128"."""
    blocks = weights.get("block_structure")
    if not isinstance(blocks, str):
        return blocks
    said = re.fullmatch(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", blocks)
    if not said:
        raise WeightsError(f"block_structure must be of the form '128x128' (got {shown(blocks)})")
    return [int(size) for size in said.groups()]


def _grid(said: Mapping[str, Any]) -> Grid:
    """Return the rows and columns of a scale by QuantizationArgs."""
    strategy, columns = said.get("strategy") or "tensor", said.get("group_size") or -1
    if strategy == "block":
        return (128, 128)  # `read` takes block_structure itself
    if strategy == "tensor":
        return (-1, -1)
    return (1, -1) if strategy == "channel" else (1, columns)
