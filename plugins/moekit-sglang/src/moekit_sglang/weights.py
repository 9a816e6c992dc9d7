"""The loaded parameters of an MoE layer of SGLang as `moekit.ExpertWeights`.

SGLang's methods keep what a checkpoint holds until ``process_weights_after_loading``. `read` is
called in its place. Methods of compressed-tensors, GPTQ and AWQ leave the parameters to
``layer.scheme``.
"""

from __future__ import annotations

from collections.abc import Mapping

from moekit.engines import readers
from moekit.engines.facts import Facts, refusal
from moekit.engines.readers import Loaded, Reader, e8m0
from moekit_sglang import versions


def read(facts: Facts) -> Loaded:
    """Return the scheme of a layer's loaded weights, and the weights: see `readers.read`."""
    return readers.read(facts, READERS, "moekit-sglang")


def _unquantized(facts: Facts) -> Loaded:
    """Read UnquantizedFusedMoEMethod: w13_weight (L, 2I or I, H), w2_weight (L, H, I)."""
    return "none", facts.weights("weight")


def _fp8(facts: Facts) -> Loaded:
    method = facts.method
    kinds = [n for n in ("use_mxfp8", "is_fp4_expert", "use_marlin") if getattr(method, n, False)]
    if kinds:
        raise refusal(f"moekit-sglang reads no fp8 weights with {kinds[0]}")
    if facts.layer.w13_weight.element_size() != 1:
        raise refusal("SGLang quantizes its 16-bit weights to fp8 when it loads them")
    owners = method, getattr(method, "quant_config", None)
    block = next(filter(None, (getattr(each, "weight_block_size", None) for each in owners)), None)
    return readers.fp8(facts, block, versions.argument("enable_eplb", False))


def _mxfp4(facts: Facts) -> Loaded:
    """Read Mxfp4MoEMethod: codes (L, N, K / 2), and scales as bytes of e8m0 (L, N, K / 32).

    SGLang rounds sizes up for some kernels, and its loader then writes gate and up in one piece.
    """
    sizes, method = (facts.hidden, facts.inner), facts.method
    held = method.hidden_size, method.intermediate_size_per_partition
    if held != sizes:
        raise refusal(f"SGLang has rounded up its hidden and intermediate size {sizes} to {held}")
    return "mxfp4_w4a16", facts.weights("weight", scale=facts.pair("weight_scale").map(e8m0))


def _compressed_tensors(facts: Facts) -> Loaded:
    if facts.has("w13_weight_zero_point"):
        raise refusal("moekit-sglang reads no zero points of compressed-tensors")
    scheme = facts.method
    return readers.compressed_tensors(facts, scheme.num_bits, scheme.actorder, transposed=True)


# Keys: the class of SGLang's method or scheme, or its base; equal names in 0.5.15 and 0.5.23.
READERS: Mapping[str, Reader] = {
    "UnquantizedFusedMoEMethod": _unquantized,
    "Fp8MoEMethod": _fp8,
    "W8A8FP8MoEMethod": _fp8,
    "CompressedTensorsW8A8Fp8MoE": _fp8,
    "W8A8Int8MoEMethod": readers.int8,
    "Mxfp4MoEMethod": _mxfp4,
    "CompressedTensorsWNA16MoE": _compressed_tensors,
    "GPTQMarlinMoEScheme": readers.gptq,
    "AWQMoEScheme": readers.awq,
    "MoeWNA16Method": readers.moe_wna16,
}
