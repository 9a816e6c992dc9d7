"""vLLM's keywords of `FusedMoE`, as the records of moekit's layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from moekit.compat.activations import NUMBERS, RENAMED, vllm_activation
from moekit.errors import InvalidProblem
from moekit.layer.parallelism import LayerParallelism
from moekit.layer.router import RoutingConfig, RoutingFunction
from moekit.problem.activation import NON_GATED, Activation
from moekit.untrusted.arguments import MAX_RANKS, accept, instance, optional, real, shown, size

Keywords = Mapping[str, Any]
"""The arguments of the constructor of `moekit.compat.vllm.FusedMoE` by name, all of them."""

# Arguments of moekit's layer that vLLM's does not have.
OF_MOEKIT = (
    "checked", "device", "dispatcher", "expert_placement_strategy", "experts", "group",
    "max_num_tokens", "parallel", "parallelism", "peer_timeout", "quant",
)  # fmt: skip
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
_HARMLESS = (
    "image_sentinel_lo", "intermediate_pad", "n_shared_experts", "router_logits_dtype",
    "routing_method_type", "shared_expert_prefix", "skip_padding",
)  # fmt: skip
_OF_PARALLELISM = ("group", "parallel", "expert_placement_strategy")
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


def activation_of(given: Keywords) -> tuple[Activation | str, bool | None]:
    """Return ``activation`` and ``is_act_and_mul`` of moekit's layer.

    Names that end in "_no_mul" have no gate, whatever ``is_act_and_mul`` says. Without any of the
    keywords of `vllm_activation`, an activation has its usual numbers.

    Raises:
        InvalidProblem: The name is unknown, or does not go with the numbers.
    """
    activation, gated = given["activation"], given["is_act_and_mul"]
    named = isinstance(activation, str)
    if named and not gated and activation in _UNGATED:
        activation += "_no_mul"
    if numbers := {name: given[name] for name in NUMBERS if given[name] is not None}:
        accept(dict.fromkeys(numbers, real()), numbers)
        if not named:
            raise InvalidProblem(
                f"activation={shown(activation)} and {', '.join(numbers)} are both given: set them "
                "in the Activation, or give its name"
            )
        activation = vllm_activation(activation, **numbers)
    elif named:
        activation = RENAMED.get(activation, activation)
    return activation, None if gated else False


def routing(given: Keywords) -> tuple[RoutingConfig, float]:
    """Return the routing, and the factor of the layer's output.

    As in vLLM, groups are ignored without ``use_grouped_topk``, and a correction bias with a table
    of hashed routing.

    Raises:
        InvalidProblem: Keywords do not fit each other.
    """
    grouped, custom = given["use_grouped_topk"], given["custom_routing_function"]
    groups = {name: given[name] for name in ("num_expert_group", "topk_group")}
    table, scoring = given["hash_indices_table"], given["scoring_func"]
    if grouped and None in groups.values():
        got = ", ".join(f"{name}={shown(value)}" for name, value in groups.items())
        raise InvalidProblem(
            f"use_grouped_topk=True needs num_expert_group and topk_group (got {got})"
        )
    if given["zero_expert_type"] not in (None, "identity"):
        raise InvalidProblem(
            f"zero_expert_type={shown(given['zero_expert_type'])}: it must be 'identity' or None"
        )
    if table is not None and (grouped or custom is not None or scoring != "sqrtsoftplus"):
        raise InvalidProblem(
            "vLLM reads hash_indices_table with scoring_func='sqrtsoftplus' only, and without "
            "use_grouped_topk and custom_routing_function (got scoring_func="
            f"{shown(scoring)}, use_grouped_topk={shown(grouped)})"
        )
    factor, output_scale = _routed_scales(given)
    common = {
        "renormalize": given["renormalize"],
        "zero_expert_num": given["zero_expert_num"] or 0,
    }
    if custom is not None:
        config = RoutingConfig(custom_routing_function=_with_vllm_names(custom), **common)
        return config, output_scale
    config = RoutingConfig(
        scoring_func=scoring,
        e_score_correction_bias=given["e_score_correction_bias"] if table is None else None,
        hash_table=table,
        routed_scaling_factor=factor,
        **(groups if grouped else {}),
        **common,
    )
    return config, output_scale


def _routed_scales(given: Keywords) -> tuple[float, float]:
    """Return the factors of the router weights and of the output, one of which is vLLM's."""
    factor, zero_expert_num = given["routed_scaling_factor"], given["zero_expert_num"]
    if not given["apply_routed_scale_to_output"]:
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


def parallelism(given: Keywords, rest: dict[str, Any]) -> LayerParallelism:
    """Return the parallelism of vLLM's sizes, or the one that is given instead.

    Args:
        given: vLLM's keywords.
        rest: Those of moekit's layer, from which this takes `LayerParallelism` and its fields.

    Raises:
        InvalidProblem: The sizes contradict each other or the record.
    """
    record = rest.pop("parallelism", None)
    more = {name: rest.pop(name) for name in _OF_PARALLELISM if name in rest}
    sizes = {name: given[name] for name in ("tp_size", "ep_size", "dp_size")}
    accept(_SIZES, {**sizes, "parallelism": record})
    if given["num_redundant_experts"] and not given["enable_eplb"]:
        raise InvalidProblem(
            f"num_redundant_experts={shown(given['num_redundant_experts'])} needs enable_eplb=True"
        )
    fields = ("is_sequence_parallel", "reduce_results", "num_redundant_experts")
    common = {**{name: given[name] for name in fields}, **more}
    if record is not None:
        if named := [name for name, value in {**sizes, **common}.items() if value]:
            raise InvalidProblem(
                f"parallelism and {', '.join(named)} are both given: set them in the "
                "LayerParallelism, or leave it out"
            )
        return record  # type: ignore[no-any-return]
    if more.get("parallel") is not None:
        if named := [name for name, value in sizes.items() if value is not None]:
            raise InvalidProblem(f"parallel and {', '.join(named)} are both given: give one")
        return LayerParallelism(**common)
    tp, ep, dp = sizes.values()
    if ep and tp is None and dp is None:
        tp = ep  # the ranks hold the same tokens
    tp, dp, spread = tp or 1, dp or 1, ep not in (None, 1)
    if spread and ep != tp * dp:
        raise InvalidProblem(
            f"ep_size={ep} must be tp_size * dp_size, because expert parallelism spreads "
            f"whole experts over all ranks (got tp_size={tp}, dp_size={dp})"
        )
    return LayerParallelism(tp_size=tp, dp_size=dp, enable_expert_parallel=spread, **common)
