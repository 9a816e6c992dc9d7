"""Quantization schemes and their reference arithmetic, on any device.

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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.errors import InvalidProblem
from moekit.untrusted.arguments import shown

_QMAX = {"float8_e4m3fn": 448.0, "int8": 127.0, "int4": 7.0, "float4_e2m1": 6.0}
_TORCH_DTYPE = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
    "float4_e2m1": torch.uint8,
}
INT4_ZERO = 8
"""The stored integer of value 0 in int4 weights without zero points."""
# Values of the codes 0..7; code + 8 is the negative value.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SMALLEST_AMAX = 1e-12
_SMALLEST_E4M3 = 2.0**-9


@dataclass(frozen=True)
class OperandQuant:
    """The quantization of one operand.

    ``dtype``: float8_e4m3fn, int8, int4 or float4_e2m1.
    ``group`` (rows, columns) share one scale; -1 means the whole extent: (-1, -1) per tensor,
    (1, -1) per row (a weight's output channel, an activation's token), (128, 128) per block.
    ``static``: the checkpoint has the scale; otherwise it is computed from the data.
    ``zero_points``: int4 only, each group has a stored zero point.
    ``act_order``: int4 only, the columns of each group are stored (``g_idx``).
    ``scale_dtype``: float32, float8_e8m0fnu (powers of two), or float8_e4m3fn (times one fp32).
    """

    dtype: str
    group: tuple[int, int]
    static: bool = False
    zero_points: bool = False
    act_order: bool = False
    scale_dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        return _TORCH_DTYPE[self.dtype]

    @property
    def qmax(self) -> float:
        """Largest representable magnitude used."""
        return _QMAX[self.dtype]

    @property
    def packed(self) -> bool:
        """Return whether a byte holds two values."""
        return self.dtype in ("int4", "float4_e2m1")

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


@dataclass(frozen=True, kw_only=True)
class QuantScheme:
    """Weights x activations. ``activation`` None means 16-bit (or fp32) activations."""

    name: str
    weight: OperandQuant | None = None
    activation: OperandQuant | None = None

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
    def shared_scale(self) -> bool:
        """Return whether the tokens of a call share a scale that is computed from all of them."""
        operand = self.activation
        if operand is None or operand.static:
            return False
        # The second scale of nvfp4 covers all rows.
        return operand.per_tensor or operand.scale_dtype == "float8_e4m3fn"


_TENSOR, _ROW, _BLOCK, _GROUP = (-1, -1), (1, -1), (128, 128), (1, 128)
_FP8, _INT8, _FP4 = "float8_e4m3fn", "int8", "float4_e2m1"
_FP8_TENSOR, _FP8_ROW = OperandQuant(_FP8, _TENSOR), OperandQuant(_FP8, _ROW)
_MXFP8 = OperandQuant(_FP8, (1, 32), scale_dtype="float8_e8m0fnu")
_MXFP4 = replace(_MXFP8, dtype=_FP4)
_NVFP4 = OperandQuant(_FP4, (1, 16), scale_dtype="float8_e4m3fn")


def _scheme(
    name: str, weight: OperandQuant | None = None, activation: OperandQuant | None = None
) -> QuantScheme:
    stored = None if weight is None else replace(weight, static=True)  # with its scales
    return QuantScheme(name=name, weight=stored, activation=activation)


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
SCHEMES: Mapping[str, QuantScheme] = MappingProxyType({scheme.name: scheme for scheme in _ALL})
"""The quantization schemes by name."""

WIRE_SCHEMES = frozenset(
    name
    for name, scheme in SCHEMES.items()
    if scheme.activation is not None and scheme.activation.scale_dtype == "float32"
)
"""Names of schemes whose activations are one byte each with fp32 scales, as transfers need them."""


def scheme(name: str) -> QuantScheme:
    """Return the named scheme. Raises InvalidProblem listing the known names."""
    if not isinstance(name, str) or name not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise InvalidProblem(f"quant scheme {shown(name)} is unknown; choose one of: {known}")
    return SCHEMES[name]


def expand(scale: Tensor, group: tuple[int, int], rows: int, columns: int) -> Tensor:
    """Expand a scale (..., SR, SC) so that it broadcasts against (..., rows, columns)."""
    for dim, (g, n) in ((-2, (group[0], rows)), (-1, (group[1], columns))):
        if g > 1:
            scale = scale.repeat_interleave(g, dim=dim).narrow(dim, 0, n)
    return scale


def compute_scale(x: Tensor, quant: OperandQuant, valid_rows: Tensor | None = None) -> Tensor:
    """Return the scale of ``x`` (..., rows, columns): (..., *quant.scale_shape(...)), fp32.

    A group of zeros gets a tiny positive scale.

    valid_rows: (rows,) bool; other rows (padding, possibly NaN) do not count.
    """
    rows, columns = x.shape[-2:]
    magnitude = x.abs().float()
    if valid_rows is not None:
        magnitude = magnitude.masked_fill(~valid_rows[:, None], 0.0)
    for dim, g, n in ((-2, quant.group[0], rows), (-1, quant.group[1], columns)):
        if g == 1:
            continue
        if g < 0:
            # amax is undefined for an empty extent; its sum is zero, as it should be.
            magnitude = magnitude.amax(dim, keepdim=True) if n else magnitude.sum(dim, keepdim=True)
            continue
        pad = (0, -n % g) if dim == -1 else (0, 0, 0, -n % g)
        magnitude = torch.unflatten(F.pad(magnitude, pad), dim, (-1, g)).amax(dim)
    magnitude = magnitude.clamp(min=SMALLEST_AMAX)
    if quant.microscaled:
        fp4 = quant.dtype == _FP4  # its largest value comes to [4, 8)
        mantissa, exponent = torch.frexp(magnitude if fp4 else magnitude / quant.qmax)
        power = exponent - (3 if fp4 else (mantissa == 0.5).int())
        return torch.where(magnitude.isfinite(), torch.exp2(power.float()), magnitude)
    scale = magnitude / quant.qmax
    if quant.scale_dtype == "float8_e4m3fn":
        whole = scale.amax((-2, -1), keepdim=True) / _QMAX[_FP8] if scale.numel() else scale
        small = (scale / whole).clamp(_SMALLEST_E4M3, _QMAX[_FP8])
        return small.to(torch.float8_e4m3fn).float() * whole
    return scale


def quantize(
    x: Tensor,
    quant: OperandQuant,
    scale: Tensor | None = None,
    valid_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` (..., rows, columns), rounding to nearest even and saturating.

    Groups are runs of columns, so the result needs no ``g_idx`` in act-order schemes. For zero
    points see `moekit.problem.convert`.

    Args:
        scale: a static scale, which broadcasts to the scheme's shape.
        valid_rows: as in `compute_scale`.

    Returns:
        (quantized, scale); int4 is packed, (..., rows, columns / 2).
    """
    assert not quant.zero_points
    if scale is None:
        scale = compute_scale(x, quant, valid_rows)
    q = x.float() / expand(scale.float(), quant.group, *x.shape[-2:])
    q = q.clamp(-quant.qmax, quant.qmax)
    if quant.dtype == _FP4:
        return pack_int4(_to_e2m1(q)), scale
    if quant.dtype in ("int8", "int4"):
        q = q.round()
    if quant.packed:
        return pack_int4((q + INT4_ZERO).to(torch.uint8)), scale
    return q.to(quant.torch_dtype), scale


def _to_e2m1(x: Tensor) -> Tensor:
    """Convert fp32 within +-6 to uint8 codes, rounded to nearest, ties to the even code."""
    # The midpoints between values: a tie at 0.25, 1.25, 2.5 or 5 rounds down, at the others up.
    up = torch.tensor([0.75, 1.75, 3.5], dtype=x.dtype, device=x.device)
    down = torch.tensor([0.25, 1.25, 2.5, 5.0], dtype=x.dtype, device=x.device)
    magnitude = x.abs()
    code = torch.bucketize(magnitude, up, right=True, out_int32=True)
    code += torch.bucketize(magnitude, down, out_int32=True)
    return (code + 8 * (x < 0)).to(torch.uint8)


def pack_int4(values: Tensor) -> Tensor:
    """Pack uint8 values below 16 (..., columns), columns even, to uint8 (..., columns / 2)."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack (..., C/2) uint8 to (..., C) uint8 of 0..15; the lower half of a byte comes first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def numbers(q: Tensor, dtype: str) -> Tensor:
    """Return stored values (..., columns) as fp32: without zero point and scale."""
    if dtype != _FP4:
        return (unpack_int4(q) if dtype == "int4" else q).float()
    code = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float32, device=q.device)
    byte = torch.arange(256, device=q.device)
    pairs = torch.stack((code[byte & 15], code[byte >> 4]), dim=1)
    # An index in brackets would be converted to int64.
    return pairs.index_select(0, q.int().flatten()).view(*q.shape, 2).flatten(-2)


def dequantize(
    q: Tensor,
    scale: Tensor,
    quant: OperandQuant,
    dtype: torch.dtype = torch.float32,
    *,
    zero_points: Tensor | None = None,
    g_idx: Tensor | None = None,
) -> Tensor:
    """Undo `quantize`: return (..., rows, columns) in ``dtype``, multiplied in fp32.

    Args:
        zero_points: uint8, shaped as scale.
        g_idx: (..., columns), the group of each column.
    """
    values = numbers(q, quant.dtype)

    def each(x: Tensor) -> Tensor:
        if g_idx is None:
            return expand(x.float(), quant.group, *values.shape[-2:])
        return x.float().gather(-1, g_idx.long().unsqueeze(-2).expand(values.shape))

    if quant.dtype == "int4":
        values -= INT4_ZERO if zero_points is None else each(zero_points)
    return (values * each(scale)).to(dtype)
