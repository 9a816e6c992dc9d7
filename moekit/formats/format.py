"""What describes a stored expert matrix: its tensors, their layout and their scales.

Matrices are laid out as in nn.Linear: N outputs by K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from moekit.errors import WeightsError
from moekit.problem.codes import Codes
from moekit.problem.int4 import IN_ORDER, repack_rows, unpack_rows
from moekit.problem.quant import OperandQuant, codes_of
from moekit.problem.quantize import numbers

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SCALES = (*FLOATS, torch.float8_e8m0fnu, torch.uint8)
WORDS = (torch.int32,)

Grid = tuple[int, int]
"""Rows and columns of the matrix that one entry covers; -1 for all of them."""


@dataclass(frozen=True)
class Part:
    """One stored tensor of a matrix.

    Args:
        suffix: Follows the module's name, as in "weight_scale". "weight" stands for the name in
            `ExpertNames`.
        dtypes: Dtypes that it may have.
        grid: Rows and columns that an entry covers; -1 for all of them.
        axes: Its dimensions in order, of "N" and "K". A part with one entry for each matrix may
            be stored with any number of dimensions.
        tail: Trailing dimensions.
        fixed: ``ExpertNames.transposed`` does not apply to it.
    """

    suffix: str
    dtypes: tuple[torch.dtype, ...]
    grid: Grid = (1, 1)
    axes: str = "NK"
    tail: tuple[int, ...] = ()
    fixed: bool = False

    def cells(self, axis: str, extent: range) -> slice:
        """Return the entries along ``axis`` that cover ``extent`` of the matrix."""
        unit = self.grid["NK".index(axis)]
        if not extent:
            return slice(0, 0)
        if unit < 0:
            return slice(0, 1)
        return slice(extent.start // unit, ceil(extent.stop / unit))

    def shape(self, n: int, k: int) -> tuple[int, ...]:
        """Return the tensor's shape for a matrix (n, k)."""
        extents = {"N": range(n), "K": range(k)}
        return (*(self.cells(a, extents[a]).stop for a in self.axes), *self.tail)

    def flipped(self) -> Part:
        """Return the same part of a matrix that is stored (in, out)."""
        return self if self.fixed else replace(self, axes=self.axes[::-1])


BIAS = Part("bias", FLOATS, axes="N", fixed=True)
"""The bias of a matrix in any format."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """The form in which a checkpoint stores each expert matrix.

    Args:
        name: The format's name, for errors.
        dtype: As in `OperandQuant`; "" for unquantized weights.
        zero_points: There is a zero point for each scale.
        act_order: The columns of a group may be any, as the part g_idx says. (A checkpoint may
            also have a g_idx for groups of adjacent columns.)
        scale_dtype: As in `OperandQuant`.
        activation: How the checkpoint intends activations to be quantized.
        parts: The stored tensors by role: weight, scale, and if the format has them
            global_scale, zeros, g_idx, input_scale.
        ignored: Suffixes of tensors that are not read.
        order: The order of eight rows in a word, if ``weight`` packs rows.
        zero_offset: Added to stored zero points.
    """

    name: str
    dtype: str = ""
    zero_points: bool = False
    act_order: bool = False
    scale_dtype: str = "float32"
    activation: OperandQuant | None = None
    parts: Mapping[str, Part]
    ignored: tuple[str, ...] = ()
    order: Sequence[int] = IN_ORDER
    zero_offset: int = 0

    @property
    def weight(self) -> Part:
        """The part that holds the weights."""
        return self.parts["weight"]

    @property
    def group(self) -> Grid:
        """Rows and columns that share a scale."""
        return self.parts["scale"].grid if "scale" in self.parts else (-1, -1)

    @property
    def biased(self) -> bool:
        """Return whether int8 values are stored plus 128."""
        return self.dtype == "int8" and self.weight.dtypes == WORDS

    @property
    def codes(self) -> Codes:
        """The codes of the core's tensor. Raises WeightsError if no scheme has its dtype."""
        found = codes_of(self.dtype)
        if found is None:
            raise WeightsError(f"{self.name}: no quant scheme has {self.dtype} weights")
        return found

    @property
    def per_byte(self) -> int:
        """Columns in an element of the core's tensor."""
        return self.codes.per_byte if self.dtype else 1

    @property
    def packs_rows(self) -> bool:
        """Return whether an entry of the stored weights holds several rows."""
        return self.weight.grid[0] > 1

    def flipped(self) -> Format:
        """Return the same format with every matrix stored (in, out)."""
        return replace(self, parts={role: part.flipped() for role, part in self.parts.items()})

    def __str__(self) -> str:
        if not self.dtype:
            return self.name
        rows, columns = ("all" if g < 0 else g for g in self.group)
        zeros = " with zero points" if self.zero_points else ""
        order = " in act-order" if self.act_order else ""
        kind = "" if self.scale_dtype == "float32" else f"{self.scale_dtype} "
        each = f"a {kind}scale per {rows} x {columns}"
        return f"{self.name} ({self.dtype}, {each}{zeros}{order})"

    # -- from stored entries to the core's tensors ----------------------------------------------

    def core_weight(self, stored: Tensor) -> Tensor:
        """Return the core's weights of ``stored`` entries (n, k', *tail).

        They include rows and columns that only complete a word.
        """
        if self.packs_rows:
            return repack_rows(stored.contiguous(), self.order)
        flat = stored.flatten(1)
        if self.per_byte == 1 and flat.dtype != torch.int32:
            return flat
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        return flat.view(torch.int8 if self.dtype == "int8" else torch.uint8)

    def core_scale(self, stored: Tensor, factor: Tensor | None) -> Tensor:
        """Return fp32 scales of stored ones and of the stored global scale, if there is one."""
        scale = scale_values(stored)
        if factor is None:
            return scale
        # compressed-tensors divides by it, and ModelOpt multiplies.
        divides = self.parts["global_scale"].suffix == "weight_global_scale"
        return scale / factor if divides else scale * factor

    def core_zeros(self, stored: Tensor) -> Tensor:
        """Return zero points (N, groups) uint8 of stored words (N / 8, groups)."""
        return (unpack_rows(stored, self.order) + self.zero_offset) & 15

    def values(self, weight: Tensor, zeros: Tensor | None) -> Tensor:
        """Return the core's ``weight`` (n, k) as fp32, before scaling. zeros: (n, k) or None."""
        return numbers(weight, self.codes, zeros) if self.dtype else weight.float()


def filled(template: str, layer: int, expert: int) -> str:
    """Return the name of an expert's tensor."""
    return template.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def stored(template: str, suffix: str) -> str:
    """Return the name of a part: ``a.weight`` becomes ``a.<suffix>``, ``a`` ``a_<suffix>``."""
    if suffix == "weight":
        return template
    if template.endswith(".weight"):
        return template.removesuffix("weight") + suffix
    return f"{template}_{suffix}"


def scale_values(stored: Tensor) -> Tensor:
    """Return scales as fp32. Bytes are exponents: 2 ** (byte - 127), and 255 is NaN."""
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    return stored.float()
