"""Describe a checkpoint's experts in moekit's terms, from its config.json and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moekit.checkpoint.files import Checkpoint, named
from moekit.checkpoint.formats import Format
from moekit.checkpoint.names import ExpertNames, layers_in, names_in, no_experts
from moekit.checkpoint.probe import format_of
from moekit.checkpoint.schema import EXPERTS, INNER, NESTED, TOP_K
from moekit.checkpoint.schemes import no_scheme, scheme_for
from moekit.errors import WeightsError
from moekit.problem import DTYPES, MoEProblem
from moekit.problem.activation import Activation


@dataclass(frozen=True, kw_only=True)
class Detected:
    """The experts of a checkpoint, as `detect` returns them.

    Attributes:
        names: What the checkpoint calls the experts' tensors.
        format: How it stores each matrix.
        scheme: The scheme of moekit that computes with the weights as they are stored and
            quantizes activations as the checkpoint intends. If None, there is no such scheme, and
            `load_experts` needs ``dequantize=True`` or a scheme that the caller names.
        layers: The layers with routed experts.
    """

    model_type: str
    names: ExpertNames
    format: Format
    scheme: str | None
    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    activation: Activation
    has_bias: bool
    apply_router_weight_on_input: bool


def detect(path: str | Path | Checkpoint, names: ExpertNames | None = None) -> Detected:
    """Describe the experts of a checkpoint from its config.json and headers.

    Args:
        path: A file, a directory, or an open `Checkpoint`.
        names: What the tensors are called; needed for model types that `NAMES` lacks.

    Raises:
        WeightsError: A size is not in the config, or the experts are not in the files.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    with named(checkpoint):
        config, model_type = _text_config(checkpoint), model_type_of(checkpoint)
        # The first layers may be dense, and the tensors may have one of several names.
        probe = names_in(checkpoint, names or model_type, None)
        layers = layers_in(checkpoint, probe)
        if not layers:
            raise WeightsError(no_experts(checkpoint, probe))
        hidden, inner = _size(config, "hidden_size"), _size(config, *INNER)
        format = format_of(checkpoint, probe, layers[0], 0, hidden, inner)
        return Detected(
            model_type=model_type,
            names=probe,
            format=format,
            scheme=scheme_for(format, inner),
            layers=layers,
            num_experts=_size(config, *EXPERTS),
            top_k=_size(config, *TOP_K),
            hidden_size=hidden,
            intermediate_size=inner,
            dtype=_dtype(config, checkpoint.config),
            activation=_activation_function(config, model_type),
            has_bias=bool(probe.down_bias),
            apply_router_weight_on_input=model_type == "llama4_text",
        )


def problem_from_config(
    path: str | Path | Checkpoint,
    *,
    names: ExpertNames | None = None,
    dequantize: bool = False,
    **given: Any,
) -> MoEProblem:
    """Return the problem of the checkpoint's routed experts.

    The scheme is one whose groups tensor parallelism does not cut: int4 groups of 128 become
    groups of 64 or 32 with the same scales if a rank's share ends within a group.

    Args:
        path: A file, a directory, or an open `Checkpoint`.
        names: What the tensors are called; needed for model types that `NAMES` lacks.
        dequantize: The weights will be loaded with ``dequantize=True``, so the scheme is "none".
        given: Fields of `MoEProblem` that the checkpoint does not know, such as ``parallel``,
            ``device`` or ``max_num_tokens``, or that replace what it says, such as ``quant``.

    Raises:
        WeightsError: No scheme of moekit computes with the stored weights.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    found = detect(checkpoint, names)
    described = {k: v for k, v in vars(found).items() if k in MoEProblem.__dataclass_fields__}
    with named(checkpoint):
        problem = MoEProblem(**{**described, "quant": "none", **given})
        if dequantize or "quant" in given:
            return problem
        scheme = scheme_for(found.format, found.intermediate_size, problem.parallel.tp_size)
        if scheme is None:
            tp_size = problem.parallel.tp_size
            raise WeightsError(no_scheme(found.format, found.intermediate_size, tp_size))
        return problem.replace(quant=scheme)


# -- config.json --------------------------------------------------------------------------------

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


def _text_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the part of config.json that describes the language model."""
    config = checkpoint.config
    if not config:
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        raise WeightsError(f"{folder}: no config.json; describe the problem with MoEProblem(...)")
    for _ in range(2):  # at most thinker_config -> text_config
        for key in NESTED:
            if config.get(key) is not None:
                config = config[key]
                break
    return config


def model_type_of(checkpoint: Checkpoint) -> str:
    """Return the language model's model type; "" if config.json does not say it."""
    return _text_config(checkpoint).get("model_type") or ""


def _size(config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, list) and len(set(value)) == 1:  # a value for each layer
            value = value[0]
        if isinstance(value, int) and value:
            return value
    raise WeightsError(
        f"config.json of model type {config.get('model_type')!r} has none of {', '.join(keys)}; "
        "describe the problem with MoEProblem(...)"
    )


def _dtype(*configs: Mapping[str, Any]) -> torch.dtype:
    for config in configs:
        said = (config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        if said in DTYPES:
            return DTYPES[said]
    return torch.bfloat16


def _activation_function(config: Mapping[str, Any], model_type: str) -> Activation:
    limit = config.get("swiglu_limit")
    if model_type == "gpt_oss":
        return Activation("swigluoai", alpha=config.get("swiglu_alpha"), limit=limit)
    said = config.get("hidden_act") or config.get("mlp_hidden_act") or "silu"
    if said not in _ACTIVATIONS:
        raise WeightsError(
            f"config.json names the activation {said!r}, but moekit maps only "
            f"{', '.join(_ACTIVATIONS)}; describe the problem with MoEProblem(...)"
        )
    kind = _ACTIVATIONS[said]
    return Activation(kind, limit=float(limit)) if limit and kind == "silu" else Activation(kind)
