"""mxfp4 and nvfp4: two codes a byte, (L, N, K / 2), as in moekit.

mxfp4 has bytes of e8m0 scales (L, N, K / 32). nvfp4 has e4m3 scales (L, N, K / 16), and a number
for each matrix that multiplies them (ModelOpt) or divides them (compressed-tensors).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moekit import ExpertWeights
from moekit_vllm.weights.parameters import (
    Pair,
    backend,
    clear_padding,
    expert_weights,
    pair,
    per_row,
    refusal,
    require_unpadded,
)

# vLLM's backends that leave activations in 16 bits, in addition to those whose names end in BF16.
_WEIGHT_ONLY = frozenset(
    {"", "NONE", "MARLIN", "BATCHED_MARLIN", "TRITON", "TRITON_UNFUSED", "CPU", "EMULATION"}
)
_ONE = 127  # the byte of the e8m0 scale 1


def mxfp4(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read GptOssMxfp4MoEMethod, Mxfp4MoEMethod and compressed-tensors' methods."""
    chosen = backend(method, "mxfp4_backend")
    if getattr(method, "use_cutlass_mxfp4", False):
        chosen = "CUTLASS_MXFP4_MXFP4"
    if chosen in _WEIGHT_ONLY or chosen.endswith("BF16"):
        scheme = "mxfp4_w4a16"
    elif chosen.endswith("MXFP8"):
        scheme = "mxfp4_w4a8"
    else:
        raise refusal(
            f"vLLM's backend {chosen} quantizes the activations of mxfp4 weights, and moekit has "
            "only 16-bit and mxfp8 activations for them"
        )
    codes, scales = pair(layer, _packed(layer)), pair(layer, "weight_scale")
    clear_padding(layer, *codes, unit=2)
    clear_padding(layer, *scales, unit=32, fill=_ONE)
    if layer.moe_config.has_bias:
        clear_padding(layer, *pair(layer, "bias"))
    values = scales.map(lambda exponents: exponents.view(torch.float8_e8m0fnu).float())
    return scheme, expert_weights(layer, codes, scale=values)


def nvfp4(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read CompressedTensorsW4A4Nvfp4MoEMethod and ModelOptNvFp4FusedMoE.

    moekit computes the scale of all activations of a call from them, as for any nvfp4 checkpoint.
    """
    require_unpadded(layer)
    if getattr(method, "per_token_activation", False):
        raise refusal("moekit has no nvfp4 activations with a scale for each token")
    divides = getattr(layer, "w13_weight_global_scale", None) is not None
    totals = pair(layer, "weight_global_scale" if divides else "weight_scale_2")
    codes, scales = pair(layer, _packed(layer)), pair(layer, "weight_scale")
    scales = Pair(_scaled(scales.w13, totals.w13, divides), _scaled(scales.w2, totals.w2, divides))
    weights = expert_weights(layer, codes, scale=scales)
    a16 = getattr(method, "use_a16", False)  # 0.26 chooses Marlin then, and keeps no mark
    only = a16 or backend(method, "nvfp4_backend") == "MARLIN"
    return ("nvfp4_w4a16" if only else "nvfp4"), weights


def _packed(layer: Any) -> str:
    """Return the suffix of the weights: compressed-tensors calls them weight_packed."""
    return "weight" if getattr(layer, "w13_weight_packed", None) is None else "weight_packed"


def _scaled(scale: Tensor, total: Tensor, divides: bool) -> Tensor:
    """Return scales (L, N, K / 16) fp32 with their matrix's number, (L,) or (L, gate and up)."""
    each = per_row(total, scale.shape[1])
    return scale.float() / each if divides else scale.float() * each
