"""Packed weights that keep their memory through updates: CUDA graphs may have captured it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moekit import PackedWeights
from moekit.plugin import settle


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
