"""The format that a quantization config declares, before any tensor is there.

An engine constructs a layer from a model's ``quantization_config`` and loads weights later. Here
the config is turned into the names, shapes and dtypes of one matrix's tensors as quantizers write
them, and `Probe` examines those as it examines a checkpoint's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from moekit.checkpoint import formats
from moekit.checkpoint.formats import Format, Grid
from moekit.checkpoint.probe import Probe, nearest_group
from moekit.checkpoint.schema import QUANTIZATION
from moekit.checkpoint.targets import Matcher
from moekit.errors import WeightsError
from moekit.problem.quant import QuantScheme
from moekit.untrusted.arguments import MAX_WIDTH, NAME, accept, instance, optional, shown, size

_FP8 = torch.float8_e4m3fn
# What models call an expert's down projection.
_DOWN = ("down_proj", "w2")
_METHODS = ("fp8", "fbgemm_fp8", "modelopt", "gptq", "awq", "compressed-tensors", "mxfp4")
_KINDS = {
    "config": optional(instance("a quantization_config (a mapping)", Mapping)),
    **dict.fromkeys(("hidden_size", "intermediate_size"), size(1, MAX_WIDTH)),
    "module": NAME,
}
# Lists of modules that are not quantized, by their names in configs and in vLLM's objects.
SKIPPED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_Tensors = dict[str, tuple[tuple[int, ...], torch.dtype | str]]


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
    if config is None or _left_out(config, module):
        return formats.plain()
    name = "quantization_config"
    accept({name: QUANTIZATION}, {name: dict(config)}, WeightsError)
    method = (config.get("quant_method") or "").lower()
    if method not in _METHODS:
        named = f"the quant_method {shown(method)}" if method else "no quant_method"
        raise WeightsError(f"quantization_config has {named}, expected {' or '.join(_METHODS)}")
    if method == "mxfp4":
        return formats.fp4_bytes("mxfp4", "weight", 32)
    called = [f"{module}.0.{name}" for name in _DOWN]
    down = max(called, key=lambda name: nearest_group(config, name)[0])
    n, k = hidden_size, intermediate_size
    make = {"gptq": _gptq, "awq": _awq, "modelopt": _modelopt, "compressed-tensors": _compressed}
    tensors = _tensors(make.get(method, _fp8)(config, down), n, k)
    if method == "gptq":
        tensors.setdefault("qzeros", ((), torch.int32))  # 8-bit weights have them, too
    stored = {formats.stored(f"{down}.weight", suffix): of for suffix, of in tensors.items()}
    return Probe(stored, f"{down}.weight", config, n, k).format()


def format_of_scheme(scheme: QuantScheme) -> Format:
    """Return a format that ``scheme`` computes with.

    Tensors are called as in compressed-tensors' checkpoints; in those of fp8 in blocks with
    quantized activations, as in DeepSeek's.
    """
    weight, activation = scheme.weight, scheme.activation
    if weight is None:
        return formats.plain()
    rows, columns = weight.group
    if weight.dtype == "int4":
        zeros, order = weight.zero_points, weight.act_order
        return formats.pack_quantized(4, columns, activation, zero_points=zeros, act_order=order)
    if weight.packed:
        name, scale = ("nvfp4", "weight_global_scale") if columns == 16 else ("mxfp4", "")
        name = f"compressed-tensors {name}"
        return formats.fp4_bytes(name, "weight_packed", columns, scale, activation)
    label = "int8" if weight.dtype == "int8" else "fp8"
    blocks = rows > 1 and activation is not None
    return formats.eight_bits(
        label if blocks else f"compressed-tensors {label}",
        weight.torch_dtype,
        weight.group,
        "weight_scale_inv" if blocks else "weight_scale",
        activation,
        scale_dtype=weight.scale_dtype,
        input_scale="input_scale" if activation is not None and activation.static else "",
    )


def _left_out(config: Mapping[str, Any], module: str) -> bool:
    """Return whether the config leaves the module, or one of its experts, unquantized.

    Entries name a module, or modules that it contains or is in, or are expressions after "re:", or
    patterns with wildcards, as ModelOpt writes them.
    """
    entries = [config.get(key) for key in SKIPPED]
    names, matcher = (module, *(f"{module}.0.{name}" for name in _DOWN)), Matcher()
    for entry in itertools.chain.from_iterable(e for e in entries if isinstance(e, list)):
        if not isinstance(entry, str):
            continue
        if f"{module}.".startswith(f"{entry}.") or entry.startswith(f"{module}."):
            return True
        if not entry.startswith("re:"):
            if "*" in entry and any(fnmatchcase(name, entry) for name in names):
                return True
            continue
        try:
            if any(matcher.matches(entry[3:], name) for name in names):
                return True
        except ValueError as error:
            raise WeightsError(f"quantization_config leaves out {shown(entry)}: {error}") from error
    return False


# -- how each method stores a matrix; `Probe` finds the rest ----------------------------------


def _tensors(format: Format, n: int, k: int) -> _Tensors:
    """Return the shape and dtype of each tensor of a matrix (n, k), by suffix."""
    found: _Tensors = {}
    for role, part in format.parts.items():
        powers = role == "scale" and format.scale_dtype == "float8_e8m0fnu"
        shape = () if part.grid == (-1, -1) else part.shape(n, k)
        found[part.suffix] = (shape, torch.uint8 if powers else part.dtypes[0])
    return found


def _eight_bits(
    grid: Grid, scale: str = "weight_scale", dtype: torch.dtype = _FP8, static: bool = False
) -> Format:
    inputs = "input_scale" if static else ""
    return formats.eight_bits("", dtype, grid, scale, None, input_scale=inputs)


def _fp8(config: Mapping[str, Any], down: str) -> Format:
    if config["quant_method"].lower() == "fbgemm_fp8":
        return _eight_bits((1, -1))
    if blocks := config.get("weight_block_size"):
        return _eight_bits(tuple(blocks), "weight_scale_inv")
    return _eight_bits((-1, -1), static=config.get("activation_scheme") == "static")


def _modelopt(config: Mapping[str, Any], down: str) -> Format:
    algorithm = (config.get("quant_algo") or "FP8").upper()
    if algorithm == "FP8":
        return _eight_bits((-1, -1), static=True)
    if "NVFP4" in algorithm:
        return formats.fp4_bytes("", "weight", 16, "weight_scale_2")
    raise WeightsError(
        f"quantization_config names ModelOpt's algorithm {shown(algorithm)}, expected FP8 or NVFP4"
    )


def _integer(config: Mapping[str, Any], key: str, allowed: tuple[int, ...]) -> int:
    value = config.get(key)
    if type(value) is not int or value not in allowed:
        choices = " or ".join(map(str, allowed))
        raise WeightsError(f"quantization_config.{key} is {shown(value)}, expected {choices}")
    return value


def _gptq(config: Mapping[str, Any], down: str) -> Format:
    bits, group = _integer(config, "bits", (4, 8)), config.get("group_size") or -1
    return formats.gptq(bits, group, zero_points=True, zero_offset=0, act_order=False, g_idx=True)


def _awq(config: Mapping[str, Any], down: str) -> Format:
    _integer({"bits": config.get("bits", config.get("w_bit"))}, "bits", (4,))
    return formats.awq(config.get("group_size") or -1)


def _compressed(config: Mapping[str, Any], down: str) -> Format:
    _, group = nearest_group(config, down)
    if not group.get("weights"):
        raise WeightsError("quantization_config has no config_groups with weights: add them")
    said, inputs = group["weights"], group.get("input_activations") or {}
    bits, kind = said.get("num_bits"), said.get("type") or "int"
    grid = _grid(said)
    if kind == "float" and bits == 8:
        static = bool(inputs) and not inputs.get("dynamic")
        found = _eight_bits(grid, static=static)
        return replace(found, scale_dtype="float8_e8m0fnu") if grid == (1, 32) else found
    if kind == "float" and bits == 4:
        if said.get("group_size") == 16:
            return formats.fp4_bytes("", "weight_packed", 16, "weight_global_scale")
        return formats.fp4_bytes("", "weight_packed", 32)
    if kind == "int" and bits in (4, 8):
        how = str(group.get("format") or config.get("format") or "")
        if bits == 8 and not how.startswith("pack"):
            return _eight_bits(grid, dtype=torch.int8)
        zeros = said.get("symmetric") is False
        order = said.get("actorder") in ("group", "GROUP", True)
        return formats.pack_quantized(bits, grid[1], None, zero_points=zeros, act_order=order)
    raise WeightsError(
        f"quantization_config describes weights of {shown(bits)} bits of type {shown(kind)}, "
        "expected 4 or 8 bits of type int or float"
    )


def _grid(said: Mapping[str, Any]) -> Grid:
    """Return the rows and columns of a scale by compressed-tensors' QuantizationArgs."""
    strategy, columns = said.get("strategy") or "tensor", said.get("group_size") or -1
    if strategy == "block":
        return (128, 128)  # `format_of` reads block_structure itself
    if strategy == "tensor":
        return (-1, -1)
    return (1, -1) if strategy == "channel" else (1, columns)
