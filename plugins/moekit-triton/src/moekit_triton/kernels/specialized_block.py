"""Both products of the block in one launch of specialized warps (Gluon, Hopper), 16 bits.

As `specialized`, with GEMM 2's tiles behind GEMM 1's: programs that find no tile of GEMM 1 left go
on with GEMM 2 instead of waiting for the others' last. A tile of GEMM 2 wants all of its block's
tiles of GEMM 1, which a counter for each block tells; they are long done but for the last blocks.

A warp for each warp group sends results off, so that these need not wait until they have arrived.
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
from .specialized import STEP, multiply, skip, stages
from .tiles import GemmConfig
from .warps import (
    BLOCK_M,
    COLUMNS,
    OF_BLOCKS,
    ROWS,
    STAGES,
    WIDE,
    acquired,
    begin_weighting,
    clear,
    descriptor,
    halves_of,
    hear,
    messages,
    next_slot,
    silu_mul,
    tell,
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
    num_pairs: int,
    num_sms: int,
    weights_RK: torch.Tensor | None = None,
) -> None:
    """a[s] = silu(gate) * up of x[s] @ w13[expert of s].T, y[s] = a[s] @ w2[expert of s].T, for the
    entries s of `aligned`, with counters.

    x, y (capacity, H) and a (capacity, I) of one 16-bit dtype, rows of whole 16 bytes. y may lie
    where x does: a block of it is written when all that reads that block of x is done. Rows that
    belong to no pair become undefined. Of the configs group_m counts; tiles are BLOCK_M x COLUMNS,
    and half blocks without rows are left out. With weights, fp32 by pair, y[s] is multiplied by
    `weight_before` of its pair's.
    """
    num_experts, w_rows, hidden = w13_LNH.shape
    inner, entries = w_rows // 2, aligned.capacity
    assert x_SH.shape == y_SH.shape == (entries, hidden) and a_SI.shape == (entries, inner)
    assert w2_LHI.shape == (num_experts, hidden, inner) and aligned.counters is not None
    assert first.specialized and second.specialized
    assert aligned.block_m == BLOCK_M and w13_LNH.is_contiguous() and w2_LHI.is_contiguous()
    tiles = triton.cdiv(inner, COLUMNS // 2) + triton.cdiv(hidden, COLUMNS)
    half = BLOCK_M // 2, COLUMNS // 2
    _launch_block(
        (min(entries // BLOCK_M * tiles, num_sms),),
        descriptor(x_SH, BLOCK_M, 64),
        descriptor(w13_LNH.view(num_experts * w_rows, hidden), COLUMNS // 2, 64),
        descriptor(a_SI, *half),
        descriptor(a_SI, BLOCK_M, 64),
        descriptor(w2_LHI.view(num_experts * hidden, inner), COLUMNS // 2, 64),
        descriptor(y_SH, *half),
        aligned.experts_B, aligned.assignments_S, aligned.num_rows, aligned.counters, weights_RK,
        hidden, inner, num_pairs, first.group_m, second.group_m, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _tiles(num_rows_ptr, H, I):
    """Blocks, and tiles of GEMM 1 and of both."""
    row_blocks = gl.load(num_rows_ptr) // (2 * ROWS)
    first = row_blocks * gl.cdiv(I, _HALF)
    return row_blocks, first, first + row_blocks * gl.cdiv(H, WIDE)


@gluon.jit
def _place(tile, first_tiles, row_blocks, H, I, group_1, group_2):
    """A tile's block, and which columns it is among its GEMM's."""
    first = tile < first_tiles
    cols = gl.where(first, gl.cdiv(I, _HALF), gl.cdiv(H, WIDE))
    index = gl.where(first, tile, tile - first_tiles)
    return tile_at(index, row_blocks, cols, gl.where(first, group_1, group_2))


@gluon.jit
def _hand_over(x, buffer, given, taken, piece):
    """To the warp that sends results off."""
    mbarrier.wait(taken, piece & 1 ^ 1)
    buffer.store(x)
    fence_async_shared()
    mbarrier.arrive(given, count=1)
    return piece + 1


@gluon.jit
def _consume(
    WHICH: gl.constexpr, pairs_ptr, num_rows_ptr, weights_ptr, H, I, num_pairs, group_1, group_2,
    a_s, w_s, buffers, full, empty, given_2, taken_2, words, told,
):  # fmt: skip
    """Half the rows of every tile, if any of them is used."""
    half_blocks = a_s._reinterpret(a_s.dtype, [2 * STAGES, ROWS, STEP], a_s.layout)
    buffer = buffers.index(WHICH)
    given = given_2.index(WHICH)
    taken = taken_2.index(WHICH)
    row_blocks, first_tiles, tiles = _tiles(num_rows_ptr, H, I)
    slot = 0
    phase = 0
    count = 0
    piece = 0
    tile, halves = hear(words, told, count)
    while tile < tiles:
        steps = gl.cdiv(gl.where(tile < first_tiles, H, I), STEP)
        if halves > WHICH:
            acc, slot, phase = multiply(WHICH, half_blocks, w_s, full, empty, slot, phase, steps)
            if tile < first_tiles:
                piece = _hand_over(silu_mul(acc).to(buffer.dtype), buffer, given, taken, piece)
            else:
                if weights_ptr is not None:
                    block_m, _ = _place(tile, first_tiles, row_blocks, H, I, group_1, group_2)
                    row = (2 * block_m + WHICH) * ROWS
                    acc = begin_weighting(acc, weights_ptr, pairs_ptr, row, num_pairs)
                left, right = halves_of(acc)
                piece = _hand_over(left.to(buffer.dtype), buffer, given, taken, piece)
                piece = _hand_over(right.to(buffer.dtype), buffer, given, taken, piece)
        else:
            slot, phase = skip(full, empty, slot, phase, steps)
            # Nothing, so that neither warp is ahead of the other by more than a tile.
            mbarrier.wait(taken, piece & 1 ^ 1)
            mbarrier.arrive(given, count=1)
            piece += 1
        count += 1
        tile, halves = hear(words, told, count)


@gluon.jit
def _upper(pairs_ptr, num_rows_ptr, weights_ptr, H, I, num_pairs, group_1, group_2, a_s, w_s,
           buffers, full, empty, given, taken, words, told):  # fmt: skip
    _consume(0, pairs_ptr, num_rows_ptr, weights_ptr, H, I, num_pairs, group_1, group_2, a_s, w_s,
             buffers, full, empty, given, taken, words, told)  # fmt: skip


@gluon.jit
def _lower(pairs_ptr, num_rows_ptr, weights_ptr, H, I, num_pairs, group_1, group_2, a_s, w_s,
           buffers, full, empty, given, taken, words, told):  # fmt: skip
    _consume(1, pairs_ptr, num_rows_ptr, weights_ptr, H, I, num_pairs, group_1, group_2, a_s, w_s,
             buffers, full, empty, given, taken, words, told)  # fmt: skip


@gluon.jit
def _send(out, row, col, buffer, given, taken, piece):
    mbarrier.wait(given, piece & 1)
    tma.async_copy_shared_to_global(out, [row, col], buffer)
    tma.store_wait(0)  # until it has been read
    mbarrier.arrive(taken, count=1)
    return piece + 1


@gluon.jit
def _arrived():
    """Waits until what this thread has sent is written."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _store(
    WHICH: gl.constexpr, a, y, num_rows_ptr, done_ptr, H, I, group_1, group_2, buffers, given_2,
    taken_2, words, told,
):  # fmt: skip
    """Sends off what a warp group hands over, and counts what has arrived of GEMM 1's."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    buffer = buffers.index(WHICH)
    given = given_2.index(WHICH)
    taken = taken_2.index(WHICH)
    row_blocks, first_tiles, tiles = _tiles(num_rows_ptr, H, I)
    count = 0
    piece = 0
    tile, halves = hear(words, told, count)
    while tile < tiles:
        block_m, block_n = _place(tile, first_tiles, row_blocks, H, I, group_1, group_2)
        row = (2 * block_m + WHICH) * ROWS
        if halves > WHICH:
            if tile < first_tiles:
                piece = _send(a, row, block_n * _HALF, buffer, given, taken, piece)
                _arrived()
            else:
                piece = _send(y, row, block_n * WIDE, buffer, given, taken, piece)
                piece = _send(y, row, block_n * WIDE + _HALF, buffer, given, taken, piece)
        else:
            mbarrier.wait(given, piece & 1)
            mbarrier.arrive(taken, count=1)
            piece += 1
        if tile < first_tiles:
            pointers = done_ptr + block_m + gl.full([32], 0, gl.int32, lanes)
            gl.atomic_add(pointers, gl.full([32], 1, gl.int32, lanes), sem="release")
        count += 1
        tile, halves = hear(words, told, count)


@gluon.jit
def _store_upper(a, y, num_rows_ptr, done_ptr, H, I, group_1, group_2, buffers, given, taken, words,
                 told):  # fmt: skip
    _store(0, a, y, num_rows_ptr, done_ptr, H, I, group_1, group_2, buffers, given, taken, words,
           told)  # fmt: skip


@gluon.jit
def _store_lower(a, y, num_rows_ptr, done_ptr, H, I, group_1, group_2, buffers, given, taken, words,
                 told):  # fmt: skip
    _store(1, a, y, num_rows_ptr, done_ptr, H, I, group_1, group_2, buffers, given, taken, words,
           told)  # fmt: skip


@gluon.jit
def _fetch(counters_ptr, tiles, row_blocks):
    """Even the first tile, so that nobody waits for that of a program which has not begun."""
    tile = gl.atomic_add(counters_ptr, 1, sem="relaxed")
    if tile == tiles + gl.num_programs(0) - 1:  # the last of all: nobody waits for a block any more
        gl.store(counters_ptr, 0)
        clear(counters_ptr + OF_BLOCKS, row_blocks)
    return tile


@gluon.jit
def _facts(tile, first_tiles, tiles, row_blocks, H, I, group_1, group_2, experts_ptr, pairs_ptr,
           num_pairs, done_ptr):  # fmt: skip
    """A tile's block, its row of weights, how many of its halves have rows, and how many sent-off
    results of GEMM 1 its block has; behind the last tile, of that."""
    tile = gl.maximum(gl.minimum(tile, tiles - 1), 0)
    block_m, block_n = _place(tile, first_tiles, gl.maximum(row_blocks, 1), H, I, group_1, group_2)
    expert = gl.load(experts_ptr + block_m)
    first = tile < first_tiles
    w_row = gl.where(first, expert * 2 * I + block_n * _HALF, expert * H + block_n * WIDE)
    pair = gl.load(pairs_ptr + (2 * block_m + 1) * ROWS)
    halves = gl.where(pair < num_pairs, 2, 1)
    return block_m, w_row, halves, acquired(done_ptr + block_m)


@gluon.jit
def _load(
    x, w13, a, w2, experts_ptr, pairs_ptr, num_rows_ptr, counters_ptr, H, I, num_pairs, group_1,
    group_2, a_s, w_boxes, full, empty, words, told,
):  # fmt: skip
    """w_boxes: for each stage two of half a tile's rows of weights. What the next tile needs is
    looked up behind this one's first steps, so that no product waits for it."""
    BYTES: gl.constexpr = (2 * ROWS + WIDE) * STEP * 2
    row_blocks, first_tiles, tiles = _tiles(num_rows_ptr, H, I)
    done_ptr = counters_ptr + OF_BLOCKS
    all_done = 2 * 32 * gl.cdiv(I, _HALF)
    slot = 0
    phase = 1
    count = 0
    tile = _fetch(counters_ptr, tiles, row_blocks)
    block_m, w_row, halves, done = _facts(
        tile, first_tiles, tiles, row_blocks, H, I, group_1, group_2, experts_ptr, pairs_ptr,
        num_pairs, done_ptr)  # fmt: skip
    while tile < tiles:
        tell(words, told, count, (tile, halves))
        count += 1
        next_tile = tile + 0
        next_m = block_m + 0
        next_row = w_row + 0
        next_halves = halves + 0
        next_done = done + 0
        first = tile < first_tiles
        apart = gl.where(first, I, _HALF)  # rows of weights between the two boxes
        steps = gl.cdiv(gl.where(first, H, I), STEP)
        looks = gl.minimum(steps, STAGES) - 1
        if tile >= first_tiles:
            while done < all_done:
                done = acquired(done_ptr + block_m)
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            k = step * STEP
            if tile < first_tiles:
                tma.async_copy_global_to_shared(x, [block_m * 2 * ROWS, k], bar, a_s.index(slot))
                tma.async_copy_global_to_shared(w13, [w_row, k], bar, w_boxes.index(2 * slot))
                tma.async_copy_global_to_shared(
                    w13, [w_row + apart, k], bar, w_boxes.index(2 * slot + 1)
                )
            else:
                tma.async_copy_global_to_shared(a, [block_m * 2 * ROWS, k], bar, a_s.index(slot))
                tma.async_copy_global_to_shared(w2, [w_row, k], bar, w_boxes.index(2 * slot))
                tma.async_copy_global_to_shared(
                    w2, [w_row + apart, k], bar, w_boxes.index(2 * slot + 1)
                )
            slot, phase = next_slot(slot, phase)
            if step == looks:
                next_tile = _fetch(counters_ptr, tiles, row_blocks)
                next_m, next_row, next_halves, next_done = _facts(
                    next_tile, first_tiles, tiles, row_blocks, H, I, group_1, group_2, experts_ptr,
                    pairs_ptr, num_pairs, done_ptr)  # fmt: skip
        tile = next_tile + 0
        block_m = next_m + 0
        w_row = next_row + 0
        halves = next_halves + 0
        done = next_done + 0
    tell(words, told, count, (tile, halves))


@gluon.jit(do_not_specialize=["num_pairs", "group_1", "group_2"])
def _block(
    x, w13, a_out, a, w2, y, experts_ptr, pairs_ptr, num_rows_ptr, counters_ptr, weights_ptr, H, I,
    num_pairs, group_1, group_2, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:  # for all warps, which begin when this one lets them
        wait_then_launch_dependents()
    a_s, w_s, buffers, full, empty = stages(x, w13, y)
    given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(2):
        mbarrier.init(given.index(which), count=1)
        mbarrier.init(taken.index(which), count=1)
    words, told = messages(2)
    fence_async_shared()
    w_boxes = w_s._reinterpret(x.dtype, [2 * STAGES, WIDE // 2, STEP], w_s.layout)
    done_ptr = counters_ptr + OF_BLOCKS
    gl.warp_specialize(
        [
            (_upper, (pairs_ptr, num_rows_ptr, weights_ptr, H, I, num_pairs, group_1, group_2, a_s,
                      w_s, buffers, full, empty, given, taken, words, told)),
            (_lower, (pairs_ptr, num_rows_ptr, weights_ptr, H, I, num_pairs, group_1, group_2, a_s,
                      w_s, buffers, full, empty, given, taken, words, told)),
            (_load, (x, w13, a, w2, experts_ptr, pairs_ptr, num_rows_ptr, counters_ptr, H, I,
                     num_pairs, group_1, group_2, a_s, w_boxes, full, empty, words, told)),
            (_store_upper, (a_out, y, num_rows_ptr, done_ptr, H, I, group_1, group_2, buffers,
                            given, taken, words, told)),
            (_store_lower, (a_out, y, num_rows_ptr, done_ptr, H, I, group_1, group_2, buffers,
                            given, taken, words, told)),
        ],
        [4, 1, 1, 1],  # warps of all but the first
        [232, 40, 40, 40],  # registers of their threads: 232 + 232 + 40 = 3 * 168 of the launch
    )  # fmt: skip


_launch_block = Launcher(_block)
