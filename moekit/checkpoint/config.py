"""Describe a checkpoint's experts in moekit's terms, from its config.json and its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moekit.checkpoint.files import Checkpoint
from moekit.checkpoint.names import ExpertNames, layers_in, names_in, no_experts
from moekit.checkpoint.schema import (
    ACTIVATIONS,
    EXPERTS,
    HIDDEN,
    INNER,
    NESTED,
    TOP_K,
    WEIGHT_ON_INPUT,
    check_understood,
)
from moekit.checkpoint.schemes import scheme_for, scheme_of
from moekit.checkpoint.share import layer_formats, several
from moekit.checkpoint.tensors import named
from moekit.errors import WeightsError
from moekit.formats.format import Format, filled, stored
from moekit.problem import DTYPES, MoEProblem, ParallelConfig
from moekit.problem.activation import Activation
from moekit.untrusted.arguments import shown


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers whose experts are alike.

    Attributes:
        layers: Their numbers.
        formats: How matrices are stored; several if they differ.
        stored: The same in words.
        scheme: The scheme of moekit that computes with the weights as they are stored and
            quantizes activations as the checkpoint intends. If None, there is no such scheme, and
            `load_experts` needs ``dequantize=True`` or a scheme that the caller names.
        problem: The problem of their unquantized experts, on one CPU.
    """

    layers: tuple[int, ...] = field(compare=False)
    formats: tuple[Format, ...]
    stored: str = field(compare=False)
    scheme: str | None
    problem: MoEProblem

    def __str__(self) -> str:
        p, runs = self.problem, _runs(self.layers)
        limit = "" if p.activation.limit is None else f" (limit {p.activation.limit:g})"
        return (
            f"layers {runs}: {self.stored}, "
            f"scheme {self.scheme or '(none: dequantize=True)'}, {p.num_experts} experts, "
            f"top {p.top_k}, hidden {p.hidden_size}, intermediate {p.intermediate_size}, "
            f"{p.activation.name}{limit}"
        )


@dataclass(frozen=True, kw_only=True)
class Detected:
    """The experts of a checkpoint, as `detect` returns them.

    Attributes:
        names: What the checkpoint calls the experts' tensors.
        groups: The layers with routed experts, by what they have in common.
    """

    model_type: str
    names: ExpertNames
    groups: tuple[LayerGroup, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with routed experts."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    def __str__(self) -> str:
        lines = [f"{self.model_type or 'model'}, {self.groups[0].problem.dtype_name}"]
        lines += [f"  experts: {self.names.down}"]
        return "\n".join([*lines, *(f"  {group}" for group in self.groups)])

    __repr__ = __str__


def detect(path: str | Path | Checkpoint, names: ExpertNames | None = None) -> Detected:
    """Describe the experts of a checkpoint from its config.json and headers.

    Args:
        path: A file, a directory, or an open `Checkpoint`.
        names: What the tensors are called; needed for model types that `NAMES` lacks.

    Raises:
        WeightsError: A size is not in the config, a field of it is not understood, or the experts
            are not in the files.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    with named(checkpoint):
        return _detect(checkpoint, names, None, {})


def _detect(
    checkpoint: Checkpoint, names: ExpertNames | None, layer: int | None, given: Mapping[str, Any]
) -> Detected:
    """Describe all layers, or one. ``given`` are fields of the problem that the caller states."""
    config, model_type = text_config(checkpoint), model_type_of(checkpoint)
    check_understood(config, given)
    # The first layers may be dense, and the tensors may have one of several names.
    probe = names_in(checkpoint, names or model_type, layer)
    layers = layers_in(checkpoint, probe)
    # Draft layers (multi-token prediction) come after the decoder's.
    depth = config.get("num_hidden_layers") or 0
    layers = tuple(n for n in layers if n < depth) or layers
    if not layers or (layer is not None and layer not in layers_in(checkpoint, probe)):
        raise WeightsError(no_experts(checkpoint, probe, layer or 0))
    on_input = model_type == "llama4_text" or bool(config.get(WEIGHT_ON_INPUT))
    groups: list[LayerGroup] = []
    for each in layers if layer is None else (layer,):
        sizes = _sizes(config, each, given)
        hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
        found = layer_formats(checkpoint, probe, each, hidden, inner)
        made = LayerGroup(
            layers=(each,),
            stored=found.text,
            formats=found.distinct,
            scheme=scheme_for(found.distinct[0], inner) if len(found.distinct) == 1 else None,
            problem=MoEProblem(
                **sizes,
                activation=_activation(config, each, given),
                dtype=_dtype(config, checkpoint.config),
                has_bias=filled(stored(probe.down, "bias"), each, 0) in checkpoint,
                apply_router_weight_on_input=on_input,
                device="cpu",
            ),
        )
        if made in groups:
            made = groups.pop(groups.index(made))
            made = replace(made, layers=(*made.layers, each))
        groups.append(made)
    return Detected(
        model_type=model_type,
        names=probe,
        groups=tuple(sorted(groups, key=lambda group: group.layers)),
    )


def problem_from_config(
    path: str | Path | Checkpoint,
    *,
    layer: int | None = None,
    names: ExpertNames | None = None,
    dequantize: bool = False,
    **given: Any,
) -> MoEProblem:
    """Return the problem of the checkpoint's routed experts.

    The scheme is one whose groups tensor parallelism does not cut: int4 groups of 128 become
    groups of 64 or 32 with the same scales if a rank's share ends within a group.

    Args:
        path: A file, a directory, or an open `Checkpoint`.
        layer: The layer that the problem is for; needed where layers differ.
        names: What the tensors are called; needed for model types that `NAMES` lacks.
        dequantize: The weights will be loaded with ``dequantize=True``, so the scheme is "none".
        given: Fields of `MoEProblem` that the checkpoint does not know, such as ``parallel``,
            ``device`` or ``max_num_tokens``, or that replace what it says, such as ``quant``.

    Raises:
        WeightsError: No scheme of moekit computes with the stored weights, layers differ, or a
            field of the config is not understood.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    with named(checkpoint):
        found = _detect(checkpoint, names, layer, given)
        first, *others = found.groups
        problem, *differ = (g.problem.replace(**{"device": None, **given}) for g in found.groups)
        plain = dequantize or "quant" in given
        mixed = not plain and any(each.formats != first.formats for each in others)
        if mixed or any(each != problem for each in differ):
            raise WeightsError(
                "layers differ, and a problem describes one: pass layer=... (or dequantize=True, "
                "where only formats differ): " + "; ".join(map(str, found.groups))
            )
        if plain:
            return problem
        tp_size = problem.parallel.tp_size
        if len(first.formats) > 1:
            raise WeightsError(f"{several(first.stored)}; load them with dequantize=True")
        scheme = scheme_of(first.formats[0], None, problem.intermediate_size, tp_size)
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


def text_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
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
    return text_config(checkpoint).get("model_type") or ""


def _sizes(config: Mapping[str, Any], layer: int, given: Mapping[str, Any]) -> dict[str, Any]:
    keys = dict(hidden_size=HIDDEN, intermediate_size=INNER, num_experts=EXPERTS, top_k=TOP_K)
    return {
        field: given.get(field) or _size(config, layer, field, names)
        for field, names in keys.items()
    }


def _size(config: Mapping[str, Any], layer: int, field: str, names: Collection[str]) -> int:
    for name in names:
        value = _of_layer(config, layer, name, field)
        if isinstance(value, int) and value:
            return value
    raise WeightsError(
        f"config.json of model type {config.get('model_type')!r} has none of "
        f"{', '.join(reversed(list(names)))}; "
        "describe the problem with MoEProblem(...)"
    )


def _of_layer(config: Mapping[str, Any], layer: int, name: str, field: str) -> Any:
    """Return a field of the config, or of a list with a value for each layer, this layer's."""
    value = config.get(name)
    if not isinstance(value, list):
        return value
    if value and all(each == value[0] for each in value):
        return value[0]
    if len(value) == config.get("num_hidden_layers") and layer < len(value):
        return value[layer]
    if not value:
        return None
    raise WeightsError(
        f"config.json of model type {config.get('model_type')!r} has {name}={shown(value)}, which "
        f"is not a value for each layer: pass {field}=..., as these experts have it"
    )


def _dtype(*configs: Mapping[str, Any]) -> torch.dtype:
    for config in configs:
        said = (config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        if said in DTYPES:
            return DTYPES[said]
    return torch.bfloat16


def _activation(config: Mapping[str, Any], layer: int, given: Mapping[str, Any]) -> Activation:
    if (said := given.get("activation")) is not None:
        return said if isinstance(said, Activation) else Activation(said)
    model_type, alpha = config.get("model_type"), config.get("swiglu_alpha") or None
    limits = (_of_layer(config, layer, f"swiglu_limit{s}", "activation") for s in ("", "s"))
    limit = next((float(limit) for limit in limits if limit), None)
    if model_type == "gpt_oss" or (alpha and limit):
        return Activation("swigluoai", alpha=alpha, limit=limit)
    name = next((config[key] for key in ACTIVATIONS if config.get(key)), "silu")
    if name not in _ACTIVATIONS:
        raise WeightsError(
            f"config.json names the activation {name!r}, but moekit maps only "
            f"{', '.join(_ACTIVATIONS)}; describe the problem with MoEProblem(...)"
        )
    kind = _ACTIVATIONS[name]
    if alpha or (limit and kind != "silu"):
        raise WeightsError(
            f"config.json of model type {model_type!r} has activation {name!r} with "
            f"swiglu_alpha={alpha} and swiglu_limit={limit}, which moekit does not know: pass "
            "activation=moekit.Activation(...), as the model computes it"
        )
    # Step's models clamp the result of silu, others its argument.
    return Activation("swiglustep" if limit and model_type == "step3p5" else kind, limit=limit)


def _runs(numbers: Collection[int]) -> str:
    """Return ascending numbers as "0, 3-60"."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    each = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in each)


# -- routing -------------------------------------------------------------------------------------

# Softmax over all experts, then top-k; renormalized as ``norm_topk_prob`` says, or always.
_SOFTMAX = frozenset({
    "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "olmoe",
    "flex_olmo",
})  # fmt: skip
_SOFTMAX_ALWAYS = frozenset({
    "mixtral", "minimax", "gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid",
    "qwen3_5_moe_text", "hunyuan_v1_moe",
})  # fmt: skip
# Sigmoid with a bias for the choice, groups, and a factor.
_SIGMOID = frozenset({
    "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm4v_moe_text", "glm4_moe_lite",
    "glm_moe_dsa", "dots1",
})  # fmt: skip
_FIELDS = (
    "num_experts", "top_k", "hidden_size", "intermediate_size", "activation", "has_bias",
    "apply_router_weight_on_input",
)  # fmt: skip
_BIAS = "e_score_correction_bias"


def layer_arguments(
    path: str | Path | Checkpoint,
    layer: int,
    names: ExpertNames | None,
    dequantize: bool,
    tp_size: int,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments of `FusedMoE` for a layer of a checkpoint; see its `from_checkpoint`.

    Args:
        tp_size: Ranks that the scheme's groups are cut for.
        given: Arguments that the caller states.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    fields = {name: given[name] for name in _FIELDS if name in given}
    problem = problem_from_config(
        checkpoint,
        layer=layer,
        names=names,
        dequantize=dequantize,
        parallel=ParallelConfig(tp_size=tp_size),
        device="cpu",
        **fields,
    )
    with named(checkpoint):
        routing = routing_of(checkpoint, layer, given)
    return {
        **{name: getattr(problem, name) for name in (*_FIELDS, "quant")},
        "params_dtype": given.get("params_dtype", problem.dtype),
        **routing,
    }


def routing_of(checkpoint: Checkpoint, layer: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the routing of a layer, as keywords of `FusedMoE`. Raises WeightsError if the model
    type's routing is not known.

    Args:
        given: Keywords that the caller states. With one of routing among them, a model type that
            is not known here is no error.
    """
    config, model_type = text_config(checkpoint), model_type_of(checkpoint)
    if model_type in _SOFTMAX_ALWAYS:
        return {"renormalize": True}
    if model_type in _SOFTMAX and "norm_topk_prob" in config:
        return {"renormalize": bool(config["norm_topk_prob"])}
    if model_type in _SIGMOID:
        grouped = (config.get("n_group") or 1) > 1
        return {
            "scoring_func": "sigmoid",
            "renormalize": bool(config.get("norm_topk_prob", True)),
            "routed_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
            "num_expert_group": config["n_group"] if grouped else None,
            "topk_group": config.get("topk_group") if grouped else None,
            _BIAS: _correction_bias(checkpoint, layer),
        }
    if given.keys() & {"renormalize", "scoring_func", "custom_routing_function"}:
        return {}
    raise WeightsError(
        f"how model type {model_type!r} routes is not known: pass it, for example "
        "scoring_func='softmax' and renormalize=True"
    )


def _correction_bias(checkpoint: Checkpoint, layer: int) -> Tensor | None:
    wanted = f"layers.{layer}.", f".{_BIAS}"
    found = [n for n in checkpoint.names() if wanted[0] in n and n.endswith(wanted[1])]
    if len(found) > 1:
        raise WeightsError(f"layer {layer} has several biases of the router: {', '.join(found)}")
    return checkpoint.read(found[0]).float() if found else None
