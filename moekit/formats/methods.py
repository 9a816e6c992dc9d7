"""All formats, the fields of a quantization config, and the format that a config declares.

An engine constructs a layer from a model's ``quantization_config`` and loads weights later. Here
the config is turned into the names, shapes and dtypes of one matrix's tensors as quantizers write
them, and the formats read those as they read a checkpoint's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch

from moekit.contract.specs import FormatSpec
from moekit.discovery.registry import registry
from moekit.errors import MoekitError, WeightsError
from moekit.formats import compressed_tensors, fp4
from moekit.formats.compressed_tensors import CompressedTensors, nearest_group
from moekit.formats.eight_bits import Fp8, eight_bits
from moekit.formats.format import FLOATS, Format, Part
from moekit.formats.fp4 import Mxfp4
from moekit.formats.gguf import Gguf
from moekit.formats.gptq import AutoRound, Awq, Gptq
from moekit.formats.method import PLAIN, Matrix, Method, Plain, Tensors, skipped
from moekit.formats.modelopt import ModelOpt
from moekit.problem.quant import QuantScheme
from moekit.untrusted.arguments import FLAG, Kind, accept, either, shown, size
from moekit.untrusted.code import Fault, contained
from moekit.untrusted.json_kinds import items, record, table, text

METHODS: tuple[Method, ...] = (
    Gguf(), Plain(), CompressedTensors(), ModelOpt(), AutoRound(), Gptq(), Awq(), Mxfp4(),
    Fp8(),
)  # fmt: skip
_BY_NAME = {name: method for method in METHODS for name in method.names}
_TEXT, _MOST = text(1000), 100_000
_GROUP = either(size(1, 1 << 22), size(-1, -1))
_BLOCK = items(size(1, 1 << 22), 2, 2)
_INTEGERS = {"bits": size(1, 64), "group_size": _GROUP, "sym": FLAG, "desc_act": FLAG}
_OPERAND = record({
    "num_bits": size(1, 64), "type": _TEXT, "strategy": _TEXT, "group_size": _GROUP,
    "block_structure": either(_BLOCK, _TEXT), "dynamic": either(FLAG, _TEXT),
})  # fmt: skip
_TARGETS = items(_TEXT, 0, _MOST)
_CONFIG_GROUP = record({
    "targets": _TARGETS, "weights": _OPERAND, "input_activations": _OPERAND, "format": _TEXT,
})  # fmt: skip

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
        "config_groups": table(_CONFIG_GROUP, most=10_000),
        "sparsity_config": record({"format": _TEXT}),
        **dict.fromkeys(("dynamic", "extra_config"), table(record(_INTEGERS), most=_MOST)),
        "quantized_layers": table(record({"quant_algo": _TEXT, "group_size": _GROUP}), most=_MOST),
    }
)  # fmt: skip


_RETURN: Mapping[str, Any] = {
    "read": Format | None, "declare": Format, "of_module": Mapping | None, "check": object,
}  # fmt: skip


class _Added:
    """A plugin's Method. Its faults become a WeightsError that names the format."""

    def __init__(self, spec: FormatSpec) -> None:
        self._spec, self.names = spec, (spec.name,)

    def __getattr__(self, what: str) -> Any:
        return partial(self._asked, what)

    def _asked(self, what: str, *arguments: object) -> Any:
        try:
            with contained():
                found = getattr(_loaded(self._spec), what)(*arguments)
                if not isinstance(found, _RETURN[what]):
                    raise TypeError(f"{what} returned {shown(found)}")
                return found
        except Fault as fault:
            if isinstance(said := fault.__cause__, MoekitError):
                raise WeightsError(str(said)) from said
            text = f"{self._spec.kind} {self._spec.name!r} ({self._spec.target}) failed: {fault}"
            raise WeightsError(text) from said


@cache
def _loaded(spec: FormatSpec) -> Any:
    made = spec.load()()
    made.names = (spec.name,)
    return made


def _added() -> dict[str, Method]:
    """Return the formats that plugins add, by name."""
    found: Any = {n: _Added(spec) for n, spec in registry().formats.items() if n not in _BY_NAME}
    return found  # type: ignore[no-any-return]


def _named(name: str) -> Method | None:
    return _BY_NAME.get(name) or (_added().get(name) if name else None)


def _candidates(named: str) -> Iterator[Method]:
    """Yield the formats that a matrix may have: plugins' formats if moekit has none named so."""
    if named not in _BY_NAME and (added := _named(named)):
        yield added
    yield from METHODS
    if not named:
        yield from _added().values()


def method_of(config: Mapping[str, Any]) -> Method | None:
    """Return the method that a quantization config names; None if it names none that is known.

    Raises:
        WeightsError: A field may change numbers and is not understood.
    """
    method = _named(str(config.get("quant_method") or "").lower())
    if method is not None:
        method.check(config)
    return method


@cache  # one warning for all tensors of a checkpoint
def _warn_of_unknown(method: str) -> None:
    # Such a method may still change plain values, for example by a rotation.
    logging.getLogger("moekit").warning(
        "moekit does not know the quantization method %s: it reads tensors by their names and "
        "dtypes alone. Compare the model's outputs with another library's.",
        method,
    )


def format_of(matrix: Matrix) -> Format | None:
    """Return the format in which a matrix is stored, as if it were stored (out, in).

    Returns:
        None if it has no form that is known, and no config says that it is quantized.

    Raises:
        WeightsError: moekit does not support the form that the config or the tensors show.
    """
    for method in _candidates(matrix.method):
        if (found := method.read(matrix)) is not None:
            if matrix.method and _named(matrix.method) is None:
                _warn_of_unknown(matrix.method)
            return found
    if not matrix.method:
        return None
    name, weight = matrix.called("weight"), "weight" in matrix.tensors
    held = f"is {matrix.dtype('weight')}" if weight else f"has {', '.join(matrix.tensors)}"
    if _named(matrix.method):
        raise WeightsError(f"{name} {held}, which is unknown for {matrix.method}")
    text = (
        f"{name} {held}, and moekit does not support the quantization method {matrix.method} "
        f"(known: {', '.join((*_BY_NAME, *_added()))}): convert the checkpoint"
    )
    raise WeightsError("\n  ".join([text, *registry().faults()]))


# What models call an expert's gate, up and down projection.
_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def declared_format(
    config: Mapping[str, Any] | None,
    hidden_size: int,
    intermediate_size: int,
    module: str = "experts",
) -> Format:
    """Return the format of experts that ``config`` describes.

    Args:
        config: A model's ``quantization_config``. None, or one that leaves the module out, stands
            for unquantized experts.
        hidden_size: H.
        intermediate_size: I.
        module: The name of the experts' module, for configs that name modules.

    Raises:
        WeightsError: moekit does not know the method, or the config contradicts itself.
    """
    if config is None:
        return PLAIN
    name = "quantization_config"
    config = dict(config)
    accept({name: QUANTIZATION}, {name: config}, WeightsError)
    config["quant_method"] = str(config.get("quant_method") or "").lower()
    if any(entry.startswith(f"{module}.") for entry in skipped(config)):
        return PLAIN
    if (method := method_of(config)) is None:
        named = config["quant_method"]
        found = f"the quant_method {named!r}" if named else "no quant_method"
        expected = " or ".join(each.names[0] for each in METHODS if each.names)
        raise WeightsError(f"quantization_config has {found}, expected {expected}")
    called = max(_NAMES, key=lambda names: nearest_group(config, f"{module}.0.{names[2]}")[0])
    each = {name: method.of_module(config, f"{module}.0.{name}") for name in called}
    fields = each[called[2]]
    if (other := next((name for name in called if each[name] != fields), None)) is not None:
        raise WeightsError(
            f"quantization_config describes {other} and {called[2]} of {module} differently, and "
            "one layer has one format: load the experts from files with dequantize=True"
        )
    if fields is None or method.of_module(config, module) is None:
        return PLAIN
    n, k = hidden_size, intermediate_size
    tensors = _tensors(method.declare(fields, called[2]), n, k)
    down = Matrix(
        name=f"{module}.0.{called[2]}.weight", tensors=tensors, n=n, k=k, config=fields,
        method=config["quant_method"], inputs="input_scale" in tensors,
    )  # fmt: skip
    format = format_of(down)
    assert format is not None
    return format


def _tensors(format: Format, n: int, k: int) -> Tensors:
    """Return the shape and dtype of each tensor of a matrix (n, k) in ``format``, by suffix."""
    found = {}
    for role, part in format.parts.items():
        powers = role == "scale" and format.scale_dtype == "float8_e8m0fnu"
        shape = () if part.grid == (-1, -1) else part.shape(n, k)
        found[part.suffix] = (shape, torch.uint8 if powers else part.dtypes[0])
    return found


def format_of_scheme(scheme: QuantScheme) -> Format:
    """Return a format that ``scheme`` computes with.

    Tensors are called as in compressed-tensors' checkpoints, and as in DeepSeek's for fp8 in blocks
    with quantized activations.
    """
    weight, activation = scheme.weight, scheme.activation
    if weight is None:
        return PLAIN
    rows, columns = weight.group
    if weight.dtype == "int4":
        return compressed_tensors.integers(
            4, columns, activation, zero_points=weight.zero_points, act_order=weight.act_order
        )
    if weight.dtype == "float4_e2m1":
        name, scale = ("nvfp4", "weight_global_scale") if columns == 16 else ("mxfp4", "")
        name = f"compressed-tensors {name}"
        return fp4.pairs(name, "weight_packed", columns, scale, activation)
    if weight.codes.bits < 8 or weight.torch_dtype == torch.uint8:  # a plugin's
        stored = Part("weight_packed", (weight.torch_dtype,), (1, weight.codes.per_byte))
        parts = {"weight": stored, "scale": Part("weight_scale", FLOATS, weight.group)}
        return Format(
            name=scheme.name, dtype=weight.dtype, scale_dtype=weight.scale_dtype,
            activation=activation, parts=parts,
        )  # fmt: skip
    label = "int8" if weight.dtype == "int8" else "fp8"
    blocks = rows > 1 and activation is not None
    return eight_bits(
        label if blocks else f"compressed-tensors {label}",
        weight.torch_dtype,
        weight.group,
        "weight_scale_inv" if blocks else "weight_scale",
        activation,
        scale_dtype=weight.scale_dtype,
        input_scale="input_scale" if activation is not None and activation.static else "",
    )
