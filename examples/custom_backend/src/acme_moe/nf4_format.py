"""The checkpoint format `acme_nf4`: nf4, the even column in a byte's upper half, as in QLoRA.

A matrix is `x.weight` uint8 (N, K / 2) and `x.absmax` fp32 (N, K / 64).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moekit.checkpoint import Format, Matrix, Method, Part
from moekit.errors import WeightsError


class Nf4Matrix(Format):
    def core_weight(self, stored: Tensor) -> Tensor:
        """Put the even column into the lower half, where moekit has it."""
        return super().core_weight((stored >> 4) | (stored << 4))


class Nf4Checkpoint(Method):
    fields = frozenset({"group_size"})  # others that may change numbers are refused

    def read(self, matrix: Matrix) -> Format | None:
        """Return the form of a matrix with these tensors, or None: it is another format's."""
        return self.declare(matrix.config, "") if matrix.has("absmax") else None

    def declare(self, config: Mapping[str, Any], module: str) -> Format:
        """Return the form of a matrix of which only the config is known, as engines need it."""
        if (group := config.get("group_size", 64)) != 64:
            raise WeightsError(f"acme_nf4: group_size={group}, and acme has groups of 64")
        weight = Part("weight", (torch.uint8,), (1, 2))
        absmax = Part("absmax", (torch.float32,), (1, 64))
        return Nf4Matrix(name="acme_nf4", dtype="nf4", parts={"weight": weight, "scale": absmax})
