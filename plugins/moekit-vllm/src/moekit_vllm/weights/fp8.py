"""fp8 weights with scales per tensor, channel or block.

All methods keep w13_weight (L, 2I or I, H) and w2_weight (L, H, I) in float8_e4m3fn, and fp32
scales as moekit defines them: (L, 2) or (L, 1) and (L,) per tensor, (L, N, 1) per channel,
(L, ceil(N / 128), ceil(K / 128)) per block. Block scales are called weight_scale_inv in
Fp8MoEMethod; scales that are stored as e8m0 have been converted by vLLM's loader.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moekit import ExpertWeights
from moekit_vllm.weights.parameters import (
    backend,
    expert_weights,
    pair,
    per_row,
    refusal,
    require_unpadded,
)

_BLOCK = 128
_SCHEMES = {"tensor": "fp8_tensor", "channel": "fp8_channel_token", "block": "fp8_block"}
# vLLM's backends that leave activations in 16 bits.
_WEIGHT_ONLY = frozenset({"MARLIN", "CPU"})


def read(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read Fp8MoEMethod, CompressedTensorsW8A8Fp8MoEMethod and ModelOptFp8MoEMethod."""
    require_unpadded(layer)
    codes = pair(layer, "weight")
    inverse = getattr(layer, "w13_weight_scale_inv", None) is not None
    scales = pair(layer, "weight_scale_inv" if inverse else "weight_scale")
    weights = expert_weights(layer, codes, scale=scales)
    if block := getattr(method, "weight_block_size", None):
        if list(block) != [_BLOCK, _BLOCK]:
            raise refusal(f"moekit has fp8 blocks of {_BLOCK} x {_BLOCK} (got {list(block)})")
        if (refined := getattr(method, "weight_scale_refine", None)) is not None:
            weights = whole_blocks(layer, weights, refined)
        return scheme(method, "block"), weights
    if scales[1].dim() == 3:
        return scheme(method, "channel"), weights
    static = getattr(layer, "w13_input_scale", None) is not None
    name = scheme(method, "tensor", static)
    if name == "fp8_channel_token":
        weights = each_row(weights)
    if name == "fp8_tensor_static":
        if layer.moe_config.moe_parallel_config.enable_eplb:
            raise refusal("EPLB moves experts between ranks, whose static activation scales differ")
        inputs = pair(layer, "input_scale")
        weights = replace(weights, w13_input_scale=inputs[0], w2_input_scale=inputs[1])
    return name, weights


def scheme(method: Any, kind: str, static: bool = False) -> str:
    """Return the scheme that vLLM computes with weight scales per tensor, channel or block.

    Args:
        kind: "tensor", "channel" or "block".
        static: The checkpoint has activation scales.
    """
    if backend(method, "fp8_backend") in _WEIGHT_ONLY:
        return f"fp8_w8a16_{kind}"
    if kind == "tensor" and getattr(method, "per_act_token_quant", False):
        return _SCHEMES["channel"]  # batch-invariant mode of 0.33: tokens have scales
    return _SCHEMES[kind] + "_static" * static


def each_row(weights: ExpertWeights) -> ExpertWeights:
    """Return weights with scales per channel, which repeat those per tensor."""
    assert weights.w13_scale is not None and weights.w2_scale is not None
    return replace(
        weights,
        w13_scale=per_row(weights.w13_scale, weights.w13.shape[1]),
        w2_scale=per_row(weights.w2_scale, weights.w2.shape[1]),
    )


def whole_blocks(layer: Any, weights: ExpertWeights, refined: tuple[int, int]) -> ExpertWeights:
    """Return weights with blocks of 128 whose share of I begins or ends within a block.

    If tensor parallelism cuts blocks, vLLM (from 0.32 on) keeps scales for smaller blocks, which
    repeat the checkpoint's. Zeros before and behind the share complete the checkpoint's blocks, so
    that scales and values stay what they are.

    Args:
        refined: In how many parts vLLM has divided a block along N and K.
    """
    if weights.interleaved or weights.w13_bias is not None:
        raise refusal("vLLM has divided its fp8 blocks, and gate and up alternate or have biases")
    config = layer.moe_config
    share = config.intermediate_size_per_partition
    before = config.tp_rank * share % _BLOCK
    inner = -(-(before + share) // _BLOCK) * _BLOCK
    real = slice(before, before + share)
    # Where in the share each block begins, and which part of the scales of w13's rows and of w2's
    # columns that is.
    begins = (torch.arange(0, inner, _BLOCK, device=weights.w2.device) - before).clamp(min=0)
    rows, columns = (begins // (_BLOCK // parts) for parts in refined)
    L, hidden, _ = weights.w2.shape
    shards = weights.w13.shape[1] // share
    assert weights.w13_scale is not None and weights.w2_scale is not None
    w13 = torch.zeros(L, shards, inner, hidden, dtype=weights.w13.dtype, device=weights.w13.device)
    w13[:, :, real] = weights.w13.view(L, shards, share, hidden)
    w2 = torch.zeros(L, hidden, inner, dtype=weights.w2.dtype, device=weights.w2.device)
    w2[:, :, real] = weights.w2
    scale13 = torch.unflatten(weights.w13_scale[:, :, :: refined[1]], 1, (shards, -1))
    return replace(
        weights,
        w13=w13.flatten(1, 2),
        w2=w2,
        w13_scale=scale13[:, :, rows].flatten(1, 2),
        w2_scale=weights.w2_scale[:, :: refined[0]][:, :, columns],
    )
