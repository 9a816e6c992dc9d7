"""The reference arithmetic of quantization, on any device: see `moekit.problem.quant`."""

from __future__ import annotations

import math
from functools import cache, partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.problem.codes import Codes
from moekit.problem.quant import FP4, OperandQuant

SMALLEST_AMAX = 1e-12
_SMALLEST_E4M3, _LARGEST_E4M3 = 2.0**-9, 448.0


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
        fp4 = quant.dtype == FP4  # its largest value comes to [4, 8)
        mantissa, exponent = torch.frexp(magnitude if fp4 else magnitude / quant.qmax)
        power = exponent - (3 if fp4 else (mantissa == 0.5).int())
        return torch.where(magnitude.isfinite(), torch.exp2(power.float()), magnitude)
    scale = magnitude / quant.qmax
    if quant.scale_dtype == "float8_e4m3fn":
        whole = scale.amax((-2, -1), keepdim=True) / _LARGEST_E4M3 if scale.numel() else scale
        small = (scale / whole).clamp(_SMALLEST_E4M3, _LARGEST_E4M3)
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
    codes, q = quant.codes, x.float() / expand(scale.float(), quant.group, *x.shape[-2:])
    q = q.clamp(-codes.largest, codes.largest)
    return stored(q, codes), scale


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
    shape = (*q.shape[:-1], q.shape[-1] * quant.codes.per_byte)

    def each(x: Tensor) -> Tensor:
        if g_idx is None:
            return expand(x.float(), quant.group, *shape[-2:])
        return x.float().gather(-1, g_idx.long().unsqueeze(-2).expand(shape))

    values = numbers(q, quant.codes, None if zero_points is None else each(zero_points))
    return (values * each(scale)).to(dtype)


def stored(x: Tensor, codes: Codes) -> Tensor:
    """Return fp32 numbers (..., columns) within +-largest as stored values; undoes `numbers`."""
    if codes.encode is not None:
        return codes.encode(x)
    if codes.codebook:
        return pack(_nearest(x, codes.codebook), codes.bits)
    x = x if codes.torch_dtype.is_floating_point else x.round()
    if codes.integers:
        return pack((x + (codes.zero or 0)).to(torch.uint8), codes.bits)
    return x.to(codes.torch_dtype)


def _nearest(x: Tensor, codebook: tuple[float, ...]) -> Tensor:
    """Convert fp32 to the uint8 codes of the nearest values; ties go to an even code."""
    ends, order = _cells(codebook)
    upper = torch.tensor(ends, dtype=torch.float32, device=x.device)
    codes = torch.tensor(order, dtype=torch.uint8, device=x.device)
    return codes.index_select(0, torch.bucketize(x, upper, out_int32=True).flatten()).view(x.shape)


@cache
def _cells(codebook: tuple[float, ...]) -> tuple[list[float], list[int]]:
    """Return the upper end of the cell of each value but the last, and the codes, both rising."""
    order = sorted(range(len(codebook)), key=lambda code: (codebook[code], -code))
    value = torch.tensor([codebook[code] for code in order], dtype=torch.float32, device="cpu")
    middle = (value[1:] + value[:-1]) / 2
    above = torch.tensor([code % 2 == 0 for code in order[1:]], device="cpu")  # takes the tie
    below = middle.nextafter(torch.full_like(middle, -math.inf))
    return torch.where(above, below, middle).tolist(), order


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes (..., columns) of ``bits`` bits to bytes, the first in the lowest bits."""
    each = [values[..., i :: 8 // bits] << i * bits for i in range(8 // bits)]
    return reduce(torch.bitwise_or, each)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack`."""
    each = [packed >> i * bits & 2**bits - 1 for i in range(8 // bits)]
    return torch.stack(each, dim=-1).flatten(-2)


pack_int4 = partial(pack, bits=4)
unpack_int4 = partial(unpack, bits=4)
"""Return the uint8 codes (..., 2 n) of 4 bits in bytes (..., n), the first in the lower bits."""


def numbers(q: Tensor, codes: Codes, zeros: Tensor | None = None) -> Tensor:
    """Return stored values (..., columns) as fp32, without scale.

    zeros: the zero point of each value; None: ``codes.zero`` for all.
    """
    if codes.decode is not None:
        return codes.decode(q)
    if codes.integers:
        values = (q if codes.bits == 8 else unpack(q, codes.bits)).float()
        return values.sub_((codes.zero or 0) if zeros is None else zeros)
    if not codes.codebook:
        return q.float()
    book = torch.tensor(codes.codebook, dtype=torch.float32, device=q.device)
    byte = torch.arange(256, dtype=torch.uint8, device=q.device)
    runs = book[unpack(byte[:, None], codes.bits).long()]
    # An index in brackets would be converted to int64.
    return runs.index_select(0, q.int().flatten()).view(*q.shape, codes.per_byte).flatten(-2)
