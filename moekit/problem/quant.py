"""Quantization schemes.

A scheme says how weights and activations are quantized. Scales have one dimension for each
dimension that they scale, of size 1 if one scale covers the whole extent, so they broadcast:

    weights      w_LNK      scale (L, N or N/group or 1, K/group or 1)
    activations  x_RH       scale (R or 1, H/group or 1)

Scales are fp32 tensors and multiply: ``value = quantized * scale``. `OperandQuant.scale_dtype` says
which values a scheme allows for them.

int4 weights are uint8: a byte holds two columns of a row, the even one in the lower half, as
integers 0..15. ``value = (stored - zero) * scale``, where zero is 8, or with ``zero_points`` an
integer 0..15 (uint8, unpacked) for each scale. A group is a run of columns. In act-order schemes it
is any set of as many columns, and ``g_idx`` (L, K) names each column's group.
`moekit.problem.int4` converts the checkpoints' packings to this form.

fp4 is packed in the same way, as codes of a sign, two exponent bits and a mantissa bit (`E2M1`).
mxfp4 and mxfp8 have one scale for 32 columns, a power of two (OCP Microscaling Formats 1.0; scales
of fp8 are rounded up as in cuBLAS and DeepGEMM, where OCP lets values saturate). nvfp4 has one
scale for 16 columns, an e4m3 number times one fp32 number for the whole matrix, or for all
activations of a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from moekit.errors import InvalidProblem
from moekit.problem.codes import CODES, Codes
from moekit.problem.codes import E2M1 as E2M1
from moekit.problem.codes import INT4_ZERO as INT4_ZERO
from moekit.untrusted.arguments import (
    FLAG,
    MAX_WIDTH,
    accept_fields,
    choice,
    instance,
    matching,
    optional,
    shown,
)


@dataclass(frozen=True)
class OperandQuant:
    """The quantization of one operand.

    ``dtype``: float8_e4m3fn, int8, int4 or float4_e2m1, or the name of ``codes``.
    ``group`` (rows, columns) share one scale; -1 means the whole extent: (-1, -1) per tensor,
    (1, -1) per row (a weight's output channel, an activation's token), (128, 128) per block.
    ``static``: the checkpoint has the scale; otherwise it is computed from the data.
    ``zero_points``: int4 and other unsigned integers, each group has a stored zero point.
    ``act_order``: int4 only, the columns of each group are stored (``g_idx``).
    ``scale_dtype``: float32, float8_e8m0fnu (powers of two), or float8_e4m3fn (times one fp32).
    ``codes``: the codes of the values; a dtype of moekit or of a known scheme implies them.
    """

    dtype: str
    group: tuple[int, int]
    static: bool = False
    zero_points: bool = False
    act_order: bool = False
    scale_dtype: str = "float32"
    codes: Codes = field(default=None, repr=False, hash=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.codes is None or self.codes in CODES.values():  # dtype may be another, replaced
            codes = CODES.get(self.dtype) or self.codes or codes_of(self.dtype)
            object.__setattr__(self, "codes", codes)

    def check(self) -> None:
        """Raise InvalidProblem if the facts contradict each other."""
        accept_fields(self, _OPERAND)
        if (self.dtype in CODES) != (self.codes in CODES.values()):
            raise InvalidProblem(f"dtype={shown(self.dtype)}: other codes need another name")
        if (self.zero_points or self.act_order) and not self.codes.integers:
            raise InvalidProblem(f"{self.dtype}: only unsigned integers have zero points and g_idx")

    @property
    def torch_dtype(self) -> torch.dtype:
        return self.codes.torch_dtype

    @property
    def qmax(self) -> float:
        """Largest representable magnitude used."""
        return self.codes.largest

    @property
    def packed(self) -> bool:
        """Return whether a byte holds several values."""
        return self.codes.bits < 8

    @property
    def microscaled(self) -> bool:
        """Return whether scales are powers of two (e8m0)."""
        return self.scale_dtype == "float8_e8m0fnu"

    @property
    def per_tensor(self) -> bool:
        return self.group == (-1, -1)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the scale of a (rows, columns) matrix."""
        gr, gc = self.group
        return (1 if gr < 0 else -(-rows // gr), 1 if gc < 0 else -(-columns // gc))


NAME = matching(
    "lower-case letters, digits and _, at most 64 with a letter first",
    lambda name: type(name) is str and re.fullmatch("[a-z][a-z0-9_]{0,63}", name),
)
_OPERAND = {
    "dtype": NAME,
    "group": matching(
        "a tuple (rows, columns) of positive integers or -1",
        lambda group: (
            type(group) is tuple
            and len(group) == 2
            and all(type(n) is int and (n == -1 or 0 < n <= MAX_WIDTH) for n in group)
        ),
    ),
    **dict.fromkeys(("static", "zero_points", "act_order"), FLAG),
    "scale_dtype": choice(("float32", "float8_e8m0fnu", "float8_e4m3fn")),
    "codes": instance("Codes, which a dtype of no known scheme needs", Codes),
}
_QUANTIZED = optional(instance("an OperandQuant", OperandQuant))
_SCHEME = {"name": NAME, "weight": _QUANTIZED, "activation": _QUANTIZED}


@dataclass(frozen=True, kw_only=True)
class QuantScheme:
    """Weights x activations. ``activation`` None means 16-bit (or fp32) activations."""

    name: str
    weight: OperandQuant | None = None
    activation: OperandQuant | None = None

    kind: ClassVar[str] = "quantization scheme"

    def __post_init__(self) -> None:
        accept_fields(self, _SCHEME)
        for operand in (self.weight, self.activation):
            if operand is not None:
                operand.check()
        if self.weight is not None and not self.weight.static:  # weights come with their scales
            object.__setattr__(self, "weight", replace(self.weight, static=True))
        if (operand := self.activation) is not None and operand.codes.error is None:
            raise InvalidProblem(f"activations of {operand.dtype}: its codes declare no error")

    @property
    def weight_only(self) -> QuantScheme:
        """The scheme of the same weights with unquantized activations, as fp8_w8a16_block.

        Raises InvalidProblem if there is none (mxfp8).
        """
        for scheme in SCHEMES.values():
            if scheme.weight == self.weight and scheme.activation is None:
                return scheme
        raise InvalidProblem(
            f"{self.name} has no weight-only form: load its weights dequantized, with quant='none'"
        )

    @property
    def static(self) -> bool:
        """Return whether the checkpoint holds the scales of activations."""
        return self.activation is not None and self.activation.static

    @property
    def shared_scale(self) -> bool:
        """Return whether the tokens of a call share a scale that is computed from all of them."""
        operand = self.activation
        if operand is None or operand.static:
            return False
        # The second scale of nvfp4 covers all rows.
        return operand.per_tensor or operand.scale_dtype == "float8_e4m3fn"


_TENSOR, _ROW, _BLOCK, _GROUP = (-1, -1), (1, -1), (128, 128), (1, 128)
_FP8, _INT8, FP4 = "float8_e4m3fn", "int8", "float4_e2m1"
_FP8_TENSOR, _FP8_ROW = OperandQuant(_FP8, _TENSOR), OperandQuant(_FP8, _ROW)
_MXFP8 = OperandQuant(_FP8, (1, 32), scale_dtype="float8_e8m0fnu")
_MXFP4 = replace(_MXFP8, dtype=FP4)
_NVFP4 = OperandQuant(FP4, (1, 16), scale_dtype="float8_e4m3fn")


def _scheme(
    name: str, weight: OperandQuant | None = None, activation: OperandQuant | None = None
) -> QuantScheme:
    return QuantScheme(name=name, weight=weight, activation=activation)


def _int4(columns: int, zero_points: bool, act_order: bool) -> QuantScheme:
    group = "channel" if columns < 0 else f"g{columns}"
    name = f"int4_w4a16_{group}" + "_zp" * zero_points + "_act_order" * act_order
    weight = OperandQuant("int4", (1, columns), zero_points=zero_points, act_order=act_order)
    return _scheme(name, weight)


_ALL = (
    _scheme("none"),
    _scheme("fp8_tensor", _FP8_TENSOR, _FP8_TENSOR),
    _scheme("fp8_tensor_static", _FP8_TENSOR, replace(_FP8_TENSOR, static=True)),
    _scheme("fp8_channel_token", _FP8_ROW, _FP8_ROW),
    _scheme("fp8_block", OperandQuant(_FP8, _BLOCK), OperandQuant(_FP8, _GROUP)),
    _scheme("int8_channel_token", OperandQuant(_INT8, _ROW), OperandQuant(_INT8, _ROW)),
    _scheme("fp8_w8a16_tensor", _FP8_TENSOR),
    _scheme("fp8_w8a16_channel", _FP8_ROW),
    _scheme("fp8_w8a16_block", OperandQuant(_FP8, _BLOCK)),
    _scheme("int8_w8a16", OperandQuant(_INT8, _ROW)),
    _scheme("int8_w8a16_g32", OperandQuant(_INT8, (1, 32))),
    *(
        _int4(columns, zero_points, act_order)
        for act_order in (False, True)
        for columns in (-1, 32, 64, 128)
        for zero_points in (False, True)
        if columns > 0 or not act_order  # one group has no order
    ),
    _scheme("int4_w4a8_g128", OperandQuant("int4", _GROUP), _FP8_ROW),
    _scheme("mxfp4_w4a16", _MXFP4),
    _scheme("mxfp4_w4a8", _MXFP4, _MXFP8),
    _scheme("mxfp8", _MXFP8, _MXFP8),
    _scheme("nvfp4_w4a16", _NVFP4),
    _scheme("nvfp4", _NVFP4, _NVFP4),
)
BUILTIN: Mapping[str, QuantScheme] = MappingProxyType({scheme.name: scheme for scheme in _ALL})


class Schemes(Set[str], Mapping[str, QuantScheme]):
    """Quantization schemes by name: moekit's, and the schemes that installed plugins add.

    It is also the set of the names, with the operators of a frozenset. Looking up a name that
    moekit does not have discovers plugins. Listing the names does not, because plugins list them
    while they are imported.

    installed: returns the Registry, after discovery or as it is, or None; the registry sets it.
    """

    installed: Callable[[bool], Any] = staticmethod(lambda discover: None)

    def __init__(self, name: str, whose: Callable[[QuantScheme], bool]) -> None:
        self._name, self._whose = name, whose

    def __repr__(self) -> str:
        return self._name

    __reduce__ = __repr__

    def __getitem__(self, name: str) -> QuantScheme:
        if name not in BUILTIN and (known := self.installed(True)) is not None:
            found: QuantScheme = known.schemes[name]
        else:
            found = BUILTIN[name]
        if not self._whose(found):
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        known = self.installed(False)
        every = {**BUILTIN, **({} if known is None else known.schemes)}
        return (name for name, scheme in every.items() if self._whose(scheme))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return Mapping.__contains__(self, name)

    def __hash__(self) -> int:
        return hash(self._name)

    _from_iterable = frozenset


def _on_wires(scheme: QuantScheme) -> bool:
    operand = scheme.activation
    return operand is not None and operand.scale_dtype == "float32" and not operand.packed


SCHEMES = Schemes("SCHEMES", bool)  # each is true
"""The quantization schemes by name."""
WIRE_SCHEMES = Schemes("WIRE_SCHEMES", _on_wires)
"""Schemes whose activations are one byte each with fp32 scales, as transfers need them."""


def scheme(name: str) -> QuantScheme:
    """Return the named scheme. Raises InvalidProblem listing the known names."""
    if not isinstance(name, str) or name not in SCHEMES:
        known = SCHEMES.installed(True)
        text = f"quant scheme {shown(name)} is unknown; choose one of: {', '.join(SCHEMES)}"
        raise InvalidProblem("\n  ".join([text, *(known.faults() if known else ())]))
    return SCHEMES[name]


def codes_of(dtype: str) -> Codes | None:
    """Return the codes of an operand's ``dtype``, or None if no known scheme has it."""
    if dtype in CODES or SCHEMES.installed(True) is None:
        return CODES.get(dtype)
    operands = (each for known in SCHEMES.values() for each in (known.weight, known.activation))
    return next((each.codes for each in operands if each and each.dtype == dtype), None)
