"""Grouped GEMM over expert-sorted rows by specialized warps (Gluon, Hopper), 16 bits.

The producer warp loads tiles of both operands, several stages ahead and across tiles. Two consumer
warp groups each multiply half of a block's rows by 256 weight rows, and store results through
shared memory. So the end of a tile stalls nothing; `sorted_gemm` achieves this by persistent
programs only where registers allow, which excludes gates.

Where half tiles are skipped, the tile scheduler takes tiles from a counter: with a fixed schedule
every program would wait for the one without a half tile. The producer takes the next tile one ahead
and commits it to the consumers.

Three more warps can copy rows into expert-sorted order ahead of the tiles that read them. Each
program first copies its share of the first tiles' rows; then the copiers take units of rows from a
counter, so that no unit waits for a program that has not started. They release each block through
its counter, which the producer acquires.

Padding rows may hold anything: rows do not mix, and their results are undefined.
"""

from __future__ import annotations

import triton
from moekit_kernels.launch import Launcher, wait_then_launch_dependents
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from . import warps
from .operands import SortedLaunch
from .tiles import SpecializedTile
from .warps import BLOCK_M, COLUMNS, COPIED, OF_BLOCKS, ROWS, STAGES, UNIT, UNITS, WIDE, descriptor

STEP = gl.constexpr(64)  # of K
_COPIERS = gl.constexpr(3)


def specialized_gemm(g: SortedLaunch) -> None:
    """Compute out[s] = a[s] @ w[expert of s].T for the sorted rows s; gated: silu(gate) * up.

    With ``x_RK``, copy x to a first: a[s] = x[assignment of s // K].
    """
    num_experts, w_rows, n, k = g.sizes()
    aligned, tile, x_RK, wide = g.aligned, g.tile, g.x_RK, 2 if g.gated else 1
    assert isinstance(tile, SpecializedTile)
    assert aligned.block_m == BLOCK_M
    assert aligned.counters is not None or not tile.halves and x_RK is None
    assert x_RK is None or x_RK.shape[1] == k and x_RK.stride(1) == 1
    tiles = aligned.capacity // BLOCK_M * triton.cdiv(n, COLUMNS // wide)
    _launch_gemm(
        (min(tiles, g.num_sms),),
        descriptor(g.a_SK, BLOCK_M, 64),
        descriptor(g.w_LNK.view(num_experts * w_rows, k), COLUMNS // wide, 64),
        descriptor(g.out, BLOCK_M // 2, COLUMNS // 2),
        x_RK, None if x_RK is None else g.a_SK, aligned.experts_B, aligned.assignments_S,
        aligned.num_rows, aligned.counters, g.weights_RK, n, k, g.num_assignments, tile.group_m,
        *((1, 0) if x_RK is None else (g.num_assignments // len(x_RK), x_RK.stride(0))),
        GATED=g.gated, HALVES=tile.halves, COPY=x_RK is not None, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _consume(
    WHICH: gl.constexpr, results, sizes, memory, barriers, mail, GATED: gl.constexpr
):  # fmt: skip
    """Compute half the rows of every tile, if any of them is used (a consumer warp group)."""
    OUT: gl.constexpr = WIDE // 2 if GATED else WIDE
    out, sorted_ptr, num_rows_ptr, weights_ptr = results
    N, K, padding, group_m = sizes
    a_s, w_s, buffers = memory
    half_blocks = warps.reinterpret(a_s, a_s.dtype, [2 * STAGES, ROWS, STEP], a_s.layout)
    row_blocks = gl.load(num_rows_ptr) // (2 * ROWS)
    col_blocks = gl.cdiv(N, OUT)
    steps = gl.cdiv(K, STEP)
    slot, phase, count = 0, 0, 0
    tile, halves = warps.wait_message(mail, count)
    while tile < row_blocks * col_blocks:
        block_m, col = warps.position(tile, row_blocks, col_blocks, group_m, OUT)
        row = (2 * block_m + WHICH) * ROWS
        if halves > WHICH:
            acc, slot, phase = warps.multiply(
                WHICH, warps.zeros(), (half_blocks, w_s), barriers, slot, phase, steps
            )
            if GATED:
                gate, up = warps.halves_of(acc)
                warps.store_tile(warps.silu_mul(gate, up), buffers, WHICH, out, row, col, 1)
            else:
                acc = warps.apply_weight_before(acc, weights_ptr, sorted_ptr, row, padding)
                left, right = warps.halves_of(acc)
                warps.store_tile(left, buffers, WHICH, out, row, col, 1)
                warps.store_tile(right, buffers, WHICH, out, row, col + WIDE // 2, 1)
        else:
            slot, phase = warps.skip(barriers, slot, phase, steps)
        count += 1
        tile, halves = warps.wait_message(mail, count)
    tma.store_wait(0)


@gluon.jit
def _copy_first(blocks, rows, num_rows_ptr, counters_ptr):
    """Copy this program's share of the first blocks' units."""
    each = gl.cdiv(blocks * UNITS, gl.num_programs(0))
    first = gl.atomic_add(counters_ptr + 1, each, sem="relaxed")
    units = gl.load(num_rows_ptr) // UNIT
    for unit in range(first, gl.minimum(first + each, units)):
        warps.copy_unit(unit, units * UNIT, counters_ptr + OF_BLOCKS, rows, UNIT, 2048, 4)


@gluon.jit
def _copy_ahead(rows, num_rows_ptr, counters_ptr, COPY: gl.constexpr):
    """Copy units until there are no more."""
    if COPY:
        units = gl.load(num_rows_ptr) // UNIT
        copied_ptr = counters_ptr + OF_BLOCKS
        warps.copy_units(units, units * UNIT, counters_ptr + 1, copied_ptr, rows)
        ended = gl.atomic_add(counters_ptr + 2, 1, sem="acq_rel")
        if ended == _COPIERS * gl.num_programs(0) - 1:  # the last copier: no unit is taken any more
            gl.store(counters_ptr + 1, 0)
            gl.store(counters_ptr + 2, 0)


@gluon.jit
def _load(
    operands, sizes, memory, barriers, mail, GATED: gl.constexpr, HALVES: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """Load every tile's operands (the producer warp). Memory for weights: per stage one box, or
    gate above up.

    The next tile is looked up after the first steps of this one, so that no product waits for it.
    """
    OUT: gl.constexpr = WIDE // 2 if GATED else WIDE
    BYTES: gl.constexpr = (2 * ROWS + WIDE) * STEP * 2
    a, w, experts_ptr, sorted_ptr, num_rows_ptr, counters_ptr = operands
    N, K, padding, group_m = sizes
    a_s, w_boxes = memory
    full, empty = barriers
    row_blocks = gl.load(num_rows_ptr) // (2 * ROWS)
    col_blocks = gl.cdiv(N, OUT)
    tiles = row_blocks * col_blocks
    steps = gl.cdiv(K, STEP)
    look_ahead = gl.minimum(steps, STAGES) - 1
    slot, phase, count = 0, 1, 0
    tile = gl.program_id(0)
    block_m, col, expert, halves = warps.tile_info(
        tile, row_blocks, col_blocks, group_m, experts_ptr, sorted_ptr, padding, OUT, HALVES
    )
    w_row = expert * (2 * N if GATED else N) + col
    while tile < tiles:
        warps.commit_message(mail, count, (tile, halves))
        count += 1
        following = warps.renamed((tile, block_m, w_row, halves))
        if COPY:
            copied = 0
            while copied < COPIED:
                copied = warps.load_acquire(counters_ptr + OF_BLOCKS + block_m)
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            k = step * STEP
            warps.async_load(a, [block_m * 2 * ROWS, k], bar, a_s.index(slot))
            if GATED:
                gate = w_boxes.index(2 * slot)
                up = w_boxes.index(2 * slot + 1)
                warps.async_load(w, [w_row, k], bar, gate)
                warps.async_load(w, [w_row + N, k], bar, up)
            else:
                warps.async_load(w, [w_row, k], bar, w_boxes.index(slot))
            slot, phase = warps.next_slot(slot, phase)
            if step == look_ahead:
                next_tile = warps.schedule(tile, tiles, counters_ptr, HALVES or COPY)
                if COPY and next_tile == tiles - 1 + gl.num_programs(0):
                    warps.clear(counters_ptr + OF_BLOCKS, row_blocks)  # no program waits any more
                next_m, next_col, next_expert, next_halves = warps.tile_info(
                    next_tile, row_blocks, col_blocks, group_m, experts_ptr, sorted_ptr, padding,
                    OUT, HALVES)  # fmt: skip
                next_row = next_expert * (2 * N if GATED else N) + next_col
                following = (next_tile, next_m, next_row, next_halves)
        tile, block_m, w_row, halves = warps.renamed(following)
    warps.commit_message(mail, count, (tile, halves))


@gluon.jit(do_not_specialize=["padding", "group_m"])
def _gemm(
    a, w, out, x_ptr, a_ptr, experts_ptr, sorted_ptr, num_rows_ptr, counters_ptr, weights_ptr, N, K,
    padding, group_m, top_k, x_stride,
    GATED: gl.constexpr, HALVES: gl.constexpr, COPY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:  # for all warps: the others start after this
        wait_then_launch_dependents()
    # The ring of both operands' tiles, and a result buffer for each consumer group.
    a_s = gl.allocate_shared_memory(a.dtype, [STAGES, 2 * ROWS, STEP], a.layout)
    w_s = gl.allocate_shared_memory(w.dtype, [STAGES, WIDE, STEP], w.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
    barriers = warps.ring_barriers(1)
    mail = warps.messages(2)
    fence_async_shared()
    if GATED:
        w_boxes = warps.reinterpret(w_s, w.dtype, [2 * STAGES, WIDE // 2, STEP], w.layout)
    else:
        w_boxes = w_s
    rows = (x_ptr, a_ptr, sorted_ptr, padding, top_k, K, x_stride)
    if COPY:
        col_blocks = gl.cdiv(N, WIDE // 2 if GATED else WIDE)
        first_blocks = group_m * gl.cdiv(gl.num_programs(0), group_m * col_blocks)
        _copy_first(first_blocks, rows, num_rows_ptr, counters_ptr)
    sizes = (N, K, padding, group_m)
    results = (out, sorted_ptr, num_rows_ptr, weights_ptr)
    operands = (a, w, experts_ptr, sorted_ptr, num_rows_ptr, counters_ptr)
    gl.warp_specialize(
        [
            (_consume, (0, results, sizes, (a_s, w_s, buffers), barriers, mail, GATED)),
            (_consume, (1, results, sizes, (a_s, w_s, buffers), barriers, mail, GATED)),
            (_load, (operands, sizes, (a_s, w_boxes), barriers, mail, GATED, HALVES, COPY)),
            (_copy_ahead, (rows, num_rows_ptr, counters_ptr, COPY)),
            (_copy_ahead, (rows, num_rows_ptr, counters_ptr, COPY)),
            (_copy_ahead, (rows, num_rows_ptr, counters_ptr, COPY)),
        ],
        [4, 1, 1, 1, 1],  # warps of all partitions but the first
        [232, 40, 40, 40, 40],  # registers per thread: 232 + 232 + 40 = 3 * 168 of the launch
    )  # fmt: skip


_launch_gemm = Launcher(_gemm)
