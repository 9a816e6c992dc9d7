"""Unquantized weights."""

from __future__ import annotations

from moekit.formats.format import FLOATS, Format, Part
from moekit.formats.method import Matrix, Method


class Plain(Method):
    """A weight in bf16, fp16 or fp32. A matrix without tensors counts as one: it is reported."""

    def read(self, matrix: Matrix) -> Format | None:
        if not matrix.tensors or (matrix.has("weight") and matrix.dtype("weight") in FLOATS):
            return plain()
        return None


def plain() -> Format:
    """Return the format of unquantized weights."""
    return Format(name="unquantized", parts={"weight": Part("weight", FLOATS)})
