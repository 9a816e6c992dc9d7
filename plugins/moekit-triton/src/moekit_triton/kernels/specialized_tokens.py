"""Swap-AB `specialized` (Gluon, Hopper), 16 bits: weights on wgmma's M, tokens on its N.

A token tile is WEIGHTS weight rows by up to TOKENS tokens of an expert, plus a rest;
WEIGHTS * TOKENS is 128 * 256. Each consumer warp group multiplies half of the weight rows by all
tokens, on wgmmas that are as wide as the tile's tokens need, so that few padding rows are computed
and both groups work. With a gate, eight rows of gate and eight of up alternate, so that a thread
holds gate and up of an output.

The list of tiles comes from `token_tiles`. Programs take them from a counter.

Padding rows may hold anything: tokens do not mix, and their results are undefined.
"""

from __future__ import annotations

import torch
import triton
from moekit_kernels.launch import Launcher, wait_then_launch_dependents
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import warps
from .operands import SortedLaunch
from .order import tile_at
from .specialized import STEP
from .tiles import TokenTile
from .token_tiles import MOST_PIECES, PIECE, REST, most_tiles
from .warps import STAGES, descriptor

_BOX = gl.constexpr(64)  # tokens of a load
_ROW = gl.constexpr(128)  # bytes of a row in a step
_PART = gl.constexpr(32)  # tokens of a store


def specialized_tokens_gemm(g: SortedLaunch) -> None:
    """Compute out[s] = a[s] @ w[expert of s].T for the sorted rows s; gated: silu(gate) * up.

    N is a multiple of 8.
    """
    num_experts, w_rows, n, k = g.sizes()
    aligned, tile = g.aligned, g.tile
    assert isinstance(tile, TokenTile) and g.scales is None
    weights, columns = tile.weights, tile.weights // (2 if g.gated else 1)
    assert aligned.block_m % _BOX.value == 0 and aligned.counters is not None and n % 8 == 0
    most = most_tiles(g.num_assignments, num_experts, tile.tokens)
    if g.gated:
        w = alternating(g.w_LNK, weights)
    else:
        w = descriptor(g.w_LNK.view(num_experts * w_rows, k), weights, 64)
    _launch_gemm(
        (min(most * triton.cdiv(n, columns), g.num_sms),),
        descriptor(g.a_SK, _BOX.value, 64), descriptor(g.a_SK, REST.value, 64), w,
        descriptor(g.out, _PART.value, columns // 2),
        g.token_tiles, aligned.assignments_S, aligned.counters, g.weights_RK, n, k,
        g.num_assignments, tile.group_m, GATED=g.gated, WEIGHTS=weights, TOKENS=tile.tokens,
        num_warps=4,
    )  # fmt: skip


def alternating(w_LNK: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return the descriptor of boxes of ``rows`` rows: eight of gate, eight of up, and so on.

    Dimensions: blocks of eight rows of all experts, gate or up, row, column.
    """
    num_experts, w_rows, k = w_LNK.shape
    box = [rows // 16, 2, 8, 64]
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    blocks = num_experts * w_rows // 8
    return TensorDescriptor(
        w_LNK, [blocks - w_rows // 16, 2, 8, k], [8 * k, w_rows // 2 * k, k, 1], box, layout
    )


# -- consumer warp groups -----------------------------------------------------------------------


@gluon.jit
def _zeros(ROWS: gl.constexpr, TOKENS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    return gl.zeros([ROWS, TOKENS], gl.float32, layout)


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, memory, barriers, slot, phase, steps, TOKENS: gl.constexpr,
    REST: gl.constexpr,
):  # fmt: skip
    """Return w @ x.T of half a weight tile for TOKENS tokens, and for REST more, which follow them
    or, after a full tile, are in rest_s."""
    w_s, x_s, rest_s = memory
    full, empty = barriers
    ROWS: gl.constexpr = w_s.shape[1]
    acc = _zeros(ROWS, TOKENS)
    if REST > 0:
        rest = _zeros(ROWS, REST)
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        w = w_s.index(2 * slot + WHICH)
        x = x_s.index(slot)
        acc = warpgroup_mma(w, x.slice(0, TOKENS).permute((1, 0)), acc, is_async=True)
        if REST == 0:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        else:
            if TOKENS < x_s.shape[1]:
                more = x.slice(TOKENS, REST)
            else:
                more = rest_s.index(slot).slice(0, REST)
            rest = warpgroup_mma(w, more.permute((1, 0)), rest, is_async=True)
            acc, rest = warpgroup_mma_wait(2, deps=(acc, rest))
        # The previous products' stage has been read. (triton 3.6 does not carry a name that keeps
        # its slot from one step to the next.)
        last = (slot + STAGES - 1) % STAGES
        mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
        slot, phase = warps.next_slot(slot, phase)
    last = (slot + STAGES - 1) % STAGES
    if REST == 0:
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(last), count=1)
        return acc, acc, slot, phase  # no rest
    else:
        acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
        mbarrier.arrive(empty.index(last), count=1)
        return acc, rest, slot, phase


@gluon.jit
def _gate(x):
    """Return silu(gate) * up, whose rows alternate by eights."""
    rows: gl.constexpr = x.shape[0]
    tokens: gl.constexpr = x.shape[1]
    gate, up = x.reshape([rows // 16, 2, 8, tokens]).permute([0, 2, 3, 1]).split()
    return warps.silu_mul(gate.reshape([rows // 2, tokens]), up.reshape([rows // 2, tokens]))


@gluon.jit
def _store(WHICH: gl.constexpr, acc, results, count, row, end, col, GATED: gl.constexpr):
    """Store the results of the tokens below sorted row ``end`` in parts, each through the next of
    this warp group's buffers."""
    if acc.shape[1] > _PART:
        left, right = warps.halves_of(acc)
        count = _store(WHICH, left, results, count, row, end, col, GATED)
        if row + acc.shape[1] // 2 < end:
            count = _store(WHICH, right, results, count, row + acc.shape[1] // 2, end, col, GATED)
    else:
        out, sorted_ptr, weights_ptr, padding, buffers = results
        BUFFERS: gl.constexpr = buffers.shape[0] // 2
        if GATED:
            acc = _gate(acc)
        else:
            acc = warps.apply_weight_before(acc, weights_ptr, sorted_ptr, row, padding, 1)
        warps.store_tile(acc, buffers, WHICH * BUFFERS + count % BUFFERS, out, row, col, BUFFERS, 1)
        count += 1
    return count


@gluon.jit
def _tile(
    WHICH: gl.constexpr, GATED: gl.constexpr, given, state, TOKENS: gl.constexpr,
    REST: gl.constexpr,
):  # fmt: skip
    """Compute and store this warp group's half of a tile of TOKENS + REST tokens."""
    results, tile, memory, barriers = given
    row, col, pieces, steps = tile
    slot, phase, count = state
    acc, rest, slot, phase = _multiply(WHICH, memory, barriers, slot, phase, steps, TOKENS, REST)
    end = row + pieces * PIECE
    count = _store(WHICH, acc, results, count, row, end, col, GATED)
    if REST > 0:
        count = _store(WHICH, rest, results, count, row + TOKENS, end, col, GATED)
    return slot, phase, count


@gluon.constexpr_function
def _narrower(tokens, rest, most):
    """Return the next smaller size (tokens, rest) of a tile, down to a quarter of ``most``."""
    if rest > 0:
        return tokens, 16 if rest > 16 and tokens == most else 0
    return tokens // 2, most // 4 if tokens == most else 0


@gluon.jit
def _on_least_tokens(
    COMPUTE: gl.constexpr, WHICH: gl.constexpr, GATED: gl.constexpr, pieces, given, state,
    TOKENS: gl.constexpr, REST: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """Return COMPUTE(WHICH, GATED, given, state, tokens, rest) with the smallest tokens + rest, at
    most TOKENS + REST, that hold ``pieces``."""
    LESS: gl.constexpr = _narrower(TOKENS, REST, MOST)
    if LESS[0] < MOST // 4:
        state = COMPUTE(WHICH, GATED, given, state, TOKENS, REST)
    elif pieces * PIECE > LESS[0] + LESS[1]:
        state = COMPUTE(WHICH, GATED, given, state, TOKENS, REST)
    else:
        state = _on_least_tokens(COMPUTE, WHICH, GATED, pieces, given, state, LESS[0], LESS[1],
                                MOST)  # fmt: skip
    return state


@gluon.jit
def _consume(
    WHICH: gl.constexpr, results, K, memory, barriers, mail, GATED: gl.constexpr
):  # fmt: skip
    """Compute half the weight rows of every tile (a consumer warp group), on wgmmas as wide as its
    tokens need."""
    w_s, x_s, rest_s = memory
    TOKENS: gl.constexpr = x_s.shape[1]
    steps = gl.cdiv(K, STEP)
    state = (0, 0, 0)  # slot, phase, number of parts stored
    taken = 0
    row, col, _, pieces = warps.wait_message(mail, taken)
    while pieces > 0:
        col += WHICH * (w_s.shape[1] // 2 if GATED else w_s.shape[1])
        given = (results, (row, col, pieces, steps), memory, barriers)
        state = _on_least_tokens(_tile, WHICH, GATED, pieces, given, state, TOKENS, REST, TOKENS)
        taken += 1
        row, col, _, pieces = warps.wait_message(mail, taken)
    tma.store_wait(0)


# -- the producer warp --------------------------------------------------------------------------


@gluon.jit
def _load_tokens(tokens, row, k, pieces, bar, slot, MORE_BYTES: gl.constexpr):
    """Load a tile's boxes of tokens, and let the barrier expect them and MORE_BYTES."""
    a, rest, x_boxes, rest_s = tokens
    REST: gl.constexpr = rest.block_shape[0]
    BOXES: gl.constexpr = x_boxes.shape[0] // STAGES
    boxes = gl.minimum(gl.cdiv(pieces * PIECE, _BOX), BOXES)
    more = pieces > BOXES * _BOX // PIECE  # the rest
    for box in gl.static_range(1, BOXES + 1):
        mbarrier.expect(bar, MORE_BYTES + box * _BOX * _ROW, pred=(boxes == box) & (more == 0))
    mbarrier.expect(bar, MORE_BYTES + (BOXES * _BOX + REST) * _ROW, pred=more)
    for box in gl.static_range(BOXES):
        x_box = x_boxes.index(BOXES * slot + box)
        warps.async_load(a, [row + box * _BOX, k], bar, x_box, pred=box < boxes)
    last = row + BOXES * _BOX
    warps.async_load(rest, [last, k], bar, rest_s.index(slot), pred=more)


@gluon.jit
def _commit_tile(mail, count, list_of, tile, N, OUT: gl.constexpr, GATED: gl.constexpr):
    """Commit a tile's first row, column, expert and pieces, all 0 past the last tile. Return its
    row, weight row and pieces."""
    tiles_ptr, row_tiles, col_tiles, group_m = list_of
    inside = tile < row_tiles * col_tiles
    index = gl.where(inside, tile, 0)
    row_tile, col_tile = tile_at(index, gl.maximum(row_tiles, 1), col_tiles, group_m)
    row = gl.where(inside, gl.load(tiles_ptr + 1 + 2 * row_tile), 0)
    word = gl.where(inside, gl.load(tiles_ptr + 2 + 2 * row_tile), 0)
    expert, pieces = word // MOST_PIECES, word % MOST_PIECES
    warps.commit_message(mail, count, (row, col_tile * OUT, expert, pieces))
    return row, expert * (2 * N if GATED else N) + col_tile * OUT, pieces


@gluon.jit
def _load_tiles(
    tokens, weights, list_of, counters_ptr, N, K, barriers, mail, WEIGHTS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Load every tile's operands (the producer warp): its boxes of tokens, and WEIGHTS weight rows.

    tokens: (descriptor of boxes of _BOX rows, descriptor of the rest, memory of each).

    The next tile is committed after this tile's first steps, so that no product waits for it.
    """
    a, _, _, _ = tokens
    w, w_boxes = weights
    tiles_ptr, group_m = list_of
    full, empty = barriers
    STEP: gl.constexpr = a.block_shape[1]
    OUT: gl.constexpr = WEIGHTS // 2 if GATED else WEIGHTS
    row_tiles = gl.load(tiles_ptr)
    col_tiles = gl.cdiv(N, OUT)
    tiles = row_tiles * col_tiles
    list_of = (tiles_ptr, row_tiles, col_tiles, group_m)
    steps = gl.cdiv(K, STEP)
    look_ahead = gl.minimum(steps, STAGES) - 1
    slot, phase, count = 0, 1, 0
    tile = gl.program_id(0)
    row, w_row, pieces = _commit_tile(mail, count, list_of, tile, N, OUT, GATED)
    while tile < tiles:
        count += 1
        following = warps.renamed((tile, row, w_row, pieces))
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            k = step * STEP
            _load_tokens(tokens, row, k, pieces, bar, slot, WEIGHTS * _ROW)
            if GATED:  # the descriptor's first dimension is of 8 rows (`alternating`)
                warps.async_load(w, [w_row // 8, 0, 0, k], bar, w_boxes.index(slot))
            else:
                warps.async_load(w, [w_row, k], bar, w_boxes.index(slot))
            slot, phase = warps.next_slot(slot, phase)
            if step == look_ahead:
                next_tile = warps.schedule(tile, tiles, counters_ptr, True)
                following = (next_tile,) + _commit_tile(mail, count, list_of, next_tile, N, OUT,
                                                        GATED)  # fmt: skip
        tile, row, w_row, pieces = warps.renamed(following)


@gluon.jit(do_not_specialize=["padding", "group_m"])
def _gemm(
    a, rest, w, out, tiles_ptr, sorted_ptr, counters_ptr, weights_ptr, N, K, padding, group_m,
    GATED: gl.constexpr, WEIGHTS: gl.constexpr, TOKENS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:  # for all warps: the others start after this
        wait_then_launch_dependents()
    BUFFERS: gl.constexpr = 4 if out.block_shape[1] <= 64 else 2
    w_boxes = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_shape, w.layout)
    x_s = gl.allocate_shared_memory(a.dtype, [STAGES, TOKENS, STEP], a.layout)
    rest_s = gl.allocate_shared_memory(a.dtype, [STAGES] + rest.block_shape, rest.layout)
    # Weights by halves, as consumers multiply them; tokens by boxes, as they are loaded.
    w_s = warps.reinterpret(w_boxes, w.dtype, [2 * STAGES, WEIGHTS // 2, STEP], a.layout)
    x_boxes = warps.reinterpret(x_s, a.dtype, [TOKENS // _BOX * STAGES, _BOX, STEP], a.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [BUFFERS] + out.block_shape, out.layout)
    barriers = warps.ring_barriers(1)
    mail = warps.messages(4)
    fence_async_shared()
    results = (out, sorted_ptr, weights_ptr, padding, buffers)
    memory = (w_s, x_s, rest_s)
    tokens = (a, rest, x_boxes, rest_s)
    gl.warp_specialize(
        [
            (_consume, (0, results, K, memory, barriers, mail, GATED)),
            (_consume, (1, results, K, memory, barriers, mail, GATED)),
            (_load_tiles, (tokens, (w, w_boxes), (tiles_ptr, group_m), counters_ptr, N, K, barriers,
                           mail, WEIGHTS, GATED)),
        ],
        [4, 1],  # warps of the second and third partition
        [240, 24],  # registers per thread: with the first's 3 * 168 of the launch
    )  # fmt: skip


_launch_gemm = Launcher(_gemm)
