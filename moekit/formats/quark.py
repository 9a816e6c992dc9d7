"""AMD Quark: fp8 and mxfp4, by a config for the model and for some of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from moekit.formats.eight_bits import eight_bits_of, is_eight_bits
from moekit.formats.format import Format
from moekit.formats.fp4 import Mxfp4
from moekit.formats.method import Matrix, Method
from moekit.problem.quant import OperandQuant

_GROUPS = {"per_tensor": (-1, -1), "per_channel": (1, -1), "per_token": (1, -1)}


class Quark(Method):
    """``weight`` and ``weight_scale``; ``input_tensors`` says how activations are quantized."""

    names = ("quark",)
    fields = frozenset({
        "global_quant_config", "layer_quant_config", "export", "layer_type_quant_config",
        "kv_cache_quant_config", "quant_mode", "algo_config", "softmax_quant_spec", "version",
        "kv_cache_post_rope",
    })  # fmt: skip

    def of_module(self, config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
        if super().of_module(config, module) is None:
            return None
        for pattern, fields in (config.get("layer_quant_config") or {}).items():
            if fnmatchcase(module, pattern):
                return dict(fields)
        return dict(config.get("global_quant_config") or {})

    def read(self, matrix: Matrix) -> Format | None:
        if matrix.method not in self.names:
            return None
        inputs = matrix.config.get("input_tensors")
        if is_eight_bits(matrix):
            return eight_bits_of(matrix, None, _operand(inputs))
        found = Mxfp4().read(matrix)
        return found and replace(found, activation=_operand(inputs))


def _operand(inputs: Mapping[str, Any] | None) -> OperandQuant | None:
    if not inputs:
        return None
    qscheme, dtype = inputs.get("qscheme") or "per_tensor", inputs.get("dtype")
    kind = {"fp8_e4m3": "float8_e4m3fn", "int8": "int8"}.get(str(dtype), str(dtype))
    group = _GROUPS.get(qscheme, (1, inputs.get("group_size") or -1))
    return OperandQuant(dtype=kind, group=group, static=not inputs.get("is_dynamic"))
