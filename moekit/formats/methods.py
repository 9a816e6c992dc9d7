"""The formats that moekit reads, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moekit.errors import WeightsError
from moekit.formats.awq import Awq
from moekit.formats.compressed_tensors import CompressedTensors
from moekit.formats.eight_bits import Fp8
from moekit.formats.format import Format
from moekit.formats.fp4 import Mxfp4
from moekit.formats.gguf import Gguf
from moekit.formats.gptq import AutoRound, Gptq
from moekit.formats.matrix import Matrix
from moekit.formats.method import Method
from moekit.formats.modelopt import ModelOpt
from moekit.formats.plain import Plain
from moekit.formats.quark import Quark
from moekit.untrusted.arguments import FLAG, Kind, either, size
from moekit.untrusted.json_kinds import items, record, table, text

METHODS: tuple[Method, ...] = (
    Gguf(), Plain(), CompressedTensors(), ModelOpt(), Quark(), AutoRound(), Gptq(), Awq(), Mxfp4(),
    Fp8(),
)  # fmt: skip
_BY_NAME = {name: method for method in METHODS for name in method.names}
_TEXT, _MOST = text(1000), 100_000
_GROUP = either(size(1, 1 << 22), size(-1, -1))
_BLOCK = items(size(1, 1 << 22), 2, 2)
_INTEGERS = {"bits": size(1, 64), "group_size": _GROUP, "sym": FLAG, "desc_act": FLAG}
_OPERAND = record(
    {
        "num_bits": size(1, 64),
        "type": _TEXT,
        "strategy": _TEXT,
        "group_size": _GROUP,
        "block_structure": either(_BLOCK, _TEXT),
        "dynamic": either(FLAG, _TEXT),
    }
)
_SPEC = record({"dtype": _TEXT, "qscheme": _TEXT, "group_size": _GROUP, "is_dynamic": FLAG})
_QUARK = record({"weight": _SPEC, "input_tensors": _SPEC})
_OBJECT = record({})
_SKIPPED = items(_TEXT, 0, _MOST)

# Types and ranges of the fields that formats read. A field that is null counts as missing.
QUANTIZATION: Kind = record(
    {
        **_INTEGERS,
        **dict.fromkeys(
            ("quant_method", "quant_algo", "activation_scheme", "version", "checkpoint_format",
             "format", "fmt", "packing_format", "data_type", "pack_dtype"),
            _TEXT,
        ),
        **dict.fromkeys(("w_bit", "act_bits"), size(1, 64)),
        "q_group_size": _GROUP,
        "weight_block_size": _BLOCK,
        "static_groups": FLAG,
        "config_groups": table(
            record(
                {
                    "targets": _SKIPPED,
                    "weights": _OPERAND,
                    "input_activations": _OPERAND,
                    "format": _TEXT,
                }
            ),
            most=10_000,
        ),
        "sparsity_config": record({"format": _TEXT}),
        **dict.fromkeys(("dynamic", "extra_config"), table(record(_INTEGERS), most=_MOST)),
        "quantized_layers": table(record({"quant_algo": _TEXT, "group_size": _GROUP}), most=_MOST),
        "layer_quant_config": table(_QUARK, most=_MOST),
        "global_quant_config": _QUARK,
    }
)  # fmt: skip


def method_of(config: Mapping[str, Any]) -> Method | None:
    """Return the method that a quantization config names; None if it names none that is known.

    Raises:
        WeightsError: A field may change numbers and is not understood.
    """
    method = _BY_NAME.get(str(config.get("quant_method") or "").lower())
    if method is not None:
        method.check(config)
    return method


def format_of(matrix: Matrix) -> Format | None:
    """Return the format in which a matrix is stored, as if it were stored (out, in).

    Returns:
        None if it has no form that is known, and no config says that it is quantized.

    Raises:
        WeightsError: moekit does not support the form that the config or the tensors show.
    """
    for method in METHODS:
        if (found := method.read(matrix)) is not None:
            return found
    if not matrix.method:
        return None
    name, weight = matrix.called("weight"), "weight" in matrix.tensors
    held = f"is {matrix.dtype('weight')}" if weight else f"has {', '.join(matrix.tensors)}"
    raise WeightsError(
        f"{name} {held}, and moekit does not support the quantization method {matrix.method} "
        f"(known: {', '.join(_BY_NAME)}): convert the checkpoint"
        if matrix.method not in _BY_NAME
        else f"{name} {held}, which is no form of {matrix.method} that moekit knows"
    )
