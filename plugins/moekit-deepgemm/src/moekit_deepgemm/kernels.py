"""Device code of rows.py; what each kernel does is said there."""

import triton
import triton.language as tl
from moekit_kernels.numerics import activate, activate_gated, convert, scale_of

_QMAX = tl.constexpr(448.0)


@triton.jit
def _columns(program, cols, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """(groups, columns, whether they exist) of one program's tile, each of shape (GROUPS, 1 or
    GROUP)."""
    group = program * GROUPS + tl.arange(0, GROUPS)[:, None]
    col = group * GROUP + tl.arange(0, GROUP)[None, :]
    return group, col, col < cols


@triton.jit
def _quantize(value, DTYPE: tl.constexpr):
    """fp32 tile (GROUPS, GROUP) -> (DTYPE, scale (GROUPS, 1))."""
    scale = scale_of(tl.max(tl.abs(value), axis=1, keep_dims=True), _QMAX)
    return convert(tl.clamp(value * (1.0 / scale), -_QMAX, _QMAX), DTYPE), scale


@triton.jit
def stage_slabs(
    x_ptr, x_scale_ptr, counts_ptr, a_ptr, scale_ptr, cols, x_slab_stride, x_stride,
    xs_slab_stride, xs_row_stride, xs_group_stride, a_slab_stride, a_stride, scale_slab_stride,
    scale_lead, MODE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    l = tl.program_id(0).to(tl.int64)
    group, col, ok = _columns(tl.program_id(2), cols, GROUPS, GROUP)
    group_ok = group * GROUP < cols
    for c in range(tl.program_id(1), tl.load(counts_ptr + l), tl.num_programs(1)):
        row = 0 * l + c  # int64
        if MODE == "copy_scaled" or MODE == "scales":
            scale_ptrs = x_scale_ptr + l * xs_slab_stride + row * xs_row_stride
            scale = tl.load(scale_ptrs + group * xs_group_stride, mask=group_ok, other=0.0)
        if MODE != "scales":
            x = tl.load(x_ptr + l * x_slab_stride + row * x_stride + col, mask=ok, other=0)
            if MODE == "quantize":
                x, scale = _quantize(x.to(tl.float32), a_ptr.dtype.element_ty)
            tl.store(a_ptr + l * a_slab_stride + row * a_stride + col, x, mask=ok)
        if MODE != "copy":
            scale_ptrs = scale_ptr + l * scale_slab_stride + group * scale_lead + row
            tl.store(scale_ptrs, scale, mask=group_ok)


@triton.jit
def _activate_row(
    h_ptr, bias_ptr, a_ptr, scale_ptr, program, inner, scale_lead, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr, HAS_BIAS: tl.constexpr,
    QUANTIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program's part of one row; the pointers are the row's own (scale_ptr: its first)."""
    group, col, ok = _columns(program, inner, GROUPS, GROUP)
    value = tl.load(h_ptr + col, mask=ok, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias_ptr + col, mask=ok, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(h_ptr + inner + col, mask=ok, other=0.0).to(tl.float32)
        if HAS_BIAS:
            up += tl.load(bias_ptr + inner + col, mask=ok, other=0.0).to(tl.float32)
        value = activate_gated(value, up, alpha, limit, ACTIVATION, CLAMP)
    else:
        value = activate(value, ACTIVATION)
    if QUANTIZE:
        result, scale = _quantize(value, a_ptr.dtype.element_ty)
        tl.store(scale_ptr + group.to(tl.int64) * scale_lead, scale, mask=group * GROUP < inner)
    else:
        result = convert(value, a_ptr.dtype.element_ty)
    tl.store(a_ptr + col, result, mask=ok)


@triton.jit
def activate_pairs(
    h_ptr, bias_ptr, rows_ptr, ids_ptr, a_ptr, scale_ptr, inner, h_stride, a_stride, scale_lead,
    alpha, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr,
    HAS_BIAS: tl.constexpr, QUANTIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    row = tl.load(rows_ptr + pair).to(tl.int64)
    if row < 0:
        return
    bias_row = bias_ptr
    if HAS_BIAS:
        bias_row = bias_ptr + tl.load(ids_ptr + pair).to(tl.int64) * (inner * (1 + GATED))
    scale_row = scale_ptr
    if QUANTIZE:
        scale_row = scale_ptr + row
    _activate_row(
        h_ptr + row * h_stride, bias_row, a_ptr + row * a_stride, scale_row, tl.program_id(1),
        inner, scale_lead, alpha, limit,
        ACTIVATION, GATED, CLAMP, HAS_BIAS, QUANTIZE, GROUP, GROUPS,
    )  # fmt: skip


@triton.jit
def activate_slabs(
    h_ptr, bias_ptr, counts_ptr, a_ptr, scale_ptr, slab, inner, h_stride, a_stride,
    scale_slab_stride, scale_lead, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr,
    HAS_BIAS: tl.constexpr, QUANTIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    l = tl.program_id(0).to(tl.int64)
    bias_row = bias_ptr
    if HAS_BIAS:
        bias_row = bias_ptr + l * (inner * (1 + GATED))
    for c in range(tl.program_id(1), tl.load(counts_ptr + l), tl.num_programs(1)):
        row = l * slab + c
        scale_row = scale_ptr
        if QUANTIZE:
            scale_row = scale_ptr + l * scale_slab_stride + c
        _activate_row(
            h_ptr + row * h_stride, bias_row, a_ptr + row * a_stride, scale_row, tl.program_id(2),
            inner, scale_lead, alpha, limit,
            ACTIVATION, GATED, CLAMP, HAS_BIAS, QUANTIZE, GROUP, GROUPS,
        )  # fmt: skip


@triton.jit
def finish_slabs(
    y_ptr, bias_ptr, counts_ptr, out_ptr, cols, y_slab_stride, y_stride, out_slab_stride,
    out_stride, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    l = tl.program_id(0).to(tl.int64)
    col = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    ok = col < cols
    for c in range(tl.program_id(1), tl.load(counts_ptr + l), tl.num_programs(1)):
        row = 0 * l + c  # int64
        y = tl.load(y_ptr + l * y_slab_stride + row * y_stride + col, mask=ok, other=0.0)
        y = y.to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + l * cols + col, mask=ok, other=0.0).to(tl.float32)
        out_ptrs = out_ptr + l * out_slab_stride + row * out_stride + col
        tl.store(out_ptrs, convert(y, out_ptr.dtype.element_ty), mask=ok)
