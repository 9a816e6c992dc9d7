"""Packed weights as an engine's layer holds them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from moekit.contract import PackedWeights
from moekit.engines.weights import refusal
from moekit.kernel import ModularKernel


def check_graphs(kernel: ModularKernel, engine: str, option: str) -> None:
    """Raise Unsupported if a kernel cannot be in the CUDA graphs that an engine captures.

    option: the engine's option that turns graphs off.
    """
    specs = (kernel.dispatcher.spec, kernel.experts.spec)
    if unfit := [repr(spec.name) for spec in specs if not spec.graph_safe]:
        names = " and ".join(unfit)
        raise refusal(f"{names} cannot be in the CUDA graphs that {engine} captures: use {option}")


def held(layer: nn.Module, packed: PackedWeights) -> dict[str, nn.Parameter]:
    """Return parameters for the packed experts: the layer's own where they share memory."""
    own = {p.data_ptr(): (name, p) for name, p in layer.named_parameters(recurse=False)}
    found = {}
    for name, tensor in packed.experts.items():
        known, parameter = own.get(tensor.data_ptr(), ("", None))
        form = tensor.shape, tensor.stride(), tensor.dtype
        if parameter is not None and (parameter.shape, parameter.stride(), parameter.dtype) == form:
            found[known] = parameter
        else:
            found[f"moekit_{name}"] = nn.Parameter(tensor, requires_grad=False)
    return found


def hold(layer: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Replace all parameters of the layer by these."""
    for name in dict(layer.named_parameters(recurse=False)):
        delattr(layer, name)
    for name, parameter in parameters.items():
        setattr(layer, name, parameter)
