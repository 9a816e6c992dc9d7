"""The kernels around DeepGEMM's GEMMs that only this plugin needs.

STANDARD: every assignment has a row of the padded layout, given by `rows_S` (-1 for none). BATCHED:
expert l has the rows l * C + c for c < counts_L[l]. Other rows are neither read nor written here.
The GEMMs compute on old values there, which affect only the same rows of the output.

fp8 rows have a scale per 128 columns, written as the GEMM reads it on Hopper: fp32, rows innermost,
(cols / 128, rows) of contiguous memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from moekit_kernels.numerics import (
    INTERPRETED,
    QMAX,
    SCALE_GROUP,
    Activation,
    activate_gated,
    convert,
    quantize,
    scale_of,
)
from moekit_kernels.numerics import activate as activate_plain

GROUP = SCALE_GROUP


@dataclass(frozen=True)
class Tiling:
    """The programs that share a row; each takes ``groups`` groups of 128 columns."""

    groups: int
    programs: int
    warps: int

    @classmethod
    def of(cls, rows: int, cols: int) -> Tiling:
        groups = triton.cdiv(cols, GROUP)
        most = 64 if INTERPRETED else 16 if rows >= 512 else 4
        mine = min(most, triton.next_power_of_2(groups))
        return cls(mine, triton.cdiv(groups, mine), max(1, mine // 4))


def stage_slabs(
    x_LCH: torch.Tensor, x_scale: torch.Tensor | None, counts_L: torch.Tensor,
    a_LCH: torch.Tensor, scale_LGC: torch.Tensor | None, *, scales_only: bool = False,
) -> None:  # fmt: skip
    """Copy the used rows of x to a batched layout of at least the same capacity.

    Args:
        x_LCH: bf16, or fp8 with x_scale (L, C, H / 128) fp32 of any strides.
        a_LCH: fp8 with scale_LGC (L, H / 128, C'), or x's dtype without.
        scales_only: a is x, and only scales are copied.
    """
    assert a_LCH.is_contiguous() and (x_scale is None or scale_LGC is not None)
    mode = "copy" if scale_LGC is None else "quantize"
    if x_scale is not None:  # quantized values are copied as bytes
        x_LCH, a_LCH = x_LCH.view(torch.uint8), a_LCH.view(torch.uint8)
        mode = "scales" if scales_only else "copy_scaled"
    _launch_copy(x_LCH, x_scale, None, counts_L, a_LCH, scale_LGC, mode)


def finish_slabs(
    y_LCH: torch.Tensor, counts_L: torch.Tensor, bias_LH: torch.Tensor | None, out_LCH: torch.Tensor
) -> None:
    """Write the used rows of y plus their expert's bias to out, which may be y."""
    _launch_copy(y_LCH, None, bias_LH, counts_L, out_LCH, None, "copy")


def _launch_copy(
    x: torch.Tensor, x_scale: torch.Tensor | None, bias: torch.Tensor | None,
    counts_L: torch.Tensor, a: torch.Tensor, scale: torch.Tensor | None, mode: str,
) -> None:  # fmt: skip
    (L, _, cols), rows = a.shape, min(x.shape[1], a.shape[1])
    assert x.stride(2) == 1 and x.shape[2] == cols and (mode == "quantize" or x.dtype == a.dtype)
    tiling = Tiling.of(rows, cols)
    xs_strides = (0, 0, 0) if x_scale is None else x_scale.stride()
    _copy_slabs[(L, _programs_per_slab(rows, L), tiling.programs)](
        x, x_scale, bias, counts_L, a, scale, cols, x.stride(0), x.stride(1), *xs_strides,
        a.stride(0), a.stride(1), 0 if scale is None else scale.stride(0), _lead(scale),
        MODE=mode, GROUP=GROUP, GROUPS=tiling.groups, num_warps=tiling.warps,
    )  # fmt: skip


def activate(
    h: torch.Tensor, bias_LN: torch.Tensor | None, activation: Activation, a: torch.Tensor,
    scale: torch.Tensor | None, *, rows_S: torch.Tensor | None = None,
    ids_S: torch.Tensor | None = None, counts_L: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Add the expert's bias to h (..., 2I if gated, else I) bf16, activate, and write a (..., I).

    Arithmetic is in fp32. a is fp8 with ``scale``, or bf16 without. STANDARD, with rows_S and
    ids_S: h (M, N), scale (I / 128, M). BATCHED, with counts_L: h (L, C, N), scale (L, I / 128, C).
    """
    rows, inner = a.shape[-2:]
    if counts_L is None:
        assert rows_S is not None
        tiling = Tiling.of(rows_S.numel(), inner)
        grid = (rows_S.numel(), 1, tiling.programs)
    else:
        tiling, L = Tiling.of(rows, inner), counts_L.numel()
        grid = (L, _programs_per_slab(rows, L), tiling.programs)
    clamp = activation.limit is not None
    _activate[grid](
        h, bias_LN, rows_S, ids_S, counts_L, a, scale, rows, inner, h.stride(-2), a.stride(-2),
        0 if scale is None else scale.stride(0), _lead(scale),
        activation.alpha, activation.limit or 0.0,
        ACTIVATION=activation.name, GATED=activation.gated, CLAMP=clamp,
        GROUP=GROUP, GROUPS=tiling.groups, num_warps=tiling.warps,
    )  # fmt: skip


def _lead(scale: torch.Tensor | None) -> int:
    """Return the distance between two groups' scales."""
    return 0 if scale is None else scale.stride(-2)


def _programs_per_slab(slab: int, num_experts: int) -> int:
    """Return the programs for an expert's rows: enough to fill the device, few for unused rows."""
    return min(slab, 2 if INTERPRETED else max(8, 2048 // num_experts))


_QMAX = tl.constexpr(QMAX[torch.float8_e4m3fn])


@triton.jit
def _columns(program, cols, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Return groups (GROUPS, 1), columns and whether they exist (GROUPS, GROUP) of a program."""
    group = program * GROUPS + tl.arange(0, GROUPS)[:, None]
    col = group * GROUP + tl.arange(0, GROUP)[None, :]
    return group, col, col < cols


@triton.jit
def _copy_slabs(
    x_ptr, x_scale_ptr, bias_ptr, counts_ptr, a_ptr, scale_ptr, cols, x_slab_stride, x_stride,
    xs_slab_stride, xs_row_stride, xs_group_stride, a_slab_stride, a_stride, scale_slab_stride,
    scale_lead, MODE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    l = tl.program_id(0).to(tl.int64)
    group, col, ok = _columns(tl.program_id(2), cols, GROUPS, GROUP)
    group_ok = group * GROUP < cols
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + l * cols + col, mask=ok, other=0.0).to(tl.float32)
    for c in range(tl.program_id(1), tl.load(counts_ptr + l), tl.num_programs(1)):
        row = 0 * l + c  # int64
        if MODE == "copy_scaled" or MODE == "scales":
            scale_ptrs = x_scale_ptr + l * xs_slab_stride + row * xs_row_stride
            scale = tl.load(scale_ptrs + group * xs_group_stride, mask=group_ok, other=0.0)
        if MODE != "scales":
            x = tl.load(x_ptr + l * x_slab_stride + row * x_stride + col, mask=ok, other=0)
            if MODE == "quantize":
                x = x.to(tl.float32)
                scale = scale_of(tl.max(tl.abs(x), axis=1, keep_dims=True), _QMAX)
                x = quantize(x, scale, _QMAX, a_ptr.dtype.element_ty)
            if bias_ptr is not None:
                x = convert(x.to(tl.float32) + bias, a_ptr.dtype.element_ty)
            tl.store(a_ptr + l * a_slab_stride + row * a_stride + col, x, mask=ok)
        if MODE != "copy":
            scale_ptrs = scale_ptr + l * scale_slab_stride + group * scale_lead + row
            tl.store(scale_ptrs, scale, mask=group_ok)


@triton.jit
def _activate(
    h_ptr, bias_ptr, rows_ptr, ids_ptr, counts_ptr, a_ptr, scale_ptr, slab, inner, h_stride,
    a_stride, scale_slab_stride, scale_lead, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Activate the row of an assignment, or used rows of an expert in the batched layout."""
    group, col, ok = _columns(tl.program_id(2), inner, GROUPS, GROUP)
    expert = tl.program_id(0).to(tl.int64)
    if counts_ptr is not None:
        start = expert * slab
        scale_start = expert * scale_slab_stride
        count = tl.load(counts_ptr + expert)
    else:
        start = tl.load(rows_ptr + expert).to(tl.int64)
        scale_start = start
        count = tl.where(start < 0, 0, 1)
        if bias_ptr is not None:
            expert = tl.load(ids_ptr + expert).to(tl.int64)
    for c in range(tl.program_id(1), count, tl.num_programs(1)):
        h_ptrs = h_ptr + (start + c) * h_stride + col
        value = tl.load(h_ptrs, mask=ok, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(h_ptrs + inner, mask=ok, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + expert * (inner * (1 + GATED)) + col
            value += tl.load(bias_ptrs, mask=ok, other=0.0).to(tl.float32)
            if GATED:
                up += tl.load(bias_ptrs + inner, mask=ok, other=0.0).to(tl.float32)
        if GATED:
            value = activate_gated(value, up, alpha, limit, ACTIVATION, CLAMP)
        else:
            value = activate_plain(value, ACTIVATION)
        if scale_ptr is not None:
            scale = scale_of(tl.max(tl.abs(value), axis=1, keep_dims=True), _QMAX)
            scale_ptrs = scale_ptr + group.to(tl.int64) * scale_lead + scale_start + c
            tl.store(scale_ptrs, scale, mask=group * GROUP < inner)
            result = quantize(value, scale, _QMAX, a_ptr.dtype.element_ty)
        else:
            result = convert(value, a_ptr.dtype.element_ty)
        tl.store(a_ptr + (start + c) * a_stride + col, result, mask=ok)
