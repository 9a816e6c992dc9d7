"""An MoE layer of vLLM as `Facts`, and as a `moekit.MoEProblem`."""

from __future__ import annotations

import os
from typing import Any

import torch

from moekit import Activation, ExpertWeights, MoEProblem
from moekit.engines.facts import Facts, refuse
from moekit.engines.kernels import names_dispatcher
from moekit_vllm import lora, versions, weights
from moekit_vllm.activations import NUMBERS, vllm_activation

# The same bits in every batch: vLLM's variable, for a fixed number of ranks, which vLLM's kernels
# for CPUs refuse; and a variable for moekit's experts alone.
_BATCH_INVARIANT = ("VLLM_BATCH_INVARIANT", "MOEKIT_BATCH_INVARIANT")


def facts_of(layer: Any, method: Any) -> Facts:
    """Return what vLLM says of a `RoutedExperts` layer."""
    config = layer.moe_config
    split, logical = config.moe_parallel_config, config.num_logical_experts
    return Facts(
        layer=layer,
        method=method,
        num_experts=logical,
        num_redundant_experts=layer.global_num_experts - logical,
        top_k=config.experts_per_token,
        hidden=config.hidden_dim,
        inner=config.intermediate_size_per_partition,
        dtype=config.in_dtype,
        activation=layer.activation.value,
        interleaved=layer.activation.value == "swigluoai",
        biases="bias" if config.has_bias else None,
        ep_size=split.ep_size,
        ep_rank=split.ep_rank,
        dispatches=dispatches(layer),
    )


def load(layer: Any, method: Any) -> tuple[MoEProblem, ExpertWeights]:
    """Return a loaded layer's problem and weights. Raise Unsupported if it stays with vLLM."""
    facts, config = facts_of(layer, method), layer.moe_config
    refuse(_against(facts))
    scheme, loaded = weights.read(facts)
    problem = facts.problem(
        scheme,
        loaded,
        activation=activation_of(layer),
        apply_router_weight_on_input=bool(layer.apply_router_weight_on_input),
        batch_invariant=_batch_invariant(),
        max_num_tokens=config.max_num_tokens if facts.dispatches else None,
        adapters=lora.room(layer),
    )
    return problem, loaded


def exchanges_tokens(layer: Any) -> bool:
    """Return whether the layer's ranks have different tokens, which vLLM or moekit moves."""
    config = layer.moe_config
    return config.moe_parallel_config.dp_size > 1 or bool(config.is_sequence_parallel)


def dispatches(layer: Any) -> bool:
    """Return whether a dispatcher of moekit moves a layer's tokens: MOEKIT_DISPATCHER names one.

    Ranks must have whole experts and different tokens.
    """
    split = layer.moe_config.moe_parallel_config
    own_tokens = split.ep_size == split.dp_size * getattr(split, "sp_size", 1)
    return names_dispatcher() and bool(split.use_ep) and split.ep_size > 1 and own_tokens


def _against(facts: Facts) -> dict[str, Any]:
    """Return the reasons to leave a layer to vLLM, and whether each one holds."""
    layer, config, moves = facts.layer, facts.layer.moe_config, facts.dispatches
    split, batches = config.moe_parallel_config, exchanges_tokens(layer)
    gathers = split.all2all_backend in ("allgather_reducescatter", "naive")
    hashed = getattr(layer, "hash_indices_table", None) is not None
    on_cpu = torch.device(config.device).type == "cpu"
    return {
        **lora.refusals(layer, batches or moves, facts.interleaved),
        "vLLM offloads weights to the host, and moekit holds its own on the device": (
            versions.offloads_weights()
        ),
        "this version of vLLM chooses experts inside its CPU kernels": (
            on_cpu and not versions.routes_on_cpu()
        ),
        f"{' or '.join(_BATCH_INVARIANT)} is set, and vLLM adds up partial sums of {split.ep_size} "
        "expert-parallel ranks, for which moekit promises no bits: run without expert "
        "parallelism": _batch_invariant() and split.ep_size > 1 and not moves,
        f"its ranks exchange tokens by all2all_backend={split.all2all_backend!r}; moekit's experts "
        "need 'allgather_reducescatter'": batches and split.use_ep and not gathers,
        "its ranks split prompts (prefill context parallelism), and only vLLM's own kernels "
        "exchange their tokens between expert-parallel ranks": (
            split.use_ep and getattr(split, "pcp_size", 1) > 1
        ),
        "its ranks may join and leave (elastic expert parallelism), and moekit's experts stay "
        "where they were loaded": split.use_ep and split.ep_size > 1 and versions.elastic(),
        "it routes by token ids, which vLLM does not gather from other ranks": (
            batches and hashed and not moves
        ),
    }


def _batch_invariant() -> bool:
    return any(os.environ.get(name, "").strip() not in ("", "0") for name in _BATCH_INVARIANT)


def activation_of(layer: Any) -> Activation:
    """Return the layer's activation; raise InvalidProblem if moekit has none like it."""
    numbers = {}
    for field in NUMBERS:  # the layer has some, and its config others, by version
        found = (getattr(owner, field, None) for owner in (layer, layer.moe_config))
        numbers[field] = next((number for number in found if number is not None), None)
    return vllm_activation(layer.activation.value, numbers)
