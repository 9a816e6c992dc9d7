"""vLLM's keywords of `FusedMoE` as keywords of moekit's layer; it checks their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from moekit import SCHEMES, Activation, QuantScheme
from moekit.checkpoint import Format, declared_format, format_of_scheme, scheme_of
from moekit.errors import InvalidProblem, WeightsError
from moekit.plugin import quant as schemes
from moekit_vllm.activations import NUMBERS, RENAMED, vllm_activation

# Parts that some versions put into the layer, and vLLM's own classes of parts.
_ABSENT = (
    "gate", "shared_experts", "fuse_shared_experts", "shared_expert_gate", "router", "bias_vl",
    "routed_input_transform", "routed_output_transform", "pcp_size", "runner_cls", "runner_args",
    "routed_experts_cls", "routed_experts_args", "moe_config_cls",
)  # fmt: skip
# Hints for some of vLLM's kernels, and what counts only with keywords of `_ABSENT`. moekit routes
# in fp32 for logits of every dtype, and `moekit.eplb` balances redundant experts.
_HARMLESS = (
    "enable_eplb", "image_sentinel_lo", "intermediate_pad", "n_shared_experts",
    "router_logits_dtype", "routing_method_type", "shared_expert_prefix", "skip_padding",
    "use_overlapped",
)  # fmt: skip


def drop_unused(keywords: dict[str, Any]) -> None:
    """Remove keywords without effect here; refuse parts that this layer does not have."""
    for name in _ABSENT:
        value = keywords.pop(name, None)
        if not (value is None or value is False or (name == "pcp_size" and value == 1)):
            raise InvalidProblem(
                f"FusedMoE has no {name} (got {value!r}): it computes routed experts from "
                "router_logits; do the rest in the model, and choose dispatcher=... and "
                "experts=... by name"
            )
    for name in _HARMLESS:
        keywords.pop(name, None)


def activation_of(
    activation: Activation | str, is_act_and_mul: bool, keywords: dict[str, Any]
) -> Activation | str:
    """Return the activation; take its numbers from ``keywords``, or leave the usual ones."""
    taken = {name: keywords.pop(name, None) for name in NUMBERS}
    numbers = {name: number for name, number in taken.items() if number is not None}
    if not is_act_and_mul:  # vLLM's activations without a gate have no numbers
        if isinstance(activation, Activation):
            return replace(activation, name=_without_gate(activation.name))
        return _without_gate(activation)
    if isinstance(activation, str):
        known = RENAMED.get(activation, activation)
        return vllm_activation(activation, numbers) if numbers else known
    if numbers:
        raise InvalidProblem(
            f"activation={activation} and {', '.join(numbers)} are both given: set them in the "
            "Activation, or give its name"
        )
    return activation


def _without_gate(name: str) -> str:
    return name if name.startswith("relu2") or name.endswith("_no_mul") else f"{name}_no_mul"


def set_routing(
    keywords: dict[str, Any],
    custom: Callable[..., Any] | None,
    hash_table: Tensor | None,
    scales_output: bool,
) -> float:
    """Write moekit's routing options into ``keywords``; return the factor of the output.

    As in vLLM, groups are ignored without ``use_grouped_topk``, a correction bias with a table of
    hashed routing, and all options with a custom routing function.
    """
    if (kind := keywords.pop("zero_expert_type", None)) not in (None, "identity"):
        raise InvalidProblem(f"zero_expert_type={kind!r}: it must be 'identity' or None")
    if not (zero_experts := keywords.get("zero_expert_num")):
        keywords.pop("zero_expert_num", None)
    grouped = keywords.pop("use_grouped_topk", False)
    ignored = [] if grouped else ["num_expert_group", "topk_group"]
    if grouped and custom is None and keywords.get("num_expert_group") is None:
        raise InvalidProblem("use_grouped_topk=True needs num_expert_group and topk_group")
    factor = 1.0
    if scales_output:
        factor = float(keywords.pop("routed_scaling_factor", 1.0))
        if zero_experts and factor != 1.0:
            raise InvalidProblem(
                "apply_routed_scale_to_output=True scales no identity experts: leave it or "
                f"zero_expert_num={zero_experts} out"
            )
    if hash_table is not None:
        scoring = keywords.get("scoring_func")
        if grouped or custom is not None or scoring != "sqrtsoftplus":
            raise InvalidProblem(
                "vLLM reads hash_indices_table with scoring_func='sqrtsoftplus' only, and without "
                "use_grouped_topk and custom_routing_function (got scoring_func="
                f"{scoring!r}, use_grouped_topk={grouped!r})"
            )
        keywords["hash_table"] = hash_table
        ignored += ["e_score_correction_bias"]
    if custom is not None:
        keywords["custom_routing_function"] = _with_vllm_names(custom)
        ignored = [
            "num_expert_group", "topk_group", "e_score_correction_bias", "scoring_func",
            "routed_scaling_factor",
        ]  # fmt: skip
    for name in ignored:
        keywords.pop(name, None)
    return factor


def _with_vllm_names(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    def custom(x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = function(
            hidden_states=x, gating_output=logits, topk=top_k, renormalize=renormalize
        )
        return found

    return custom


def set_ranks(
    keywords: dict[str, Any], tp_size: int | None, ep_size: int | None, dp_size: int | None
) -> None:
    """Write vLLM's sizes into ``keywords`` as fields of `LayerParallelism`."""
    if ep_size not in (None, 1):
        if tp_size is None and dp_size is None:
            tp_size = ep_size  # the ranks hold the same tokens
        tp_size, dp_size = tp_size or 1, dp_size or 1
        if ep_size != tp_size * dp_size:
            raise InvalidProblem(
                f"ep_size={ep_size} must be tp_size * dp_size, because expert parallelism spreads "
                f"whole experts over all ranks (got tp_size={tp_size}, dp_size={dp_size})"
            )
        keywords["enable_expert_parallel"] = True
    sizes = {"tp_size": tp_size, "dp_size": dp_size}
    keywords |= {name: size for name, size in sizes.items() if size is not None}


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
