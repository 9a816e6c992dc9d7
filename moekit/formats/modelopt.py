"""NVIDIA ModelOpt: fp8, and nvfp4 with weight_scale_2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moekit.errors import WeightsError
from moekit.formats.compressed_tensors import nearest_group, operand
from moekit.formats.eight_bits import FP8, by_convention, eight_bits, eight_bits_of, is_eight_bits
from moekit.formats.format import Format
from moekit.formats.fp4 import pairs
from moekit.formats.method import Matrix, Method
from moekit.problem.quant import SCHEMES, OperandQuant
from moekit.untrusted.arguments import shown

_WEIGHT_ONLY = ("W4A16_NVFP4", "NVFP4_W4A16")
_FP8 = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "MIXED_PRECISION")


class ModelOpt(Method):
    """``quant_algo`` says how activations are quantized, or config_groups do if they are there.

    In files of several algorithms, ``quantized_layers`` has the fields of each Linear.
    """

    names = ("modelopt", "modelopt_fp4", "modelopt_mixed")
    fields = frozenset({
        "quant_algo", "group_size", "config_groups", "quantized_layers", "producer",
        "activation_scheme", "kv_cache_scheme", "quantization_status", "kv_cache_quant_algo",
    })  # fmt: skip

    def of_module(self, config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
        if super().of_module(config, module) is None:
            return None
        found = {**config, **(config.get("quantized_layers") or {}).get(module, {})}
        near, group = nearest_group(config, module)
        return found if near < 0 else {**found, **group}

    def read(self, matrix: Matrix) -> Format | None:
        fp4 = matrix.has("weight") and matrix.dtype("weight") == torch.uint8
        if fp4 and matrix.has("weight_scale_2"):
            return pairs("ModelOpt nvfp4", "weight", 16, "weight_scale_2", _of_fp4(matrix))
        if matrix.method in self.names and is_eight_bits(matrix):
            return eight_bits_of(matrix, matrix.config.get("weight_block_size"), _of_fp8)
        return None

    def declare(self, config: Mapping[str, Any], module: str) -> Format:
        algorithm = (config.get("quant_algo") or "FP8").upper()
        if algorithm == "FP8":
            return eight_bits("", FP8, (-1, -1), "weight_scale", None, input_scale="input_scale")
        if "NVFP4" in algorithm:
            return pairs("", "weight", 16, "weight_scale_2")
        raise WeightsError(
            f"quantization_config names ModelOpt's algorithm {shown(algorithm)}, expected FP8 "
            "or NVFP4"
        )


def _of_fp4(matrix: Matrix) -> OperandQuant | None:
    """Return the quantization of activations of nvfp4 weights."""
    config = matrix.config
    if "weights" in config:
        return operand(config.get("input_activations")) and SCHEMES["nvfp4"].activation
    algorithm = (config.get("quant_algo") or "NVFP4").upper()
    if algorithm in _WEIGHT_ONLY:
        return None
    if algorithm in ("NVFP4", "NVFP4_AWQ", "MIXED_PRECISION"):
        return SCHEMES["nvfp4"].activation
    return OperandQuant(dtype=algorithm, group=(-1, -1))  # no scheme has it


def _of_fp8(matrix: Matrix, usual: OperandQuant) -> OperandQuant | None:
    """Return the quantization of activations of 8-bit weights."""
    algorithm = (matrix.config.get("quant_algo") or "FP8").upper()
    if algorithm not in _FP8:
        raise WeightsError(
            f"quantization_config.quant_algo is {shown(algorithm)}, expected one of "
            f"{', '.join(_FP8)} for 8-bit weights"
        )
    if algorithm.endswith("_WO"):
        return None
    if algorithm == "FP8":
        return OperandQuant(dtype=usual.dtype, group=(-1, -1), static=matrix.inputs)
    return by_convention(matrix, usual)
