"""16-bit checkpoints that vLLM quantizes when it loads them.

moekit quantizes by its reference arithmetic, to the same schemes. Under tensor parallelism vLLM
(from 0.32 on) takes the scales of whole matrices, and moekit takes this rank's part's.
"""

from __future__ import annotations

from typing import Any

import torch

from moekit import SCHEMES, ExpertWeights
from moekit_vllm.weights import fp8
from moekit_vllm.weights.parameters import refusal, unquantized


def fp8_tensor(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read Fp8PerTensorOnlineMoEMethod."""
    name = fp8.scheme(method, "tensor")
    weights = _quantized(layer, method, "fp8_tensor")
    return name, fp8.each_row(weights) if name == "fp8_channel_token" else weights


def fp8_block(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read Fp8PerBlockOnlineMoEMethod."""
    return fp8.scheme(method, "block"), _quantized(layer, method, "fp8_block")


def fp8_channel(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read Fp8PtpcOnlineMoEMethod: per token and channel."""
    return fp8.scheme(method, "channel"), _quantized(layer, method, "fp8_channel_token")


def int8(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read Int8OnlineMoEMethod, which leaves activations in 16 bits."""
    return "int8_w8a16", _quantized(layer, method, "int8_w8a16")


def _quantized(layer: Any, method: Any, scheme: str) -> ExpertWeights:
    """Quantize one expert after the other, which bounds the memory in use."""
    if getattr(method, "requantization_source", None) is not None:
        raise refusal("vLLM quantizes weights anew that the checkpoint has quantized")
    _, weights = unquantized(layer, method)
    parts = [
        ExpertWeights(weights.w13[e : e + 1], weights.w2[e : e + 1]).quantize(SCHEMES[scheme])
        for e in range(weights.num_experts)
    ]
    joined = {
        name: torch.cat([part.tensors()[name] for part in parts]) for name in parts[0].tensors()
    }
    biases = {name: t for name, t in weights.tensors().items() if name.endswith("_bias")}
    return ExpertWeights(**joined, **biases, interleaved=weights.interleaved)
