"""Both GEMMs over expert-sorted rows in one launch of specialized warps (Gluon, Hopper), 16 bits.

Like `specialized`, with GEMM 2's tiles after GEMM 1's: programs that find no tile of GEMM 1 go on
with GEMM 2 instead of waiting for the last tiles of others. A tile of GEMM 2 needs all of GEMM 1's
tiles of its block, which a counter per block tracks; only those of the last blocks are ever late.

One more warp per consumer group stores results, so that the group need not wait for the writes.
"""

from __future__ import annotations

import torch
import triton
from moekit_kernels.align import SortedAssignments
from moekit_kernels.launch import Launcher, wait_then_launch_dependents
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from .gemm import tile_at
from .specialized import STEP, multiply, release_stages, stages
from .tiles import GemmConfig
from .warps import (
    BLOCK_M,
    COLUMNS,
    OF_BLOCKS,
    ROWS,
    STAGES,
    WIDE,
    apply_weight_before,
    commit_message,
    descriptor,
    halves_of,
    load_acquire,
    messages,
    next_slot,
    renamed,
    silu_mul,
    take_tile,
    wait_message,
    wait_stored,
)

_HALF = gl.constexpr(COLUMNS // 2)


def specialized_block(
    x_SH: torch.Tensor,
    w13_LNH: torch.Tensor,
    a_SI: torch.Tensor,
    w2_LHI: torch.Tensor,
    y_SH: torch.Tensor,
    aligned: SortedAssignments,
    first: GemmConfig,
    second: GemmConfig,
    num_assignments: int,
    num_sms: int,
    weights_RK: torch.Tensor | None = None,
) -> None:
    """Compute a[s] = silu(gate) * up of x[s] @ w13[expert of s].T, then y[s] = a[s] @ w2[expert of
    s].T, for the sorted rows s.

    Tiles are BLOCK_M x COLUMNS, and half tiles without rows are skipped; of the configs only
    group_m counts. Padding rows become undefined.

    Args:
        x_SH: (capacity, H), 16 bits, rows of whole 16 bytes.
        w13_LNH: (L, 2I, H).
        a_SI: (capacity, I), written.
        w2_LHI: (L, H, I).
        y_SH: (capacity, H), written. May be x_SH: a block is written after its last read.
        aligned: the sorted assignments, with counters.
        first: GEMM 1's tile.
        second: GEMM 2's tile.
        num_assignments: what ``aligned.assignments_S`` holds for padding.
        num_sms: programs.
        weights_RK: fp32 router weights; y[s] is multiplied by `weight_before`.
    """
    num_experts, w_rows, hidden = w13_LNH.shape
    inner, capacity = w_rows // 2, aligned.capacity
    assert x_SH.shape == y_SH.shape == (capacity, hidden) and a_SI.shape == (capacity, inner)
    assert w2_LHI.shape == (num_experts, hidden, inner) and aligned.counters is not None
    assert first.specialized and second.specialized
    assert aligned.block_m == BLOCK_M and w13_LNH.is_contiguous() and w2_LHI.is_contiguous()
    tiles = triton.cdiv(inner, COLUMNS // 2) + triton.cdiv(hidden, COLUMNS)
    half = BLOCK_M // 2, COLUMNS // 2
    _launch_block(
        (min(capacity // BLOCK_M * tiles, num_sms),),
        descriptor(x_SH, BLOCK_M, 64),
        descriptor(w13_LNH.view(num_experts * w_rows, hidden), COLUMNS // 2, 64),
        descriptor(a_SI, *half),
        descriptor(a_SI, BLOCK_M, 64),
        descriptor(w2_LHI.view(num_experts * hidden, inner), COLUMNS // 2, 64),
        descriptor(y_SH, *half),
        aligned.experts_B, aligned.assignments_S, aligned.num_rows, aligned.counters, weights_RK,
        hidden, inner, num_assignments, first.group_m, second.group_m, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _tiles(num_rows_ptr, H, I):
    """Return the blocks, the tiles of GEMM 1 and those of both GEMMs."""
    row_blocks = gl.load(num_rows_ptr) // (2 * ROWS)
    first = row_blocks * gl.cdiv(I, _HALF)
    return row_blocks, first, first + row_blocks * gl.cdiv(H, WIDE)


@gluon.jit
def _place(tile, first_tiles, row_blocks, H, I, group_1, group_2):
    """Return a tile's block, and the index of its columns in its GEMM."""
    first = tile < first_tiles
    cols = gl.where(first, gl.cdiv(I, _HALF), gl.cdiv(H, WIDE))
    index = gl.where(first, tile, tile - first_tiles)
    return tile_at(index, row_blocks, cols, gl.where(first, group_1, group_2))


@gluon.jit
def _commit_result(x, buffer, ready, free, piece):
    """Commit a result to the warp that stores it."""
    mbarrier.wait(free, piece & 1 ^ 1)
    buffer.store(x)
    fence_async_shared()
    mbarrier.arrive(ready, count=1)
    return piece + 1


@gluon.jit
def _consume(WHICH: gl.constexpr, rows, sizes, memory, barriers, stored, mail):
    """Compute half the rows of every tile, if any of them is used (a consumer warp group)."""
    sorted_ptr, num_rows_ptr, weights_ptr = rows
    H, I, padding, group_1, group_2 = sizes
    a_s, w_s, buffers = memory
    half_blocks = a_s._reinterpret(a_s.dtype, [2 * STAGES, ROWS, STEP], a_s.layout)
    buffer = buffers.index(WHICH)
    ready = stored[0].index(WHICH)
    free = stored[1].index(WHICH)
    row_blocks, first_tiles, tiles = _tiles(num_rows_ptr, H, I)
    slot = 0
    phase = 0
    count = 0
    piece = 0
    tile, halves = wait_message(mail, count)
    while tile < tiles:
        steps = gl.cdiv(gl.where(tile < first_tiles, H, I), STEP)
        if halves > WHICH:
            acc, slot, phase = multiply(WHICH, half_blocks, w_s, barriers, slot, phase, steps)
            if tile < first_tiles:
                gate, up = halves_of(acc)
                result = silu_mul(gate, up).to(buffer.dtype)
                piece = _commit_result(result, buffer, ready, free, piece)
            else:
                if weights_ptr is not None:
                    block_m, _ = _place(tile, first_tiles, row_blocks, H, I, group_1, group_2)
                    row = (2 * block_m + WHICH) * ROWS
                    acc = apply_weight_before(acc, weights_ptr, sorted_ptr, row, padding)
                left, right = halves_of(acc)
                piece = _commit_result(left.to(buffer.dtype), buffer, ready, free, piece)
                piece = _commit_result(right.to(buffer.dtype), buffer, ready, free, piece)
        else:
            slot, phase = release_stages(barriers, slot, phase, steps)
            # Commit nothing, so that neither warp is ahead of the other by more than a tile.
            mbarrier.wait(free, piece & 1 ^ 1)
            mbarrier.arrive(ready, count=1)
            piece += 1
        count += 1
        tile, halves = wait_message(mail, count)


@gluon.jit
def _store_piece(out, row, col, buffer, ready, free, piece):
    mbarrier.wait(ready, piece & 1)
    tma.async_copy_shared_to_global(out, [row, col], buffer)
    tma.store_wait(0)  # until the buffer has been read
    mbarrier.arrive(free, count=1)
    return piece + 1


@gluon.jit
def _store(WHICH: gl.constexpr, results, sizes, buffers, stored, mail):
    """Store a consumer group's results, and release those of GEMM 1 through counters."""
    a, y, num_rows_ptr, done_ptr = results
    H, I, group_1, group_2 = sizes
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    buffer = buffers.index(WHICH)
    ready = stored[0].index(WHICH)
    free = stored[1].index(WHICH)
    row_blocks, first_tiles, tiles = _tiles(num_rows_ptr, H, I)
    count = 0
    piece = 0
    tile, halves = wait_message(mail, count)
    while tile < tiles:
        block_m, block_n = _place(tile, first_tiles, row_blocks, H, I, group_1, group_2)
        row = (2 * block_m + WHICH) * ROWS
        if halves > WHICH:
            if tile < first_tiles:
                piece = _store_piece(a, row, block_n * _HALF, buffer, ready, free, piece)
                wait_stored()
            else:
                piece = _store_piece(y, row, block_n * WIDE, buffer, ready, free, piece)
                piece = _store_piece(y, row, block_n * WIDE + _HALF, buffer, ready, free, piece)
        else:
            mbarrier.wait(ready, piece & 1)
            mbarrier.arrive(free, count=1)
            piece += 1
        if tile < first_tiles:
            pointers = done_ptr + block_m + gl.full([32], 0, gl.int32, lanes)
            gl.atomic_add(pointers, gl.full([32], 1, gl.int32, lanes), sem="release")
        count += 1
        tile, halves = wait_message(mail, count)


@gluon.jit
def _tile_info(tile, first_tiles, tiles, row_blocks, H, I, group_1, group_2, experts_ptr,
               sorted_ptr, padding, done_ptr):  # fmt: skip
    """Return a tile's block, its weight row, how many of its halves have rows, and its block's
    count of stored results of GEMM 1; past the last tile, those of the last."""
    tile = gl.maximum(gl.minimum(tile, tiles - 1), 0)
    block_m, block_n = _place(tile, first_tiles, gl.maximum(row_blocks, 1), H, I, group_1, group_2)
    expert = gl.load(experts_ptr + block_m)
    first = tile < first_tiles
    w_row = gl.where(first, expert * 2 * I + block_n * _HALF, expert * H + block_n * WIDE)
    assignment = gl.load(sorted_ptr + (2 * block_m + 1) * ROWS)
    halves = gl.where(assignment < padding, 2, 1)
    return block_m, w_row, halves, load_acquire(done_ptr + block_m)


@gluon.jit
def _load_step(a, w, block_m, w_row, apart, k, bar, slot, memory):
    """Load a step of a block, and of both boxes of weight rows, ``apart`` from each other."""
    a_s, w_boxes = memory
    tma.async_copy_global_to_shared(a, [block_m * 2 * ROWS, k], bar, a_s.index(slot))
    tma.async_copy_global_to_shared(w, [w_row, k], bar, w_boxes.index(2 * slot))
    tma.async_copy_global_to_shared(w, [w_row + apart, k], bar, w_boxes.index(2 * slot + 1))


@gluon.jit
def _load(operands, sizes, memory, barriers, mail):
    """Load every tile's operands (the producer warp). Memory for weights: per stage two boxes,
    each half a tile's rows. The next tile is looked up after the first steps of this one."""
    BYTES: gl.constexpr = (2 * ROWS + WIDE) * STEP * 2
    x, w13, a, w2, experts_ptr, sorted_ptr, num_rows_ptr, counters_ptr = operands
    H, I, padding, group_1, group_2 = sizes
    full, empty = barriers
    row_blocks, first_tiles, tiles = _tiles(num_rows_ptr, H, I)
    done_ptr = counters_ptr + OF_BLOCKS
    all_done = 2 * 32 * gl.cdiv(I, _HALF)
    slot = 0
    phase = 1
    count = 0
    tile = take_tile(counters_ptr, tiles, row_blocks)
    block_m, w_row, halves, done = _tile_info(
        tile, first_tiles, tiles, row_blocks, H, I, group_1, group_2, experts_ptr, sorted_ptr,
        padding, done_ptr)  # fmt: skip
    while tile < tiles:
        commit_message(mail, count, (tile, halves))
        count += 1
        following = renamed((tile, block_m, w_row, halves, done))
        steps = gl.cdiv(gl.where(tile < first_tiles, H, I), STEP)
        look_ahead = gl.minimum(steps, STAGES) - 1
        if tile >= first_tiles:
            while done < all_done:
                done = load_acquire(done_ptr + block_m)
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            k = step * STEP
            if tile < first_tiles:
                _load_step(x, w13, block_m, w_row, I, k, bar, slot, memory)
            else:
                _load_step(a, w2, block_m, w_row, _HALF, k, bar, slot, memory)
            slot, phase = next_slot(slot, phase)
            if step == look_ahead:
                next_tile = take_tile(counters_ptr, tiles, row_blocks)
                following = (next_tile,) + _tile_info(
                    next_tile, first_tiles, tiles, row_blocks, H, I, group_1, group_2, experts_ptr,
                    sorted_ptr, padding, done_ptr)  # fmt: skip
        tile, block_m, w_row, halves, done = renamed(following)
    commit_message(mail, count, (tile, halves))


@gluon.jit(do_not_specialize=["padding", "group_1", "group_2"])
def _block(
    x, w13, a_out, a, w2, y, experts_ptr, sorted_ptr, num_rows_ptr, counters_ptr, weights_ptr, H, I,
    padding, group_1, group_2, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:  # for all warps: the others start after this
        wait_then_launch_dependents()
    a_s, w_s, buffers, barriers = stages(x, w13, y)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(2):
        mbarrier.init(ready.index(which), count=1)
        mbarrier.init(free.index(which), count=1)
    mail = messages(2)
    fence_async_shared()
    w_boxes = w_s._reinterpret(x.dtype, [2 * STAGES, WIDE // 2, STEP], w_s.layout)
    rows = (sorted_ptr, num_rows_ptr, weights_ptr)
    sizes = (H, I, padding, group_1, group_2)
    memory = (a_s, w_s, buffers)
    stored = (ready, free)
    operands = (x, w13, a, w2, experts_ptr, sorted_ptr, num_rows_ptr, counters_ptr)
    results = (a_out, y, num_rows_ptr, counters_ptr + OF_BLOCKS)
    gl.warp_specialize(
        [
            (_consume, (0, rows, sizes, memory, barriers, stored, mail)),
            (_consume, (1, rows, sizes, memory, barriers, stored, mail)),
            (_load, (operands, sizes, (a_s, w_boxes), barriers, mail)),
            (_store, (0, results, (H, I, group_1, group_2), buffers, stored, mail)),
            (_store, (1, results, (H, I, group_1, group_2), buffers, stored, mail)),
        ],
        [4, 1, 1, 1],  # warps of all but the first
        [232, 40, 40, 40],  # registers per thread: 232 + 232 + 40 = 3 * 168 of the launch
    )  # fmt: skip


_launch_block = Launcher(_block)
