"""An MoE layer of SGLang as `Facts`, and as a `moekit.MoEProblem`."""

from __future__ import annotations

from typing import Any

from moekit import Activation, ExpertWeights, MoEProblem
from moekit.engines.facts import Facts, refuse
from moekit.engines.kernels import names_dispatcher
from moekit.errors import InvalidProblem
from moekit_sglang import versions
from moekit_sglang.weights import read

# Runners whose layers are given the chosen experts, and parameters in the checkpoint's order.
_RUNNERS = ("auto", "triton", "deep_gemm", "cutlass", "marlin")


def facts_of(layer: Any, method: Any) -> Facts:
    """Return what SGLang says of a `FusedMoE` layer.

    SGLang's router chooses physical experts, which the ranks hold in order: they are moekit's
    experts.
    """
    config = layer.moe_runner_config
    return Facts(
        layer=layer,
        method=getattr(layer, "scheme", None) or method,
        num_experts=layer.num_experts,
        top_k=config.top_k,
        hidden=layer.hidden_size,
        inner=layer.intermediate_size_per_partition,
        dtype=config.params_dtype,
        activation=config.activation,
        interleaved=config.gemm1_alpha is not None and bool(config.gate_up_interleaved),
        biases=None if getattr(layer, "w13_weight_bias", None) is None else "weight_bias",
        ep_size=layer.moe_ep_size,
        ep_rank=layer.moe_ep_rank,
        dispatches=dispatches(layer),
    )


def load(layer: Any, method: Any) -> tuple[MoEProblem, ExpertWeights]:
    """Return a loaded layer's problem and weights. Raise Unsupported if it stays with SGLang."""
    facts, config = facts_of(layer, method), layer.moe_runner_config
    refuse(_against(facts))
    scheme, weights = read(facts)
    problem = facts.problem(
        scheme,
        weights,
        activation=activation_of(layer),
        apply_router_weight_on_input=bool(config.apply_router_weight_on_input),
        batch_invariant=bool(versions.argument("enable_deterministic_inference")),
        max_num_tokens=versions.most_scheduled() if facts.dispatches else None,
    )
    return problem, weights


def dispatches(layer: Any) -> bool:
    """Return whether a dispatcher that MOEKIT_DISPATCHER names moves a layer's tokens.

    Ranks must have whole experts and different tokens, as they do with --moe-a2a-backend.
    """
    return names_dispatcher() and layer.moe_ep_size > 1 and versions.all_to_all() != "none"


def _against(facts: Facts) -> dict[str, Any]:
    """Return the reasons to leave a layer to SGLang, and whether each one holds."""
    layer, ranks, moves = facts.layer, facts.ep_size, facts.dispatches
    config, runner = layer.moe_runner_config, versions.runner(layer)
    all_to_all, argument = versions.all_to_all(), versions.argument
    return {
        "moekit has no LoRA": argument("enable_lora") or argument("lora_paths"),
        "SGLang offloads weights to the host, and moekit holds its own on the device": (
            argument("cpu_offload_gb", 0) > 0 or argument("offload_group_size", -1) > 0
        ),
        f"its runner {runner!r} chooses experts or orders weights in its own way: use "
        "--moe-runner-backend triton": runner not in _RUNNERS,
        f"its ranks exchange tokens by --moe-a2a-backend {all_to_all}; set MOEKIT_DISPATCHER to a "
        "dispatcher of moekit, or use none": all_to_all != "none" and not moves,
        "the model is compiled (--enable-torch-compile), and moekit's kernels are not operators": (
            argument("enable_torch_compile")
        ),
        "two batches overlap (--enable-two-batch-overlap), and moekit moves tokens in one step": (
            moves and argument("enable_two_batch_overlap")
        ),
        "every rank holds the shared experts, and moekit's experts are on one rank each: use "
        "--disable-shared-experts-fusion": ranks > 1 and layer.num_fused_shared_experts,
        f"deterministic inference adds up partial sums of {ranks} expert-parallel ranks, for which "
        "moekit promises no bits": (
            argument("enable_deterministic_inference") and ranks > 1 and not moves
        ),
        "it returns every expert's row (no_combine)": config.no_combine,
        "it weights the experts' input and scales their sum (routed_scaling_factor)": (
            config.apply_router_weight_on_input and scaling(layer) != 1.0
        ),
        "its number of experts per token is unknown": config.top_k is None,
    }


def activation_of(layer: Any) -> Activation:
    """Return what SGLang computes (moe_runner/triton_utils/fused_moe.py).

    With gemm1_alpha, gate and up are clamped and 1 is added to up, as in gpt-oss; their rows may
    alternate. gemm1_clamp_limit alone clamps after silu, and swiglu_limit before it. Raises
    InvalidProblem if moekit has no such activation, or does not have it with these numbers.
    """
    config = layer.moe_runner_config
    name, limit, alpha = config.activation, config.gemm1_clamp_limit, config.gemm1_alpha
    if not config.is_gated:
        return Activation({"silu": "silu_no_mul", "gelu": "gelu_no_mul"}.get(name, name))
    numbers = (limit, alpha, config.swiglu_limit)
    if name != "silu" and numbers != (None, None, None):
        raise InvalidProblem(f"moekit has no {name!r} with the numbers {numbers}")
    if alpha is not None:
        if getattr(config, "gemm1_beta", None) not in (None, 1.0):
            raise InvalidProblem(f"moekit adds 1 to up (got gemm1_beta={config.gemm1_beta})")
        return Activation("swigluoai", alpha=alpha, limit=limit)
    if limit is not None:
        return Activation("swiglustep", limit=limit)
    return Activation(name, limit=config.swiglu_limit)


def scaling(layer: Any) -> float:
    """Return the factor by which SGLang's kernel multiplies the sum: 1 if the router does it."""
    factor = layer.moe_runner_config.routed_scaling_factor
    return 1.0 if factor is None or layer.should_fuse_routed_scaling_factor_in_topk else factor
