"""Functions that the readers share: a layer's parameters, its biases, and vLLM's padding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moekit import ExpertWeights
from moekit.engines.weights import Pair, made, pair, refusal
from moekit_vllm.problem import interleaved

# The layer (0.32, 0.33) and the method whose weights gpt-oss's own loaders fill.
_GPT_OSS = frozenset({"GptOssRoutedExperts", "GptOssMxfp4MoEMethod"})


def backend(method: Any, name: str) -> str:
    """Return the name of the backend that vLLM chose, which ``method.<name>`` holds; "" if none."""
    return str(getattr(getattr(method, name, None), "name", ""))


def expert_weights(layer: Any, weights: Pair, **more: Pair | None) -> ExpertWeights:
    """Return weights with the layer's biases and its order of gate and up rows.

    more: both matrices' ``scale``, ``zero_points`` and so on; None for those that do not exist.
    """
    if layer.moe_config.has_bias:
        more["bias"] = pair(layer, "bias")
    return made(weights, interleaved(layer), **more)


def unquantized(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read w13_weight (L, 2I or I, H), w2_weight (L, H, I) and their biases."""
    weights = pair(layer, "weight")
    clear_padding(layer, *weights)
    if layer.moe_config.has_bias:
        clear_padding(layer, *pair(layer, "bias"))
    return "none", expert_weights(layer, weights)


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


def clear_padding(layer: Any, w13: Tensor, w2: Tensor, unit: int = 1, fill: int = 0) -> None:
    """Write ``fill`` where vLLM's sizes exceed the model's, so that it computes to zeros.

    vLLM leaves those rows and columns as allocated.

    Args:
        w13, w2: (L, 2I or I, H / unit), (L, H, I / unit): weights or scales. Biases are (L, N).
        unit: Columns that an entry covers.
    """
    hidden, inner = layer.moe_config.hidden_dim_unpadded, real_neurons(layer)
    gated = layer.moe_config.is_act_and_mul
    if gated and not interleaved(layer):
        halves, rows = list(w13.chunk(2, dim=1)), inner
    else:
        halves, rows = [w13], inner * (2 if gated else 1)
    for half in halves:
        half[:, rows:] = fill
    w2[:, hidden:] = fill
    for matrix, columns in ((w13, hidden), (w2, inner)):
        if matrix.dim() == 3:
            matrix[:, :, -(-columns // unit) :] = fill
