"""Copy token rows into expert-sorted rows: each block's input becomes one contiguous tile.

Shape suffixes: R rows, H hidden size, S expert-sorted rows, G groups of 128 columns.
"""

import torch
import triton
import triton.language as tl

from .align import SortedAssignments
from .launch import Launcher, cdiv, next_power_of_2, wait_then_launch_dependents
from .numerics import QMAX, SCALE_GROUP, quantize, scale_of
from .rows import row_programs, rows_of_program

__all__ = ["copy_rows", "copy_rows_quantized"]

_COLUMNS = 2048


def copy_rows(x_RH: torch.Tensor, aligned: SortedAssignments, out_SH: torch.Tensor) -> None:
    """Copy each row of ``x_RH`` to the sorted rows of its K assignments.

    Each row of x is read once; a gather would read it once per assignment. Rows without any expert
    are not read, and padding rows of the output are not written.

    x_RH: (R, H) of any dtype, unit stride along H. aligned: filled by `align`, with ``rows_A``;
    rows from its ``live_R`` on are not read.
    out_SH: (capacity, H), the dtype of x, contiguous.
    """
    rows, hidden = x_RH.shape
    assert out_SH.shape[1] == hidden and aligned.rows_A is not None
    assert x_RH.stride(1) == 1 and out_SH.is_contiguous()
    _launch_copy(
        (row_programs(rows, aligned.live_R), cdiv(hidden, _COLUMNS)),
        x_RH, out_SH, aligned.rows_A, aligned.live_R, hidden, x_RH.stride(0),
        TOP_K=aligned.rows_A.numel() // rows,
        BLOCK=min(_COLUMNS, next_power_of_2(hidden)), num_warps=4,
    )  # fmt: skip


def copy_rows_quantized(
    x_RH: torch.Tensor,
    x_scale_RG: torch.Tensor | None,
    aligned: SortedAssignments,
    out_SH: torch.Tensor,
    scale_GS: torch.Tensor,
) -> None:
    """Copy like `copy_rows`, quantized to e4m3 by groups of 128 columns.

    Args:
        x_RH: (R, H), 16-bit, quantized here as `rows.quantize_rows` does, once for all assignments
            of a row; or e4m3 already.
        x_scale_RG: fp32 (R, ceil(H / 128)) if x is e4m3, else None.
        aligned: filled by `align`, with ``rows_A``.
        out_SH: e4m3 (capacity, H), contiguous.
        scale_GS: fp32 (ceil(H / 128), capacity), contiguous.
    """
    rows, hidden = x_RH.shape
    capacity, groups = len(out_SH), cdiv(hidden, SCALE_GROUP)
    assert out_SH.shape[1] == hidden and scale_GS.shape == (groups, capacity)
    assert x_RH.stride(1) == 1 and out_SH.is_contiguous() and scale_GS.is_contiguous()
    assert aligned.rows_A is not None and (x_scale_RG is None) == (x_RH.dtype.itemsize == 2)
    assert x_scale_RG is None or x_scale_RG.shape == (rows, groups)
    each, qmax = min(_COLUMNS // SCALE_GROUP, next_power_of_2(groups)), QMAX[out_SH.dtype]
    if x_scale_RG is not None:
        x_RH, out_SH = x_RH.view(torch.uint8), out_SH.view(torch.uint8)
    _launch_quantize(
        (row_programs(rows, aligned.live_R), cdiv(groups, each)),
        x_RH, x_scale_RG, out_SH, scale_GS, aligned.rows_A, aligned.live_R, hidden, groups,
        capacity, x_RH.stride(0), *((0, 0) if x_scale_RG is None else x_scale_RG.stride()),
        TOP_K=aligned.rows_A.numel() // rows, GROUPS=each, GROUP=SCALE_GROUP,
        QMAX=qmax, QUANTIZED=x_scale_RG is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _sorted_rows(rows_ptr, row, TOP_K: tl.constexpr):
    """Return rows[k] of the row's K assignments (-1: no expert), and max over k of rows[k]."""
    rows = ()
    last = tl.full((), -1, tl.int32)
    for k in tl.static_range(TOP_K):
        rows += (tl.load(rows_ptr + row * TOP_K + k),)
        last = tl.maximum(last, rows[k])
    return rows, last


@triton.jit
def _copy(
    x_ptr, out_ptr, rows_ptr, live_ptr, hidden, x_stride,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_then_launch_dependents()
    first, end_row, step = rows_of_program(live_ptr)
    for index in range(first, end_row, step):
        row = tl.cast(index, tl.int64)
        rows_K, last = _sorted_rows(rows_ptr, row, TOP_K)
        if last >= 0:
            col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * x_stride + col, mask=col < hidden)
            for k in tl.static_range(TOP_K):
                sorted_row = rows_K[k].to(tl.int64)
                end = tl.where(sorted_row >= 0, hidden, 0)
                tl.store(out_ptr + sorted_row * hidden + col, x, mask=col < end)


@triton.jit(do_not_specialize=["capacity"])
def _quantize(
    x_ptr, x_scale_ptr, out_ptr, scale_ptr, rows_ptr, live_ptr, hidden, groups, capacity,
    x_stride, x_scale_stride_m, x_scale_stride_k,
    TOP_K: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, QMAX: tl.constexpr,
    QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy GROUPS groups of each row."""
    if PDL:
        wait_then_launch_dependents()
    first, end_row, step = rows_of_program(live_ptr)
    for index in range(first, end_row, step):
        row = tl.cast(index, tl.int64)
        rows_K, last = _sorted_rows(rows_ptr, row, TOP_K)
        if last >= 0:
            group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
            col = group * GROUP + tl.arange(0, GROUP)[None, :]
            x = tl.load(x_ptr + row * x_stride + col, mask=col < hidden, other=0)
            if QUANTIZED:
                scale_ptrs = x_scale_ptr + row * x_scale_stride_m + group * x_scale_stride_k
                scale = tl.load(scale_ptrs, mask=group < groups, other=0.0)
            else:
                value = x.to(tl.float32)
                scale = scale_of(tl.max(tl.abs(value), axis=1, keep_dims=True), QMAX)
                x = quantize(value, scale, QMAX, out_ptr.dtype.element_ty)
            for k in tl.static_range(TOP_K):
                sorted_row = rows_K[k].to(tl.int64)
                end = tl.where(sorted_row >= 0, hidden, 0)
                tl.store(out_ptr + sorted_row * hidden + col, x, mask=col < end)
                scales = scale_ptr + group * capacity + sorted_row
                tl.store(scales, scale, mask=group * GROUP < end)


_launch_copy, _launch_quantize = map(Launcher, (_copy, _quantize))
