"""The products of a training step over compact expert-sorted rows: gathers, epilogues, outer sums.

    rows_gemm     out[s] = source[s] @ w[expert of s], and one of the epilogues of `Epilogue`
    outer_gemm    out[l] = sum over the rows s of expert l of a[s]' b[s]

A row s is an assignment; rows of an expert are contiguous, and experts have no padding. Weights and
the gradients of weights may have any strides.

On one H100 these tiles take 1.1 to 1.6 times as long as `specialized_training`, which needs more
than 64 rows per expert, sorted copies of gathered rows, and sizes that 128 divides. Of the tiles
that were tried for qwen3-30b at T = 16384, no other was faster than the rule's by more than noise
(3 %); 4 warps for a tile of 128 x 256 take twice as long.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from moekit_kernels import numerics
from moekit_kernels.launch import Constants, Launcher, cdiv, wait_then_launch_dependents
from moekit_kernels.numerics import NO_ACTIVATION, Activation
from triton.tools.tensor_descriptor import TensorDescriptor

from .derivatives import pull_gated, pull_plain
from .low_rank import LowRank, add_low_rank
from .order import tile_at
from .tiles import GemmTile


@dataclass(frozen=True)
class CompactRows:
    """The rows of a call, as `rows_gemm` takes them.

    order_S: int32 (S,), the assignment of each row; undefined behind the last expert's rows.
    ends_L: int32 (L,), where each expert's rows end. blocks: of `list_blocks` for block_m.
    top_k: assignments of a token.
    """

    order_S: torch.Tensor
    ends_L: torch.Tensor
    blocks: torch.Tensor
    block_m: int
    top_k: int

    @property
    def most_blocks(self) -> int:
        return self.blocks.shape[0] // 2  # `len` takes the host longer


class Epilogue(NamedTuple):
    """The end of a `rows_gemm`, which gets the sums q of a row.

    kind "store": store q + bias in ``out``. "early": multiply it by `weight_before` of the weights
    first. "activation": store q + bias in ``h``, (S, 2I or I), and the activation of it in ``out``.
    "pull": read ``h``, and with a = activation(h) store three results, of which each may be None:
    the gradient of h in ``dh``, where the gradient of a is weights * q; weights * a in ``out``; and
    the sum of a * q over the columns of each tile in ``partials``, fp32 (S, tiles).

    weights: fp32 (A,), of the assignments. bias: (L, columns of the weights), unit stride.
    low_rank: deltas that are added to q first; of "activation" with a gate (N = 2I).
    """

    kind: str = "store"
    activation: Activation = NO_ACTIVATION
    h: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    dh: torch.Tensor | None = None
    partials: torch.Tensor | None = None
    low_rank: LowRank | None = None


_STORE = Epilogue()


class _Pointers(NamedTuple):
    out: torch.Tensor | None
    h: torch.Tensor | None
    bias: torch.Tensor | None
    weights: torch.Tensor | None
    dh: torch.Tensor | None
    partials: torch.Tensor | None
    order: torch.Tensor
    ends: torch.Tensor
    blocks: torch.Tensor
    low: torch.Tensor | None
    low_b: torch.Tensor | None
    slots: torch.Tensor | None


class _Strides(NamedTuple):
    """Strides of rows, and of the weights' experts, columns and K."""

    a: int
    out: int
    h: int
    dh: int
    bias: int
    expert: int
    n: int
    k: int


@dataclass(frozen=True, eq=False)
class _Form(Constants):
    """The constants of a launch: the tile, and what follows the sums.

    tma: weights come through a descriptor. across: as (N, K), because K is contiguous. even: the
    tile divides N and K. rank to low_multiple: `LowRank.form`, 0 for none.
    """

    n: int
    k: int
    top_k: int
    gather: bool
    tma: bool
    across: bool
    even: bool
    kind: str
    activation: str
    gated: bool
    clamp: bool
    rank: int
    low_columns: int
    low_addends: int
    low_slots: int
    low_multiple: int


_form = functools.cache(_Form)


def rows_gemm(
    a: torch.Tensor,
    w_LKN: torch.Tensor,
    out: torch.Tensor | None,
    rows: CompactRows,
    tile: GemmTile,
    *,
    gather: bool = False,
    epilogue: Epilogue = _STORE,
) -> None:
    """Compute each row times its expert's matrix, and the epilogue.

    Args:
        a: (S, K), or with ``gather`` (R, K), of which assignment i takes row i // top_k; unit
            stride along K.
        w_LKN: (L, K, N) of a's dtype, any strides; with an activation with a gate N is twice as
            large as out's columns.
        out: (S, N), any float dtype.
    """
    assert tile.block_m == rows.block_m and a.stride(1) == 1
    act, e = epilogue.activation, epilogue
    columns, k = w_LKN.shape[2], w_LKN.shape[1]
    n = columns // 2 if e.kind == "activation" and act.gated else columns
    assert a.shape[1] == k and rows.blocks.is_contiguous()
    if rows.most_blocks == 0:
        return
    across = w_LKN.stride(2) != 1
    w: torch.Tensor | TensorDescriptor = w_LKN
    tma = tile.tma and _describable(w_LKN)
    if tma:
        box = (tile.block_n, tile.block_k) if across else (tile.block_k, tile.block_n)
        whole = w_LKN.mT if across else w_LKN
        w = TensorDescriptor(whole, list(whole.shape), list(whole.stride()), [1, *box])
    of_rows = (0 if t is None else t.stride(0) for t in (a, out, e.h, e.dh, e.bias))
    low = e.low_rank
    strides = _Strides(*of_rows, *(w_LKN.stride(dim) for dim in (0, 2, 1)))
    _launch_rows(
        (rows.most_blocks * cdiv(n, tile.block_n),),
        a, w,
        _Pointers(out, e.h, e.bias, e.weights, e.dh, e.partials, rows.order_S, rows.ends_L,
                  rows.blocks, *(low[:3] if low else (None, None, None))),
        n, k, rows.most_blocks, tile.group_m, strides, low.strides if low else (), act.alpha,
        act.limit or 0.0,
        FORM=_form(tile.block_n, tile.block_k, rows.top_k, gather, tma, across,
                   n % tile.block_n == 0 and k % tile.block_k == 0, e.kind, act.name, act.gated,
                   act.limit is not None, *(low.form[:5] if low else (0, 0, 0, 0, 0))),
        BLOCK_M=tile.block_m, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def outer_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out_LMN: torch.Tensor,
    rows: CompactRows,
    tile: GemmTile,
    *,
    gather: str,
    add: bool,
) -> None:
    """Write each expert's sum of outer products, accumulated in fp32; 0 for experts without rows.

    Args:
        a: (S, M), or (R, M) with ``gather`` "a".
        b: (S, N), or (R, N) with ``gather`` "b"; both of one dtype with unit strides in rows.
        out_LMN: any float dtype and strides.
        tile: block_m by block_n of a matrix, in steps of block_k rows.
        add: add to what ``out_LMN`` holds.
    """
    experts, m, n = out_LMN.shape
    assert a.shape[1] == m and b.shape[1] == n and a.stride(1) == 1 and b.stride(1) == 1
    tiles = cdiv(m, tile.block_m) * cdiv(n, tile.block_n)
    _launch_outer(
        (experts * tiles,),
        a, b, out_LMN, rows.order_S, rows.ends_L, m, n, a.stride(0), b.stride(0),
        out_LMN.stride(), tile.group_m,
        TOP_K=rows.top_k, GATHER=gather, ADD=add, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, EVEN=m % tile.block_m == 0 and n % tile.block_n == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _describable(w_LKN: torch.Tensor) -> bool:
    """Return whether a tensor descriptor can load the weights: rows of whole 16 bytes."""
    size, strides = w_LKN.element_size(), w_LKN.stride()
    whole = sum(stride * size % 16 == 0 for stride in strides)
    return whole == 2 and 1 in strides[1:] and w_LKN.data_ptr() % 16 == 0


@triton.jit
def _weights(w, expert, pointers, step, col0, col_N, N, K, FORM: tl.constexpr):
    """Return the weights (block_k, block_n) of a step of K; zeros past K."""
    BLOCK_N: tl.constexpr = FORM.n
    BLOCK_K: tl.constexpr = FORM.k
    if FORM.tma:
        if FORM.across:
            tile = w.load([expert, col0, step * BLOCK_K]).reshape(BLOCK_N, BLOCK_K).T
        else:
            tile = w.load([expert, step * BLOCK_K, col0]).reshape(BLOCK_K, BLOCK_N)
    elif FORM.even:
        tile = tl.load(pointers)
    else:
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        tile = tl.load(pointers, mask=(k < K)[:, None] & (col_N < N)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=["most_blocks", "group_m"])
def _rows(
    a, w, pointers, N, K, most_blocks, group_m, strides, low_strides, alpha, limit,
    FORM: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows by FORM.n columns."""
    if PDL:
        wait_then_launch_dependents()
    BLOCK_N: tl.constexpr = FORM.n
    BLOCK_K: tl.constexpr = FORM.k
    KIND: tl.constexpr = FORM.kind
    GATED: tl.constexpr = FORM.gated
    TWO: tl.constexpr = KIND == "activation" and GATED  # sums: of gate and of up
    ACTIVATION: tl.constexpr = FORM.activation
    CLAMP: tl.constexpr = FORM.clamp
    row_blocks = tl.load(pointers.blocks)
    col_blocks = tl.cdiv(N, BLOCK_N)
    if tl.program_id(0) >= row_blocks * col_blocks:
        return
    block_m, block_n = tile_at(tl.program_id(0), row_blocks, col_blocks, group_m)
    expert = tl.load(pointers.blocks + 1 + block_m)
    row_M = tl.load(pointers.blocks + 1 + most_blocks + block_m) + tl.arange(0, BLOCK_M)
    end = tl.load(pointers.ends + expert)
    ok_M = row_M < end
    row_M = tl.minimum(row_M, end - 1)  # rows past the end repeat the last one
    if FORM.gather or pointers.weights is not None or FORM.rank > 0:
        assignment_M = tl.load(pointers.order + row_M)
    if FORM.gather:
        a_ptrs = a + (assignment_M // FORM.top_k)[:, None].to(tl.int64) * strides.a
    else:
        a_ptrs = a + row_M[:, None].to(tl.int64) * strides.a
    k = tl.arange(0, BLOCK_K)
    a_ptrs += k[None, :]
    col0 = block_n * BLOCK_N
    col_N = col0 + tl.arange(0, BLOCK_N)
    w_ptrs, up_ptrs = a, a  # not read
    if not FORM.tma:
        w_ptrs = w + expert.to(tl.int64) * strides.expert + k[:, None].to(tl.int64) * strides.k
        if TWO:
            up_ptrs = w_ptrs + (col_N + N)[None, :].to(tl.int64) * strides.n
        w_ptrs += col_N[None, :].to(tl.int64) * strides.n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        if FORM.even:
            a_tile = tl.load(a_ptrs)
        else:
            a_tile = tl.load(a_ptrs, mask=(step * BLOCK_K + k < K)[None, :], other=0.0)
        w_tile = _weights(w, expert, w_ptrs, step, col0, col_N, N, K, FORM)
        acc = numerics.dot(a_tile, w_tile, acc, "ieee")
        if TWO:
            w_tile = _weights(w, expert, up_ptrs, step, col0 + N, col_N, N, K, FORM)
            up = numerics.dot(a_tile, w_tile, up, "ieee")
        a_ptrs += BLOCK_K
        if not FORM.tma:
            w_ptrs += BLOCK_K * strides.k
            if TWO:
                up_ptrs += BLOCK_K * strides.k

    if FORM.rank > 0:
        slot_M = tl.load(pointers.slots + assignment_M // FORM.top_k, mask=ok_M, other=-1)
        acc, up = add_low_rank(
            acc, up, pointers.low, pointers.low_b, slot_M, assignment_M, expert, col0,
            tl.cast(N, tl.int32), 2 * N if TWO else N, low_strides, FORM.rank,
            FORM.low_columns, FORM.low_addends, FORM.low_slots, FORM.low_multiple, TWO,
        )  # fmt: skip
    weight_M1 = tl.zeros((BLOCK_M, 1), tl.float32)
    if pointers.weights is not None:
        weight_M1 = tl.load(pointers.weights + assignment_M)[:, None]
    if KIND == "pull":
        # By halves of the columns, because registers do not hold six values of each.
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = _halves(acc)
        sum_M = _pull(left, weight_M1, row_M, ok_M, col0, pointers, strides, N, alpha, limit, FORM)
        sum_M += _pull(right, weight_M1, row_M, ok_M, col0 + HALF, pointers, strides, N, alpha,
                       limit, FORM)  # fmt: skip
        if pointers.partials is not None:
            partial_ptrs = pointers.partials + row_M.to(tl.int64) * col_blocks + block_n
            tl.store(partial_ptrs, sum_M, mask=ok_M)
    else:
        ok = ok_M[:, None] & (col_N < N)[None, :]
        row_M1 = row_M[:, None].to(tl.int64)
        if pointers.bias is not None:
            bias_ptrs = pointers.bias + expert.to(tl.int64) * strides.bias + col_N
            acc += tl.load(bias_ptrs, mask=col_N < N, other=0.0).to(tl.float32)[None, :]
            if TWO:
                up += tl.load(bias_ptrs + N, mask=col_N < N, other=0.0).to(tl.float32)[None, :]
        if KIND == "activation":
            h_ptrs = pointers.h + row_M1 * strides.h + col_N[None, :]
            tl.store(h_ptrs, numerics.convert(acc, pointers.h.dtype.element_ty), mask=ok)
            if GATED:
                tl.store(h_ptrs + N, numerics.convert(up, pointers.h.dtype.element_ty), mask=ok)
                acc = numerics.activate_gated(acc, up, alpha, limit, ACTIVATION, CLAMP)
            else:
                acc = numerics.activate(acc, ACTIVATION)
        elif KIND == "early":
            acc *= numerics.weight_before(weight_M1)
        out_ptrs = pointers.out + row_M1 * strides.out + col_N[None, :]
        tl.store(out_ptrs, numerics.convert(acc, pointers.out.dtype.element_ty), mask=ok)


@triton.jit
def _halves(x):
    """Return the left and the right columns of x."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _pull(q, weight_M1, row_M, ok_M, col0, pointers, strides, N, alpha, limit, FORM: tl.constexpr):
    """Pull weights * q back through the activation of the stored h. Return the sums of a * q."""
    ACTIVATION: tl.constexpr = FORM.activation
    CLAMP: tl.constexpr = FORM.clamp
    col = col0 + tl.arange(0, q.shape[1])[None, :]
    ok = ok_M[:, None] & (col < N)
    row_M1 = row_M[:, None].to(tl.int64)
    h_ptrs = pointers.h + row_M1 * strides.h + col
    gate = tl.load(h_ptrs, mask=ok, other=0.0).to(tl.float32)
    dup = gate
    if FORM.gated:
        up = tl.load(h_ptrs + N, mask=ok, other=0.0).to(tl.float32)
        a, dgate, dup = pull_gated(gate, up, weight_M1 * q, alpha, limit, ACTIVATION, CLAMP)
    else:
        a, dgate = pull_plain(gate, weight_M1 * q, ACTIVATION)
    if pointers.dh is not None:
        dh_ptrs = pointers.dh + row_M1 * strides.dh + col
        tl.store(dh_ptrs, numerics.convert(dgate, pointers.dh.dtype.element_ty), mask=ok)
        if FORM.gated:
            tl.store(dh_ptrs + N, numerics.convert(dup, pointers.dh.dtype.element_ty), mask=ok)
    if pointers.out is not None:
        out_ptrs = pointers.out + row_M1 * strides.out + col
        tl.store(out_ptrs, numerics.convert(weight_M1 * a, pointers.out.dtype.element_ty), mask=ok)
    return tl.sum(tl.where(ok, q * a, 0.0), axis=1)


@triton.jit(do_not_specialize=["group_m"])
def _outer(
    a_ptr, b_ptr, out_ptr, order_ptr, ends_ptr, M, N, a_stride, b_stride, out_strides, group_m,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M by BLOCK_N of one expert's matrix; the sum runs over its rows."""
    if PDL:
        wait_then_launch_dependents()
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    expert = tl.program_id(0) // tiles
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    tile = tl.program_id(0) % tiles
    block_m, block_n = tile_at(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), group_m)
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    k = tl.arange(0, BLOCK_K)
    # A step ahead, so that loads of a and b do not wait for it.
    ahead = tl.load(order_ptr + start + k, mask=start + k < end, other=0)
    for first in range(start, end, BLOCK_K):
        row = first + k
        ok = row < end
        token = ahead // TOP_K
        ahead = tl.load(order_ptr + row + BLOCK_K, mask=row + BLOCK_K < end, other=0)
        # Both are masked: rows past the end may hold NaN.
        a_row = (token if GATHER == "a" else row).to(tl.int64)
        b_row = (token if GATHER == "b" else row).to(tl.int64)
        a_ok, b_ok = ok[:, None], ok[:, None]
        if not EVEN:
            a_ok, b_ok = a_ok & (m < M)[None, :], b_ok & (n < N)[None, :]
        a = tl.load(a_ptr + a_row[:, None] * a_stride + m[None, :], mask=a_ok, other=0.0)
        b = tl.load(b_ptr + b_row[:, None] * b_stride + n[None, :], mask=b_ok, other=0.0)
        acc = numerics.dot(a.T, b, acc, "ieee")
    out_ptr += expert.to(tl.int64) * out_strides[0]
    n0 = block_n * BLOCK_N
    left, right = _halves(acc)
    _store_outer(left, out_ptr, m, n0, M, N, out_strides, ADD)
    _store_outer(right, out_ptr, m, n0 + BLOCK_N // 2, M, N, out_strides, ADD)


@triton.jit
def _store_outer(acc, out_ptr, m, n0, M, N, strides, ADD: tl.constexpr):
    """Store or add some columns; half of a tile at once, because registers do not hold more."""
    n = n0 + tl.arange(0, acc.shape[1])
    ok = (m < M)[:, None] & (n < N)[None, :]
    out_ptrs = out_ptr + m[:, None].to(tl.int64) * strides[1]
    out_ptrs += n[None, :].to(tl.int64) * strides[2]
    if ADD:
        acc += tl.load(out_ptrs, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptrs, numerics.convert(acc, out_ptr.dtype.element_ty), mask=ok)


_launch_rows, _launch_outer = map(Launcher, (_rows, _outer))
