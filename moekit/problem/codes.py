"""Codes store the values of quantized operands: moekit's codes, and functions for all codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moekit.errors import InvalidProblem
from moekit.untrusted.arguments import FUNCTION, accept_fields, matching, optional, real, size

INT4_ZERO = 8
"""The stored integer of value 0 in int4 weights without zero points."""
# Values of the codes 0..7; code + 8 is the negative value.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, kw_only=True)
class Codes:
    """The codes that store the values of an operand. A plugin's schemes bring their own.

    bits: the bits of a code: 8, 4, 2 or 1. A byte holds 8 / bits codes, the first column in its
        lowest bits.
    torch_dtype: the dtype of the stored tensor; uint8 unless ``bits`` is 8.
    largest: the magnitude to which the largest value of a group is scaled. Default: the codebook's.
    codebook: the 2 ** bits values of the codes, multiplied by the scale; empty for numbers of
        ``torch_dtype``.
    zero: the code of 0, with which moekit pads; None if there is none, and sizes are then not
        padded. It is subtracted from integers. A codebook that holds 0.0 sets it.
    encode, decode: functions for other codes. ``encode(x)`` takes fp32 (..., rows, columns) divided
        by the scales and within +-largest, and returns the stored tensor, with columns * bits / 8
        columns; ``decode`` undoes it. Groups must not depend on each other, and zeros must become
        bytes of ``zero``.
    error: an upper bound of a layer's relative RMS error if these codes store its activations.
        None: the codes are for weights only.
    """

    bits: int = 8
    torch_dtype: torch.dtype = torch.uint8
    largest: float = 0.0
    codebook: tuple[float, ...] = ()
    zero: int | None = 0
    encode: Callable[[Tensor], Tensor] | None = None
    decode: Callable[[Tensor], Tensor] | None = None
    error: float | None = None

    def __post_init__(self) -> None:
        if book := self.codebook:
            object.__setattr__(self, "zero", book.index(0.0) if 0.0 in book else None)
            object.__setattr__(self, "largest", self.largest or max(map(abs, book)))
        accept_fields(self, _CODES)
        if book and len(book) != 2**self.bits:
            raise InvalidProblem(f"codebook has {len(book)} values, expected {2**self.bits}")
        if self.torch_dtype != torch.uint8 and self.bits != 8:
            raise InvalidProblem(f"codes of {self.bits} bits are stored in torch.uint8")
        if (self.encode is None) != (self.decode is None):
            raise InvalidProblem("encode and decode must be given together")

    @property
    def integers(self) -> bool:
        """Return whether codes are unsigned integers, from which a zero point is subtracted."""
        return self.torch_dtype == torch.uint8 and not self.codebook and self.decode is None

    @property
    def per_byte(self) -> int:
        """Columns in a stored element."""
        return 8 // self.bits

    @property
    def zero_byte(self) -> int:
        """The byte of a stored element whose columns are all 0."""
        return (self.zero or 0) * (255 // ((1 << self.bits) - 1))


_STORED = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_CODES = {
    "codebook": matching(
        "a tuple of floats below 1e9",
        lambda book: type(book) is tuple and all(type(v) is float and abs(v) < 1e9 for v in book),
    ),
    "bits": matching("1, 2, 4 or 8", lambda bits: type(bits) is int and bits in (1, 2, 4, 8)),
    "torch_dtype": matching("a torch.dtype of 8 bits", lambda dtype: dtype in _STORED),
    "largest": real(above=0.0),
    "zero": optional(size(0, 255)),
    "encode": optional(FUNCTION),
    "decode": optional(FUNCTION),
    "error": optional(real(above=0.0, most=0.5)),
}

# `error` of layers whose activations have these codes: they lose bits twice, before each GEMM.
CODES = {
    # 4 significant bits: 2.6e-2 for one rounding, 4e-2 to 6.3e-2 for the two and what the
    # activation makes of the first. How many values share a scale hardly matters, because fp8 is a
    # floating-point format.
    "float8_e4m3fn": Codes(torch_dtype=torch.float8_e4m3fn, largest=448.0, error=9e-2),
    # A token's largest value sets its step, and grows against the RMS with I: 1.5e-2 at I = 100,
    # 3e-2 at I = 2048.
    "int8": Codes(torch_dtype=torch.int8, largest=127.0, error=4e-2),
    "int4": Codes(bits=4, largest=7.0, zero=INT4_ZERO),
    # In groups of 16: 9.5e-2 for one rounding, 1.5e-1 for the two.
    "float4_e2m1": Codes(bits=4, codebook=(*E2M1, *(-v for v in E2M1)), error=0.22),
}
