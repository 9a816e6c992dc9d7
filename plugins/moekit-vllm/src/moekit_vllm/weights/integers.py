"""int8 with scales per channel, and the packings of int4 and int8 in 32-bit words.

moekit's int4 is uint8 (L, N, K / 2), the even column in the lower half of a byte; words of eight
columns are the same bytes. Method, parameters, and what an entry of the weights covers:

    CompressedTensorsWNA16MoEMethod   weight_packed (L, N, K / 8): columns in order. 0.26 and its
                                      ...MarlinMoEMethod have (L, K / 8, N), scales (L, G, N)
    AutoGPTQMoEMethod                 qweight (L, K / 8, N): columns in order; scales (L, G, N)
    AutoAWQMoEMethod                  qweight (L, K, N / 8): rows in AWQ's order; scales (L, G, N)
    MoeWNA16Method                    qweight (L, N, K / 2): columns in order; scales (L, N, G)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moekit import ExpertWeights
from moekit.plugin import int4
from moekit_vllm.weights.parameters import (
    Pair,
    expert_weights,
    pair,
    refusal,
    require_unpadded,
)

_GROUPS = (128, 64, 32)


def int8(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read CompressedTensorsW8A8Int8MoEMethod: int8 (L, N, K) and fp32 scales (L, N, 1)."""
    require_unpadded(layer)
    weights, scales = pair(layer, "weight"), pair(layer, "weight_scale")
    return "int8_channel_token", expert_weights(layer, weights, scale=scales)


def compressed_tensors(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read CompressedTensorsWNA16MoEMethod, and ...MarlinMoEMethod of 0.26."""
    quant = method.weight_quant
    words, scales = pair(layer, "weight_packed"), pair(layer, "weight_scale")
    zeros = None if quant.symmetric else pair(layer, "weight_zero_point")
    if getattr(layer.w13_weight_packed, "is_transposed", False):
        words, scales = words.map(_flip), scales.map(_flip)
        zeros = zeros and zeros.map(_flip)
    zeros = zeros and zeros.map(int4.unpack_rows)
    act_order = getattr(quant, "actorder", None) in ("group", "dynamic")
    g_idx = pair(layer, "weight_g_idx") if act_order else None
    return _grouped(layer, method.num_bits, words, scales, zeros, g_idx)


def w4a8(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read CompressedTensorsW4A8Fp8MoEMethod: int4 in groups of 128, and fp8 activations."""
    scheme, weights = compressed_tensors(layer, method)
    if scheme != "int4_w4a16_g128":
        raise refusal(f"moekit has fp8 activations for int4_w4a16_g128 (got {scheme})")
    return "int4_w4a8_g128", weights


def gptq(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read AutoGPTQMoEMethod. Its weights are symmetric; 0.26 also knows act-order."""
    config = method.quant_config
    if not config.is_sym:
        raise refusal("vLLM's AutoGPTQMoEMethod has no zero points")
    g_idx = pair(layer, "g_idx") if getattr(config, "desc_act", False) else None
    words, scales = pair(layer, "qweight").map(_flip), pair(layer, "scales").map(_flip)
    scheme, weights = _grouped(layer, config.weight_bits, words, scales, None, g_idx)
    if (loaded := getattr(layer, "_loaded_expert_biases", None)) is None:
        return scheme, weights
    # From 0.32 on there are biases for every model, and the layer notes which were loaded.
    biases = {"w13_bias", "w2_bias"}
    if not biases & set(loaded):
        return scheme, replace(weights, w13_bias=None, w2_bias=None)
    for name in biases - set(loaded):
        getattr(layer, name).data.zero_()
    w13, w2 = pair(layer, "bias")
    return scheme, replace(weights, w13_bias=w13, w2_bias=w2)


def awq(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read AutoAWQMoEMethod; without zero points, vLLM subtracts 8."""

    def unpacked(stored: Tensor) -> Tensor:
        return int4.unpack_rows(_flip(stored), int4.AWQ_ORDER)

    zeros = pair(layer, "qzeros").map(unpacked) if method.quant_config.zero_point else None
    weights = pair(layer, "qweight").map(lambda t: int4.repack_rows(_flip(t), int4.AWQ_ORDER))
    return _grouped(layer, 4, weights, pair(layer, "scales").map(_flip), zeros)


def moe_wna16(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read MoeWNA16Method, whose loader has converted GPTQ's and AWQ's words."""
    config = method.quant_config
    bits, has_zeros = config.weight_bits, config.has_zp and config.weight_bits == 4
    zeros = pair(layer, "qzeros").map(_halves) if has_zeros else None
    return _grouped(layer, bits, pair(layer, "qweight"), pair(layer, "scales"), zeros)


def _grouped(
    layer: Any,
    bits: int,
    words: Pair,
    scales: Pair,
    zeros: Pair | None,
    g_idx: Pair | None = None,
) -> tuple[str, ExpertWeights]:
    """Return integers with scales per group of columns, and the scheme that holds them.

    Args:
        words: (L, N, .) of int32 or uint8; their bytes are the columns in order.
        scales: (L, N, G).
        zeros: (L, N, G) uint8.
        g_idx: (L, K) int32, the group of each column.
    """
    require_unpadded(layer)
    codes = words.map(lambda words: words.view(torch.uint8))
    by_channel = scales.w13.shape[2] == scales.w2.shape[2] == 1
    if bits == 8 and by_channel and zeros is None:
        # Stored are the integers plus 128.
        codes = codes.map(lambda codes: codes.bitwise_xor(128).view(torch.int8))
        return "int8_w8a16", expert_weights(layer, codes, scale=scales)
    if bits != 4:
        raise refusal(
            f"moekit has no scheme for {bits}-bit integers in groups, or with zero points"
        )
    kind = "channel"
    if by_channel:
        g_idx = None
    else:
        group = _group(layer, scales)
        if group not in _GROUPS:
            raise refusal(f"moekit has int4 groups of {', '.join(map(str, _GROUPS))} (got {group})")
        if g_idx is not None and all(_in_order(each, group) for each in g_idx):
            g_idx = None
        kind = f"g{group}"
    kind += "_zp" * (zeros is not None) + "_act_order" * (g_idx is not None)
    weights = expert_weights(layer, codes, scale=scales, zero_points=zeros, g_idx=g_idx)
    return f"int4_w4a16_{kind}", weights


def _group(layer: Any, scales: Pair) -> int:
    """Return how many columns share a scale of ``scales`` (L, N, G)."""
    config = layer.moe_config
    columns = config.hidden_dim, config.intermediate_size_per_partition
    counts = scales.w13.shape[2], scales.w2.shape[2]
    group = int(columns[0] // counts[0])
    if (group * counts[0], group * counts[1]) != columns:
        raise refusal(
            f"w13 has {counts[0]} groups in {columns[0]} columns and w2 {counts[1]} in "
            f"{columns[1]}; tensor parallelism must not cut the groups of act-order"
        )
    return group


def _in_order(g_idx: Tensor, group: int) -> bool:
    """Return whether the groups that ``g_idx`` (L, K) names are runs of ``group`` columns."""
    return bool((g_idx == torch.arange(g_idx.shape[1], device=g_idx.device) // group).all())


def _flip(tensor: Tensor) -> Tensor:
    """Transpose (L, a, b) to contiguous (L, b, a)."""
    return tensor.transpose(1, 2).contiguous()


def _halves(packed: Tensor) -> Tensor:
    """Unpack (L, N / 2, G), which has the even row in the lower half, to (L, N, G)."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1, 2)
