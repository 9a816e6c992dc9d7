"""Quantization configs in the forms in which engines and models hand them to a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moekit import SCHEMES, QuantScheme
from moekit.checkpoint import Format, declared_format, format_of_scheme, scheme_of
from moekit.errors import InvalidProblem, WeightsError
from moekit.plugin import quant as schemes

# The lists of modules that are not quantized.
_SKIPPED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_ARGUMENTS = (
    "num_bits", "type", "strategy", "group_size", "symmetric", "actorder", "dynamic",
    "block_structure",
)  # fmt: skip


def resolve(
    given: object,
    quant: QuantScheme | str | None,
    dequantize: bool,
    sizes: tuple[int, int, int],
    module: str,
) -> tuple[Format, QuantScheme]:
    """Return how a checkpoint stores the experts, and the scheme that computes with them.

    Args:
        given: ``quant_config``: None, a scheme or its name, a model's ``quantization_config`` as a
            mapping or an object with ``to_dict``, or an object of vLLM's QuantizationConfig.
        quant: The scheme, if not the one that fits the stored weights best.
        dequantize: The scheme is "none".
        sizes: H, I and the tensor-parallel size.
        module: The layer's name.

    Raises:
        InvalidProblem: moekit does not know the config, or has no scheme for it.
    """
    chosen = schemes.scheme(quant) if isinstance(quant, str) else quant
    H, I, tp_size = sizes
    try:
        if isinstance(given, str | QuantScheme):
            found = schemes.scheme(given) if isinstance(given, str) else given
            format, chosen = format_of_scheme(found), chosen or found
        else:
            format = declared_format(_config(given), H, I, module)
        if dequantize:
            return format, SCHEMES["none"]
        return format, scheme_of(format, chosen, I, tp_size)
    except WeightsError as error:
        raise InvalidProblem(f"quant_config: {error}") from error


def _config(given: object) -> dict[str, Any] | None:
    """Return a quantization config as it is in config.json."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        config = dict(given)
    elif callable(getattr(given, "get_name", None)):
        return _of_vllm(given)
    elif callable(convert := getattr(given, "to_dict", None)):
        config = dict(convert())
    else:
        raise InvalidProblem(
            f"quant_config={given!r}: it must be a scheme of moekit.SCHEMES, a model's "
            "quantization_config, an object of vLLM's QuantizationConfig, or None"
        )
    if isinstance(inner := config.get("quantization"), Mapping):  # ModelOpt's hf_quant_config.json
        config = {"quant_method": "modelopt", **inner}
    name = config.get("quant_method")
    name = getattr(name, "value", name)  # transformers' configs have enums
    return config | {"quant_method": _method(name) if isinstance(name, str) else name}


def _method(name: str) -> str:
    """Return the method as checkpoints call it; vLLM's kernels have other names."""
    text = name.lower()
    return text.removeprefix("auto_").removesuffix("_marlin").removeprefix("gpt_oss_")


def _of_vllm(given: Any) -> dict[str, Any]:
    """Convert an object with the public fields of one of vLLM's QuantizationConfig classes."""
    name = str(given.get_name())
    method = _method(name)
    lists = {key: getattr(given, key) for key in _SKIPPED if isinstance(_get(given, key), list)}
    for field in ("full_config", "config"):  # the model's own config
        raw = _get(given, field)
        if isinstance(raw, Mapping) and raw.get("quant_method"):
            return {**raw, **lists, "quant_method": method}
    if method == "compressed-tensors":
        return {**lists, "quant_method": method, **_compressed(given)}
    if method not in _FIELDS:
        known = ", ".join((*_FIELDS, "compressed-tensors"))
        raise InvalidProblem(f"quant_config of vLLM's method {name!r}: expected one of {known}")
    if _get(given, "is_checkpoint_fp8_serialized") is False:
        raise InvalidProblem(
            "quant_config says that the checkpoint is not fp8 yet: quantize it before loading, or "
            "leave quant_config out"
        )
    default, attributes = _FIELDS[method]
    said = {key: _get(given, attribute) for key, attribute in attributes.items()}
    given_fields = {key: value for key, value in said.items() if value not in (None, "")}
    return {**lists, "quant_method": method, **default, **given_fields}


def _get(given: object, field: str) -> Any:
    return getattr(given, field, None)


def _compressed(given: object) -> dict[str, Any]:
    groups = {}
    for number, (target, said) in enumerate((_get(given, "target_scheme_map") or {}).items()):
        groups[f"group_{number}"] = {
            "targets": [target],
            "weights": _arguments(said.get("weights")),
            "input_activations": _arguments(said.get("input_activations")),
        }
    return {"format": _get(given, "quant_format"), "config_groups": groups}


def _arguments(said: object) -> dict[str, Any] | None:
    """Convert compressed-tensors' QuantizationArgs, a mapping or an object."""
    if said is None:
        return None
    read = said.get if isinstance(said, Mapping) else lambda field: _get(said, field)
    values = {field: read(field) for field in _ARGUMENTS}
    return {field: getattr(value, "value", value) for field, value in values.items()}


# By the method: fields of config.json, and the attributes of vLLM's object that replace them.
_FIELDS: Mapping[str, tuple[dict[str, Any], dict[str, str]]] = {
    "fp8": (
        {"activation_scheme": "dynamic"},
        {"activation_scheme": "activation_scheme", "weight_block_size": "weight_block_size"},
    ),
    "fbgemm_fp8": ({}, {"ignore": "ignore_list"}),
    "gptq": (
        {"desc_act": False, "sym": True},
        {
            "bits": "weight_bits",
            "group_size": "group_size",
            "desc_act": "desc_act",
            "sym": "is_sym",
            "checkpoint_format": "checkpoint_format",
        },
    ),
    "awq": ({}, {"bits": "weight_bits", "group_size": "group_size"}),
    "modelopt": ({"quant_algo": "FP8"}, {"quant_algo": "quant_method"}),
    "modelopt_fp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_algo": "quant_method"},
    ),
    "mxfp4": ({}, {}),
}
