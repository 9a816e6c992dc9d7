"""The loaded parameters of an MoE layer of vLLM as `moekit.ExpertWeights`.

vLLM's methods keep what a checkpoint holds until ``process_weights_after_loading``. `read` is
called in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moekit import SCHEMES, ExpertWeights
from moekit.engines import readers
from moekit.engines.facts import Facts, Pair, refusal
from moekit.engines.readers import BLOCK, Loaded, Reader, e8m0, each_row, flip, per_row
from moekit.plugin import int4

# vLLM's backends that leave activations in 16 bits. For mxfp4, so do those that end in BF16.
_FP8_WEIGHT_ONLY = ("MARLIN", "CPU")
_MXFP4_WEIGHT_ONLY = (
    "", "NONE", "MARLIN", "BATCHED_MARLIN", "TRITON", "TRITON_UNFUSED", "CPU", "EMULATION",
)  # fmt: skip
_ONE = 127  # the byte of the e8m0 scale 1
# The layer (0.32, 0.33) and the method whose weights gpt-oss's own loaders fill.
_GPT_OSS = frozenset({"GptOssRoutedExperts", "GptOssMxfp4MoEMethod"})


def read(facts: Facts) -> Loaded:
    """Return the scheme of a layer's loaded weights, and the weights: see `readers.read`."""
    if any(kind.__name__ in _EXACT for kind in type(facts.method).__mro__):
        require_unpadded(facts.layer)
    return readers.read(facts, READERS, "moekit-vllm")


def unquantized(facts: Facts) -> Loaded:
    """Read w13_weight (L, 2I or I, H), w2_weight (L, H, I) and their biases."""
    clear_padding(facts, "weight")
    if facts.biases is not None:
        clear_padding(facts, facts.biases)
    return "none", facts.weights("weight")


def fp8(facts: Facts) -> Loaded:
    """Read Fp8MoEMethod, CompressedTensorsW8A8Fp8MoEMethod and ModelOptFp8MoEMethod.

    vLLM's loader has converted scales that are stored as e8m0.
    """
    method, split = facts.method, facts.layer.moe_config.moe_parallel_config
    block = getattr(method, "weight_block_size", None)
    scheme, weights = readers.fp8(facts, block, split.enable_eplb, _schemes(method))
    if block and (refined := getattr(method, "weight_scale_refine", None)) is not None:
        weights = whole_blocks(facts.layer, weights, refined)
    return scheme, weights


def _schemes(method: Any) -> dict[str, str]:
    """Return the schemes that vLLM computes with scales per "tensor", "channel" or "block"."""
    if _backend(method, "fp8_backend") in _FP8_WEIGHT_ONLY:
        return {kind: f"fp8_w8a16_{kind}" for kind in readers.FP8}
    if getattr(method, "per_act_token_quant", False):  # batch-invariant mode of 0.33
        return readers.FP8 | {"tensor": readers.FP8["channel"]}
    return readers.FP8


def _backend(method: Any, name: str) -> str:
    """Return the name of the backend that vLLM chose, which ``method.<name>`` holds; "" if none."""
    return str(getattr(getattr(method, name, None), "name", ""))


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
    before = config.tp_rank * share % BLOCK
    inner = -(-(before + share) // BLOCK) * BLOCK
    real = slice(before, before + share)
    # Where in the share each block begins, and which part of the scales of w13's rows and of w2's
    # columns that is.
    begins = (torch.arange(0, inner, BLOCK, device=weights.w2.device) - before).clamp(min=0)
    rows, columns = (begins // (BLOCK // parts) for parts in refined)
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


def mxfp4(facts: Facts) -> Loaded:
    """Read GptOssMxfp4MoEMethod, Mxfp4MoEMethod and compressed-tensors' methods.

    Codes are (L, N, K / 2), as in moekit, and scales bytes of e8m0 (L, N, K / 32).
    """
    chosen = _backend(facts.method, "mxfp4_backend")
    if getattr(facts.method, "use_cutlass_mxfp4", False):
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
    clear_padding(facts, _codes(facts), unit=2)
    clear_padding(facts, "weight_scale", unit=32, fill=_ONE)
    if facts.biases is not None:
        clear_padding(facts, facts.biases)
    return scheme, facts.weights(_codes(facts), scale=facts.pair("weight_scale").map(e8m0))


def nvfp4(facts: Facts) -> Loaded:
    """Read CompressedTensorsW4A4Nvfp4MoEMethod and ModelOptNvFp4FusedMoE.

    Codes are (L, N, K / 2), as in moekit, and scales e4m3 (L, N, K / 16). A number for each matrix
    multiplies them (ModelOpt) or divides them (compressed-tensors). moekit computes the scale of
    all activations of a call from them, as for any nvfp4 checkpoint.
    """
    if getattr(facts.method, "per_token_activation", False):
        raise refusal("moekit has no nvfp4 activations with a scale for each token")
    divides = facts.has("w13_weight_global_scale")
    totals = facts.pair("weight_global_scale" if divides else "weight_scale_2")

    def scaled(scale: Tensor, total: Tensor) -> Tensor:
        each = per_row(total, scale.shape[1])
        return scale.float() / each if divides else scale.float() * each

    scales = Pair(*map(scaled, facts.pair("weight_scale"), totals))
    a16 = getattr(facts.method, "use_a16", False)  # 0.26 chooses Marlin then, and keeps no mark
    only = a16 or _backend(facts.method, "nvfp4_backend") == "MARLIN"
    weights = facts.weights(_codes(facts), scale=scales)
    return "nvfp4_w4a16" if only else "nvfp4", weights


def _codes(facts: Facts) -> str:
    """Return the suffix of the weights: compressed-tensors calls them weight_packed."""
    return "weight_packed" if facts.has("w13_weight_packed") else "weight"


def online(facts: Facts, kind: str) -> Loaded:
    """Read a 16-bit checkpoint, and quantize it.

    moekit quantizes by its reference arithmetic, to the same schemes. Under tensor parallelism vLLM
    (from 0.32 on) takes the scales of whole matrices, and moekit takes this rank's part's.

    Args:
        kind: "tensor", "channel" or "block" for fp8, or "int8", with activations in 16 bits.
    """
    if getattr(facts.method, "requantization_source", None) is not None:
        raise refusal("vLLM quantizes weights anew that the checkpoint has quantized")
    name = "int8_w8a16" if kind == "int8" else _schemes(facts.method)[kind]
    weights = unquantized(facts)[1].quantize(SCHEMES[readers.FP8.get(kind, name)])
    by_row = (kind, name) == ("tensor", readers.FP8["channel"])
    return name, each_row(weights) if by_row else weights


def compressed_tensors(facts: Facts) -> Loaded:
    """Read CompressedTensorsWNA16MoEMethod, and the transposed ...MarlinMoEMethod of 0.26."""
    quant, method = facts.method.weight_quant, facts.method
    transposed = bool(getattr(facts.layer.w13_weight_packed, "is_transposed", False))
    zeros = None if quant.symmetric else facts.pair("weight_zero_point")
    if zeros is not None:
        zeros = (zeros.map(flip) if transposed else zeros).map(int4.unpack_rows)
    actorder = getattr(quant, "actorder", None)
    return readers.compressed_tensors(facts, method.num_bits, actorder, transposed, zeros)


def w4a8(facts: Facts) -> Loaded:
    """Read CompressedTensorsW4A8Fp8MoEMethod: int4 in groups of 128, and fp8 activations."""
    scheme, weights = compressed_tensors(facts)
    if scheme != "int4_w4a16_g128":
        raise refusal(f"moekit has fp8 activations for int4_w4a16_g128 (got {scheme})")
    return "int4_w4a8_g128", weights


def gptq(facts: Facts) -> Loaded:
    """Read AutoGPTQMoEMethod. From 0.32 on there are biases for every model, and the layer notes
    which were loaded."""
    scheme, weights = readers.gptq(facts)
    if (loaded := getattr(facts.layer, "_loaded_expert_biases", None)) is None:
        return scheme, weights
    biases = {"w13_bias", "w2_bias"}
    if not biases & set(loaded):
        return scheme, replace(weights, w13_bias=None, w2_bias=None)
    for name in biases - set(loaded):
        getattr(facts.layer, name).data.zero_()
    w13, w2 = facts.pair("bias")
    return scheme, replace(weights, w13_bias=w13, w2_bias=w2)


# -- sizes that vLLM rounds up for its own kernels ---------------------------------------


def require_unpadded(layer: Any) -> None:
    """Raise Unsupported if vLLM has rounded up the layer's sizes and left the rest as allocated."""
    config = layer.moe_config
    sizes = (config.hidden_dim, config.intermediate_size_per_partition)
    real = (config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded)
    # With tp_shard_with_padding vLLM clears the rest.
    if sizes != real and not getattr(config, "tp_shard_with_padding", False):
        raise refusal(
            f"vLLM has rounded up its hidden and intermediate size from {real} to {sizes}, and "
            f"leaves the rest of {type(layer.quant_method).__name__}'s weights undefined"
        )


def real_neurons(layer: Any) -> int:
    """Return how many of this rank's neurons (of I) may hold values of the model.

    vLLM's loaders give each rank I / tp_size neurons. For gpt-oss they give it whole blocks of 32,
    or (from 0.32 on, for streamed experts) as many as vLLM has rounded its share up to. This is
    the largest number that it can be.
    """
    config = layer.moe_config
    share = config.intermediate_size_per_partition_unpadded
    names = [kind.__name__ for kind in (*type(layer).__mro__, *type(layer.quant_method).__mro__)]
    if not _GPT_OSS.intersection(names):
        return int(share)
    total, held = config.intermediate_size, config.intermediate_size_per_partition
    blocks = -(-total // (32 * config.tp_size)) * 32
    ends = [min(stride, total - config.tp_rank * stride, held) for stride in (blocks, held)]
    return int(max(share, *ends))


def clear_padding(facts: Facts, suffix: str, unit: int = 1, fill: int = 0) -> None:
    """Write ``fill`` where vLLM's sizes exceed the model's, so that it computes to zeros.

    vLLM leaves those rows and columns as allocated.

    Args:
        suffix: The parameters: (L, 2I or I, H / unit), (L, H, I / unit). Biases are (L, N).
        unit: Columns that an entry covers.
    """
    (w13, w2), config = facts.pair(suffix), facts.layer.moe_config
    hidden, inner = config.hidden_dim_unpadded, real_neurons(facts.layer)
    gated = config.is_act_and_mul
    if gated and not facts.interleaved:
        halves, rows = list(w13.chunk(2, dim=1)), inner
    else:
        halves, rows = [w13], inner * (2 if gated else 1)
    for half in halves:
        half[:, rows:] = fill
    w2[:, hidden:] = fill
    for matrix, columns in ((w13, hidden), (w2, inner)):
        if matrix.dim() == 3:
            matrix[:, :, -(-columns // unit) :] = fill


# By the class that vLLM's method is or extends. 0.26, 0.32 and 0.33 have the same names; only 0.26
# has CompressedTensorsWNA16MarlinMoEMethod. These readers clear what pads the sizes.
_PADDED: Mapping[str, Reader] = {
    "UnquantizedFusedMoEMethod": unquantized,
    "GptOssMxfp4MoEMethod": mxfp4,
    "Mxfp4MoEMethod": mxfp4,
    "CompressedTensorsW4A4Mxfp4MoEMethod": mxfp4,
    "Fp8PerTensorOnlineMoEMethod": partial(online, kind="tensor"),
    "Fp8PerBlockOnlineMoEMethod": partial(online, kind="block"),
    "Fp8PtpcOnlineMoEMethod": partial(online, kind="channel"),
    "Int8OnlineMoEMethod": partial(online, kind="int8"),
}
_EXACT: Mapping[str, Reader] = {
    "Fp8MoEMethod": fp8,
    "CompressedTensorsW8A8Fp8MoEMethod": fp8,
    "ModelOptFp8MoEMethod": fp8,
    "CompressedTensorsW8A8Int8MoEMethod": readers.int8,
    "CompressedTensorsWNA16MoEMethod": compressed_tensors,
    "CompressedTensorsWNA16MarlinMoEMethod": compressed_tensors,
    "CompressedTensorsW4A8Fp8MoEMethod": w4a8,
    "AutoGPTQMoEMethod": gptq,
    "AutoAWQMoEMethod": readers.awq,
    "MoeWNA16Method": readers.moe_wna16,
    "CompressedTensorsW4A4Nvfp4MoEMethod": nvfp4,
    "ModelOptNvFp4FusedMoE": nvfp4,
}
READERS = {**_PADDED, **_EXACT}
