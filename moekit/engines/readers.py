"""Readers of the quantization formats that several engines load.

A reader takes the `Facts` of a loaded layer, and returns the name of the scheme and the weights, as
views if possible. It raises Unsupported if no scheme of moekit computes exactly with them. N and K
are a matrix's rows and columns, and G its groups of columns. moekit's int4 is uint8 (L, N, K / 2),
the even column in the lower half of a byte; words of eight columns are the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moekit.engines.facts import Facts, Pair, refusal
from moekit.problem import ExpertWeights, int4

Loaded = tuple[str, ExpertWeights]
Reader = Callable[[Facts], Loaded]
FP8 = {"tensor": "fp8_tensor", "channel": "fp8_channel_token", "block": "fp8_block"}
BLOCK = 128
_GROUPS = (128, 64, 32)


def read(facts: Facts, readers: Mapping[str, Reader], package: str) -> Loaded:
    """Call the reader of the class that the layer's method is, or of its nearest base."""
    kind = type(facts.method)
    for ancestor in kind.__mro__:
        if (reader := readers.get(ancestor.__name__)) is not None:
            return reader(facts)
    raise refusal(f"{package} does not read the weights of {kind.__name__}")


def fp8(
    facts: Facts, block: Sequence[int] | None, moves: bool, schemes: Mapping[str, str] = FP8
) -> Loaded:
    """Read weights (L, N, K) in float8_e4m3fn.

    Their fp32 scales are (L, 2) or (L, 1) and (L,) per tensor, (L, N, 1) per channel, (L, ceil(N /
    128), ceil(K / 128)) per block. Methods with block scales may call them weight_scale_inv.

    Args:
        block: The sizes of blocks, or None.
        moves: EPLB moves experts between ranks.
        schemes: What the engine computes with scales per "tensor", "channel" or "block".
    """
    scales = facts.pair("weight_scale_inv" if facts.has("w13_weight_scale_inv") else "weight_scale")
    weights = facts.weights("weight", scale=scales)
    if block:
        if list(block) != [BLOCK, BLOCK]:
            raise refusal(f"moekit has fp8 blocks of {BLOCK} x {BLOCK} (got {list(block)})")
        return schemes["block"], weights
    if scales.w2.dim() == 3:
        return schemes["channel"], weights
    scheme = schemes["tensor"]
    if scheme == FP8["tensor"] and facts.has("w13_input_scale"):
        if moves:
            raise refusal("EPLB moves experts between ranks, whose static activation scales differ")
        inputs = facts.pair("input_scale")
        static = replace(weights, w13_input_scale=inputs.w13, w2_input_scale=inputs.w2)
        return "fp8_tensor_static", static
    return scheme, each_row(weights) if scheme == FP8["channel"] else weights


def int8(facts: Facts) -> Loaded:
    """Read int8 (L, N, K) and fp32 scales (L, N, 1)."""
    return "int8_channel_token", facts.weights("weight", scale=facts.pair("weight_scale"))


def per_row(numbers: Tensor, rows: int) -> Tensor:
    """Repeat numbers of matrices, (L,) or (L, gate and up), for each row: (L, rows, 1)."""
    parts = numbers.view(len(numbers), -1)
    return parts.repeat_interleave(rows // parts.shape[1], dim=1).unsqueeze(2)


def each_row(weights: ExpertWeights) -> ExpertWeights:
    """Repeat scales per tensor for each channel."""
    assert weights.w13_scale is not None and weights.w2_scale is not None
    return replace(
        weights,
        w13_scale=per_row(weights.w13_scale, weights.w13.shape[1]),
        w2_scale=per_row(weights.w2_scale, weights.w2.shape[1]),
    )


def e8m0(exponents: Tensor) -> Tensor:
    """Decode bytes of e8m0 to fp32 scales."""
    return exponents.view(torch.float8_e8m0fnu).float()


# -- integers in groups of columns -------------------------------------------------------


def flip(tensor: Tensor) -> Tensor:
    """Transpose (L, a, b) to contiguous (L, b, a)."""
    return tensor.transpose(1, 2).contiguous()


def compressed_tensors(
    facts: Facts, bits: int, actorder: str | None, transposed: bool, zeros: Pair | None = None
) -> Loaded:
    """Read words (L, N, K / 8), columns in order, and scales (L, N, G).

    Args:
        transposed: Words are (L, K / 8, N), and scales (L, G, N).
        zeros: The zero points, (L, N, G) uint8.
    """
    words, scales = facts.pair("weight_packed"), facts.pair("weight_scale")
    if transposed:
        words, scales = words.map(flip), scales.map(flip)
    g_idx = facts.pair("weight_g_idx") if actorder in ("group", "dynamic") else None
    return _grouped(facts, bits, words, scales, zeros, g_idx)


def gptq(facts: Facts) -> Loaded:
    """Read words (L, K / 8, N), columns in order, and scales (L, G, N); they are symmetric."""
    config = facts.method.quant_config
    if not getattr(config, "is_sym", True):
        raise refusal(f"{type(facts.method).__name__} has no zero points")
    words, scales = facts.pair("qweight").map(flip), facts.pair("scales").map(flip)
    g_idx = facts.pair("g_idx") if getattr(config, "desc_act", False) else None
    return _grouped(facts, config.weight_bits, words, scales, None, g_idx)


def awq(facts: Facts) -> Loaded:
    """Read words (L, K, N / 8), rows in AWQ's order, and scales (L, G, N)."""
    config = facts.method.quant_config
    words, scales = facts.pair("qweight").map(flip), facts.pair("scales").map(flip)
    codes = words.map(lambda words: int4.repack_rows(words, int4.AWQ_ORDER))
    zeros = None
    if config.zero_point:
        zeros = facts.pair("qzeros").map(lambda z: int4.unpack_rows(flip(z), int4.AWQ_ORDER))
    return _grouped(facts, config.weight_bits, codes, scales, zeros)


def moe_wna16(facts: Facts) -> Loaded:
    """Read bytes (L, N, K / 2) and scales (L, N, G), as loaders convert GPTQ's and AWQ's words."""
    config = facts.method.quant_config
    bits, zeros = config.weight_bits, None
    if config.has_zp and bits == 4:  # (L, N / 2, G), the even row in the lower half of a byte
        zeros = facts.pair("qzeros").map(lambda z: torch.stack((z & 15, z >> 4), 2).flatten(1, 2))
    return _grouped(facts, bits, facts.pair("qweight"), facts.pair("scales"), zeros)


def _grouped(
    facts: Facts,
    bits: int,
    words: Pair,
    scales: Pair,
    zeros: Pair | None,
    g_idx: Pair | None = None,
) -> Loaded:
    """Return the weights of integers with a scale for each group of columns.

    Args:
        words: (L, N, .) of int32 or uint8; their bytes are the columns in order.
        scales: (L, N, G).
        zeros: (L, N, G) uint8.
        g_idx: (L, K) int32, the group of each column.
    """
    codes = words.map(lambda words: words.view(torch.uint8))
    by_channel = scales.w13.shape[2] == scales.w2.shape[2] == 1
    if bits == 8 and by_channel and zeros is None:
        # The checkpoint stores the integers plus 128.
        codes = codes.map(lambda codes: codes.bitwise_xor(128).view(torch.int8))
        return "int8_w8a16", facts.weights(codes, scale=scales)
    if bits != 4:
        raise refusal(
            f"moekit has no scheme for {bits}-bit integers in groups, or with zero points"
        )
    kind = "channel"
    if by_channel:
        g_idx = None
    else:
        group = _group((facts.hidden, facts.inner), scales)
        if group not in _GROUPS:
            raise refusal(f"moekit has int4 groups of {', '.join(map(str, _GROUPS))} (got {group})")
        if g_idx is not None and all(_in_order(each, group) for each in g_idx):
            g_idx = None
        kind = f"g{group}"
    kind += "_zp" * (zeros is not None) + "_act_order" * (g_idx is not None)
    weights = facts.weights(codes, scale=scales, zero_points=zeros, g_idx=g_idx)
    return f"int4_w4a16_{kind}", weights


def _group(columns: tuple[int, int], scales: Pair) -> int:
    """Return how many columns share a scale of ``scales`` (L, N, G)."""
    counts = scales.w13.shape[2], scales.w2.shape[2]
    group = columns[0] // counts[0]
    if (group * counts[0], group * counts[1]) != columns:
        raise refusal(
            f"w13 has {counts[0]} groups in {columns[0]} columns and w2 {counts[1]} in "
            f"{columns[1]}; tensor parallelism must not cut the groups of act-order"
        )
    return group


def _in_order(g_idx: Tensor, group: int) -> bool:
    """Return whether the groups that ``g_idx`` (L, K) names are runs of ``group`` columns."""
    return bool((g_idx == torch.arange(g_idx.shape[1], device=g_idx.device) // group).all())
