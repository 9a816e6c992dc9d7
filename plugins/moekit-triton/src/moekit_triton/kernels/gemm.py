"""Grouped GEMM: out[row] = a[row] @ w[expert of row].T for blocks of rows of one expert each.

One kernel serves both formats. STANDARD: `SortedAssignments` lists the rows. BATCHED: rows of
expert l are the first counts_L[l] of its C rows.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from moekit_kernels import numerics
from moekit_kernels.launch import Constants, Launcher, cdiv, wait_then_launch_dependents
from moekit_kernels.numerics import NO_ACTIVATION, QMAX, SCALE_GROUP
from triton.language.extra import cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from .low_rank import LowRank, add_low_rank, prefetch_b
from .operands import Epilogue, Rows
from .order import tile_at
from .packed import packed_products
from .tiles import CHUNK, GemmTile

_STORE = Epilogue(NO_ACTIVATION)
_GROUP = tl.constexpr(SCALE_GROUP)


class _Pointers(NamedTuple):
    """The tensors of a launch but x and w; None where it has none. weights: of the router."""

    out: torch.Tensor
    assignments: torch.Tensor | None
    experts: torch.Tensor
    a_scale: torch.Tensor | None
    w_scale: torch.Tensor | None
    w_offset: torch.Tensor | None
    bias: torch.Tensor | None
    weights: torch.Tensor | None
    out_scale: torch.Tensor | None
    low: torch.Tensor | None
    low_b: torch.Tensor | None
    slots: torch.Tensor | None


class _Strides(NamedTuple):
    """Strides of rows, and of a's scales by expert, row and group: 0 where one serves all."""

    a: int
    out: int
    scale_expert: int
    scale_row: int
    scale_group: int
    out_scale: int


# Constants of a kernel. `functools.cache` makes one object for equal values, so that a launch
# compares objects and not their fields. (triton 3.6 takes no named tuple for a constant, and a
# kernel's `not`, `or` and text arguments need a constexpr name for a member.)


@dataclass(frozen=True, eq=False)
class _Scheme(Constants):
    """How operands are stored: the kinds of scales of a and w, 4-bit weights and their columns of a
    group, zero points and e2m1, int8; promote: add each step's product to a sum in fp32."""

    a_scale: str
    w_scale: str
    packed: bool
    w_group: int
    w_offset: bool
    e2m1: bool
    int8: bool
    promote: bool


@dataclass(frozen=True, eq=False)
class _Finish(Constants):
    """The steps after the sums over K. rank to top_k: `LowRank.form`, rank 0 for no deltas."""

    bias: bool
    activation: str
    gated: bool
    clamp: bool
    quantize: str
    qmax: float
    rank: int
    low_columns: int
    low_addends: int
    low_slots: int
    low_multiple: int
    top_k: int


@dataclass(frozen=True, eq=False)
class _Tile(Constants):
    """The tile, see `GemmTile`; splits: programs that share K; one_scale: its weights have one
    scale in a step; even_n, even_k: it divides N and K."""

    n: int
    k: int
    tma: bool
    halves: bool
    wide: bool
    swapped: bool
    splits: int
    one_scale: bool
    even_n: bool
    even_k: bool


_scheme, _finish, _tile = map(functools.cache, (_Scheme, _Finish, _Tile))


def grouped_gemm(
    a: torch.Tensor,
    w_LNK: torch.Tensor,
    out: torch.Tensor,
    rows: Rows,
    tile: GemmTile,
    *,
    a_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    w_offset: torch.Tensor | None = None,
    bias_LN: torch.Tensor | None = None,
    weights_RK: torch.Tensor | None = None,
    epilogue: Epilogue | None = None,
    splits: int = 1,
    low_rank: LowRank | None = None,
) -> None:
    """Compute out[row] = epilogue(a[row] @ w[expert of row].T + bias) for the rows in ``rows``.

    Args:
        a: STANDARD (R, K), BATCHED (L, C, K); bf16, fp16, fp32, e4m3 or int8.
        w_LNK: (L, N, K) of a's dtype, or e4m3 or int8 with a of 16 bits; or 4-bit, int16 as
            `moekit_triton.packing` lays it out, with a of 16 bits.
        out: STANDARD (A, N) by assignment or expert-sorted, BATCHED (L, C, N); any float dtype or
            the epilogue's quantized one. N is half of w's rows with a gated epilogue. Other rows
            stay untouched. With splits = S, (S * A, N): S addends in consecutive rows.
        a_scale: fp32: one value, (rows, 1) or (rows or 1, ceil(K / 128)); BATCHED with L and C in
            front, which may be 1.
        w_scale: fp32 (L,), (L, N) or (L, ceil(N / 128), ceil(K / 128)); 4-bit: as laid out, uint8
            for e2m1.
        w_offset: 4-bit zero points, as laid out.
        weights_RK: fp32 router weights: multiply each row by `weight_before` of its weight.
            STANDARD, by assignment.
        epilogue: None = store the sums.
        splits: programs that share K, of 4-bit weights.
        low_rank: deltas that are added with the bias; STANDARD only.
    """
    if rows.blocks == 0:
        return
    if a.dim() == 3:
        a, out = a.flatten(0, 1), out.view(-1, out.shape[-1])
    plain, epilogue = epilogue is None, epilogue or _STORE
    act, out_scale = epilogue.activation, epilogue.scale
    w_rows, k = w_LNK.shape[-2], a.shape[1]
    n = w_rows // 2 if act.gated else w_rows
    packed = w_LNK.dtype == torch.int16
    assert w_LNK.shape[1 if packed else 2] == (cdiv(k, CHUNK) if packed else k)
    assert out.shape[1] == n and w_LNK.is_contiguous() and a.stride(1) == out.stride(1) == 1
    assert weights_RK is None or rows.top_k == 1 and weights_RK.is_contiguous()
    a_kind, scale_strides = _a_scale_layout(a_scale)
    # Hopper's fp8 tensor cores accumulate with about 14 bits. Where scales change with K, and where
    # it costs nothing, sums per step are added up in fp32; large tiles would wait for it.
    promote = a.dtype == torch.float8_e4m3fn and not (tile.block_m >= 64 and _hopper(a.device))
    scheme = _scheme(
        a_kind, *_weight_layout(w_LNK, w_scale, w_offset), a.dtype == torch.int8, promote
    )
    constants = _tile(
        tile.block_n, tile.block_k, tile.tma, tile.halves and rows.kind != "direct",
        tile.wide and plain and n % (2 * tile.block_n) == 0, tile.swapped, splits,
        # A tile has one scale if scale blocks begin where tiles do, for gate and for up.
        SCALE_GROUP % tile.block_n == 0 and n % (SCALE_GROUP if act.gated else 1) == 0,
        n % tile.block_n == 0, k % tile.block_k == 0,
    )  # fmt: skip
    _launch_gemm(
        (rows.blocks * cdiv(n, tile.block_n * (2 if constants.wide else 1)), splits),
        a, _weight_tiles(w_LNK, tile),
        _Pointers(out, rows.assignments, rows.experts, a_scale, w_scale, w_offset, bias_LN,
                  weights_RK, out_scale, *(low_rank[:3] if low_rank else (None, None, None))),
        n, k, a.shape[0] * rows.top_k, rows.blocks, cdiv(rows.capacity, tile.block_m),
        rows.capacity, tile.group_m,
        _Strides(a.stride(0), out.stride(0), *scale_strides,
                 0 if out_scale is None else out_scale.stride(0)),
        low_rank.strides if low_rank else (),
        act.alpha, act.limit or 0.0,
        TOP_K=rows.top_k, ROWS=rows.kind, IN_ORDER=rows.in_order, SCHEME=scheme,
        FINISH=_finish(bias_LN is not None, act.name, act.gated, act.limit is not None,
                       epilogue.quantize, QMAX.get(out.dtype, 0.0),
                       *(low_rank.form if low_rank else (0, 0, 0, 0, 0, 1))),
        TILE=constants, BLOCK_M=tile.block_m, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _weight_layout(
    w: torch.Tensor, w_scale: torch.Tensor | None, w_offset: torch.Tensor | None
) -> tuple[str, bool, int, bool, bool]:
    """Return `_Scheme`'s w_scale, packed, w_group, w_offset and e2m1."""
    packed, kind, group = w.dtype == torch.int16, "none", 0
    if w_scale is not None:
        kind = ("tensor", "channel", "block")[w_scale.dim() - 1]
        if packed and kind == "block":
            kind, group = "group", CHUNK * w.shape[1] // w_scale.shape[1]
    e2m1 = packed and w_scale is not None and w_scale.dtype == torch.uint8
    return kind, packed, group, w_offset is not None, e2m1


def _weight_tiles(w_LNK: torch.Tensor, tile: GemmTile) -> "torch.Tensor | TensorDescriptor":
    """Return the weights as the kernel loads them."""
    if not tile.tma:
        return w_LNK
    num_experts, w_rows, k = w_LNK.shape
    box = [tile.block_n, tile.block_k]
    return TensorDescriptor(w_LNK, [num_experts * w_rows, k], [k, 1], box)


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _a_scale_layout(a_scale: torch.Tensor | None) -> tuple[str, tuple[int, int, int]]:
    """Return the kind, and the strides of expert, row and group; 0 where one scale serves all."""
    if a_scale is None:
        return "none", (0, 0, 0)
    if a_scale.numel() == 1:
        return "tensor", (0, 0, 0)
    strides = [
        0 if size == 1 else stride
        for size, stride in zip(a_scale.shape, a_scale.stride(), strict=True)
    ]
    expert, row, group = strides if len(strides) == 3 else (0, *strides)
    return "row" if a_scale.shape[-1] == 1 else "group", (expert, row, group)


@triton.jit
def _w_tile(w, expert, row0, rows, K, step, n_ok, TILE: tl.constexpr):
    """Load w[expert, row0 : row0 + TILE.n, step * TILE.k : (step + 1) * TILE.k].T."""
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    EVEN_K: tl.constexpr = TILE.even_k
    if TILE.tma:  # the next expert's rows may fill the tile; their columns are not stored
        tile = w.load([(expert * rows + row0).to(tl.int32), step * BLOCK_K]).T
    else:
        offs_n = row0 + tl.arange(0, BLOCK_N)
        offs_k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        pointers = w + expert * rows * K + offs_n[None, :].to(tl.int64) * K + offs_k[:, None]
        if not EVEN_K:
            tile = tl.load(pointers, mask=(offs_k < K)[:, None] & n_ok[None, :], other=0.0)
        elif TILE.even_n:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=n_ok[None, :], other=0.0)
    return tile


@triton.jit
def _zeros(DTYPE: tl.constexpr, SWAPPED: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr):  # fmt: skip
    """Return zeros (BLOCK_M, BLOCK_N), or (BLOCK_N, BLOCK_M) with swap-AB."""
    if SWAPPED:
        return tl.zeros((BLOCK_N, BLOCK_M), dtype=DTYPE)
    else:
        return tl.zeros((BLOCK_M, BLOCK_N), dtype=DTYPE)


@triton.jit
def _plus(acc, a, w, SWAPPED: tl.constexpr):
    """Return acc + a @ w; with swap-AB, acc + (a @ w).T."""
    if SWAPPED:
        return numerics.dot(tl.trans(w), tl.trans(a), acc, "ieee")
    else:
        return numerics.dot(a, w, acc, "ieee")


@triton.jit
def _scaled_partial(a, w, a_scale_M, w_scale_ptr, row0, scale_cols, n_ok,
                    SCHEME: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Return (a @ w) * a_scale * w_scale of one step in fp32."""
    BLOCK_N: tl.constexpr = TILE.n
    SWAPPED: tl.constexpr = TILE.swapped
    ACC: tl.constexpr = tl.int32 if SCHEME.int8 else tl.float32
    if SCHEME.w_scale == "block":  # loaded before the product, which hides it
        if TILE.one_scale:
            w_scale = tl.load(w_scale_ptr + row0 // _GROUP * scale_cols)
        else:
            pointers = w_scale_ptr + (row0 + tl.arange(0, BLOCK_N)) // _GROUP * scale_cols
            w_scale = tl.load(pointers, mask=n_ok, other=0.0)
    zeros = _zeros(ACC, SWAPPED, BLOCK_M, BLOCK_N)
    partial = _plus(zeros, a, w, SWAPPED).to(tl.float32)
    if SCHEME.w_scale == "block":
        if TILE.one_scale:
            a_scale_M *= w_scale
        else:
            partial *= w_scale[:, None] if SWAPPED else w_scale[None, :]
    return partial * (a_scale_M[None, :] if SWAPPED else a_scale_M[:, None])


@triton.jit
def _products(
    a_rows, row_ok, w, pointers, strides, a_scale_row, expert, row0, up_rows, W_ROWS, K, n_ok,
    SCHEME: tl.constexpr, TILE: tl.constexpr, TWO: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return a @ w.T (BLOCK_M, TILE.n) for the weight rows from row0 on; with TWO, also for those
    that start up_rows later."""
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    SWAPPED: tl.constexpr = TILE.swapped
    A_SCALE: tl.constexpr = SCHEME.a_scale
    W_SCALE: tl.constexpr = SCHEME.w_scale
    INT8: tl.constexpr = SCHEME.int8
    PER_STEP: tl.constexpr = (W_SCALE == "block") or (A_SCALE == "group")
    ACC: tl.constexpr = tl.int32 if INT8 and not PER_STEP else tl.float32
    # fp32 inputs are multiplied exactly (no tf32); 16- and 8-bit inputs ignore this.
    acc = _zeros(ACC, SWAPPED, BLOCK_M, BLOCK_N)
    up = _zeros(ACC, SWAPPED, BLOCK_M, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_rows[:, None] + offs_k[None, :]
    scale_cols = tl.cdiv(K, _GROUP)
    w_scales = pointers.w_scale
    if W_SCALE == "block":
        w_scales += expert * tl.cdiv(W_ROWS, _GROUP) * scale_cols
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        if TILE.even_k:
            a = tl.load(a_ptrs, mask=row_ok[:, None], other=0.0)
        else:
            k_ok = offs_k < K - step * BLOCK_K
            a = tl.load(a_ptrs, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        w_tile = _w_tile(w, expert, row0, W_ROWS, K, step, n_ok, TILE)
        if TWO:
            u_tile = _w_tile(w, expert, up_rows + row0, W_ROWS, K, step, n_ok, TILE)
        if PER_STEP:
            scale_col = step * BLOCK_K // _GROUP
            a_scale_M = tl.full((BLOCK_M,), 1.0, tl.float32)
            if A_SCALE == "group":
                scales = pointers.a_scale + a_scale_row + scale_col * strides.scale_group
                a_scale_M = tl.load(scales, mask=row_ok, other=0.0)
            acc += _scaled_partial(a, w_tile, a_scale_M, w_scales + scale_col, row0, scale_cols,
                                   n_ok, SCHEME, TILE, BLOCK_M)  # fmt: skip
            if TWO:
                up += _scaled_partial(a, u_tile, a_scale_M, w_scales + scale_col, up_rows + row0,
                                      scale_cols, n_ok, SCHEME, TILE, BLOCK_M)  # fmt: skip
        elif SCHEME.promote:
            zeros = _zeros(tl.float32, SWAPPED, BLOCK_M, BLOCK_N)
            acc += _plus(zeros, a, w_tile, SWAPPED)
            if TWO:
                up += _plus(zeros, a, u_tile, SWAPPED)
        else:
            acc = _plus(acc, a, w_tile, SWAPPED)
            if TWO:
                up = _plus(up, a, u_tile, SWAPPED)
        a_ptrs += BLOCK_K
    if SWAPPED:
        acc, up = acc.T, up.T
    return acc, up


@triton.jit
def _compute(
    block_n, expert, first_row, used, a, w, pointers, N, K, num_rows, capacity, strides,
    low_strides, alpha, limit, TOP_K: tl.constexpr, ROWS: tl.constexpr, IN_ORDER: tl.constexpr,
    SCHEME: tl.constexpr, FINISH: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows by TILE.n columns of out = epilogue(a @ w.T + bias).

    Rows begin at first_row: an expert-sorted row, a row of the expert's `used` rows (batched), or
    an assignment (direct). With a gate, or TILE.wide, each tile of a is multiplied by two weight
    tiles: N rows apart, or side by side.
    """
    BLOCK_N: tl.constexpr = TILE.n
    GATED: tl.constexpr = FINISH.gated
    WIDE: tl.constexpr = TILE.wide
    SPLITS: tl.constexpr = TILE.splits
    EVEN_N: tl.constexpr = TILE.even_n
    ACTIVATION: tl.constexpr = FINISH.activation
    row_M = first_row + tl.arange(0, BLOCK_M)
    if ROWS == "batched":
        row_ok = row_M < used
        out_row = expert * capacity + row_M
        a_row = out_row
        a_scale_row = expert * strides.scale_expert + row_M * strides.scale_row
    else:
        if ROWS == "direct":
            assignment_M = tl.where(row_M == first_row, first_row, num_rows)
        else:
            assignment_M = tl.load(pointers.assignments + row_M)
        row_ok = assignment_M < num_rows
        out_row = (row_M if IN_ORDER else assignment_M).to(tl.int64)
        a_row = (assignment_M // TOP_K).to(tl.int64)
        a_scale_row = a_row * strides.scale_row

    if FINISH.rank > 0:
        slots = pointers.slots + assignment_M // FINISH.top_k
        slot_M = tl.load(slots, mask=row_ok, other=-1)
        slot_M = tl.where(tl.program_id(1) == 0, slot_M, -1)  # one program of each tile adds
    row0 = block_n * BLOCK_N * (2 if WIDE else 1)
    up_rows = N if GATED else BLOCK_N
    offs_n = row0 + tl.arange(0, BLOCK_N)
    n_ok = offs_n < N
    a_rows = a + a_row * strides.a
    W_ROWS = 2 * N if GATED else N

    TWO: tl.constexpr = GATED or WIDE
    if PDL and FINISH.rank > 0:
        prefetch_b(pointers.low_b, slot_M, expert, row0, W_ROWS, low_strides, BLOCK_N, FINISH.rank)
        if TWO:
            prefetch_b(pointers.low_b, slot_M, expert, row0 + up_rows, W_ROWS, low_strides, BLOCK_N,
                       FINISH.rank)  # fmt: skip
    if SCHEME.packed:
        acc, up = packed_products(
            a_rows, row_ok, w, pointers.w_scale, pointers.w_offset, expert, row0, N, W_ROWS, K,
            n_ok, tl.program_id(1), SPLITS, SCHEME.w_group, SCHEME.e2m1, SCHEME.w_offset, GATED,
            TILE.even_k, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        acc, up = _products(a_rows, row_ok, w, pointers, strides, a_scale_row, expert, row0,
                            up_rows, W_ROWS, K, n_ok, SCHEME, TILE, TWO, BLOCK_M)  # fmt: skip

    scale_M = tl.full((BLOCK_M,), 1.0, tl.float32)
    if SCHEME.a_scale == "tensor":
        scale_M *= tl.load(pointers.a_scale)
    elif SCHEME.a_scale == "row":
        scale_M = tl.load(pointers.a_scale + a_scale_row, mask=row_ok, other=0.0)
    value = _values(acc, scale_M, pointers, expert, W_ROWS, row0, n_ok, SCHEME, FINISH, BLOCK_N)
    up_value = value
    if TWO:
        up_value = _values(up, scale_M, pointers, expert, W_ROWS, up_rows + row0, n_ok, SCHEME,
                           FINISH, BLOCK_N)  # fmt: skip
    if FINISH.rank > 0:
        if PDL:
            cuda.gdc_wait()
        value, up_value = add_low_rank(
            value, up_value, pointers.low, pointers.low_b, slot_M, assignment_M, expert,
            row0, tl.cast(up_rows, tl.int32), W_ROWS, low_strides, FINISH.rank, FINISH.low_columns,
            FINISH.low_addends, FINISH.low_slots, FINISH.low_multiple, TWO,
        )  # fmt: skip
    if GATED:
        value = numerics.activate_gated(value, up_value, alpha, limit, ACTIVATION, FINISH.clamp)
    elif ACTIVATION != "none":
        value = numerics.activate(value, ACTIVATION)

    if pointers.weights is not None:
        weights = pointers.weights + assignment_M
        weight_M = numerics.weight_before(tl.load(weights, mask=row_ok, other=0.0))
        value *= weight_M[:, None]
    if SPLITS > 1:
        out_row = out_row * SPLITS + tl.program_id(1)
    ok = row_ok[:, None] & n_ok[None, :]
    DTYPE: tl.constexpr = pointers.out.dtype.element_ty
    if FINISH.quantize == "none":
        result = numerics.convert(value, DTYPE)
    else:
        if FINISH.quantize == "group":
            if not EVEN_N:  # weights past N are masked, or with TMA another expert's
                value = tl.where(n_ok[None, :], value, 0.0)
            scale = numerics.scale_of(tl.max(tl.abs(value), axis=1, keep_dims=True), FINISH.qmax)
            scales = pointers.out_scale + out_row * strides.out_scale + block_n
            tl.store(scales[:, None], scale, mask=row_ok[:, None])
        else:
            scale = tl.load(pointers.out_scale + tl.zeros((1, 1), tl.int32))
        result = numerics.quantize(value, scale, FINISH.qmax, DTYPE)
    out_ptrs = pointers.out + out_row[:, None] * strides.out + offs_n[None, :]
    tl.store(out_ptrs, result, mask=ok)
    if WIDE:
        value = up_value
        if pointers.weights is not None:
            value *= weight_M[:, None]
        tl.store(out_ptrs + BLOCK_N, numerics.convert(value, DTYPE), mask=ok)


@triton.jit
def _values(acc, scale_M, pointers, expert, rows, row0, n_ok,
            SCHEME: tl.constexpr, FINISH: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Return acc * a_scale * w_scale + bias in fp32, with the scales that serve all of K."""
    offs_n = expert * rows + row0 + tl.arange(0, BLOCK_N)
    value = acc.to(tl.float32) * scale_M[:, None]
    if SCHEME.w_scale == "tensor":
        value *= tl.load(pointers.w_scale + expert)
    elif SCHEME.w_scale == "channel":
        value *= tl.load(pointers.w_scale + offs_n, mask=n_ok, other=0.0)[None, :]
    if FINISH.bias:  # the first of the programs that share K adds it
        bias_N = tl.load(pointers.bias + offs_n, mask=n_ok, other=0.0).to(tl.float32)
        value += tl.where(tl.program_id(1) == 0, bias_N, 0.0)[None, :]
    return value


# Integers that change with the number of tokens must not compile a kernel each. They are not
# members of tuples, because Triton would specialize those.
@triton.jit(
    do_not_specialize=["num_rows", "row_blocks", "blocks_per_expert", "capacity", "group_m"]
)
def _gemm(
    a, w, pointers, N, K, num_rows, row_blocks, blocks_per_expert, capacity, group_m, strides,
    low_strides, alpha, limit, TOP_K: tl.constexpr, ROWS: tl.constexpr, IN_ORDER: tl.constexpr,
    SCHEME: tl.constexpr, FINISH: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile; ROWS: `Rows.kind`.

    With adapters the previous kernel is `shrink`. It has waited for the tensors that the sums read,
    and writes none of them. So this kernel waits for it after the sums, and the two overlap.
    """
    if PDL:
        if FINISH.rank > 0:
            cuda.gdc_launch_dependents()
        else:
            wait_then_launch_dependents()
    COLUMNS: tl.constexpr = TILE.n * (2 if TILE.wide else 1)
    block_m, block_n = tile_at(tl.program_id(0), row_blocks, tl.cdiv(N, COLUMNS), group_m)
    HALF: tl.constexpr = BLOCK_M // 2
    if ROWS == "batched":
        expert = (block_m // blocks_per_expert).to(tl.int64)
        used = tl.minimum(tl.load(pointers.experts + expert), capacity)
        first_row = block_m % blocks_per_expert * BLOCK_M
        if first_row >= used:
            return
        half = first_row + HALF >= used
    else:
        expert = tl.load(pointers.experts + block_m).to(tl.int64)
        if expert < 0:
            if PDL and FINISH.rank > 0:
                cuda.gdc_wait()
            return
        used = 0
        first_row = block_m if ROWS == "direct" else block_m * BLOCK_M
        if TILE.halves:
            half = tl.load(pointers.assignments + first_row + HALF) >= num_rows
    if TILE.halves:
        if half:
            _compute(block_n, expert, first_row, used, a, w, pointers, N, K, num_rows, capacity,
                     strides, low_strides, alpha, limit, TOP_K, ROWS, IN_ORDER, SCHEME, FINISH,
                     TILE, HALF, PDL)  # fmt: skip
            return
    _compute(block_n, expert, first_row, used, a, w, pointers, N, K, num_rows, capacity, strides,
             low_strides, alpha, limit, TOP_K, ROWS, IN_ORDER, SCHEME, FINISH, TILE,
             BLOCK_M, PDL)  # fmt: skip


_launch_gemm = Launcher(_gemm)
