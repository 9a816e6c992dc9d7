"""Quantization configs in the forms in which engines and models hand them to a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moekit import SCHEMES, QuantScheme
from moekit.checkpoint import Format, declared_format, format_of_scheme, scheme_of
from moekit.errors import InvalidProblem, WeightsError
from moekit.plugin import quant as schemes

# What objects of vLLM leave to their class, by method.
_METHODS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"activation_scheme": "dynamic"},
    "fbgemm_fp8": {},
    "gptq": {"desc_act": False, "sym": True},
    "awq": {},
    "modelopt": {"quant_algo": "FP8"},
    "modelopt_fp4": {"quant_algo": "NVFP4"},
    "mxfp4": {},
    "compressed-tensors": {},
}
# Fields of config.json, and the attributes of vLLM's objects that have other names.
_FIELDS = (
    "activation_scheme", "weight_block_size", "group_size", "desc_act", "checkpoint_format",
    "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules",
)  # fmt: skip
_RENAMED = {
    "weight_bits": "bits", "is_sym": "sym", "ignore_list": "ignore", "quant_method": "quant_algo",
    "quant_format": "format",
}  # fmt: skip
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
    said = {}
    for attribute in (*_FIELDS, *_RENAMED):
        if (value := getattr(given, attribute, None)) not in (None, ""):
            said[_RENAMED.get(attribute, attribute)] = value
    for field in ("full_config", "config"):  # the model's own config
        raw = getattr(given, field, None)
        if isinstance(raw, Mapping) and raw.get("quant_method"):
            lists = {key: value for key, value in said.items() if isinstance(value, list)}
            return {**raw, **lists, "quant_method": method}
    if method not in _METHODS:
        known = ", ".join(_METHODS)
        raise InvalidProblem(f"quant_config of vLLM's method {name!r}: expected one of {known}")
    if getattr(given, "is_checkpoint_fp8_serialized", None) is False:
        raise InvalidProblem(
            "quant_config says that the checkpoint is not fp8 yet: quantize it before loading, or "
            "leave quant_config out"
        )
    if method == "compressed-tensors":
        said["config_groups"] = {
            f"group_{number}": {
                "targets": [target],
                "weights": _arguments(each.get("weights")),
                "input_activations": _arguments(each.get("input_activations")),
            }
            for number, (target, each) in enumerate(given.target_scheme_map.items())
        }
    return {**_METHODS[method], **said, "quant_method": method}


def _arguments(said: object) -> dict[str, Any] | None:
    """Convert compressed-tensors' QuantizationArgs, a mapping or an object."""
    if said is None:
        return None
    fields = said if isinstance(said, Mapping) else vars(said)
    return {name: getattr(fields.get(name), "value", fields.get(name)) for name in _ARGUMENTS}
