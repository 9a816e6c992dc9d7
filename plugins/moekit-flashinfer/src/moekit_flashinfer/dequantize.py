"""Quantized tokens back to 16 bits, for a library that quantizes them itself."""

from __future__ import annotations

import triton
import triton.language as tl
from moekit_kernels.numerics import convert
from torch import Tensor

_GROUP = 128


def dequantize_rows(q_RH: Tensor, scale_RG: Tensor, ids_RK: Tensor, out_RH: Tensor) -> None:
    """q (e4m3) times its scales, one for each 128 columns; rows without any id are not written."""
    rows, columns = q_RH.shape
    assert scale_RG.shape == (rows, triton.cdiv(columns, _GROUP)) and scale_RG.stride(1) == 1
    assert q_RH.is_contiguous() and out_RH.is_contiguous() and ids_RK.is_contiguous()
    if rows:
        _dequantize[(rows,)](
            q_RH, scale_RG, ids_RK, out_RH, columns, scale_RG.stride(0),
            SLOTS=ids_RK.shape[1], PADDED=triton.next_power_of_2(ids_RK.shape[1]),
            GROUP=_GROUP, BLOCK=triton.next_power_of_2(columns), num_warps=8,
        )  # fmt: skip


@triton.jit
def _dequantize(
    q_ptr, scale_ptr, ids_ptr, out_ptr, columns, scale_stride,
    SLOTS: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, PADDED)
    ids = tl.load(ids_ptr + row * SLOTS + slot, mask=slot < SLOTS, other=-1)
    if tl.max(ids, axis=0) >= 0:
        column = tl.arange(0, BLOCK)
        inside = column < columns
        scale = tl.load(scale_ptr + row * scale_stride + column // GROUP, mask=inside, other=0.0)
        q = tl.load(q_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        wide = convert(q * scale, out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * columns + column, wide, mask=inside)
