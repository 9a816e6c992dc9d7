"""Packed weights that keep their memory through updates: CUDA graphs may have captured it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from moekit.contract import PackedWeights
from moekit.kernel import ModularKernel
from moekit.runtime.workspace import settle


def tensors(packed: PackedWeights) -> dict[str, Tensor]:
    """Return all tensors by name."""
    return {**packed.experts, **packed.shared}


def form(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two tensors must share to be copied into one another in place."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def forms(packed: PackedWeights) -> tuple[Any, ...]:
    """Return the backend, and the `form` of each tensor."""
    return packed.backend, {name: form(tensor) for name, tensor in tensors(packed).items()}


def copy(packed: PackedWeights, into: PackedWeights) -> None:
    """Write the values of ``packed`` where they are not in the same memory."""
    held = tensors(into)
    for name, new in tensors(packed).items():
        if new.data_ptr() != held[name].data_ptr():
            held[name].copy_(new)
            settle(new.device)


def against_graphs(
    kernel: ModularKernel, packed: PackedWeights, before: PackedWeights | None, captures: str
) -> list[str]:
    """Return why CUDA graphs cannot hold the kernel and its weights; empty if they can.

    Args:
        before: The layer's packed weights before an update, which graphs may have captured.
        captures: The engine's name and the option that turns graphs off, if it captures some.
    """
    if before is not None:
        if forms(before) == forms(packed):
            return []
        return ["its packed weights have other shapes or dtypes, or another backend, than before"]
    specs = (kernel.dispatcher.spec, kernel.experts.spec)
    unfit = [repr(spec.name) for spec in specs if not spec.graph_safe]
    if not unfit or not captures:
        return []
    engine, _, option = captures.partition(" ")
    names = " and ".join(unfit)
    return [f"{names} cannot be in the CUDA graphs that {engine} captures: use {option}"]


def held(layer: nn.Module, packed: PackedWeights) -> dict[str, nn.Parameter]:
    """Return parameters for the packed experts: the layer's own where they share memory."""
    own = {p.data_ptr(): (name, p) for name, p in layer.named_parameters(recurse=False)}
    found = {}
    for name, tensor in packed.experts.items():
        known, parameter = own.get(tensor.data_ptr(), ("", None))
        if parameter is not None and form(parameter) == form(tensor):
            found[known] = parameter
        else:
            found[f"moekit_{name}"] = nn.Parameter(tensor, requires_grad=False)
    return found


def hold(layer: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Give the layer these parameters in place of those that it has."""
    for name in dict(layer.named_parameters(recurse=False)):
        delattr(layer, name)
    for name, parameter in parameters.items():
        setattr(layer, name, parameter)
