"""The loaded parameters of an MoE layer of SGLang as `moekit.ExpertWeights`.

SGLang's methods keep what a checkpoint holds until ``process_weights_after_loading``, with the
experts of this rank in dim 0 and the gate and up rows in one parameter. `read` is called in its
place. Methods of compressed-tensors, GPTQ and AWQ leave the parameters to ``layer.scheme``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moekit import ExpertWeights
from moekit.engines.weights import (
    Pair,
    awq_words,
    awq_zeros,
    e8m0,
    flip,
    grouped,
    halves,
    made,
    pair,
    refusal,
)
from moekit_sglang import versions
from moekit_sglang.problem import interleaved

Loaded = tuple[str, ExpertWeights]
_BLOCK = 128


def read(layer: Any, method: Any) -> Loaded:
    """Return the scheme of a layer's loaded weights, and the weights, as views if possible.

    Raises Unsupported if moekit does not know how the method stores weights, or if no scheme of
    moekit computes exactly with them.
    """
    owner = getattr(layer, "scheme", None) or method
    for ancestor in type(owner).__mro__:
        if (reader := READERS.get(ancestor.__name__)) is not None:
            return reader(layer, owner)
    raise refusal(f"moekit-sglang does not read the weights of {type(owner).__name__}")


def _weights(layer: Any, codes: Pair, **more: Pair | None) -> ExpertWeights:
    """Return weights with the layer's biases, which SGLang also keeps in fp32."""
    biases = None
    if getattr(layer, "w13_weight_bias", None) is not None:
        dtype = layer.moe_runner_config.params_dtype
        biases = pair(layer, "weight_bias").map(lambda bias: bias.to(dtype))
    return made(codes, interleaved(layer), bias=biases, **more)


def _unquantized(layer: Any, method: Any) -> Loaded:
    """Read UnquantizedFusedMoEMethod: w13_weight (L, 2I or I, H), w2_weight (L, H, I)."""
    return "none", _weights(layer, pair(layer, "weight"))


def _fp8(layer: Any, method: Any) -> Loaded:
    """Read Fp8MoEMethod, W8A8FP8MoEMethod and CompressedTensorsW8A8Fp8MoE.

    w13_weight (L, 2I or I, H) and w2_weight (L, H, I) are float8_e4m3fn, with fp32 scales (L, 2)
    and (L,) per tensor, (L, N, 1) per channel, or (L, ceil(N / 128), ceil(K / 128)) per block.
    """
    kinds = [n for n in ("use_mxfp8", "is_fp4_expert", "use_marlin") if getattr(method, n, False)]
    if kinds:
        raise refusal(f"moekit-sglang reads no fp8 weights with {kinds[0]}")
    if layer.w13_weight.element_size() != 1:
        raise refusal("SGLang quantizes its 16-bit weights to fp8 when it loads them")
    inverse = getattr(layer, "w13_weight_scale_inv", None) is not None
    scales = pair(layer, "weight_scale_inv" if inverse else "weight_scale")
    weights = _weights(layer, pair(layer, "weight"), scale=scales)
    config = getattr(method, "quant_config", None)
    block = getattr(method, "weight_block_size", None) or getattr(config, "weight_block_size", None)
    if block:
        if list(block) != [_BLOCK, _BLOCK]:
            raise refusal(f"moekit has fp8 blocks of {_BLOCK} x {_BLOCK} (got {list(block)})")
        return "fp8_block", weights
    if scales.w2.dim() == 3:
        return "fp8_channel_token", weights
    if getattr(layer, "w13_input_scale", None) is None:
        return "fp8_tensor", weights
    if versions.argument("enable_eplb", False):
        raise refusal("EPLB moves experts between ranks, whose static activation scales differ")
    inputs = pair(layer, "input_scale")
    return "fp8_tensor_static", replace(
        weights, w13_input_scale=inputs.w13, w2_input_scale=inputs.w2
    )


def _int8(layer: Any, method: Any) -> Loaded:
    """Read W8A8Int8MoEMethod: int8 (L, N, K) and fp32 scales (L, N, 1)."""
    scales = pair(layer, "weight_scale")
    return "int8_channel_token", _weights(layer, pair(layer, "weight"), scale=scales)


def _mxfp4(layer: Any, method: Any) -> Loaded:
    """Read Mxfp4MoEMethod: codes (L, N, K / 2), and scales as bytes of e8m0 (L, N, K / 32).

    SGLang rounds sizes up for some kernels, and its loader then writes gate and up in one piece.
    """
    sizes = layer.hidden_size, layer.intermediate_size_per_partition
    held = method.hidden_size, method.intermediate_size_per_partition
    if held != sizes:
        raise refusal(f"SGLang has rounded up its hidden and intermediate size {sizes} to {held}")
    scales = pair(layer, "weight_scale").map(e8m0)
    return "mxfp4_w4a16", _weights(layer, pair(layer, "weight"), scale=scales)


def _compressed_tensors(layer: Any, scheme: Any) -> Loaded:
    """Read CompressedTensorsWNA16MoE: words (L, K / 8, N), columns in order; scales (L, G, N)."""
    words, scales = pair(layer, "weight_packed").map(flip), pair(layer, "weight_scale").map(flip)
    if getattr(layer, "w13_weight_zero_point", None) is not None:
        raise refusal("moekit-sglang reads no zero points of compressed-tensors")
    g_idx = pair(layer, "weight_g_idx") if scheme.actorder in ("group", "dynamic") else None
    return _grouped(layer, scheme.num_bits, words, scales, None, g_idx)


def _gptq(layer: Any, scheme: Any) -> Loaded:
    """Read GPTQMarlinMoEScheme: words (L, K / 8, N), columns in order; scales (L, G, N)."""
    config = scheme.quant_config
    if not getattr(config, "is_sym", True):
        raise refusal("SGLang's GPTQMarlinMoEScheme has no zero points")
    words, scales = pair(layer, "qweight").map(flip), pair(layer, "scales").map(flip)
    g_idx = pair(layer, "g_idx") if config.desc_act else None
    return _grouped(layer, config.weight_bits, words, scales, None, g_idx)


def _awq(layer: Any, scheme: Any) -> Loaded:
    """Read AWQMoEScheme: words (L, K, N / 8), rows in AWQ's order; scales (L, G, N)."""
    zeros = pair(layer, "qzeros").map(awq_zeros) if scheme.quant_config.zero_point else None
    words, scales = pair(layer, "qweight").map(awq_words), pair(layer, "scales").map(flip)
    return _grouped(layer, scheme.quant_config.weight_bits, words, scales, zeros)


def _moe_wna16(layer: Any, method: Any) -> Loaded:
    """Read MoeWNA16Method, whose loader has converted words: (L, N, K / 2); scales (L, N, G)."""
    config = method.quant_config
    bits, has_zeros = config.weight_bits, config.has_zp and config.weight_bits == 4
    zeros = pair(layer, "qzeros").map(halves) if has_zeros else None
    return _grouped(layer, bits, pair(layer, "qweight"), pair(layer, "scales"), zeros)


def _grouped(layer: Any, bits: int, words: Pair, scales: Pair, *more: Pair | None) -> Loaded:
    columns = int(layer.hidden_size), int(layer.intermediate_size_per_partition)
    kind, codes, rest = grouped(columns, bits, words, scales, *more)
    return kind, _weights(layer, codes, **rest)


# Keys: the class of SGLang's method or scheme, or its base; equal names in 0.5.15 and 0.5.23.
READERS: Mapping[str, Callable[[Any, Any], Loaded]] = {
    "UnquantizedFusedMoEMethod": _unquantized,
    "Fp8MoEMethod": _fp8,
    "W8A8FP8MoEMethod": _fp8,
    "CompressedTensorsW8A8Fp8MoE": _fp8,
    "W8A8Int8MoEMethod": _int8,
    "Mxfp4MoEMethod": _mxfp4,
    "CompressedTensorsWNA16MoE": _compressed_tensors,
    "GPTQMarlinMoEScheme": _gptq,
    "AWQMoEScheme": _awq,
    "MoeWNA16Method": _moe_wna16,
}
