"""An MoE layer of vLLM as a `moekit.MoEProblem`."""

from __future__ import annotations

import os
from typing import Any

import torch

from moekit import SCHEMES, Activation, ExpertWeights, MoEProblem, ParallelConfig
from moekit.engines.kernels import names_dispatcher
from moekit.errors import Unsupported
from moekit_vllm import lora, versions
from moekit_vllm.activations import NUMBERS, vllm_activation

# The same bits in every batch: vLLM's variable, for a fixed number of ranks, which vLLM's kernels
# for CPUs refuse; and a variable for moekit's experts alone.
_BATCH_INVARIANT = ("VLLM_BATCH_INVARIANT", "MOEKIT_BATCH_INVARIANT")


def problem_of(layer: Any, quant: str, weights: ExpertWeights) -> MoEProblem:
    """Return the problem that a `RoutedExperts` layer of vLLM computes on this rank.

    Unless moekit `dispatches`, vLLM's runner gathers tokens before the layer and sums ranks after
    it, so every rank passes the same tokens (``dp_size=1``) and the output is this rank's partial
    sum. Raises Unsupported if the layer needs something that moekit, or this way of calling it, has
    not.
    """
    config, moves = layer.moe_config, dispatches(layer)
    if reasons := _refusals(layer):
        raise Unsupported("; ".join(reasons), reasons)
    split = config.moe_parallel_config
    batches = split.ep_size if moves else 1
    logical, scheme = config.num_logical_experts, SCHEMES[quant].weight
    inner = weights.w2.shape[2] * (2 if scheme is not None and scheme.packed else 1)
    return MoEProblem(
        num_experts=logical,
        num_redundant_experts=layer.global_num_experts - logical,
        top_k=config.experts_per_token,
        hidden_size=config.hidden_dim,
        intermediate_size=inner,
        dtype=config.in_dtype,
        activation=activation_of(layer),
        quant=quant,
        has_bias=weights.w13_bias is not None,
        apply_router_weight_on_input=bool(layer.apply_router_weight_on_input),
        batch_invariant=_batch_invariant(),
        parallel=ParallelConfig(ep_size=split.ep_size, ep_rank=split.ep_rank, dp_size=batches),
        max_num_tokens=config.max_num_tokens if moves else None,
        adapters=lora.room(config),
        device=torch.device(config.device),
    )


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


def _refusals(layer: Any) -> list[str]:
    config = layer.moe_config
    split = config.moe_parallel_config
    batches, moves = exchanges_tokens(layer), dispatches(layer)
    gathers = split.all2all_backend in ("allgather_reducescatter", "naive")
    hashed = getattr(layer, "hash_indices_table", None) is not None
    on_cpu = torch.device(config.device).type == "cpu"
    against = {
        **lora.refusals(layer, batches or moves, interleaved(layer)),
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
    return [reason for reason, holds in against.items() if holds]


def _batch_invariant() -> bool:
    return any(os.environ.get(name, "").strip() not in ("", "0") for name in _BATCH_INVARIANT)


def activation_of(layer: Any) -> Activation:
    """Return the layer's activation; raise InvalidProblem if moekit has none like it."""
    numbers = {}
    for field in NUMBERS:  # the layer has some, and its config others, by version
        found = (getattr(owner, field, None) for owner in (layer, layer.moe_config))
        numbers[field] = next((number for number in found if number is not None), None)
    return vllm_activation(layer.activation.value, numbers)


def interleaved(layer: Any) -> bool:
    """Return whether the gate and up rows of w13 alternate."""
    return bool(layer.activation.value == "swigluoai")


def shape(layer: Any) -> str:
    """Return the layer's shape in words; layers of one shape get the same decision."""
    config = layer.moe_config
    split = config.moe_parallel_config
    words = [
        f"{layer.global_num_experts} experts",
        f"top {config.experts_per_token}",
        f"hidden {config.hidden_dim}",
        f"intermediate {config.intermediate_size_per_partition}",
        str(config.in_dtype).removeprefix("torch."),
        layer.activation.value,
        type(layer.quant_method).__name__,
    ]
    words += [f"ep {split.ep_size}"] if split.use_ep else []
    return "MoE layer (" + ", ".join(words) + ")"
