"""vLLM's keywords of `FusedMoE`, as the records of moekit's layer, which checks their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from moekit import Activation, LayerParallelism, RoutingConfig
from moekit.errors import InvalidProblem
from moekit_vllm.activations import NUMBERS, RENAMED, vllm_activation

Keywords = Mapping[str, Any]
"""The arguments of the constructor of `moekit_vllm.FusedMoE` by name, all of them."""

_IN_THE_MODEL = "compute it in the model, outside the layer"
_SHARED = "call the shared experts in the model, and add their output"
_BY_NAME = "moekit has no classes of it: choose dispatcher=... and experts=... by name"
# What to do instead, for keywords of some versions that this layer does not have.
_INSTEAD = {
    "gate": "call the gate in the model, and pass router_logits",
    "shared_experts": _SHARED,
    "fuse_shared_experts": _SHARED,
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
}
# Hints for some of vLLM's kernels, and what counts only with keywords of `_INSTEAD`. moekit routes
# in fp32 for logits of every dtype, and padding needs no hint.
_HARMLESS = frozenset(
    {
        "image_sentinel_lo", "intermediate_pad", "n_shared_experts", "router_logits_dtype",
        "routing_method_type", "shared_expert_prefix", "skip_padding", "use_overlapped",
    }
)  # fmt: skip
_OF_PARALLELISM = ("group", "parallel", "expert_placement_strategy")


def take_rest(keywords: Keywords) -> dict[str, Any]:
    """Return ``keywords`` without the ones of vLLM that moekit's layer does not need.

    Raises:
        InvalidProblem: A keyword belongs to a part that this layer does not have.
    """
    for name in keywords.keys() & _INSTEAD.keys():
        value = keywords[name]
        if not (value is None or value is False or (name == "pcp_size" and value == 1)):
            raise InvalidProblem(f"FusedMoE has no {name} (got {value!r}): {_INSTEAD[name]}")
    unused = _INSTEAD.keys() | _HARMLESS
    return {name: value for name, value in keywords.items() if name not in unused}


def activation_of(given: Keywords) -> Activation | str:
    """Return ``activation`` of moekit's layer.

    Names that end in "_no_mul" never have a gate. Without any of the keywords of `vllm_activation`,
    an activation has its usual numbers.

    Raises:
        InvalidProblem: The name is unknown, or does not go with the numbers.
    """
    activation: Any = given["activation"]
    if not given["is_act_and_mul"]:  # vLLM's activations without a gate have no numbers
        if isinstance(activation, Activation):
            return replace(activation, name=_without_gate(activation.name))
        return _without_gate(activation)
    numbers = {name: given[name] for name in NUMBERS if given[name] is not None}
    if isinstance(activation, Activation):
        if numbers:
            raise InvalidProblem(
                f"activation={activation} and {', '.join(numbers)} are both given: set them in the "
                "Activation, or give its name"
            )
        return activation
    if numbers:
        return vllm_activation(activation, **numbers)
    name: str = activation
    return RENAMED.get(name, name)


def _without_gate(name: str) -> str:
    return name if name.startswith("relu2") or name.endswith("_no_mul") else f"{name}_no_mul"


def routing(given: Keywords) -> tuple[RoutingConfig, float]:
    """Return the routing, and the factor of the layer's output.

    As in vLLM, groups are ignored without ``use_grouped_topk``, and a correction bias with a table
    of hashed routing.

    Raises:
        InvalidProblem: Keywords do not fit each other.
    """
    grouped, custom = given["use_grouped_topk"], given["custom_routing_function"]
    table, scoring = given["hash_indices_table"], given["scoring_func"]
    if given["zero_expert_type"] not in (None, "identity"):
        raise InvalidProblem(
            f"zero_expert_type={given['zero_expert_type']!r}: it must be 'identity' or None"
        )
    if table is not None and (grouped or custom is not None or scoring != "sqrtsoftplus"):
        raise InvalidProblem(
            "vLLM reads hash_indices_table with scoring_func='sqrtsoftplus' only, and without "
            "use_grouped_topk and custom_routing_function (got scoring_func="
            f"{scoring!r}, use_grouped_topk={grouped!r})"
        )
    factor, output_scale = _routed_scales(given)
    common = {
        "renormalize": given["renormalize"],
        "zero_expert_num": given["zero_expert_num"] or 0,
    }
    if custom is not None:
        config = RoutingConfig(custom_routing_function=_with_vllm_names(custom), **common)
        return config, output_scale
    groups = {name: given[name] for name in ("num_expert_group", "topk_group")}
    if grouped and groups["num_expert_group"] is None:
        raise InvalidProblem("use_grouped_topk=True needs num_expert_group and topk_group")
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


def _with_vllm_names(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
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
    sizes = {name: given[name] for name in ("tp_size", "ep_size", "dp_size")}
    fields = {
        name: given[name]
        for name in ("is_sequence_parallel", "reduce_results", "num_redundant_experts")
    } | {name: rest.pop(name) for name in _OF_PARALLELISM if name in rest}
    record = rest.pop("parallelism", None)
    if record is not None:
        _refuse_both("parallelism", {**sizes, **fields})
        return record  # type: ignore[no-any-return]
    if fields.get("parallel") is not None:
        _refuse_both("parallel", sizes)
        return LayerParallelism(**fields)
    tp, ep, dp = sizes.values()
    if ep and tp is None and dp is None:
        tp = ep  # the ranks hold the same tokens
    tp, dp, spread = tp or 1, dp or 1, ep not in (None, 1)
    if spread and ep != tp * dp:
        raise InvalidProblem(
            f"ep_size={ep} must be tp_size * dp_size, because expert parallelism spreads "
            f"whole experts over all ranks (got tp_size={tp}, dp_size={dp})"
        )
    return LayerParallelism(tp_size=tp, dp_size=dp, enable_expert_parallel=spread, **fields)


def _refuse_both(argument: str, others: Mapping[str, Any]) -> None:
    if named := [name for name, value in others.items() if value]:
        raise InvalidProblem(f"{argument} and {', '.join(named)} are both given: give one")
