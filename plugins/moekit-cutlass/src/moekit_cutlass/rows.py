"""Row kernels around the grouped GEMMs: rows into sorted order (quantized), bias, and back.

Rows without a slot, and sorted rows at or past the last offset, are neither read nor written: what
lies there (NaN, old values) is never seen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from moekit_triton.numerics import INTERPRETED, QMAX, convert, quantize, scale_of
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
    """``h[s] += bias[expert of s]``, in place, rounded to h's dtype."""
    rows, cols = h_SN.shape
    block = _block(cols)
    _add_bias[(rows, triton.cdiv(cols, block))](
        h_SN, bias_LN, groups.experts_S, groups.total, cols, h_SN.stride(0), bias_LN.stride(0),
        BLOCK=block, num_warps=4,
    )  # fmt: skip


def gather_sum(
    z_SH: Tensor,
    groups: Groups,
    out_RH: Tensor,
    *,
    weights_RK: Tensor | None = None,
    bias_LH: Tensor | None = None,
) -> None:
    """``out[r] = sum_k weights[r, k] * (z[slot] + bias[expert])``, in fp32, in order of k.

    Slots of -1 are skipped whatever the weight is. Rows without any slot become 0; with
    weights_RK None (K = 1, BATCHED) they stay as they were.
    """
    rows, top_k = groups.slots_RK.shape
    cols = out_RH.shape[1]
    assert z_SH.stride(1) == 1 and out_RH.stride(1) == 1
    assert weights_RK is None or weights_RK.is_contiguous()
    assert weights_RK is not None or top_k == 1
    block = _block(cols)
    _gather_sum[(rows, triton.cdiv(cols, block))](
        z_SH, groups.slots_RK, groups.experts_S, weights_RK, bias_LH, out_RH, cols,
        z_SH.stride(0), out_RH.stride(0), TOP_K=top_k, WEIGHTED=weights_RK is not None,
        BIAS=bias_LH is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _block(cols: int) -> int:
    return min(triton.next_power_of_2(cols), 8192 if INTERPRETED else 1024)


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
        x = quantize(value, tl.broadcast_to(scale, value.shape), QMAX, out_ptr.dtype.element_ty)
    for k in tl.static_range(TOP_K):
        slot = slots[k].to(tl.int64)
        end = tl.where(slot >= 0, cols, 0)
        tl.store(out_ptr + slot * out_stride + col, x, mask=col < end)
        if SCALED or KIND == "row":
            tl.store(out_scale_ptr + slot + one, scale, mask=(one + slot) >= 0)


@triton.jit
def _add_bias(
    h_ptr, bias_ptr, experts_ptr, total_ptr, cols, h_stride, bias_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(total_ptr):
        return
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = col < cols
    expert = tl.load(experts_ptr + row).to(tl.int64)
    bias = tl.load(bias_ptr + expert * bias_stride + col, mask=ok, other=0.0).to(tl.float32)
    pointers = h_ptr + row * h_stride + col
    value = tl.load(pointers, mask=ok, other=0.0).to(tl.float32) + bias
    tl.store(pointers, convert(value, h_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _gather_sum(
    z_ptr, slots_ptr, experts_ptr, weights_ptr, bias_ptr, out_ptr, cols, z_stride, out_stride,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = col < cols
    if not WEIGHTED:
        if tl.load(slots_ptr + row) < 0:
            return
    total = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, TOP_K, 8):
        slots, rows, weights = (), (), ()
        for k in tl.static_range(first, first + 8):
            if k < TOP_K:
                slots += (tl.load(slots_ptr + row * TOP_K + k),)
        for k in tl.static_range(first, first + 8):
            if k < TOP_K:
                slot = slots[k - first].to(tl.int64)
                end = tl.where(slot >= 0, cols, 0)
                rows += (tl.load(z_ptr + slot * z_stride + col, mask=col < end, other=0.0),)
        # ptxas saves registers by asking for a row only when the one before it is added up. Behind
        # a barrier all rows have been asked for, and the weights hold the arithmetic back there.
        tl.debug_barrier()
        for k in tl.static_range(first, first + 8):
            if k < TOP_K and WEIGHTED:
                weights += (tl.load(weights_ptr + row * TOP_K + k),)
        for k in tl.static_range(first, first + 8):
            if k < TOP_K:
                slot = slots[k - first]
                present = slot >= 0
                z = rows[k - first].to(tl.float32)
                if BIAS:
                    expert = tl.load(experts_ptr + slot, mask=present, other=0).to(tl.int64)
                    z += tl.load(bias_ptr + expert * cols + col, mask=ok, other=0.0).to(tl.float32)
                if WEIGHTED:
                    z *= weights[k - first]
                total += tl.where(present, z, 0.0)
    result = convert(total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + col, result, mask=ok)
