"""AWQ's words, which hold eight rows in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moekit.errors import WeightsError
from moekit.formats.format import FLOATS, WORDS, Format, Grid, Part
from moekit.formats.matrix import Matrix, Tensors
from moekit.formats.method import Method, skipped, tensors_of
from moekit.problem.int4 import AWQ_ORDER
from moekit.untrusted.arguments import shown


class Awq(Method):
    """``qweight``, ``qzeros`` and ``scales``; without qzeros, 8 is subtracted."""

    names = ("awq",)
    fields = frozenset({
        "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format", "backend",
        "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "sym", "desc_act",
        "block_name_to_quantize",
    })  # fmt: skip

    def of_module(self, config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
        """AutoAWQ leaves out every module whose name contains an entry."""
        return None if any(entry in f"{module}." for entry in skipped(config)) else config

    def read(self, matrix: Matrix) -> Format | None:
        if not matrix.has("qweight") or matrix.method not in ("", "awq"):
            return None
        version = (matrix.config.get("version") or "gemm").lower()
        if version != "gemm":
            raise WeightsError(
                f"AWQ version {version!r} is not supported; convert the checkpoint to 'gemm'"
            )
        return read(matrix)

    def declare(self, config: Mapping[str, Any], module: str, n: int, k: int) -> Tensors:
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise WeightsError(f"quantization_config.bits is {shown(bits)}, expected 4")
        group = config.get("group_size") or config.get("q_group_size") or -1
        return tensors_of(words(group, config.get("zero_point") is not False), n, k)


def read(matrix: Matrix) -> Format:
    """Return the format of words (K, N / 8)."""
    groups = matrix.sides("scales")[0] if matrix.has("scales") else 1
    said = matrix.config.get("group_size") or matrix.config.get("q_group_size")
    zero_points = matrix.has("qzeros") or matrix.config.get("zero_point") is not False
    return words(matrix.group(groups, said), zero_points)


def words(group: int, zero_points: bool = True) -> Format:
    """Return AWQ's: qweight (K, N / 8), qzeros (G, N / 8), scales (G, N)."""
    parts = {
        "weight": in_out("qweight", WORDS, (8, 1)),
        "scale": in_out("scales", FLOATS, (1, group)),
    }
    if zero_points:
        parts["zeros"] = in_out("qzeros", WORDS, (8, group))
    return Format(name="AWQ", dtype="int4", zero_points=zero_points, parts=parts, order=AWQ_ORDER)


def in_out(suffix: str, dtypes: tuple[torch.dtype, ...], grid: Grid) -> Part:
    """Return a part that GPTQ and AWQ store as (in, out)."""
    return Part(suffix, dtypes, grid, "KN", fixed=True)
