"""fp8, mxfp4 and nvfp4, and 16-bit checkpoints that vLLM quantizes when it loads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moekit import SCHEMES, ExpertWeights
from moekit.engines.weights import Pair, e8m0, each_row, pair, per_row, refusal
from moekit_vllm.weights.parameters import (
    backend,
    clear_padding,
    expert_weights,
    require_unpadded,
    unquantized,
)

_BLOCK = 128
_FP8 = {"tensor": "fp8_tensor", "channel": "fp8_channel_token", "block": "fp8_block"}
# vLLM's backends that leave activations in 16 bits. For mxfp4, so do those that end in BF16.
_FP8_WEIGHT_ONLY = ("MARLIN", "CPU")
_MXFP4_WEIGHT_ONLY = (
    "", "NONE", "MARLIN", "BATCHED_MARLIN", "TRITON", "TRITON_UNFUSED", "CPU", "EMULATION",
)  # fmt: skip
_ONE = 127  # the byte of the e8m0 scale 1


def fp8(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read Fp8MoEMethod, CompressedTensorsW8A8Fp8MoEMethod and ModelOptFp8MoEMethod.

    All keep w13_weight (L, 2I or I, H) and w2_weight (L, H, I) in float8_e4m3fn, and fp32 scales as
    moekit defines them: (L, 2) or (L, 1) and (L,) per tensor, (L, N, 1) per channel, (L, ceil(N /
    128), ceil(K / 128)) per block. Fp8MoEMethod calls block scales weight_scale_inv; vLLM's loader
    has converted scales that are stored as e8m0.
    """
    require_unpadded(layer)
    inverse = getattr(layer, "w13_weight_scale_inv", None) is not None
    scales = pair(layer, "weight_scale_inv" if inverse else "weight_scale")
    weights = expert_weights(layer, pair(layer, "weight"), scale=scales)
    if block := getattr(method, "weight_block_size", None):
        if list(block) != [_BLOCK, _BLOCK]:
            raise refusal(f"moekit has fp8 blocks of {_BLOCK} x {_BLOCK} (got {list(block)})")
        if (refined := getattr(method, "weight_scale_refine", None)) is not None:
            weights = whole_blocks(layer, weights, refined)
        return _fp8_scheme(method, "block"), weights
    if scales.w2.dim() == 3:
        return _fp8_scheme(method, "channel"), weights
    name = _fp8_scheme(method, "tensor")
    if name == "fp8_channel_token":
        weights = each_row(weights)
    if name == "fp8_tensor" and getattr(layer, "w13_input_scale", None) is not None:
        if layer.moe_config.moe_parallel_config.enable_eplb:
            raise refusal("EPLB moves experts between ranks, whose static activation scales differ")
        inputs = pair(layer, "input_scale")
        weights = replace(weights, w13_input_scale=inputs.w13, w2_input_scale=inputs.w2)
        name = "fp8_tensor_static"
    return name, weights


def _fp8_scheme(method: Any, kind: str) -> str:
    """Return the scheme that vLLM computes with scales per "tensor", "channel" or "block"."""
    if backend(method, "fp8_backend") in _FP8_WEIGHT_ONLY:
        return f"fp8_w8a16_{kind}"
    if kind == "tensor" and getattr(method, "per_act_token_quant", False):
        return _FP8["channel"]  # batch-invariant mode of 0.33: tokens have scales
    return _FP8[kind]


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
    w13 = weights.w13.new_zeros(L, shards, inner, hidden)
    w13[:, :, real] = weights.w13.view(L, shards, share, hidden)
    w2 = weights.w2.new_zeros(L, hidden, inner)
    w2[:, :, real] = weights.w2
    scale13 = torch.unflatten(weights.w13_scale[:, :, :: refined[1]], 1, (shards, -1))
    return replace(
        weights,
        w13=w13.flatten(1, 2),
        w2=w2,
        w13_scale=scale13[:, :, rows].flatten(1, 2),
        w2_scale=weights.w2_scale[:, :: refined[0]][:, :, columns],
    )


def mxfp4(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read GptOssMxfp4MoEMethod, Mxfp4MoEMethod and compressed-tensors' methods.

    Codes are (L, N, K / 2), as in moekit, and scales bytes of e8m0 (L, N, K / 32).
    """
    chosen = backend(method, "mxfp4_backend")
    if getattr(method, "use_cutlass_mxfp4", False):
        chosen = "CUTLASS_MXFP4_MXFP4"
    if chosen in _MXFP4_WEIGHT_ONLY or chosen.endswith("BF16"):
        scheme = "mxfp4_w4a16"
    elif chosen.endswith("MXFP8"):
        scheme = "mxfp4_w4a8"
    else:
        raise refusal(
            f"vLLM's backend {chosen} quantizes the activations of mxfp4 weights, and moekit has "
            "only 16-bit and mxfp8 activations for them"
        )
    codes, scales = pair(layer, _codes(layer)), pair(layer, "weight_scale")
    clear_padding(layer, *codes, unit=2)
    clear_padding(layer, *scales, unit=32, fill=_ONE)
    if layer.moe_config.has_bias:
        clear_padding(layer, *pair(layer, "bias"))
    values = scales.map(e8m0)
    return scheme, expert_weights(layer, codes, scale=values)


def nvfp4(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read CompressedTensorsW4A4Nvfp4MoEMethod and ModelOptNvFp4FusedMoE.

    Codes are (L, N, K / 2), as in moekit, and scales e4m3 (L, N, K / 16). A number for each matrix
    multiplies them (ModelOpt) or divides them (compressed-tensors). moekit computes the scale of
    all activations of a call from them, as for any nvfp4 checkpoint.
    """
    require_unpadded(layer)
    if getattr(method, "per_token_activation", False):
        raise refusal("moekit has no nvfp4 activations with a scale for each token")
    divides = getattr(layer, "w13_weight_global_scale", None) is not None
    totals = pair(layer, "weight_global_scale" if divides else "weight_scale_2")

    def scaled(scale: Tensor, total: Tensor) -> Tensor:
        each = per_row(total, scale.shape[1])
        return scale.float() / each if divides else scale.float() * each

    scales = Pair(*map(scaled, pair(layer, "weight_scale"), totals))
    a16 = getattr(method, "use_a16", False)  # 0.26 chooses Marlin then, and keeps no mark
    only = a16 or backend(method, "nvfp4_backend") == "MARLIN"
    weights = expert_weights(layer, pair(layer, _codes(layer)), scale=scales)
    return "nvfp4_w4a16" if only else "nvfp4", weights


def _codes(layer: Any) -> str:
    """Return the suffix of the weights: compressed-tensors calls them weight_packed."""
    return "weight" if getattr(layer, "w13_weight_packed", None) is None else "weight_packed"


def online(layer: Any, method: Any, kind: str) -> tuple[str, ExpertWeights]:
    """Read a 16-bit checkpoint, and quantize it.

    moekit quantizes by its reference arithmetic, to the same schemes. Under tensor parallelism vLLM
    (from 0.32 on) takes the scales of whole matrices, and moekit takes this rank's part's.

    Args:
        kind: "tensor", "channel" or "block" for fp8, or "int8", with activations in 16 bits.
    """
    if getattr(method, "requantization_source", None) is not None:
        raise refusal("vLLM quantizes weights anew that the checkpoint has quantized")
    name = "int8_w8a16" if kind == "int8" else _fp8_scheme(method, kind)
    weights = unquantized(layer, method)[1].quantize(SCHEMES[_FP8.get(kind, name)])
    return name, each_row(weights) if (kind, name) == ("tensor", _FP8["channel"]) else weights
