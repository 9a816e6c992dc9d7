"""The loaded parameters of an MoE layer of vLLM as `moekit.ExpertWeights`.

vLLM's methods keep what a checkpoint holds until ``process_weights_after_loading``, with the
experts of this rank in dim 0 and the gate and up rows in one parameter. `read` is called in its
place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moekit import ExpertWeights
from moekit.errors import Unsupported
from moekit_vllm.problem import interleaved

# (layer, method) -> (name of the scheme, weights)
Reader = Callable[[Any, Any], tuple[str, ExpertWeights]]


def read(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Return the scheme of a layer's weights, and the weights, as views if possible.

    Args:
        layer: A `RoutedExperts` layer of vLLM whose weights are loaded.
        method: Its quantization method.

    Raises:
        Unsupported: moekit does not know how the method stores weights.
    """
    for ancestor in type(method).__mro__:
        if (reader := READERS.get(ancestor.__name__)) is not None:
            return reader(layer, method)
    reason = f"moekit-vllm does not read the weights of {type(method).__name__}"
    raise Unsupported(reason, [reason])


def unquantized(layer: Any, method: Any) -> tuple[str, ExpertWeights]:
    """Read w13_weight (L, 2I or I, H), w2_weight (L, H, I) and their biases."""
    clear_padding(layer)
    return "none", ExpertWeights(
        layer.w13_weight.detach(),
        layer.w2_weight.detach(),
        w13_bias=detached(layer, "w13_bias"),
        w2_bias=detached(layer, "w2_bias"),
        interleaved=interleaved(layer),
    )


def detached(layer: Any, name: str) -> Tensor | None:
    """Return a parameter without its gradient, or None if the layer has none of that name."""
    found = getattr(layer, name, None)
    return None if found is None else found.detach()


def clear_padding(layer: Any) -> None:
    """Fill what vLLM's sizes add to the model's with zeros, which then compute to zeros.

    vLLM rounds sizes up for its own kernels, and leaves those rows and columns as allocated.
    """
    config = layer.moe_config
    hidden, inner = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
    w13, w2 = layer.w13_weight.data, layer.w2_weight.data
    if interleaved(layer) or not config.is_act_and_mul:
        halves = [w13]
        rows = inner * (2 if config.is_act_and_mul else 1)
    else:
        halves, rows = list(w13.chunk(2, dim=1)), inner
    for half in halves:
        half[:, rows:] = 0
    for matrix, rows, columns in ((w13, w13.shape[1], hidden), (w2, hidden, inner)):
        matrix[:, rows:] = 0
        matrix[:, :, columns:] = 0


READERS: dict[str, Reader] = {"UnquantizedFusedMoEMethod": unquantized}
