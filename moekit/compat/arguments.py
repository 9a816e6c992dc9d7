"""vLLM's keywords of `FusedMoE`, as the records of moekit's layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from moekit.compat.activations import RENAMED, vllm_activation
from moekit.errors import InvalidProblem
from moekit.layer.parallelism import LayerParallelism
from moekit.layer.router import RoutingConfig, RoutingFunction
from moekit.problem.activation import NON_GATED, Activation
from moekit.untrusted.arguments import MAX_RANKS, accept, instance, optional, real, shown, size

# Arguments of moekit's layer that vLLM's does not have.
OF_MOEKIT = frozenset(
    (
        "checked",
        "device",
        "dispatcher",
        "expert_placement_strategy",
        "experts",
        "group",
        "max_num_tokens",
        "parallel",
        "parallelism",
        "peer_timeout",
        "quant",
    )
)
_IN_THE_MODEL = "compute it in the model, outside the layer"
_BY_NAME = "moekit has no classes of it: choose dispatcher=... and experts=... by name"
# What to do instead, for keywords of some versions that this layer does not have.
_INSTEAD = {
    "gate": "call the gate in the model, and pass router_logits",
    "shared_experts": "call the shared experts in the model, and add their output",
    "shared_expert_gate": _IN_THE_MODEL,
    "routed_input_transform": _IN_THE_MODEL,
    "routed_output_transform": _IN_THE_MODEL,
    "router": "pass its options, or a custom_routing_function",
    "bias_vl": "moekit has one correction bias for all tokens; choose image tokens' experts in the "
    "model, and call the layer with topk_weights and topk_ids of moekit.FusedMoE",
    "pcp_size": "use tensor, data or expert parallelism",
    "runner_cls": _BY_NAME,
    "runner_args": _BY_NAME,
    "routed_experts_cls": _BY_NAME,
    "routed_experts_args": _BY_NAME,
    "moe_config_cls": _BY_NAME,
    "fuse_shared_experts": "call the shared experts in the model, and add their output",
}
# Hints for some of vLLM's kernels, and what counts only beside keywords of `_INSTEAD`. moekit
# routes in fp32, whatever the logits' dtype, and padding needs no hint.
_HARMLESS = frozenset(
    (
        "image_sentinel_lo",
        "intermediate_pad",
        "n_shared_experts",
        "router_logits_dtype",
        "routing_method_type",
        "shared_expert_prefix",
        "skip_padding",
    )
)
_UNGATED = frozenset(name.removesuffix("_no_mul") for name in NON_GATED)
_SIZES = {
    **dict.fromkeys(("tp_size", "ep_size", "dp_size"), optional(size(1, MAX_RANKS))),
    "parallelism": optional(instance("a LayerParallelism", LayerParallelism)),
}


def take_rest(keywords: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of moekit's layer among ``keywords``.

    Raises:
        InvalidProblem: A keyword is none of this layer's, and its value is not the default.
    """
    kept = {name: value for name, value in keywords.items() if name in OF_MOEKIT}
    for name, value in keywords.items():
        unset = value is None or value is False or (name == "pcp_size" and value == 1)
        if name in kept or name in _HARMLESS or (unset and name in _INSTEAD):
            continue
        if name in _INSTEAD:
            raise InvalidProblem(f"FusedMoE has no {name} (got {shown(value)}): {_INSTEAD[name]}")
        near = get_close_matches(name, [*known, *OF_MOEKIT], 1)
        raise InvalidProblem(
            f"FusedMoE has no {name} (got {shown(value)}): expected the keywords of vLLM's layer "
            "in versions 0.9 to 0.33, or of moekit.FusedMoE"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    return kept


def activation_of(
    activation: Activation | str, is_act_and_mul: bool, **numbers: float | None
) -> tuple[Activation | str, bool | None]:
    """Return ``activation`` and ``is_act_and_mul`` of moekit's layer.

    Names that end in "_no_mul" have no gate, whatever ``is_act_and_mul`` says.

    Args:
        activation: A name in vLLM, or an `Activation`.
        is_act_and_mul: Whether there is a gate.
        numbers: The keywords of `vllm_activation`; without any, an activation has its usual ones.

    Raises:
        InvalidProblem: The name is unknown, or does not go with the numbers.
    """
    if isinstance(activation, str) and not is_act_and_mul and activation in _UNGATED:
        activation += "_no_mul"
    if given := {name: value for name, value in numbers.items() if value is not None}:
        accept(dict.fromkeys(given, real()), given)
        if not isinstance(activation, str):
            raise InvalidProblem(
                f"activation={shown(activation)} and {', '.join(given)} are both given: set them "
                "in the Activation, or give its name"
            )
        activation = vllm_activation(activation, **given)
    elif isinstance(activation, str):
        activation = RENAMED.get(activation, activation)
    return activation, None if is_act_and_mul else False


def routing(
    *,
    renormalize: bool,
    use_grouped_topk: bool,
    num_expert_group: int | None,
    topk_group: int | None,
    custom_routing_function: Callable[..., Any] | None,
    scoring_func: str,
    routed_scaling_factor: float,
    e_score_correction_bias: Tensor | None,
    zero_expert_num: int,
    zero_expert_type: str | None,
    hash_indices_table: Tensor | None,
) -> RoutingConfig:
    """Return the routing.

    As in vLLM, groups are ignored without ``use_grouped_topk``, and a correction bias with a table
    of hashed routing.
    """
    if use_grouped_topk and (num_expert_group is None or topk_group is None):
        raise InvalidProblem(
            f"use_grouped_topk=True needs num_expert_group and topk_group (got "
            f"num_expert_group={shown(num_expert_group)}, topk_group={shown(topk_group)})"
        )
    if zero_expert_type not in (None, "identity"):
        raise InvalidProblem(
            f"zero_expert_type={shown(zero_expert_type)}: it must be 'identity' or None"
        )
    if hash_indices_table is not None and (
        use_grouped_topk or custom_routing_function is not None or scoring_func != "sqrtsoftplus"
    ):
        raise InvalidProblem(
            "vLLM reads hash_indices_table with scoring_func='sqrtsoftplus' only, and without "
            "use_grouped_topk and custom_routing_function (got scoring_func="
            f"{shown(scoring_func)}, use_grouped_topk={shown(use_grouped_topk)})"
        )
    if custom_routing_function is not None:
        return RoutingConfig(
            renormalize=renormalize,
            custom_routing_function=_with_vllm_names(custom_routing_function),
            zero_expert_num=zero_expert_num or 0,
        )
    return RoutingConfig(
        renormalize=renormalize,
        scoring_func=scoring_func,
        e_score_correction_bias=e_score_correction_bias if hash_indices_table is None else None,
        hash_table=hash_indices_table,
        num_expert_group=num_expert_group if use_grouped_topk else None,
        topk_group=topk_group if use_grouped_topk else None,
        routed_scaling_factor=routed_scaling_factor,
        zero_expert_num=zero_expert_num or 0,
    )


def routed_scales(
    factor: float, to_output: bool, zero_expert_num: int | None
) -> tuple[float, float]:
    """Return the factors of the router weights and of the output, one of which is ``factor``.

    Raises:
        InvalidProblem: vLLM scales the output, but not that of identity experts.
    """
    if not to_output:
        return factor, 1.0
    if zero_expert_num and factor != 1.0:
        raise InvalidProblem(
            "apply_routed_scale_to_output=True scales no identity experts: leave it or "
            f"zero_expert_num={zero_expert_num} out"
        )
    return 1.0, float(factor)


def projections(ckpt_names: Any, expert_mapping: object) -> dict[str, str]:
    """Return the names of vLLM's ``ckpt_names`` as `make_expert_params_mapping` takes them."""
    if expert_mapping is not None:
        raise InvalidProblem("ckpt_names and expert_mapping are both given: give one")
    fits = isinstance(ckpt_names, (list, tuple)) and len(ckpt_names) == 3
    if not fits or not all(isinstance(name or "", str) for name in ckpt_names):
        raise InvalidProblem(
            f"ckpt_names={shown(ckpt_names)}: it must be the names of the gate, down and up "
            "projection, None for the last without a gate"
        )
    parts = ("gate", "down", "up")
    return {f"ckpt_{p}_proj_name": n or "" for p, n in zip(parts, ckpt_names, strict=True)}


def _with_vllm_names(function: Callable[..., Any]) -> RoutingFunction:
    if not callable(function):
        raise InvalidProblem(f"custom_routing_function={shown(function)}: it must be a function")

    def custom(x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = function(
            hidden_states=x, gating_output=logits, topk=top_k, renormalize=renormalize
        )
        return found

    custom.__name__ = getattr(function, "__name__", "custom function")
    return custom


def parallelism(
    given: LayerParallelism | None,
    *,
    tp_size: int | None,
    ep_size: int | None,
    dp_size: int | None,
    is_sequence_parallel: bool,
    enable_eplb: bool,
    num_redundant_experts: int,
    reduce_results: bool,
    **more: Any,
) -> LayerParallelism:
    """Return the parallelism of vLLM's sizes, or the one that is given instead.

    Args:
        more: Further fields of LayerParallelism.

    Raises:
        InvalidProblem: The sizes contradict each other or the record.
    """
    accept(_SIZES, {**locals(), "parallelism": given})
    if num_redundant_experts and not enable_eplb:
        raise InvalidProblem(
            f"num_redundant_experts={shown(num_redundant_experts)} needs enable_eplb=True"
        )
    if given is not None:
        sizes = {"tp_size": tp_size, "ep_size": ep_size, "dp_size": dp_size}
        flags = {"is_sequence_parallel": is_sequence_parallel, "reduce_results": reduce_results}
        said = {**sizes, **flags, "num_redundant_experts": num_redundant_experts, **more}
        if named := [name for name, value in said.items() if value]:
            raise InvalidProblem(
                f"parallelism and {', '.join(named)} are both given: set them in the "
                "LayerParallelism, or leave it out"
            )
        return given
    common: dict[str, Any] = {
        "is_sequence_parallel": is_sequence_parallel,
        "num_redundant_experts": num_redundant_experts,
        "reduce_results": reduce_results,
        **more,
    }
    if more.get("parallel") is not None:
        sizes = {"tp_size": tp_size, "ep_size": ep_size, "dp_size": dp_size}
        if named := [name for name, value in sizes.items() if value is not None]:
            raise InvalidProblem(f"parallel and {', '.join(named)} are both given: give one")
        return LayerParallelism(**common)
    tp, dp = tp_size or 1, dp_size or 1
    if ep_size and tp_size is None and dp_size is None:
        tp = ep_size  # the ranks hold the same tokens
    spread = ep_size not in (None, 1)
    if spread and ep_size != tp * dp:
        raise InvalidProblem(
            f"ep_size={ep_size} must be tp_size * dp_size, because expert parallelism spreads "
            f"whole experts over all ranks (got tp_size={tp}, dp_size={dp})"
        )
    return LayerParallelism(tp_size=tp, dp_size=dp, enable_expert_parallel=spread, **common)
