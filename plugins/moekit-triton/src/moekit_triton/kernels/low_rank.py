"""Low-rank deltas of expert rows (LoRA): `shrink` computes low = A row, and GEMMs add B low.

A tile of rows of one expert may have rows of several slots. Both products treat the matrices of all
slots as one matrix, and put zeros where a column belongs to another slot than the row: a step of 64
columns serves eight slots of rank 8. Zero times infinity is NaN, so all matrices must be finite.

Shape suffixes beyond `plans`': U columns between A and B, G * r of w13 and r of w2; J columns of
all slots, U or r of each.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from moekit_kernels.launch import Launcher, cdiv, next_power_of_2, wait_then_launch_dependents
from moekit_kernels.numerics import SCALE_GROUP, convert, dot

from .operands import Rows

_GROUP = tl.constexpr(SCALE_GROUP)


class LowRank(NamedTuple):
    """The operands of a GEMM's deltas: rows of ``low``, and B of their slots and experts.

    low_PAU: fp32, P addends of ``scaling A row`` by assignment, undefined where there is no slot;
    unit stride along U. b_SLNr: B, any strides. slots_R: int32, the slot of each token, -1 for
    none. top_k: assignments of a token.
    """

    low_PAU: torch.Tensor
    b_SLNr: torch.Tensor
    slots_R: torch.Tensor
    top_k: int

    @property
    def form(self) -> tuple[int, int, int, int, int, int]:
        """Return the constants of `add_low_rank` and ``top_k``: r, U, addends, the slots of a step,
        and a power of 2 that divides the offsets of B's rows."""
        slots, _, _, rank = self.b_SLNr.shape
        *_, row, unit = self.b_SLNr.stride()
        multiple = rank & -rank if (row, unit) == (rank, 1) else 1
        at_once = min(64 // _padded(rank), next_power_of_2(slots))
        at_once = max(at_once, 16 // _padded(rank))  # `dot` needs 16 columns
        columns, addends = self.low_PAU.shape[2], self.low_PAU.shape[0]
        return rank, columns, addends, at_once, multiple, self.top_k

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the strides of low's addends and rows, and of B."""
        return *self.low_PAU.stride()[:2], *self.b_SLNr.stride()


def shrink(
    x: torch.Tensor, x_scale: torch.Tensor | None, a_SLGrK: torch.Tensor,
    scaling_S: torch.Tensor, low: LowRank, rows: Rows, block_m: int,
) -> None:  # fmt: skip
    """Write ``low.low_PAU`` for the assignments in ``rows``; each addend sums a part of K.

    x (rows, K), of A's dtype, or quantized with ``x_scale`` as in `grouped_gemm`. a_SLGrK: any
    strides.
    """
    slots, _, groups, rank, k = a_SLGrK.shape
    parts, _, columns = low.low_PAU.shape
    assert x.shape[1] == k and x.stride(1) == low.low_PAU.stride(2) == 1
    assert columns == groups * rank
    if rows.blocks == 0:
        return
    scale = (0, 0) if x_scale is None or x_scale.numel() == 1 else x_scale.stride()
    kind = "none" if x_scale is None else "group" if x_scale.shape[1] > 1 else "row"
    all_columns = columns * (1 if rows.kind == "direct" else slots)
    block_j = max(16, _padded(all_columns))
    _launch_shrink(
        (rows.blocks * parts, cdiv(all_columns, block_j)),
        x, a_SLGrK, low.low_PAU, rows.experts, rows.assignments, low.slots_R, scaling_S, x_scale,
        rows.ends_L, low.slots_R.numel() * low.top_k, rows.blocks, k, x.stride(0), a_SLGrK.stride(),
        low.low_PAU.stride()[:2], scale,
        IDS=low.top_k, TOP_K=rows.top_k, ROWS=rows.kind, IN_ORDER=rows.in_order, SCALE=kind,
        RANK=rank, COLUMNS=columns, PARTS=parts, BLOCK_M=block_m, BLOCK_J=block_j,
        BLOCK_K=SCALE_GROUP if block_m <= 32 else SCALE_GROUP // 2, num_warps=4, num_stages=4,
    )  # fmt: skip


def _padded(columns: int) -> int:
    """Return the columns of a step of products, of ``columns`` in all."""
    return min(64, max(8, next_power_of_2(columns)))


@triton.jit(do_not_specialize=["count", "blocks"])
def _shrink(
    x, a, low, experts, assignments, slots, scaling, x_scale, ends, count, blocks, K, x_stride,
    a_strides, low_strides, scale_strides, IDS: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, IN_ORDER: tl.constexpr, SCALE: tl.constexpr, RANK: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store scaling x @ A.T for BLOCK_M rows, BLOCK_J columns and one part of K. ROWS and IN_ORDER
    are as in `Rows`."""
    if PDL:
        wait_then_launch_dependents()
    block, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    if ROWS == "compact":
        if block >= tl.load(experts):
            return
        experts += 1  # behind the number of blocks
    expert = tl.load(experts + block).to(tl.int64)
    if expert < 0:
        return
    m = tl.arange(0, BLOCK_M)
    column_J = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    if ROWS == "compact":
        row_M = tl.load(experts + blocks + block) + m
        end = tl.load(ends + expert)
        assignment_M = tl.load(assignments + row_M, mask=row_M < end, other=count)
    elif ROWS == "direct":  # one row, so the columns of one slot
        column_J += tl.load(slots + block // IDS) * COLUMNS
        assignment_M = tl.where(m == 0, block, count)
    else:
        assignment_M = tl.load(assignments + block * BLOCK_M + m)
    slot_M = tl.load(slots + assignment_M // IDS, mask=assignment_M < count, other=-1)
    slot_J, u = column_J // COLUMNS, column_J % COLUMNS
    mine_MJ = _mine(slot_M, slot_J)
    used_J = tl.max(mine_MJ.to(tl.int32), axis=0) > 0
    if tl.max(used_J.to(tl.int32)) == 0:
        return
    used_M = tl.max(mine_MJ.to(tl.int32), axis=1) > 0
    k = part * BLOCK_K + tl.arange(0, BLOCK_K)
    if not IN_ORDER:
        row_M = assignment_M // TOP_K
    row_M = row_M.to(tl.int64)
    x_ptrs = x + row_M[:, None] * x_stride + k[None, :]
    a_rows = slot_J.to(tl.int64) * a_strides[0] + expert * a_strides[1]
    a_rows += (u // RANK).to(tl.int64) * a_strides[2] + u % RANK * a_strides[3]
    a_ptrs = a + a_rows[None, :] + k[:, None].to(tl.int64) * a_strides[4]
    scale_ptrs = x_scale
    if SCALE != "none":
        scale_ptrs += row_M * scale_strides[0]
    acc = tl.zeros((BLOCK_M, BLOCK_J), tl.float32)
    for first in range(part * BLOCK_K, K, PARTS * BLOCK_K):
        k_ok = k < K - first + part * BLOCK_K
        x_tile = tl.load(x_ptrs, mask=used_M[:, None] & k_ok[None, :], other=0.0)
        a_tile = tl.load(a_ptrs, mask=used_J[None, :] & k_ok[:, None], other=0.0)
        if SCALE == "group":
            column = first // _GROUP * scale_strides[1]
            scale_M = tl.load(scale_ptrs + column, mask=used_M, other=0.0)
            product = dot(x_tile, a_tile, tl.zeros((BLOCK_M, BLOCK_J), tl.float32), "ieee")
            acc += product * scale_M[:, None]
        else:
            acc = dot(x_tile, a_tile, acc, "ieee")
        x_ptrs += PARTS * BLOCK_K
        a_ptrs += PARTS * BLOCK_K * a_strides[4]
    if SCALE == "row":
        acc *= tl.load(scale_ptrs, mask=used_M, other=0.0)[:, None]
    acc *= tl.load(scaling + slot_J, mask=used_J, other=0.0)[None, :]
    low_ptrs = low + part * low_strides[0] + u[None, :]
    low_ptrs += assignment_M[:, None].to(tl.int64) * low_strides[1]
    tl.store(low_ptrs, acc, mask=_mine(slot_M, slot_J))


@triton.jit
def _mine(slot_M, slot_J):
    """Return whether a column is of a row's slot (M, J)."""
    return (slot_M[:, None] == slot_J[None, :]) & (slot_M >= 0)[:, None]


@triton.jit
def prefetch_b(b, slot_M, expert, row0, rows, strides, N: tl.constexpr, RANK: tl.constexpr):
    """Prefetch B[row0 : row0 + N] of one of the tile's slots into L2; B has ``rows`` rows."""
    slot = tl.max(slot_M)
    if slot >= 0:
        # Lines of up to 128 bytes; `tl.arange` takes powers of 2.
        LINES: tl.constexpr = N * (1 if RANK <= 64 else (2 if RANK <= 128 else 4))
        line = tl.arange(0, LINES)
        row, r = tl.minimum(row0 + line % N, rows - 1), tl.minimum(line // N * 64, RANK - 1)
        b += slot.to(tl.int64) * strides[2] + expert.to(tl.int64) * strides[3]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l",
            [b + row.to(tl.int64) * strides[4] + r * strides[5]], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def add_low_rank(
    value, up, low, b, slot_M, assignment_M, expert, row0, up_rows, rows, strides,
    RANK: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
    MULTIPLE: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Return value (M, N) + low @ B.T; rows without a slot get zeros, and keep their bits. With
    TWO, also for up, whose rows of B start up_rows later.

    row0: the tile's first row of B, which has ``rows`` rows. The other arguments are in `LowRank`.
    """
    R: tl.constexpr = 8 if RANK <= 8 else (16 if RANK <= 16 else (32 if RANK <= 32 else 64))
    row_N = row0 + tl.arange(0, value.shape[1])
    column_J = tl.arange(0, SLOTS * R)
    low += assignment_M[:, None].to(tl.int64) * strides[1]
    b += expert.to(tl.int64) * strides[3]
    b += tl.multiple_of(row_N.to(tl.int64) * strides[4], MULTIPLE)[None, :]
    last = tl.max(slot_M)
    first_slot = tl.maximum(tl.min(tl.where(slot_M < 0, last, slot_M)), 0)
    # More stages would not fit in shared memory with the largest tiles.
    STAGES: tl.constexpr = 2 if RANK <= 32 and COLUMNS == RANK else 1
    # Steps begin at multiples of SLOTS, so that the other rows of a tile change no bits of a row.
    for slot0 in tl.range(first_slot // SLOTS * SLOTS, last + 1, SLOTS, num_stages=STAGES):
        slot_J = slot0 + column_J // R
        mine_MS = slot_M[:, None] == (slot0 + tl.arange(0, SLOTS))[None, :]
        used_S1 = tl.max(mine_MS.to(tl.int32), axis=0)[:, None]
        used_J = tl.broadcast_to(used_S1, (SLOTS, R)).reshape(SLOTS * R)
        used_J = tl.max_constancy(used_J, R) > 0  # else Triton would load single values
        mine_M1 = (slot_M >= slot0)[:, None] & (slot_M < slot0 + SLOTS)[:, None]
        for first in tl.static_range(0, RANK, R):
            r, r_J = first + tl.arange(0, R), first + column_J % R
            ok_J1 = (used_J & (r_J < RANK))[:, None]
            low_ok = mine_M1 & (r < RANK)[None, :]
            b_ptrs = b + slot_J[:, None].to(tl.int64) * strides[2]
            b_ptrs += r_J[:, None].to(tl.int64) * strides[5]
            b_JN = tl.load(b_ptrs, mask=ok_J1 & (row_N < rows)[None, :], other=0.0)
            low_MR = _between(low + r[None, :], low_ok, strides[0], b.dtype.element_ty, PARTS)
            low_MJ = _of_slots(low_MR, mine_MS)
            value = dot(low_MJ, b_JN, value, "ieee")
            if TWO:
                b_ptrs += up_rows.to(tl.int64) * strides[4]
                ok_JN = ok_J1 & (row_N + up_rows < rows)[None, :]
                b_JN = tl.load(b_ptrs, mask=ok_JN, other=0.0)
                if COLUMNS > RANK:  # up has its own A
                    low_MR = _between(low + RANK + r[None, :], low_ok, strides[0],
                                      b.dtype.element_ty, PARTS)  # fmt: skip
                    low_MJ = _of_slots(low_MR, mine_MS)
                up = dot(low_MJ, b_JN, up, "ieee")
    return value, up


@triton.jit
def _of_slots(low_MR, mine_MS):
    """Return (M, S * R): low_MR (M, R) in the columns of each row's slot, and zeros elsewhere."""
    M: tl.constexpr = low_MR.shape[0]
    if mine_MS.shape[1] == 1:
        return low_MR
    else:
        spread = tl.where(mine_MS[:, :, None], low_MR[:, None, :], 0.0).to(low_MR.dtype)
        return spread.reshape(M, mine_MS.shape[1] * low_MR.shape[1])


@triton.jit
def _between(low, ok, addend, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """Return the sum of the addends (M, U), in DTYPE; zeros where not ok."""
    low_MR = tl.load(low, mask=ok, other=0.0)
    for part in tl.static_range(1, PARTS):
        low_MR += tl.load(low + part * addend, mask=ok, other=0.0)
    return convert(low_MR, DTYPE)


def spread_low(
    low_PAU: torch.Tensor, slots_R: torch.Tensor, order_S: torch.Tensor, ends_L: torch.Tensor,
    top_k: int, out_SJ: torch.Tensor, weights_A: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write low of each expert-sorted row to the columns of its slot, and zeros to the others.

    Args:
        low_PAU, slots_R: as in `LowRank`.
        order_S: int32, the assignment of each row. ends_L: int32, where each expert's rows end.
        out_SJ: any float dtype, contiguous, J = slots * U. Rows past the last end stay untouched.
        weights_A: fp32, contiguous: multiply each row by the weight of its assignment.
    """
    (addends, _, columns), (rows, all_columns) = low_PAU.shape, out_SJ.shape
    if rows == 0:
        return
    block_j = min(256, max(16, next_power_of_2(all_columns)))
    block_s = 2048 // block_j
    _launch_spread(
        (cdiv(rows, block_s), cdiv(all_columns, block_j)),
        low_PAU, slots_R, order_S, ends_L, weights_A, out_SJ, len(ends_L), all_columns,
        *low_PAU.stride()[:2], TOP_K=top_k, COLUMNS=columns, PARTS=addends, BLOCK_S=block_s,
        BLOCK_J=block_j, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["experts"])
def _spread(
    low, slots, order, ends, weights, out, experts, all_columns, addend, row_stride,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_J: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_then_launch_dependents()
    row_S = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    column_J = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    ok_S = row_S < tl.load(ends + experts - 1)
    assignment_S = tl.load(order + row_S, mask=ok_S, other=0)
    slot_S = tl.load(slots + assignment_S // TOP_K, mask=ok_S, other=-1)
    low += assignment_S[:, None].to(tl.int64) * row_stride + (column_J % COLUMNS)[None, :]
    ok_SJ = _mine(slot_S, column_J // COLUMNS)
    value = _between(low, ok_SJ, addend, tl.float32, PARTS)
    if weights is not None:
        value *= tl.load(weights + assignment_S, mask=ok_S, other=0.0)[:, None]
        value = tl.where(ok_SJ, value, 0.0)  # weights of rows without a slot may be anything
    out += row_S[:, None].to(tl.int64) * all_columns + column_J[None, :]
    ok_SJ = ok_S[:, None] & (column_J < all_columns)[None, :]
    tl.store(out, convert(value, out.dtype.element_ty), mask=ok_SJ)


_launch_shrink, _launch_spread = map(Launcher, (_shrink, _spread))
