"""Quantization configs in the forms in which models hand them to a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moekit import SCHEMES, QuantScheme
from moekit.checkpoint import Format, declared_format, format_of_scheme, scheme_of
from moekit.errors import InvalidProblem, WeightsError
from moekit.plugin import quant as schemes


def resolve(
    given: object,
    quant: QuantScheme | str | None,
    dequantize: bool,
    sizes: tuple[int, int, int],
    module: str,
) -> tuple[Format, QuantScheme]:
    """Return how a checkpoint stores the experts, and the scheme that computes with them.

    sizes: H, I and the tensor-parallel size; see `FusedMoE` for the others. Raises InvalidProblem
    if moekit does not know the config, or has no scheme for it.
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
    elif callable(convert := getattr(given, "to_dict", None)):
        config = dict(convert())
    else:
        raise InvalidProblem(
            f"quant_config={given!r}: it must be a model's quantization_config (a mapping, or an "
            "object with to_dict), a scheme of moekit.SCHEMES or its name, or None"
        )
    if isinstance(inner := config.get("quantization"), Mapping):  # ModelOpt's hf_quant_config.json
        config = {"quant_method": "modelopt", **inner}
    name = config.get("quant_method")
    return config | {"quant_method": getattr(name, "value", name)}  # transformers has enums
