"""Swap-AB `specialized` (Gluon, Hopper), 16 bits: weights on wgmma's M, tokens on its N.

A tile is WEIGHTS weight rows by up to TOKENS tokens of an expert, plus a rest; WEIGHTS * TOKENS is
128 * 256. Each consumer warp group multiplies half of the weight rows by all tokens, on wgmmas as
wide as the tile's tokens need, so that few padding rows are computed and no half of a tile is idle.
With a gate, eight rows of gate and of up alternate: then a thread holds both of an output.

The list of tiles comes from `token_tiles`. Programs take them from a counter.

Padding rows may hold anything: tokens do not mix, and their results are undefined.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gemm import tile_at
from .specialized import STEP
from .tiles import GemmConfig
from .token_tiles import MOST_PIECES, PIECE, most_tiles, token_sizes
from .warps import (
    BLOCK_M,
    STAGES,
    commit_message,
    descriptor,
    halves_of,
    messages,
    next_slot,
    rcp,
    schedule,
    silu_divisor,
    wait_message,
)

_BOX = gl.constexpr(64)  # tokens of a load
_REST = gl.constexpr(32)  # most tokens beyond a full tile
_PART = gl.constexpr(32)  # tokens of a store
_BLOCK = gl.constexpr(BLOCK_M)


def specialized_tokens_gemm(
    a_SK: torch.Tensor,
    w_LNK: torch.Tensor,
    out_SN: torch.Tensor,
    aligned: SortedAssignments,
    tiles: torch.Tensor,
    config: GemmConfig,
    num_assignments: int,
    num_sms: int,
    *,
    gated: bool = False,
    weights_RK: torch.Tensor | None = None,
) -> None:
    """Compute out[s] = a[s] @ w[expert of s].T for the sorted rows s; gated: silu(gate) * up.

    Of ``config`` only block_n and group_m count. Padding rows become undefined.

    Args:
        a_SK: (capacity, K), 16 bits, rows of whole 16 bytes.
        w_LNK: (L, N, K), or (L, 2N, K) with a gate, N a multiple of 8; a's dtype.
        out_SN: (capacity, N), a's dtype.
        aligned: the sorted assignments, with counters.
        tiles: the list of `list_token_tiles`, for `token_sizes` of the tile.
        config: the tile.
        num_assignments: what ``aligned.assignments_S`` holds for padding.
        num_sms: programs.
        gated: whether w holds gate and up.
        weights_RK: fp32 router weights; out[s] is multiplied by `weight_before`. Not gated.
    """
    num_experts, w_rows, k = w_LNK.shape
    wide = 2 if gated else 1
    n, capacity, weights = w_rows // wide, aligned.capacity, config.block_n * wide
    sizes = token_sizes(config, gated)
    assert sizes is not None and sizes.rest == _REST.value
    tokens = sizes.tokens
    assert a_SK.shape == (capacity, k) and out_SN.shape == (capacity, n)
    assert aligned.block_m % _BOX.value == 0 and w_LNK.is_contiguous() and tokens in (128, 256)
    assert aligned.counters is not None and (weights_RK is None or not gated) and n % 8 == 0
    most = most_tiles(num_assignments, num_experts, tokens)
    if gated:
        w = alternating(w_LNK, weights)
    else:
        w = descriptor(w_LNK.view(num_experts * w_rows, k), weights, 64)
    _launch_gemm(
        (min(most * triton.cdiv(n, config.block_n), num_sms),),
        descriptor(a_SK, _BOX.value, 64), descriptor(a_SK, _REST.value, 64), w,
        descriptor(out_SN, _PART.value, config.block_n // 2),
        tiles, aligned.assignments_S, aligned.counters, weights_RK, n, k, num_assignments,
        config.group_m, GATED=gated, WEIGHTS=weights, TOKENS=tokens, num_warps=4,
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
    WHICH: gl.constexpr, w_s, x_s, rest_s, full, empty, slot, phase, steps, ROWS: gl.constexpr,
    TOKENS: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Multiply half of a weight tile by TOKENS tokens, and by REST more of ``rest_s``."""
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
            if rest_s is None:
                more = x.slice(TOKENS, REST)
            else:
                more = rest_s.index(slot).slice(0, REST)
            rest = warpgroup_mma(w, more.permute((1, 0)), rest, is_async=True)
            acc, rest = warpgroup_mma_wait(2, deps=(acc, rest))
        # The previous products' stage has been read. (triton 3.6 does not carry a name that keeps
        # its slot from one step to the next.)
        last = (slot + STAGES - 1) % STAGES
        mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
        slot, phase = next_slot(slot, phase)
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
    """Return silu(gate) * up, whose rows alternate by eights.

    Two tokens share a reciprocal: `silu_divisor` is finite even if one of them is NaN.
    """
    rows: gl.constexpr = x.shape[0]
    tokens: gl.constexpr = x.shape[1]
    gate, up = x.reshape([rows // 16, 2, 8, tokens]).permute([0, 2, 3, 1]).split()
    gate = gate.reshape([rows // 2, tokens])
    up = up.reshape([rows // 2, tokens])
    below0, below1 = halves_of(silu_divisor(gate))
    inverse = rcp(below0 * below1)
    both = gl.join(inverse * below1, inverse * below0).permute([0, 2, 1]).reshape(gate.shape)
    return gate * up * gl.convert_layout(both, gate.type.layout, assert_trivial=True)


@gluon.jit
def _store_part(
    acc, buffers, count, WHICH: gl.constexpr, out, row, col, sorted_ptr, weights_ptr, padding,
    GATED: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Store the results of up to _PART tokens through the next of this warp group's buffers."""
    if GATED:
        acc = _gate(acc)
    else:
        acc = weigh_tokens(acc, row, sorted_ptr, weights_ptr, padding)
    store_tokens(acc, buffers, WHICH * BUFFERS + count % BUFFERS, out, row, col, BUFFERS)
    return count + 1


@gluon.jit
def weigh_tokens(x, row, sorted_ptr, weights_ptr, padding):
    """Return x, whose columns are tokens from ``row`` on, times `weight_before` of their router
    weights; x itself without weights. Padding becomes 0 or NaN."""
    if weights_ptr is not None:
        tokens: gl.constexpr = gl.SliceLayout(0, x.type.layout)
        assignment = gl.load(sorted_ptr + row + gl.arange(0, x.shape[1], tokens))
        weight = gl.load(weights_ptr + assignment, mask=assignment < padding, other=0.0)
        x = x * gl.expand_dims(gl.where(gl.abs(weight) > 1.0, 1.0, weight), 0)
    return x


@gluon.jit
def store_tokens(x, buffers, index, out, row, col, BUFFERS: gl.constexpr):
    """Store x, whose columns are tokens from ``row`` on, through a buffer of the ring, once its
    previous store has been read. Rows of the buffer beyond them hold anything."""
    tma.store_wait(BUFFERS - 1)
    buffer = buffers.index(index)
    buffer.slice(0, x.shape[1]).store(x.to(out.dtype).permute((1, 0)))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, col], buffer)


@gluon.jit
def _store(
    acc, buffers, count, WHICH: gl.constexpr, out, row, end, col, sorted_ptr, weights_ptr, padding,
    GATED: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Store the results of the tokens up to sorted row ``end``, part by part."""
    if acc.shape[1] > _PART:
        left, right = halves_of(acc)
        count = _store(left, buffers, count, WHICH, out, row, end, col, sorted_ptr, weights_ptr,
                       padding, GATED, BUFFERS)  # fmt: skip
        if row + acc.shape[1] // 2 < end:
            count = _store(right, buffers, count, WHICH, out, row + acc.shape[1] // 2, end, col,
                           sorted_ptr, weights_ptr, padding, GATED, BUFFERS)  # fmt: skip
    else:
        count = _store_part(acc, buffers, count, WHICH, out, row, col, sorted_ptr, weights_ptr,
                            padding, GATED, BUFFERS)  # fmt: skip
    return count


@gluon.jit
def release_tile(row, done_ptr):
    """Wait until this thread's stores are written, then count it at the block of sorted ``row``."""
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
    block = gl.full([128], 0, gl.int32, threads) + row // _BLOCK
    gl.atomic_add(done_ptr + block, gl.full([128], 1, gl.int32, threads), sem="release")


@gluon.jit
def _tile(
    WHICH: gl.constexpr, out, sorted_ptr, weights_ptr, padding, row, col, pieces, steps, w_s, x_s,
    rest_s, buffers, full, empty, slot, phase, count, held, done_ptr, GATED: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, REST: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Compute and store this warp group's half of a tile of TOKENS + REST tokens."""
    acc, rest, slot, phase = _multiply(WHICH, w_s, x_s, rest_s, full, empty, slot, phase, steps,
                                       ROWS, TOKENS, REST)  # fmt: skip
    if done_ptr is not None:
        if held >= 0:
            release_tile(held, done_ptr)
    end = row + pieces * PIECE
    count = _store(acc, buffers, count, WHICH, out, row, end, col, sorted_ptr, weights_ptr, padding,
                   GATED, BUFFERS)  # fmt: skip
    if REST > 0:
        count = _store(rest, buffers, count, WHICH, out, row + TOKENS, end, col, sorted_ptr,
                       weights_ptr, padding, GATED, BUFFERS)  # fmt: skip
    return slot, phase, count


@gluon.jit
def compute_tile(
    WHICH: gl.constexpr, out, sorted_ptr, weights_ptr, padding, row, col, pieces, steps, w_s, x_s,
    rest_s, buffers, full, empty, slot, phase, count, held, done_ptr, GATED: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    """Compute and store this warp group's half of a tile, on the least tokens that hold it. Return
    the ring's next state, and how many parts have been stored. With ``done_ptr``, release the tile
    before, if its row ``held`` is not negative."""
    ROWS: gl.constexpr = w_s.shape[1]
    N: gl.constexpr = x_s.shape[1]
    MOST: gl.constexpr = N // PIECE
    col += WHICH * (ROWS // 2 if GATED else ROWS)
    if pieces == MOST + 2:
        slot, phase, count = _tile(
            WHICH, out, sorted_ptr, weights_ptr, padding, row, col, pieces, steps, w_s, x_s, rest_s,
            buffers, full, empty, slot, phase, count, held, done_ptr, GATED, ROWS,
            N, _REST, BUFFERS)  # fmt: skip
    elif pieces == MOST + 1:
        slot, phase, count = _tile(
            WHICH, out, sorted_ptr, weights_ptr, padding, row, col, pieces, steps, w_s, x_s, rest_s,
            buffers, full, empty, slot, phase, count, held, done_ptr, GATED, ROWS,
            N, PIECE, BUFFERS)  # fmt: skip
    elif pieces > 3 * MOST // 4:
        slot, phase, count = _tile(
            WHICH, out, sorted_ptr, weights_ptr, padding, row, col, pieces, steps, w_s, x_s, None,
            buffers, full, empty, slot, phase, count, held, done_ptr, GATED, ROWS,
            N, 0, BUFFERS)  # fmt: skip
    elif pieces > MOST // 2:
        slot, phase, count = _tile(
            WHICH, out, sorted_ptr, weights_ptr, padding, row, col, pieces, steps, w_s, x_s, None,
            buffers, full, empty, slot, phase, count, held, done_ptr, GATED, ROWS,
            N // 2, N // 4, BUFFERS)  # fmt: skip
    elif pieces > MOST // 4:
        slot, phase, count = _tile(
            WHICH, out, sorted_ptr, weights_ptr, padding, row, col, pieces, steps, w_s, x_s, None,
            buffers, full, empty, slot, phase, count, held, done_ptr, GATED, ROWS,
            N // 2, 0, BUFFERS)  # fmt: skip
    else:
        slot, phase, count = _tile(
            WHICH, out, sorted_ptr, weights_ptr, padding, row, col, pieces, steps, w_s, x_s, None,
            buffers, full, empty, slot, phase, count, held, done_ptr, GATED, ROWS,
            N // 4, 0, BUFFERS)  # fmt: skip
    return slot, phase, count


@gluon.jit
def _consume(
    WHICH: gl.constexpr, out, sorted_ptr, weights_ptr, K, padding, w_s, x_s, rest_s, buffers, full,
    empty, words, valid, GATED: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Compute half the weight rows of every tile (a consumer warp group)."""
    steps = gl.cdiv(K, STEP)
    slot = 0
    phase = 0
    count = 0
    taken = 0
    row, col, pieces = wait_message(words, valid, taken)
    while pieces > 0:
        slot, phase, count = compute_tile(
            WHICH, out, sorted_ptr, weights_ptr, padding, row, col, pieces, steps, w_s, x_s, rest_s,
            buffers, full, empty, slot, phase, count, -1, None, GATED, BUFFERS)  # fmt: skip
        taken += 1
        row, col, pieces = wait_message(words, valid, taken)
    tma.store_wait(0)


@gluon.jit
def _upper(out, sorted_ptr, weights_ptr, K, padding, w_s, x_s, rest_s, buffers, full, empty, words,
           valid, GATED: gl.constexpr, BUFFERS: gl.constexpr):  # fmt: skip
    _consume(0, out, sorted_ptr, weights_ptr, K, padding, w_s, x_s, rest_s, buffers, full, empty,
             words, valid, GATED, BUFFERS)  # fmt: skip


@gluon.jit
def _lower(out, sorted_ptr, weights_ptr, K, padding, w_s, x_s, rest_s, buffers, full, empty, words,
           valid, GATED: gl.constexpr, BUFFERS: gl.constexpr):  # fmt: skip
    _consume(1, out, sorted_ptr, weights_ptr, K, padding, w_s, x_s, rest_s, buffers, full, empty,
             words, valid, GATED, BUFFERS)  # fmt: skip


# -- the producer warp --------------------------------------------------------------------------


@gluon.jit
def load_tokens(
    a, rest, row, k, pieces, bar, slot, x_boxes, rest_s, WEIGHT_BYTES: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Load the boxes of tokens that a tile has, and expect them and the weights."""
    BOXES: gl.constexpr = TOKENS // _BOX
    boxes = gl.minimum(gl.cdiv(pieces * PIECE, _BOX), BOXES)
    more = pieces > TOKENS // PIECE  # the rest
    for box in gl.static_range(1, BOXES + 1):
        mbarrier.expect(bar, WEIGHT_BYTES + box * _BOX * STEP * 2,
                        pred=(boxes == box) & (more == 0))  # fmt: skip
    mbarrier.expect(bar, WEIGHT_BYTES + (TOKENS + _REST) * STEP * 2, pred=more)
    for box in gl.static_range(BOXES):
        x_box = x_boxes.index(BOXES * slot + box)
        tma.async_copy_global_to_shared(a, [row + box * _BOX, k], bar, x_box, pred=box < boxes)
    tma.async_copy_global_to_shared(rest, [row + TOKENS, k], bar, rest_s.index(slot), pred=more)


@gluon.jit
def _commit_tile(
    words, valid, count, tiles_ptr, tile, row_tiles, col_tiles, group_m, N, GATED: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Commit what consumers need to know of a tile: its first row and column, and its pieces, none
    past the last tile. Return its row, weight row and pieces."""
    inside = tile < row_tiles * col_tiles
    at = gl.where(inside, tile, 0)
    row_tile, col_tile = tile_at(at, gl.maximum(row_tiles, 1), col_tiles, group_m)
    row = gl.load(tiles_ptr + 1 + 2 * row_tile)
    word = gl.load(tiles_ptr + 2 + 2 * row_tile)
    pieces = gl.where(inside, word % MOST_PIECES, 0)
    commit_message(words, valid, count, (row, col_tile * OUT, pieces))
    return row, word // MOST_PIECES * (2 * N if GATED else N) + col_tile * OUT, pieces


@gluon.jit
def _load(
    a, rest, w, tiles_ptr, counters_ptr, N, K, group_m, w_boxes, x_boxes, rest_s, full, empty,
    words, valid, GATED: gl.constexpr, WEIGHTS: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Load every tile's operands: weights, and the boxes of tokens that it has.

    The next tile is committed after the first steps of this one, so that no product waits for it.
    """
    OUT: gl.constexpr = WEIGHTS // 2 if GATED else WEIGHTS
    row_tiles = gl.load(tiles_ptr)
    col_tiles = gl.cdiv(N, OUT)
    tiles = row_tiles * col_tiles
    steps = gl.cdiv(K, STEP)
    look_ahead = gl.minimum(steps, STAGES) - 1
    slot = 0
    phase = 1
    count = 0
    tile = gl.program_id(0)
    row, w_row, pieces = _commit_tile(words, valid, count, tiles_ptr, tile, row_tiles, col_tiles,
                                      group_m, N, GATED, OUT)  # fmt: skip
    while tile < tiles:
        count += 1
        next_tile = tile + 0
        next_row = row + 0
        next_w = w_row + 0
        next_pieces = pieces + 0
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            k = step * STEP
            load_tokens(a, rest, row, k, pieces, bar, slot, x_boxes, rest_s, WEIGHTS * STEP * 2,
                        TOKENS)  # fmt: skip
            if GATED:
                tma.async_copy_global_to_shared(w, [w_row // 8, 0, 0, k], bar, w_boxes.index(slot))
            else:
                tma.async_copy_global_to_shared(w, [w_row, k], bar, w_boxes.index(slot))
            slot, phase = next_slot(slot, phase)
            if step == look_ahead:
                next_tile = schedule(tile, tiles, counters_ptr, True)
                next_row, next_w, next_pieces = _commit_tile(
                    words, valid, count, tiles_ptr, next_tile, row_tiles, col_tiles, group_m, N,
                    GATED, OUT)  # fmt: skip
        # (triton 3.6 does not carry a name that is assigned another carried name: + 0.)
        tile = next_tile + 0
        row = next_row + 0
        w_row = next_w + 0
        pieces = next_pieces + 0


@gluon.jit(do_not_specialize=["padding", "group_m"])
def _gemm(
    a, rest, w, out, tiles_ptr, sorted_ptr, counters_ptr, weights_ptr, N, K, padding, group_m,
    GATED: gl.constexpr, WEIGHTS: gl.constexpr, TOKENS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:  # for all warps: the others start after this
        wait_then_launch_dependents()
    BUFFERS: gl.constexpr = 2 if out.block_shape[1] <= 64 else 1
    BOXES: gl.constexpr = TOKENS // _BOX
    w_boxes = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_shape, w.layout)
    x_s = gl.allocate_shared_memory(a.dtype, [STAGES, TOKENS, STEP], a.layout)
    rest_s = gl.allocate_shared_memory(a.dtype, [STAGES] + rest.block_shape, rest.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [2 * BUFFERS] + out.block_shape, out.layout)
    w_s = w_boxes._reinterpret(w.dtype, [2 * STAGES, WEIGHTS // 2, STEP], a.layout)
    x_boxes = x_s._reinterpret(a.dtype, [BOXES * STAGES, _BOX, STEP], a.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    words, valid = messages(3)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_upper, (out, sorted_ptr, weights_ptr, K, padding, w_s, x_s, rest_s, buffers, full,
                      empty, words, valid, GATED, BUFFERS)),
            (_lower, (out, sorted_ptr, weights_ptr, K, padding, w_s, x_s, rest_s, buffers, full,
                      empty, words, valid, GATED, BUFFERS)),
            (_load, (a, rest, w, tiles_ptr, counters_ptr, N, K, group_m, w_boxes, x_boxes, rest_s,
                     full, empty, words, valid, GATED, WEIGHTS, TOKENS)),
        ],
        [4, 1],  # warps of the second and third partition
        [240, 24],  # registers per thread: with the first's 3 * 168 of the launch
    )  # fmt: skip


_launch_gemm = Launcher(_gemm)
