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

from moekit import ExpertWeights
from moekit.engines.weights import Pair, awq_words, awq_zeros, flip, grouped, halves, pair, refusal
from moekit.plugin import int4
from moekit_vllm.weights.parameters import expert_weights, require_unpadded


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
        words, scales = words.map(flip), scales.map(flip)
        zeros = zeros and zeros.map(flip)
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
    words, scales = pair(layer, "qweight").map(flip), pair(layer, "scales").map(flip)
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

    zeros = pair(layer, "qzeros").map(awq_zeros) if method.quant_config.zero_point else None
    weights = pair(layer, "qweight").map(awq_words)
    return _grouped(layer, 4, weights, pair(layer, "scales").map(flip), zeros)


def moe_wna16(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read MoeWNA16Method, whose loader has converted GPTQ's and AWQ's words."""
    config = method.quant_config
    bits, has_zeros = config.weight_bits, config.has_zp and config.weight_bits == 4
    zeros = pair(layer, "qzeros").map(halves) if has_zeros else None
    return _grouped(layer, bits, pair(layer, "qweight"), pair(layer, "scales"), zeros)


def _grouped(
    layer: Any,
    bits: int,
    words: Pair,
    scales: Pair,
    zeros: Pair | None,
    g_idx: Pair | None = None,
) -> tuple[str, ExpertWeights]:
    require_unpadded(layer)
    config = layer.moe_config
    columns = int(config.hidden_dim), int(config.intermediate_size_per_partition)
    scheme, codes, more = grouped(columns, bits, words, scales, zeros, g_idx)
    return scheme, expert_weights(layer, codes, **more)
