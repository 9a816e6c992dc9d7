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
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    a_SLGrK: torch.Tensor,
    scaling_S: torch.Tensor,
    low: LowRank,
    rows: Rows,
    block_m: int,
    places_A: torch.Tensor | None = None,
) -> None:
    """Write ``low.low_PAU`` for the assignments in ``rows``; each addend sums a part of K.

    x (rows, K), of A's dtype, or quantized with ``x_scale`` as in `grouped_gemm`. a_SLGrK: any
    strides. places_A: the row of x of each assignment; None: ``assignment // rows.top_k``.
    """
    slots, _, groups, rank, k = a_SLGrK.shape
    parts, count, columns = low.low_PAU.shape
    assert x.shape[1] == k and x.stride(1) == low.low_PAU.stride(2) == 1
    assert columns == groups * rank
    if rows.blocks == 0:
        return
    scale = (0, 0) if x_scale is None or x_scale.numel() == 1 else x_scale.stride()
    kind = "none" if x_scale is None else "group" if x_scale.shape[1] > 1 else "row"
    block_u = min(64, max(16, next_power_of_2(columns)))
    _launch_shrink(
        (rows.blocks * parts, cdiv(columns, block_u), slots),
        x, a_SLGrK, low.low_PAU, rows.experts, rows.assignments, low.slots_R, scaling_S, x_scale,
        places_A, count, k, x.stride(0), a_SLGrK.stride(), low.low_PAU.stride()[:2], scale,
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
    block, part, slot = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(2)
    expert = tl.load(experts + block).to(tl.int64)
    if expert < 0:
        return
    m = tl.arange(0, BLOCK_M)
    if DIRECT:
        assignment_M = tl.where(m == 0, block, count)
    else:
        assignment_M = tl.load(assignments + block * BLOCK_M + m)
    slot_M = tl.load(slots + assignment_M // IDS, mask=assignment_M < count, other=-1)
    mine_M = slot_M == slot
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
def add_low_rank(
    value, low, b, slot_M, assignment_M, expert, row0, rows, low_column, strides,
    RANK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return value (M, N) plus low @ B.T for rows with a slot; other rows keep their bits.

    row0: the tile's first row of B, which has ``rows`` rows. low_column: the first column of A's
    group in low. The other arguments are in `LowRank`.
    """
    M: tl.constexpr = value.shape[0]
    N: tl.constexpr = value.shape[1]
    if M * N >= 128 * 128:  # by halves of the columns: registers do not hold all deltas
        left, right = value.reshape(M, 2, N // 2).permute(0, 2, 1).split()
        left = _add(left, low, b, slot_M, assignment_M, expert, row0, rows, low_column, strides,
                    RANK, PARTS)  # fmt: skip
        right = _add(right, low, b, slot_M, assignment_M, expert, row0 + N // 2, rows, low_column,
                     strides, RANK, PARTS)  # fmt: skip
        value = tl.join(left, right).permute(0, 2, 1).reshape(M, N)
    else:
        value = _add(value, low, b, slot_M, assignment_M, expert, row0, rows, low_column, strides,
                     RANK, PARTS)  # fmt: skip
    return value


@triton.jit
def _add(
    value, low, b, slot_M, assignment_M, expert, row0, rows, low_column, strides,
    RANK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row_N = row0 + tl.arange(0, value.shape[1])
    ok_N = row_N < rows
    R: tl.constexpr = 16 if RANK <= 16 else (32 if RANK <= 32 else 64)
    b += expert.to(tl.int64) * strides[3] + row_N[None, :].to(tl.int64) * strides[4]
    low += assignment_M[:, None].to(tl.int64) * strides[1] + low_column
    slot = tl.min(tl.where(slot_M < 0, _NO_SLOT, slot_M))
    while slot < _NO_SLOT:
        mine_M = slot_M == slot
        b_slot = b + slot.to(tl.int64) * strides[2]
        delta = tl.zeros(value.shape, tl.float32)
        for first in tl.static_range(0, RANK, R):
            r = first + tl.arange(0, R)
            low_ok = mine_M[:, None] & (r < RANK)[None, :]
            low_MR = tl.load(low + r[None, :], mask=low_ok, other=0.0)
            for part in tl.static_range(1, PARTS):
                low_MR += tl.load(low + part * strides[0] + r[None, :], mask=low_ok, other=0.0)
            b_ptrs = b_slot + r[:, None].to(tl.int64) * strides[5]
            b_RN = tl.load(b_ptrs, mask=(r < RANK)[:, None] & ok_N[None, :], other=0.0)
            delta = dot(convert(low_MR, b.dtype.element_ty), b_RN, delta, "ieee")
        value = tl.where(mine_M[:, None], value + delta, value)
        slot = tl.min(tl.where(slot_M > slot, slot_M, _NO_SLOT))
    return value


_launch_shrink = Launcher(_shrink)
