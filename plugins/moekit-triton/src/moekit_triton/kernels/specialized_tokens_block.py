"""Both GEMMs over expert-sorted rows in one launch of `specialized_tokens`' tiles (Gluon, Hopper).

GEMM 2's tiles come after GEMM 1's: programs that find no tile of GEMM 1 go on with GEMM 2 instead
of waiting for the last tiles of others. A tile of GEMM 2 needs all of GEMM 1's tiles of its tokens,
which a counter tracks at the block where its rows begin; only those of the last blocks are ever
late. Both GEMMs have tiles of 256 weight rows, thus the same tiles of tokens.

A consumer warp group releases a result of GEMM 1 after its next tile, when the result has long been
written, or at once if the next tile is not of GEMM 1.
"""

from __future__ import annotations

import torch
import triton
from moekit_kernels.align import SortedAssignments
from moekit_kernels.launch import Launcher, wait_then_launch_dependents
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .specialized import STEP
from .specialized_tokens import alternating, compute_tile, release_tile
from .tiles import GemmConfig
from .token_tiles import REST, most_tiles, tile_tokens
from .token_warps import listed_tile, load_tokens, load_weights, token_stages
from .warps import (
    BLOCK_M,
    OF_BLOCKS,
    STAGES,
    commit_message,
    descriptor,
    load_acquire,
    messages,
    next_slot,
    renamed,
    ring_barriers,
    take_tile,
    wait_message,
)

_WEIGHTS = gl.constexpr(256)  # weight rows of a tile
_HALF = gl.constexpr(128)  # columns of the result of gate and up
_TOKENS = gl.constexpr(128)
_BLOCK = gl.constexpr(BLOCK_M)
_RELEASES = gl.constexpr(2 * 128)  # of a tile: one for each thread of both warp groups


def specialized_tokens_block(
    x_SH: torch.Tensor,
    w13_LNH: torch.Tensor,
    a_SI: torch.Tensor,
    w2_LHI: torch.Tensor,
    y_SH: torch.Tensor,
    aligned: SortedAssignments,
    tiles: torch.Tensor,
    first: GemmConfig,
    second: GemmConfig,
    num_assignments: int,
    num_sms: int,
    weights_RK: torch.Tensor | None = None,
) -> None:
    """Compute a[s] = silu(gate) * up of x[s] @ w13[expert of s].T, then y[s] = a[s] @ w2[expert of
    s].T, for the sorted rows s.

    Of the configs only group_m counts. Padding rows become undefined.

    Args:
        x_SH: (capacity, H), 16 bits, rows of whole 16 bytes.
        w13_LNH: (L, 2I, H).
        a_SI: (capacity, I), written.
        w2_LHI: (L, H, I).
        y_SH: (capacity, H), written. May be x_SH: a block is written after its last read.
        aligned: the sorted assignments, with counters.
        tiles: what `list_token_tiles` made for `tile_tokens` of the configs.
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
    assert tile_tokens(first, True) == tile_tokens(second) == _TOKENS.value and inner % 8 == 0
    assert aligned.block_m == BLOCK_M and w13_LNH.is_contiguous() and w2_LHI.is_contiguous()
    cols = triton.cdiv(inner, _HALF.value) + triton.cdiv(hidden, _WEIGHTS.value)
    _launch_block(
        (min(most_tiles(num_assignments, num_experts) * cols, num_sms),),
        descriptor(x_SH, 64, 64), descriptor(x_SH, REST.value, 64),
        alternating(w13_LNH, _WEIGHTS.value), descriptor(a_SI, REST.value, _HALF.value // 2),
        descriptor(a_SI, 64, 64), descriptor(a_SI, REST.value, 64),
        descriptor(w2_LHI.view(num_experts * hidden, inner), _WEIGHTS.value, 64),
        descriptor(y_SH, REST.value, _WEIGHTS.value // 2),
        tiles, aligned.assignments_S, aligned.num_rows, aligned.counters, weights_RK, hidden, inner,
        num_assignments, first.group_m, second.group_m, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _consume(
    WHICH: gl.constexpr, results, sizes, memory, buffers, barriers, mail, done_ptr
):  # fmt: skip
    """Compute half the weight rows of every tile (a consumer warp group)."""
    a, y, sorted_ptr, weights_ptr = results
    H, I, padding = sizes
    wide_buffers = buffers._reinterpret(y.dtype, [2] + y.block_shape, y.layout)
    firsts = (a, sorted_ptr, None, padding, buffers)
    seconds = (y, sorted_ptr, weights_ptr, padding, wide_buffers)
    state = (0, 0, 0)
    taken = 0
    held = -1  # the row of a result that is not released yet
    row, col, pieces, first = wait_message(mail, taken)
    while pieces > 0:
        if first > 0:
            tile = (row, col, pieces, gl.cdiv(H, STEP))
            state = compute_tile(WHICH, firsts, tile, memory, barriers, state, held, done_ptr, True)
            held = row + 0
        else:
            tile = (row, col, pieces, gl.cdiv(I, STEP))
            state = compute_tile(WHICH, seconds, tile, memory, barriers, state, held, None, False)
        taken += 1
        row, col, pieces, first = wait_message(mail, taken)
        if (held >= 0) & (first == 0):
            release_tile(held, done_ptr)
            held = held * 0 - 1
    tma.store_wait(0)


@gluon.jit
def _commit_tile(mail, count, tile, lists, sizes, done_ptr):
    """Commit what consumers need to know of a tile: its first row and column, its pieces, none past
    the last tile, and whether it is of GEMM 1. Return its row, weight row, pieces, and its count of
    released results of GEMM 1."""
    tiles_ptr, row_tiles, first_tiles, tiles = lists
    H, I, group_1, group_2 = sizes
    inside = tile < tiles
    first = tile < first_tiles
    index = gl.where(inside, gl.where(first, tile, tile - first_tiles), 0)
    cols = gl.where(first, gl.cdiv(I, _HALF), gl.cdiv(H, _WEIGHTS))
    group = gl.where(first, group_1, group_2)
    row, col_tile, expert, pieces = listed_tile(tiles_ptr, index, inside, row_tiles, cols, group)
    col = col_tile * gl.where(first, _HALF, _WEIGHTS)
    commit_message(mail, count, (row, col, pieces, gl.where(inside & first, 1, 0)))
    done = load_acquire(done_ptr + row // _BLOCK)
    return row, expert * gl.where(first, 2 * I, H) + col, pieces, done


@gluon.jit
def _load(operands, lists, sizes, memory, barriers, mail):
    """Load every tile's operands (the producer warp). The next tile is committed after the first
    steps of this one."""
    x, x_rest, w13, a, a_rest, w2 = operands
    tiles_ptr, num_rows_ptr, counters_ptr = lists
    H, I, group_1, group_2 = sizes
    w_boxes, x_boxes, rest_s = memory
    full, empty = barriers
    WEIGHT_BYTES: gl.constexpr = _WEIGHTS * STEP * 2
    paired_boxes = w_boxes._reinterpret(w13.dtype, [STAGES] + w13.block_shape, w13.layout)
    row_blocks = gl.load(num_rows_ptr) // _BLOCK
    row_tiles = gl.load(tiles_ptr)
    first_tiles = row_tiles * gl.cdiv(I, _HALF)
    tiles = first_tiles + row_tiles * gl.cdiv(H, _WEIGHTS)
    done_ptr = counters_ptr + OF_BLOCKS
    all_done = _RELEASES * gl.cdiv(I, _HALF)
    lists = (tiles_ptr, row_tiles, first_tiles, tiles)
    slot = 0
    phase = 1
    count = 0
    tile = take_tile(counters_ptr, tiles, row_blocks)
    row, w_row, pieces, done = _commit_tile(mail, count, tile, lists, sizes, done_ptr)
    while tile < tiles:
        count += 1
        following = renamed((tile, row, w_row, pieces, done))
        steps = gl.cdiv(gl.where(tile < first_tiles, H, I), STEP)
        look_ahead = gl.minimum(steps, STAGES) - 1
        if tile >= first_tiles:
            while done < all_done:
                done = load_acquire(done_ptr + row // _BLOCK)
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            k = step * STEP
            if tile < first_tiles:
                tokens = (x, x_rest, x_boxes, rest_s)
                load_tokens(tokens, row, k, pieces, bar, slot, WEIGHT_BYTES)
                load_weights(w13, w_row, k, bar, paired_boxes.index(slot))
            else:
                tokens = (a, a_rest, x_boxes, rest_s)
                load_tokens(tokens, row, k, pieces, bar, slot, WEIGHT_BYTES)
                load_weights(w2, w_row, k, bar, w_boxes.index(slot))
            slot, phase = next_slot(slot, phase)
            if step == look_ahead:
                next_tile = take_tile(counters_ptr, tiles, row_blocks)
                following = (next_tile,) + _commit_tile(mail, count, next_tile, lists, sizes,
                                                        done_ptr)  # fmt: skip
        tile, row, w_row, pieces, done = renamed(following)


@gluon.jit(do_not_specialize=["padding", "group_1", "group_2"])
def _block(
    x, x_rest, w13, a_out, a, a_rest, w2, y, tiles_ptr, sorted_ptr, num_rows_ptr, counters_ptr,
    weights_ptr, H, I, padding, group_1, group_2, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:  # for all warps: the others start after this
        wait_then_launch_dependents()
    w_boxes, w_s, x_s, tokens = token_stages(x, x_rest, w2, _WEIGHTS, _TOKENS)
    buffers = gl.allocate_shared_memory(y.dtype, [4] + a_out.block_shape, a_out.layout)
    barriers = ring_barriers(1)
    mail = messages(4)
    fence_async_shared()
    results = (a_out, y, sorted_ptr, weights_ptr)
    memory = (w_s, x_s, tokens[3])
    done_ptr = counters_ptr + OF_BLOCKS
    gl.warp_specialize(
        [
            (_consume, (0, results, (H, I, padding), memory, buffers, barriers, mail, done_ptr)),
            (_consume, (1, results, (H, I, padding), memory, buffers, barriers, mail, done_ptr)),
            (_load, ((x, x_rest, w13, a, a_rest, w2), (tiles_ptr, num_rows_ptr, counters_ptr),
                     (H, I, group_1, group_2), (w_boxes, tokens[2], tokens[3]), barriers, mail)),
        ],
        [4, 1],  # warps of the second and third partition
        [232, 40],  # registers per thread: with the first's 3 * 168 of the launch
    )  # fmt: skip


_launch_block = Launcher(_block)
