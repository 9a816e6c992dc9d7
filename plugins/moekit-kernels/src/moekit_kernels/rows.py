"""Row-wise kernels around the GEMMs: quantize, activate (and quantize), weighted sum over K.

`ValidRows` says which rows exist. Other rows are neither read nor written, so their contents (NaN,
old values) do not matter.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from moekit.plugin import OperandQuant
from moekit.plugin import quantize as in_torch

from .launch import Launcher, cdiv, launches_of, next_power_of_2, wait_then_launch_dependents
from .numerics import (
    INTERPRETED,
    NO_ACTIVATION,
    QMAX,
    SCALE_GROUP,
    Activation,
    activate,
    activate_gated,
    convert,
    quantize,
    scale_of,
    weight_after,
)

__all__ = [
    "AMAX_PARTIALS", "ValidRows", "activate_rows", "quantize_activations", "quantize_rows",
    "quantize_rows_per_tensor", "row_programs", "rows_of_program", "weight_and_reduce",
    "weighted_sum",
]  # fmt: skip

AMAX_PARTIALS = 4 if INTERPRETED else 256
"""fp32 entries of scratch for a dynamic per-tensor scale, one per program."""

STRIDED_ROWS = 2 if INTERPRETED else 1024
"""The most programs for rows that the device counts: about as many as run at once. 16384 x 2
programs that only read the count would take about 10 microseconds."""


def row_programs(rows: int, live_R: torch.Tensor | None) -> int:
    """Return the programs among which `rows_of_program` divides rows."""
    return rows if live_R is None else min(rows, STRIDED_ROWS)


@triton.jit
def rows_of_program(live_ptr):
    """Return the range of a program's rows: one row, or every n-th row before the live end."""
    first = tl.program_id(0)
    if live_ptr is None:
        return first, first + 1, 1
    else:
        return first, tl.load(live_ptr), tl.num_programs(0)


@dataclass(frozen=True)
class ValidRows:
    """The rows of a matrix that exist; with no argument, all of them.

    mask: bool (rows,). ids: integers, one for each row, negative = no such row. counts_L: int32
    (L,), used rows of each expert in the batched layout, and capacity its rows.
    """

    mask: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    counts_L: torch.Tensor | None = None
    capacity: int = 1

    @property
    def kind(self) -> str:
        if self.mask is not None:
            return "mask"
        return "ids" if self.ids is not None else "all" if self.counts_L is None else "counts"

    @property
    def tensor(self) -> torch.Tensor | None:
        if self.mask is not None:
            return self.mask.contiguous().view(torch.int8)
        return self.counts_L if self.ids is None else self.ids


def quantize_rows(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, valid: ValidRows = ValidRows()
) -> None:
    """Quantize each row, or each group of 128 columns of a row, with its own scale.

    scale = max(amax, TINY) / QMAX; q = x / scale, rounded to nearest even.

    Args:
        x: (rows, cols), any float dtype, unit stride along cols.
        q: (rows, cols), e4m3 or int8; written.
        scale: fp32 (rows, 1) or (rows, ceil(cols / 128)); written.
    """
    _launch_rows(x, q, scale, None, "group" if scale.shape[1] > 1 else "row", valid)


def quantize_rows_per_tensor(
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    valid: ValidRows = ValidRows(),
    *,
    scratch: torch.Tensor | None,
) -> None:
    """Quantize all rows with one scale.

    Args:
        x: (rows, cols), any float dtype, unit stride along cols.
        q: (rows, cols), e4m3 or int8; written.
        scale: fp32, one element. Read if ``scratch`` is None (a static scale), else written: from
            the amax over the valid rows.
        scratch: fp32 (AMAX_PARTIALS,) or None.
    """
    rows, cols = x.shape
    if scratch is not None and rows > 0:
        _launch_amax(
            (AMAX_PARTIALS,), x, scratch, valid.tensor, rows, cols, x.stride(0), valid.capacity,
            VALID=valid.kind, BLOCK=next_power_of_2(cols), num_warps=_warps(cols),
        )  # fmt: skip
    _launch_rows(x, q, scale, scratch, "tensor", valid)


def quantize_activations(
    x_RH: torch.Tensor,
    operand: OperandQuant,
    static_scale: torch.Tensor | None,
    valid_rows: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations like `moekit.plugin.quantize`, with the kernels of this module.

    Inputs other than a non-empty matrix with unit stride go to the core's function. Rows outside
    ``valid_rows``, bool (R,), become undefined, but never decide a scale.

    Returns:
        (q, scale): q of the operand's dtype (R, H); scale fp32 (R, 1), (R, ceil(H / 128)) or
        (1, 1).
    """
    if x_RH.dim() != 2 or x_RH.numel() == 0 or x_RH.stride(1) != 1:
        return in_torch(x_RH, operand, static_scale, valid_rows)
    q = torch.empty(x_RH.shape, dtype=operand.torch_dtype, device=x_RH.device)
    valid = ValidRows() if valid_rows is None else ValidRows(mask=valid_rows)
    if not operand.per_tensor:
        shape = (x_RH.shape[0], operand.scale_shape(*x_RH.shape)[1])
        scale = torch.empty(shape, dtype=torch.float32, device=x_RH.device)
        given = x_RH, q, scale, valid_rows
        launches_of(quantize_rows)((), given, (), partial(quantize_rows, x_RH, q, scale, valid))
        return q, scale
    if static_scale is not None:
        quantize_rows_per_tensor(x_RH, q, static_scale, valid, scratch=None)
        return q, static_scale
    scratch = torch.empty(AMAX_PARTIALS + 1, dtype=torch.float32, device=x_RH.device)
    scale = scratch[AMAX_PARTIALS:].view(1, 1)
    quantize_rows_per_tensor(x_RH, q, scale, valid, scratch=scratch[:AMAX_PARTIALS])
    return q, scale


def activate_rows(
    x: torch.Tensor,
    out: torch.Tensor,
    activation: Activation,
    valid: ValidRows = ValidRows(),
    *,
    scale: torch.Tensor | None = None,
    static_scale: bool = False,
) -> None:
    """Apply an activation row by row in fp32, and quantize the result if ``scale`` is given.

    Args:
        x: (rows, 2I if gated else I).
        out: (rows, I), a float dtype; with ``scale``, e4m3 or int8.
        scale: fp32 (rows, 1) or (rows, ceil(I / 128)), written; with ``static_scale`` one element,
            read. None = no quantization.
        static_scale: whether ``scale`` is given rather than computed.
    """
    kind = "none"
    if scale is not None:
        kind = "tensor" if static_scale else "group" if scale.shape[1] > 1 else "row"
    _launch_rows(x, out, scale, None, kind, valid, activation)


def _warps(cols: int) -> int:
    if cols <= 1024:
        return 1 if cols <= 256 else 4
    return min(16, int(next_power_of_2(cols)) // 1024)


@dataclass(frozen=True)
class Tiling:
    """The division of rows into lines, each quantized by itself: a program takes ``lines`` lines,
    each as ``chunks`` tiles of ``block`` columns."""

    lines: int
    chunks: int
    block: int
    warps: int

    @property
    def width(self) -> int:
        return self.chunks * self.block

    @classmethod
    def of(cls, rows: int, cols: int, whole_rows: bool, gated: bool) -> "Tiling":
        """Choose a tiling. ``whole_rows``: a row is one line; otherwise a line is a scale group.

        A small input is spread over many threads. In a large one each thread has a few loads of 16
        bytes, all of which ptxas issues before it computes; with more loads it waits in between.
        """
        if not whole_rows:
            lines = 8 if rows * cols < 1 << 22 else 16 if gated else 32
            return cls(lines, 1, SCALE_GROUP, 4)
        warps, most = 1, 4 if gated else 7
        while warps < 32 and cols > 256 * warps * (1 if rows * warps < 4096 else most):
            warps *= 2
        block = 256 * warps  # 8 columns a thread
        lines = max(1, 4 // warps)
        return cls(lines, cdiv(cols, block), block, lines * warps)


def _launch_rows(
    x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None, partials: torch.Tensor | None,
    kind: str, valid: ValidRows, activation: Activation = NO_ACTIVATION,
) -> None:  # fmt: skip
    rows, cols = out.shape
    act, gated = activation, activation.gated
    assert x.shape == (rows, 2 * cols if gated else cols)
    assert x.stride(1) == 1 and out.stride(1) == 1
    assert valid.ids is None or (valid.ids.numel() == rows and valid.ids.is_contiguous())
    if rows == 0:
        return
    tiling = Tiling.of(rows, cols, kind == "row", gated)
    parts = cdiv(cols, tiling.width)
    capacity = valid.capacity if valid.kind == "counts" else rows
    assert rows % capacity == 0
    row_stride, group_stride = (0, 0) if scale is None or kind == "tensor" else scale.stride()
    _launch_rows_kernel(
        (cdiv(capacity * parts, tiling.lines), rows // capacity),
        x, out, scale, partials, valid.tensor, capacity,
        x.stride(0), out.stride(0), row_stride, group_stride,
        act.alpha, act.limit or 0.0,
        ACTIVATION=act.name, GATED=gated, CLAMP=act.limit is not None, QUANTIZE=kind,
        PARTIALS=0 if partials is None else AMAX_PARTIALS, QMAX=QMAX.get(out.dtype, 0.0),
        VALID=valid.kind, COLS=cols, PARTS=parts, LINES=tiling.lines, CHUNKS=tiling.chunks,
        BLOCK=tiling.block, num_warps=tiling.warps,
    )  # fmt: skip


def weighted_sum(
    y_SH: torch.Tensor,
    weights_RK: torch.Tensor | None,
    ids_RK: torch.Tensor,
    out_RH: torch.Tensor,
    rows_A: torch.Tensor | None = None,
    bias_LH: torch.Tensor | None = None,
    *,
    weight_before_applied: bool = False,
    live_R: torch.Tensor | None = None,
) -> None:
    """Sum each row's K expert outputs, in order of k, in fp32.

    out[r] = sum over k with ids[r, k] >= 0 of weights[r, k] * (y[r * K + k] + bias[ids[r, k]]).
    Assignments with a negative id are skipped, so y may hold anything there; a row without other
    assignments becomes 0.

    Args:
        y_SH: (R * K, H), any float dtype. Also (R * K * addends, H): consecutive rows of an
            assignment are added (without bias). With ``rows_A``: expert-sorted rows.
        weights_RK: fp32 (R, K), contiguous; None = ones.
        ids_RK: integers (R, K), contiguous.
        out_RH: (R, H), any float dtype; written.
        rows_A: integers (R * K,), contiguous, the row in y of each assignment.
        bias_LH: (L, H), contiguous; None = zeros.
        weight_before_applied: y has been multiplied by `numerics.weight_before` of the weights, so
            only `numerics.weight_after` is applied here.
        live_R: int32 (1,), `Dispatched.num_rows`: rows from it on are neither read nor written.
            None: all rows are read and written.
    """
    rows, top_k = ids_RK.shape
    cols = out_RH.shape[1]
    addends = 1 if rows_A is not None else max(1, y_SH.shape[0] // max(1, rows * top_k))
    assert y_SH.shape[1] == cols
    assert rows_A is not None or len(y_SH) == rows * top_k * addends
    assert y_SH.stride(1) == 1 and out_RH.stride(1) == 1
    assert ids_RK.is_contiguous() and (weights_RK is None or weights_RK.is_contiguous())
    assert not weight_before_applied or (weights_RK is not None and bias_LH is None)
    assert bias_LH is None or (addends == 1 and bias_LH.is_contiguous())
    if rows == 0:
        return
    block = min(next_power_of_2(cols), 8192 if INTERPRETED else 1024)
    _launch_weighted_sum(
        (row_programs(rows, live_R), cdiv(cols, block)),
        y_SH, weights_RK, ids_RK, rows_A, bias_LH, out_RH, live_R, cols, y_SH.stride(0),
        out_RH.stride(0), TOP_K=top_k, ADDENDS=addends, BY_ROWS=rows_A is not None,
        WEIGHTED=weights_RK is not None, BEFORE_APPLIED=weight_before_applied, BLOCK=block,
        num_warps=4,
    )  # fmt: skip


def weight_and_reduce(
    rows_NH: torch.Tensor,
    ids_RK: torch.Tensor,
    weights_RK: torch.Tensor,
    out_RH: torch.Tensor,
    places_RK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do as `moekit.plugin.weight_and_reduce`, with the same bits, in one launch."""
    dense = torch.contiguous_format
    out = out_RH if out_RH.stride(1) == 1 else torch.empty_like(out_RH, memory_format=dense)
    places_A = None if places_RK is None else places_RK.contiguous().view(-1)
    weighted_sum(rows_NH, weights_RK.contiguous(), ids_RK.contiguous(), out, places_A)
    return out if out is out_RH else out_RH.copy_(out)


@triton.jit
def _row_is_valid(valid_ptr, row, capacity, VALID: tl.constexpr):
    if VALID == "mask":
        return tl.load(valid_ptr + row) != 0
    elif VALID == "ids":
        return tl.load(valid_ptr + row) >= 0
    else:
        return row % capacity < tl.load(valid_ptr + row // capacity)


@triton.jit(do_not_specialize=["rows", "capacity"])
def _amax(
    x_ptr, partials_ptr, valid_ptr, rows, cols, x_stride, capacity, VALID: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store partials[p] = max |x[r]| over the valid rows r = p, p + programs, ..."""
    if PDL:
        wait_then_launch_dependents()
    col = tl.arange(0, BLOCK)
    amax_B = tl.zeros((BLOCK,), tl.float32)
    x_ptrs = x_ptr + tl.program_id(0).to(tl.int64) * x_stride + col
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), loop_unroll_factor=4):
        if VALID == "all":
            x = tl.load(x_ptrs, mask=col < cols, other=0.0)
        else:
            end = tl.where(_row_is_valid(valid_ptr, row, capacity, VALID), cols, 0)
            x = tl.load(x_ptrs, mask=col < end, other=0.0)
        amax_B = tl.maximum(amax_B, tl.abs(x.to(tl.float32)))
        x_ptrs += tl.num_programs(0).to(tl.int64) * x_stride
    tl.store(partials_ptr + tl.program_id(0), tl.max(amax_B, axis=0))


@triton.jit(do_not_specialize=["capacity"])
def _rows(
    x_ptr, out_ptr, scale_ptr, partials_ptr, valid_ptr, capacity, x_stride, out_stride,
    scale_row_stride, scale_group_stride, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr, QUANTIZE: tl.constexpr,
    PARTIALS: tl.constexpr, QMAX: tl.constexpr, VALID: tl.constexpr, COLS: tl.constexpr,
    PARTS: tl.constexpr, LINES: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Activate and quantize LINES lines: load all of them, then compute, then store.

    A row is PARTS lines of CHUNKS tiles of BLOCK columns; each line has its own scale.
    """
    if PDL:
        wait_then_launch_dependents()
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = CHUNKS * BLOCK
    if PARTIALS > 0:
        amax = tl.max(
            tl.load(partials_ptr + tl.arange(0, PARTIALS)[None, :]), axis=1, keep_dims=True
        )
        tensor_scale = scale_of(amax, QMAX)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_ptr + tl.zeros((1, 1), tl.int32), tensor_scale)
    first = tl.program_id(0) * LINES
    rows = capacity
    if VALID == "counts":
        rows = tl.load(valid_ptr + tl.program_id(1))
        if first >= rows * PARTS:
            return
    line = first + tl.arange(0, LINES)[:, None]
    exists = line < rows * PARTS
    row = line // PARTS
    part = line % PARTS
    if VALID == "mask":
        exists = exists & (tl.load(valid_ptr + row, mask=exists, other=0) != 0)
    elif VALID == "ids":
        exists = exists & (tl.load(valid_ptr + row, mask=exists, other=-1) >= 0)
    if VALID == "mask" or VALID == "ids":
        if tl.max(exists.to(tl.int32)) == 0:
            return

    row = tl.program_id(1).to(tl.int64) * capacity + row
    x_ptrs = x_ptr + row * x_stride + part * WIDTH + tl.arange(0, BLOCK)[None, :]
    oks, values, ups = (), (), ()
    for i in tl.static_range(CHUNKS):
        if PARTS * WIDTH == COLS:
            ok = exists
        else:
            ok = exists & (part * WIDTH + i * BLOCK + tl.arange(0, BLOCK)[None, :] < COLS)
        oks += (ok,)
        values += (tl.load(x_ptrs + i * BLOCK, mask=ok, other=0.0),)
        if GATED:
            ups += (tl.load(x_ptrs + COLS + i * BLOCK, mask=ok, other=0.0),)
    results = ()
    for i in tl.static_range(CHUNKS):
        value = values[i].to(tl.float32)
        if GATED:
            value = activate_gated(value, ups[i].to(tl.float32), alpha, limit, ACTIVATION, CLAMP)
        elif ACTIVATION != "none":
            value = activate(value, ACTIVATION)
        results += (value,)

    if QUANTIZE == "tensor":
        if PARTIALS > 0:
            scale = tensor_scale
        else:
            scale = tl.load(scale_ptr + tl.zeros((1, 1), tl.int32))
    elif QUANTIZE != "none":
        amax = tl.abs(results[0])
        for i in tl.static_range(1, CHUNKS):
            amax = tl.maximum(amax, tl.abs(results[i]))
        scale = scale_of(tl.max(amax, axis=1, keep_dims=True), QMAX)
        scale_ptrs = scale_ptr + row * scale_row_stride + part * scale_group_stride
        tl.store(scale_ptrs, scale, mask=exists)
    out_ptrs = out_ptr + row * out_stride + part * WIDTH + tl.arange(0, BLOCK)[None, :]
    for i in tl.static_range(CHUNKS):
        if QUANTIZE == "none":
            result = convert(results[i], DTYPE)
        else:
            result = quantize(results[i], scale, QMAX, DTYPE)
        tl.store(out_ptrs + i * BLOCK, result, mask=oks[i])


@triton.jit
def _weighted_sum(
    y_ptr, weights_ptr, ids_ptr, rows_ptr, bias_ptr, out_ptr, live_ptr, cols, y_stride, out_stride,
    TOP_K: tl.constexpr, ADDENDS: tl.constexpr, BY_ROWS: tl.constexpr, WEIGHTED: tl.constexpr,
    BEFORE_APPLIED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_then_launch_dependents()
    start, end_row, step = rows_of_program(live_ptr)
    for index in range(start, end_row, step):
        row = tl.cast(index, tl.int64)
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        ok = col < cols
        total = tl.zeros((BLOCK,), tl.float32)
        ROWS: tl.constexpr = TOP_K * ADDENDS
        for first in tl.static_range(0, ROWS, 8):
            ids, ys, weights = (), (), ()
            for i in tl.static_range(first, first + 8):
                if i < ROWS:
                    ids += (tl.load(ids_ptr + row * TOP_K + i // ADDENDS),)
            for i in tl.static_range(first, first + 8):
                if i < ROWS:
                    end = tl.where(ids[i - first] >= 0, cols, 0)
                    if BY_ROWS:
                        y_row = tl.load(rows_ptr + row * TOP_K + i).to(tl.int64)
                    else:
                        y_row = row * ROWS + i
                    y_ptrs = y_ptr + y_row * y_stride + col
                    ys += (tl.load(y_ptrs, mask=col < end, other=0.0),)
            # To save registers, ptxas would load a row only after adding the one before it. The
            # barrier makes it issue all loads first; the weights, loaded after it, hold the
            # arithmetic back.
            tl.debug_barrier()
            for i in tl.static_range(first, first + 8):
                if i < ROWS and WEIGHTED:
                    weights += (tl.load(weights_ptr + row * TOP_K + i // ADDENDS),)
            for i in tl.static_range(first, first + 8):
                if i < ROWS:
                    y = ys[i - first].to(tl.float32)
                    if bias_ptr is not None:
                        bias_ptrs = bias_ptr + ids[i - first].to(tl.int64) * cols + col
                        end = tl.where(ids[i - first] >= 0, cols, 0)
                        y += tl.load(bias_ptrs, mask=col < end, other=0.0).to(tl.float32)
                    if WEIGHTED:
                        weight = weights[i - first]
                        y *= weight_after(weight) if BEFORE_APPLIED else weight
                    total += tl.where(ids[i - first] >= 0, y, 0.0)
        tl.store(
            out_ptr + row * out_stride + col, convert(total, out_ptr.dtype.element_ty), mask=ok
        )


_launch_amax, _launch_rows_kernel, _launch_weighted_sum = map(
    Launcher, (_amax, _rows, _weighted_sum)
)
