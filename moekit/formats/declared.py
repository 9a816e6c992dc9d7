"""The format that a quantization config declares, before any tensor is there.

An engine constructs a layer from a model's ``quantization_config`` and loads weights later. Here
the config is turned into the names, shapes and dtypes of one matrix's tensors as quantizers write
them, and the formats read those as they read a checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moekit.errors import WeightsError
from moekit.formats import compressed_tensors, fp4
from moekit.formats.compressed_tensors import nearest_group
from moekit.formats.eight_bits import eight_bits
from moekit.formats.format import Format
from moekit.formats.matrix import Matrix
from moekit.formats.method import skipped
from moekit.formats.methods import METHODS, QUANTIZATION, format_of, method_of
from moekit.formats.plain import plain
from moekit.problem.quant import QuantScheme
from moekit.untrusted.arguments import MAX_WIDTH, NAME, accept, instance, optional, size

# What models call an expert's gate, up and down projection.
_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_KINDS = {
    "config": optional(instance("a quantization_config (a mapping)", Mapping)),
    **dict.fromkeys(("hidden_size", "intermediate_size"), size(1, MAX_WIDTH)),
    "module": NAME,
}


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
    accept(_KINDS, locals(), WeightsError)
    if config is None:
        return plain()
    name = "quantization_config"
    config = dict(config)
    accept({name: QUANTIZATION}, {name: config}, WeightsError)
    config["quant_method"] = str(config.get("quant_method") or "").lower()
    if any(entry.startswith(f"{module}.") for entry in skipped(config)):
        return plain()
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
        return plain()
    n, k = hidden_size, intermediate_size
    down, tensors = f"{module}.0.{called[2]}", method.declare(fields, called[2], n, k)
    format = format_of(
        Matrix(
            name=f"{down}.weight",
            tensors=tensors,
            n=n,
            k=k,
            method=config["quant_method"],
            config=fields,
            inputs="input_scale" in tensors,
        )
    )
    assert format is not None
    return format


def format_of_scheme(scheme: QuantScheme) -> Format:
    """Return a format that ``scheme`` computes with.

    Tensors are called as in compressed-tensors' checkpoints, and as in DeepSeek's for fp8 in blocks
    with quantized activations.
    """
    weight, activation = scheme.weight, scheme.activation
    if weight is None:
        return plain()
    rows, columns = weight.group
    if weight.dtype == "int4":
        return compressed_tensors.words(
            4, columns, activation, zero_points=weight.zero_points, act_order=weight.act_order
        )
    if weight.packed:
        name, scale = ("nvfp4", "weight_global_scale") if columns == 16 else ("mxfp4", "")
        name = f"compressed-tensors {name}"
        return fp4.pairs(name, "weight_packed", columns, scale, activation)
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
