"""Low-rank deltas of expert rows (LoRA): `shrink` computes low = A row, and GEMMs add B low.

A tile of rows of one expert may have rows of several slots. `shrink` has a program for each slot,
which ends at once if the tile has no row of the slot. `add_low_rank` loops over its tile's slots.

Shape suffixes beyond `plans`': U columns between A and B, G * r of w13 and r of w2.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from moekit_kernels.launch import Launcher, cdiv, next_power_of_2, wait_then_launch_dependents
from moekit_kernels.numerics import SCALE_GROUP, convert, dot

from .operands import Rows

_GROUP = tl.constexpr(SCALE_GROUP)
_NO_SLOT = tl.constexpr(2**31 - 1)


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
    def form(self) -> tuple[int, int, int, int]:
        """Return the constants of `add_low_rank`: r, U, addends, and assignments of a token."""
        return self.b_SLNr.shape[3], self.low_PAU.shape[2], self.low_PAU.shape[0], self.top_k

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the strides of low's addends and rows, and of B."""
        return *self.low_PAU.stride()[:2], *self.b_SLNr.stride()


def shrink(
    x: torch.Tensor, x_scale: torch.Tensor | None, a_SLGrK: torch.Tensor,
    scaling_S: torch.Tensor, low: LowRank, rows: Rows, block_m: int,
    places_A: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write ``low.low_PAU`` for the assignments in ``rows``; each addend sums a part of K.

    x (rows, K), of A's dtype, or quantized with ``x_scale`` as in `grouped_gemm`. a_SLGrK: any
    strides. places_A: the row of x of each assignment; None: ``assignment // rows.top_k``.
    """
    slots, _, groups, rank, k = a_SLGrK.shape
    parts, _, columns = low.low_PAU.shape
    assert x.shape[1] == k and x.stride(1) == low.low_PAU.stride(2) == 1
    assert columns == groups * rank
    if rows.blocks == 0:
        return
    scale = (0, 0) if x_scale is None or x_scale.numel() == 1 else x_scale.stride()
    kind = "none" if x_scale is None else "group" if x_scale.shape[1] > 1 else "row"
    block_u = min(64, max(16, next_power_of_2(columns)))
    _launch_shrink(
        (rows.blocks * parts, cdiv(columns, block_u), 1 if rows.kind == "direct" else slots),
        x, a_SLGrK, low.low_PAU, rows.experts, rows.assignments, low.slots_R, scaling_S, x_scale,
        places_A, low.slots_R.numel() * low.top_k, k, x.stride(0), a_SLGrK.stride(),
        low.low_PAU.stride()[:2], scale,
        IDS=low.top_k, TOP_K=rows.top_k, DIRECT=rows.kind == "direct", SCALE=kind, RANK=rank,
        COLUMNS=columns, PARTS=parts, BLOCK_M=block_m, BLOCK_U=block_u,
        BLOCK_K=SCALE_GROUP if block_m <= 32 else SCALE_GROUP // 2, num_warps=4, num_stages=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _shrink(
    x, a, low, experts, assignments, slots, scaling, x_scale, places, count, K, x_stride, a_strides,
    low_strides, scale_strides, IDS: tl.constexpr, TOP_K: tl.constexpr, DIRECT: tl.constexpr,
    SCALE: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store scaling x @ A.T for BLOCK_M rows, BLOCK_U columns, one part of K and one slot."""
    if PDL:
        wait_then_launch_dependents()
    block, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    expert = tl.load(experts + block).to(tl.int64)
    if expert < 0:
        return
    m = tl.arange(0, BLOCK_M)
    if DIRECT:
        slot = tl.load(slots + block // IDS)
        assignment_M = tl.where(m == 0, block, count)
    else:
        slot = tl.program_id(2)
        assignment_M = tl.load(assignments + block * BLOCK_M + m)
    slot_M = tl.load(slots + assignment_M // IDS, mask=assignment_M < count, other=-1)
    mine_M = (slot_M == slot) & (slot_M >= 0)
    if tl.max(mine_M.to(tl.int32)) == 0:
        return
    u = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    k = part * BLOCK_K + tl.arange(0, BLOCK_K)
    if places is None:
        row_M = (assignment_M // TOP_K).to(tl.int64)
    else:
        row_M = tl.load(places + assignment_M, mask=mine_M, other=0).to(tl.int64)
    x_ptrs = x + row_M[:, None] * x_stride + k[None, :]
    a += slot.to(tl.int64) * a_strides[0] + expert * a_strides[1]
    u_rows = (u // RANK).to(tl.int64) * a_strides[2] + u % RANK * a_strides[3]
    a_ptrs = a + u_rows[None, :] + k[:, None].to(tl.int64) * a_strides[4]
    scale_ptrs = x_scale
    if SCALE != "none":
        scale_ptrs += row_M * scale_strides[0]
    acc = tl.zeros((BLOCK_M, BLOCK_U), tl.float32)
    for first in range(part * BLOCK_K, K, PARTS * BLOCK_K):
        k_ok = k < K - first + part * BLOCK_K
        x_tile = tl.load(x_ptrs, mask=mine_M[:, None] & k_ok[None, :], other=0.0)
        a_tile = tl.load(a_ptrs, mask=(u < COLUMNS)[None, :] & k_ok[:, None], other=0.0)
        if SCALE == "group":
            column = first // _GROUP * scale_strides[1]
            scale_M = tl.load(scale_ptrs + column, mask=mine_M, other=0.0)
            product = dot(x_tile, a_tile, tl.zeros((BLOCK_M, BLOCK_U), tl.float32), "ieee")
            acc += product * scale_M[:, None]
        else:
            acc = dot(x_tile, a_tile, acc, "ieee")
        x_ptrs += PARTS * BLOCK_K
        a_ptrs += PARTS * BLOCK_K * a_strides[4]
    if SCALE == "row":
        acc *= tl.load(scale_ptrs, mask=mine_M, other=0.0)[:, None]
    acc *= tl.load(scaling + slot)
    low_ptrs = low + part * low_strides[0] + u[None, :]
    low_ptrs += assignment_M[:, None].to(tl.int64) * low_strides[1]
    tl.store(low_ptrs, acc, mask=mine_M[:, None] & (u < COLUMNS)[None, :])


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
    value, up, low, b, slot_M, row_ok, assignment_M, expert, row0, up_rows, rows, strides,
    RANK: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Return value (M, N) + low @ B.T for rows with a slot; other rows keep their bits. With TWO,
    also for up, whose rows of B start up_rows later.

    row0: the tile's first row of B, which has ``rows`` rows. The other arguments are in `LowRank`.
    """
    M: tl.constexpr = value.shape[0]
    N: tl.constexpr = value.shape[1]
    slot = tl.max(slot_M)
    if (slot >= 0) & (tl.min(tl.where(row_ok, slot_M, _NO_SLOT)) == slot):
        value, up = _products(
            value, up, low + assignment_M[:, None].to(tl.int64) * strides[1], b, slot_M >= 0, slot,
            expert, row0, up_rows, rows, strides, RANK, COLUMNS, PARTS, TWO,
        )  # fmt: skip
    elif M * N * (2 if TWO else 1) >= 128 * 128:  # registers do not hold the deltas of all columns
        left, right = value.reshape(M, 2, N // 2).permute(0, 2, 1).split()
        left_up, right_up = up.reshape(M, 2, N // 2).permute(0, 2, 1).split()
        left, left_up = _add(left, left_up, low, b, slot_M, assignment_M, expert, row0, up_rows,
                             rows, strides, RANK, COLUMNS, PARTS, TWO)  # fmt: skip
        right, right_up = _add(right, right_up, low, b, slot_M, assignment_M, expert, row0 + N // 2,
                               up_rows, rows, strides, RANK, COLUMNS, PARTS, TWO)  # fmt: skip
        value = tl.join(left, right).permute(0, 2, 1).reshape(M, N)
        if TWO:
            up = tl.join(left_up, right_up).permute(0, 2, 1).reshape(M, N)
    else:
        value, up = _add(value, up, low, b, slot_M, assignment_M, expert, row0, up_rows, rows,
                         strides, RANK, COLUMNS, PARTS, TWO)  # fmt: skip
    return value, up


@triton.jit
def _add(
    value, up, low, b, slot_M, assignment_M, expert, row0, up_rows, rows, strides,
    RANK: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Add the products of each slot to its rows alone: another slot's B may hold NaN."""
    low += assignment_M[:, None].to(tl.int64) * strides[1]
    zeros = tl.zeros(value.shape, tl.float32)
    first_slot = tl.min(tl.where(slot_M < 0, _NO_SLOT, slot_M))
    # More stages would not fit in shared memory with the largest tiles.
    STAGES: tl.constexpr = 2 if RANK <= 32 and COLUMNS == RANK else 1
    for slot in tl.range(first_slot, tl.max(slot_M) + 1, num_stages=STAGES):
        mine_M = slot_M == slot
        end = tl.where(tl.max(mine_M.to(tl.int32)) > 0, rows, 0)  # 0: no row has the slot
        delta, up_delta = _products(
            zeros, zeros, low, b, mine_M, slot, expert, row0, up_rows, end, strides, RANK, COLUMNS,
            PARTS, TWO,
        )  # fmt: skip
        value = tl.where(mine_M[:, None], value + delta, value)
        if TWO:
            up = tl.where(mine_M[:, None], up + up_delta, up)
    return value, up


@triton.jit
def _products(
    value, up, low, b, mine_M, slot, expert, row0, up_rows, rows, strides,
    RANK: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Return value + low @ B.T and, with TWO, up + low @ B_up.T, for one slot; low: pointers."""
    R: tl.constexpr = 16 if RANK <= 16 else (32 if RANK <= 32 else 64)
    row_N = row0 + tl.arange(0, value.shape[1])
    b += tl.cast(slot, tl.int64) * strides[2] + expert.to(tl.int64) * strides[3]
    b += row_N[None, :].to(tl.int64) * strides[4]
    for first in tl.static_range(0, RANK, R):
        r = first + tl.arange(0, R)
        low_ok, r_ok = mine_M[:, None] & (r < RANK)[None, :], (r < RANK)[:, None]
        b_ptrs = b + r[:, None].to(tl.int64) * strides[5]
        b_RN = tl.load(b_ptrs, mask=r_ok & (row_N < rows)[None, :], other=0.0)
        low_MR = _between(low + r[None, :], low_ok, strides[0], b.dtype.element_ty, PARTS)
        value = dot(low_MR, b_RN, value, "ieee")
        if TWO:
            b_ptrs += up_rows.to(tl.int64) * strides[4]
            b_RN = tl.load(b_ptrs, mask=r_ok & (row_N + up_rows < rows)[None, :], other=0.0)
            if COLUMNS > RANK:  # up has its own A
                low_MR = _between(low + RANK + r[None, :], low_ok, strides[0], b.dtype.element_ty,
                                  PARTS)  # fmt: skip
            up = dot(low_MR, b_RN, up, "ieee")
    return value, up


@triton.jit
def _between(low, ok, addend, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """Return the sum of the addends in B's dtype."""
    low_MR = tl.load(low, mask=ok, other=0.0)
    for part in tl.static_range(1, PARTS):
        low_MR += tl.load(low + part * addend, mask=ok, other=0.0)
    return convert(low_MR, DTYPE)


_launch_shrink = Launcher(_shrink)
