"""The loaded parameters of an MoE layer of vLLM as `moekit.ExpertWeights`.

vLLM's methods keep what a checkpoint holds until ``process_weights_after_loading``, with the
experts of this rank in dim 0 and the gate and up rows in one parameter. `read` is called in its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from moekit import ExpertWeights
from moekit.engines.weights import refusal
from moekit_vllm.weights import floats, integers
from moekit_vllm.weights.parameters import unquantized

# (layer, method) -> (name of the scheme, weights), by the class that vLLM's method is or extends.
# 0.26, 0.32 and 0.33 have the same names; only 0.26 has CompressedTensorsWNA16MarlinMoEMethod.
READERS: Mapping[str, Callable[[Any, Any], tuple[str, ExpertWeights]]] = {
    "UnquantizedFusedMoEMethod": unquantized,
    "Fp8MoEMethod": floats.fp8,
    "CompressedTensorsW8A8Fp8MoEMethod": floats.fp8,
    "ModelOptFp8MoEMethod": floats.fp8,
    "CompressedTensorsW8A8Int8MoEMethod": integers.int8,
    "CompressedTensorsWNA16MoEMethod": integers.compressed_tensors,
    "CompressedTensorsWNA16MarlinMoEMethod": integers.compressed_tensors,
    "CompressedTensorsW4A8Fp8MoEMethod": integers.w4a8,
    "AutoGPTQMoEMethod": integers.gptq,
    "AutoAWQMoEMethod": integers.awq,
    "MoeWNA16Method": integers.moe_wna16,
    "GptOssMxfp4MoEMethod": floats.mxfp4,
    "Mxfp4MoEMethod": floats.mxfp4,
    "CompressedTensorsW4A4Mxfp4MoEMethod": floats.mxfp4,
    "CompressedTensorsW4A4Nvfp4MoEMethod": floats.nvfp4,
    "ModelOptNvFp4FusedMoE": floats.nvfp4,
    "Fp8PerTensorOnlineMoEMethod": partial(floats.online, kind="tensor"),
    "Fp8PerBlockOnlineMoEMethod": partial(floats.online, kind="block"),
    "Fp8PtpcOnlineMoEMethod": partial(floats.online, kind="channel"),
    "Int8OnlineMoEMethod": partial(floats.online, kind="int8"),
}


def read(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Return the scheme of a layer's loaded weights, and the weights, as views if possible. Raises
    Unsupported if moekit does not know how the method stores weights, or has no scheme that
    computes with them exactly."""
    for ancestor in type(method).__mro__:
        if (reader := READERS.get(ancestor.__name__)) is not None:
            return reader(layer, method)
    raise refusal(f"moekit-vllm does not read the weights of {type(method).__name__}")
