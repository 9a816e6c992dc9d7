"""One stored matrix as a format sees it: its tensors, and what the config says about its module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch

from moekit.errors import WeightsError
from moekit.formats.format import stored

BLOCKS = (128, 64, 32, 16, 256)  # sizes of groups and blocks, the likeliest first
Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype | str]]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The down, gate or up projection of one expert: ``n`` outputs, ``k`` inputs.

    Args:
        name: The name of its weight.
        tensors: The (shape, dtype) of each of its tensors, by suffix; "weight" is the weight's.
        method: The config's quant_method; "" if there is none.
        config: The fields of the quantization config that hold for this module.
        transposed: It is stored (in, out).
        block: ggml's type, if it consists of GGUF blocks.
        inputs: Some matrix of the layer has a scale of its input.
    """

    name: str
    tensors: Tensors
    n: int
    k: int
    method: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    transposed: bool = False
    block: str = ""
    inputs: bool = False

    def called(self, suffix: str) -> str:
        """Return the full name of a tensor."""
        return stored(self.name, suffix)

    def has(self, *suffixes: str) -> bool:
        """Return whether there is a tensor with one of the suffixes."""
        return any(suffix in self.tensors for suffix in suffixes)

    def shape(self, suffix: str) -> tuple[int, ...]:
        return self.tensors[suffix][0]

    def dtype(self, suffix: str) -> torch.dtype | str:
        return self.tensors[suffix][1]

    def sides(self, suffix: str) -> tuple[int, int]:
        """Return a tensor's shape; raise WeightsError unless it has two dimensions."""
        shape = self.shape(suffix)
        if len(shape) != 2:
            raise WeightsError(
                f"{self.called(suffix)} must have two dimensions for each expert (got {shape})"
            )
        return shape[0], shape[1]

    def group(self, groups: int, said: int | None = None) -> int:
        """Return the size of one of ``groups`` groups along K; -1 for a single one.

        The tensor decides; the config's size counts where it fits the number of groups.
        """
        if said is not None and (1 if said < 0 else ceil(self.k / said)) == groups:
            return said
        if groups <= 1:
            return -1
        guess = max(1, self.k // groups)
        return next((g for g in BLOCKS if ceil(self.k / g) == groups), guess)
