"""Row kernels around the grouped GEMMs: rows into sorted order (quantized), bias, back to slabs.

Rows without a slot, and sorted rows at or past the last offset, are neither read nor written: what
lies there (NaN, old values) is never seen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from moekit_kernels.numerics import INTERPRETED, QMAX, convert, quantize, scale_of
from torch import Tensor

from .groups import Groups


def spread_rows(
    x_RH: Tensor,
    slots_RK: Tensor,
    out_SH: Tensor,
    *,
    x_scale: Tensor | None = None,
    out_scale_S: Tensor | None = None,
    static: bool = False,
) -> None:
    """Copies each row to its slots; every row is read once.

    out of x's dtype: a copy, with x_scale (fp32; one value, or one a row) spread to out_scale_S.
    out e4m3, x of a float dtype: quantized, with one scale per row, or with the one value of
    x_scale (``static``); the scale used goes to out_scale_S.
    """
    rows, cols = x_RH.shape
    assert out_SH.shape[1] == cols and x_RH.stride(1) == 1 and slots_RK.is_contiguous()
    assert (x_scale is None) or (out_scale_S is not None)
    kind = "copy"
    if x_RH.dtype != out_SH.dtype:
        kind = "static" if static else "row"
    elif x_RH.element_size() == 1:
        x_RH, out_SH = x_RH.view(torch.uint8), out_SH.view(torch.uint8)
    per_row = x_scale is not None and x_scale.numel() > 1
    _spread[(rows,)](
        x_RH, out_SH, x_scale, out_scale_S, slots_RK, cols, x_RH.stride(0), out_SH.stride(0),
        KIND=kind, SCALED=x_scale is not None, SCALE_PER_ROW=per_row, TOP_K=slots_RK.shape[1],
        QMAX=QMAX.get(out_SH.dtype, 0.0), BLOCK=triton.next_power_of_2(cols),
        num_warps=_warps(cols),
    )  # fmt: skip


def add_bias(h_SN: Tensor, bias_LN: Tensor, groups: Groups) -> None:
    """``h[slot] += bias[expert]`` for the slot of each pair, in place, rounded to h's dtype."""
    _launch_take(h_SN, bias_LN, groups, h_SN, to_slots=True)


def return_rows(z_SH: Tensor, bias_LH: Tensor | None, groups: Groups, out_RH: Tensor) -> None:
    """``out[r] = z[slot] + bias[expert]``, K = 1; rows without a slot stay as they were."""
    assert groups.slots_RK.shape[1] == 1
    _launch_take(z_SH, bias_LH, groups, out_RH, to_slots=False)


def _launch_take(
    z: Tensor, bias: Tensor | None, groups: Groups, out: Tensor, *, to_slots: bool
) -> None:
    cols = z.shape[1]
    assert z.stride(1) == 1 and out.stride(1) == 1 and (bias is None or bias.is_contiguous())
    block = min(triton.next_power_of_2(cols), 8192 if INTERPRETED else 1024)
    _take[(groups.slots_RK.numel(), triton.cdiv(cols, block))](
        z, bias, groups.slots_RK, groups.ids_RK, out, cols, z.stride(0), out.stride(0),
        TO_SLOTS=to_slots, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _warps(cols: int) -> int:
    """About 16 elements a thread."""
    return max(1, min(16, triton.next_power_of_2(cols) // 512))


@triton.jit
def _spread(
    x_ptr, out_ptr, x_scale_ptr, out_scale_ptr, slots_ptr, cols, x_stride, out_stride,
    KIND: tl.constexpr, SCALED: tl.constexpr, SCALE_PER_ROW: tl.constexpr,
    TOP_K: tl.constexpr, QMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slots = ()
    last = tl.full((), -1, tl.int32)
    for k in tl.static_range(TOP_K):
        slots += (tl.load(slots_ptr + row * TOP_K + k),)
        last = tl.maximum(last, slots[k])
    if last < 0:
        return
    col = tl.arange(0, BLOCK)[None, :]
    ok = col < cols
    one = tl.zeros((1, 1), tl.int32)
    x = tl.load(x_ptr + row * x_stride + col, mask=ok, other=0)
    if SCALED:
        scale = tl.load(x_scale_ptr + (row if SCALE_PER_ROW else 0) + one)
    if KIND != "copy":
        value = x.to(tl.float32)
        if KIND == "row":
            scale = scale_of(tl.max(tl.abs(value), axis=1, keep_dims=True), QMAX)
        x = quantize(value, scale, QMAX, out_ptr.dtype.element_ty)
    for k in tl.static_range(TOP_K):
        slot = slots[k].to(tl.int64)
        end = tl.where(slot >= 0, cols, 0)
        tl.store(out_ptr + slot * out_stride + col, x, mask=col < end)
        if SCALED or KIND == "row":
            tl.store(out_scale_ptr + slot + one, scale, mask=(one + slot) >= 0)


@triton.jit
def _take(
    z_ptr, bias_ptr, slots_ptr, ids_ptr, out_ptr, cols, z_stride, out_stride,
    TO_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    if slot < 0:
        return
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = col < cols
    value = tl.load(z_ptr + slot * z_stride + col, mask=ok, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias_row = tl.load(ids_ptr + pair).to(tl.int64) * cols
        value += tl.load(bias_ptr + bias_row + col, mask=ok, other=0.0).to(tl.float32)
    out_row = slot if TO_SLOTS else pair
    out_ptrs = out_ptr + out_row * out_stride + col
    tl.store(out_ptrs, convert(value, out_ptr.dtype.element_ty), mask=ok)
