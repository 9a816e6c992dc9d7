"""`specialized_tokens` for e4m3 with scales by blocks of 128 x 128 weights and 128 columns of rows.

A tile is 256 weight rows, two boxes of 128 (gate and up, or left and right), by up to 128 tokens,
plus REST. As in `specialized_fp8`, each step's product is scaled and added to fp32 sums. A consumer
warp group multiplies its 64 rows of the first box and then of the second: while it scales one
product, the tensor cores compute the other group's.

A product's column has the scale of a token, which comes with the operands; its rows share one. So
products are scaled by parts of 32 tokens, whose scales are loaded when they are needed.

With a gate, the result is quantized by groups of 128 columns, 64 of each warp group: they exchange
the largest values of each token. Weight rows are loaded in such an order that a thread holds two
neighbouring columns of the result.

Padding rows and their scales may hold anything: tokens do not mix, and their results are undefined.
"""

from __future__ import annotations

import torch
import triton
from moekit_kernels.align import SortedAssignments
from moekit_kernels.launch import Launcher, wait_then_launch_dependents
from moekit_kernels.numerics import QMAX, SCALE_GROUP, TINY
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
from .specialized_tokens import store_tokens, weigh_tokens
from .tiles import GemmConfig
from .token_tiles import MOST_PIECES, PIECE, TokenSizes, most_tiles, token_sizes
from .warps import (
    ROWS,
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

_STEP = gl.constexpr(SCALE_GROUP)  # of K
_BOX = gl.constexpr(128)  # weight rows of a load
_TOKENS = gl.constexpr(128)
_REST = gl.constexpr(16)
_TOKEN_BOX = gl.constexpr(64)  # tokens of a load
_PART = gl.constexpr(32)  # tokens that are scaled, and stored, at a time
_SCALES = gl.constexpr(256)  # tokens whose scales are loaded
_QMAX = gl.constexpr(QMAX[torch.float8_e4m3fn])
_TINY = gl.constexpr(TINY)


def specialized_tokens_fp8_gemm(
    a_SK: torch.Tensor,
    a_scale_GS: torch.Tensor,
    w_LNK: torch.Tensor,
    w_scale_LBG: torch.Tensor,
    out_SN: torch.Tensor,
    aligned: SortedAssignments,
    tiles: torch.Tensor,
    config: GemmConfig,
    num_assignments: int,
    num_sms: int,
    *,
    out_scale_GS: torch.Tensor | None = None,
    weights_RK: torch.Tensor | None = None,
) -> None:
    """Compute out[s] = a[s] @ w[expert of s].T for the sorted rows s; with ``out_scale_GS``,
    silu(gate) * up, quantized by groups of 128 columns.

    Of ``config`` only group_m counts. Padding rows become undefined. Arguments are those of
    `specialized_fp8_gemm`, and ``tiles``, what `list_token_tiles` made for `token_sizes` of the
    tile.
    """
    num_experts, w_rows, k = w_LNK.shape
    gated = out_scale_GS is not None
    wide = 2 if gated else 1
    n, capacity, groups = w_rows // wide, aligned.capacity, triton.cdiv(k, SCALE_GROUP)
    assert a_SK.shape == (capacity, k) and out_SN.shape == (capacity, n) and k % 16 == 0
    assert a_scale_GS.shape == (groups, capacity) and a_scale_GS.is_contiguous()
    assert w_scale_LBG.shape == (num_experts, triton.cdiv(w_rows, SCALE_GROUP), groups)
    assert w_scale_LBG.is_contiguous() and w_LNK.is_contiguous()
    assert aligned.block_m % _TOKEN_BOX.value == 0 and aligned.counters is not None
    assert groups * capacity < 2**31 and w_scale_LBG.numel() < 2**31
    assert token_sizes(config, gated) == TokenSizes(_TOKENS.value, _REST.value)
    assert weights_RK is None or not gated
    if gated:
        assert n % SCALE_GROUP == 0 and out_scale_GS is not None
        assert out_scale_GS.shape == (n // SCALE_GROUP, capacity) and out_scale_GS.is_contiguous()
        w = _paired(w_LNK)
    else:
        w = descriptor(w_LNK.view(num_experts * w_rows, k), _BOX.value, SCALE_GROUP)
    most = most_tiles(num_assignments, num_experts, _TOKENS.value)
    _launch_gemm(
        (min(most * triton.cdiv(w_rows, 2 * _BOX.value), num_sms),),
        descriptor(a_SK, _TOKEN_BOX.value, SCALE_GROUP),
        descriptor(a_SK, _REST.value, SCALE_GROUP),
        descriptor(a_scale_GS, 1, _SCALES.value), w, descriptor(out_SN, _PART.value, 64),
        out_scale_GS, w_scale_LBG, tiles, aligned.assignments_S, aligned.counters, weights_RK, n, k,
        capacity, num_assignments, config.group_m, GATED=gated, num_warps=4,
    )  # fmt: skip


def _paired(w_LNK: torch.Tensor) -> TensorDescriptor:
    """Return the descriptor of boxes of 128 rows, of each 16 the even ones before the odd ones:
    wgmma's rows r and r + 8, which a thread holds both, are then neighbours."""
    num_experts, w_rows, k = w_LNK.shape
    shape, strides = [num_experts * w_rows // 16, 2, 8, k], [16 * k, k, 2 * k, 1]
    layout = gl.NVMMASharedLayout(128, 8, rank=4)
    return TensorDescriptor(w_LNK, shape, strides, [_BOX.value // 16, 2, 8, SCALE_GROUP], layout)


# -- consumer warp groups -----------------------------------------------------------------------


@gluon.jit
def _zeros(TOKENS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    return gl.zeros([ROWS, TOKENS], gl.float32, layout)


@gluon.jit
def _product(w, x, TOKENS: gl.constexpr):
    return warpgroup_mma(w, x.permute((1, 0)), _zeros(TOKENS), use_acc=False, is_async=True)


@gluon.jit
def _parts(x):
    """Return x by parts of up to _PART tokens; moves no register."""
    if x.shape[1] > _PART:
        left, right = halves_of(x)
        return _parts(left) + _parts(right)
    else:
        return (x,)


@gluon.jit
def _added(acc, product, factor):
    """Return acc + product * factor of the column, computed here: LLVM would delay it past the next
    product, and double the registers of products."""
    factor = gl.expand_dims(factor, 0).broadcast_to(product.shape)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=r,r,r,r", [product, factor, acc], dtype=gl.float32,
        is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _of_tokens(part, scales, first):
    """Return the scales, from ``first`` on, of the tokens of a part."""
    return scales.slice(first, part.shape[1]).load(gl.SliceLayout(0, part.type.layout))


@gluon.jit
def _add_scaled(acc, product, scales, w_scale):
    """Return the parts ``acc`` plus the product's, times the scales of tokens and of weights."""
    parts = _parts(product)
    found = ()
    for i in gl.static_range(len(parts)):
        factor = _of_tokens(parts[i], scales, i * _PART) * w_scale
        found += (_added(acc[i], parts[i], factor),)
    return found


@gluon.jit
def _load_scalar(ptr):
    """Load an fp32, and wait for it where it is used: `gl.load` of a scalar would wait at once."""
    return gl.inline_asm_elementwise(
        "ld.global.f32 $0, [$1];", "=f,l", [ptr], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _scales_at(words, valid, count, N, steps, GATED: gl.constexpr):
    """Return where the scales of both boxes of a tile's weights begin."""
    _, col, expert, _ = wait_message(words, valid, count)
    blocks = gl.cdiv(2 * N if GATED else N, _STEP)
    block = col // _STEP
    if GATED:
        other = block + N // _STEP
    else:  # columns past N are not stored
        other = gl.minimum(block + 1, blocks - 1)
    return (expert * blocks + block) * steps, (expert * blocks + other) * steps


@gluon.jit
def _next_scales(
    last, at, other, words, valid, taken, w_scale_ptr, N, steps, GATED: gl.constexpr
):  # fmt: skip
    """Return where the next step's scales of weights are, and both; after a tile's ``last`` step
    those of the next tile."""
    if last:
        at, other = _scales_at(words, valid, taken, N, steps, GATED)
        scale, other_scale = _load_scalar(w_scale_ptr + at), _load_scalar(w_scale_ptr + other)
    else:  # (ptxas moves what follows the branches past the wait.)
        at += 1
        other += 1
        scale, other_scale = _load_scalar(w_scale_ptr + at), _load_scalar(w_scale_ptr + other)
    return at, other, scale, other_scale


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, w_scale_ptr, N, steps, w_s, x_s, rest_s, scale_s, full, empty, words,
    valid, slot, phase, taken, at, other, w_scale, v_scale, GATED: gl.constexpr,
    TOKENS: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Return the parts of the products of 64 rows of both boxes, and the ring's and scales' next
    state. The rest's part is the last."""
    acc0 = _parts(_zeros(TOKENS))
    if REST > 0:
        acc0 += (_zeros(REST),)
    acc1 = acc0
    for step in range(steps):
        mbarrier.wait(full.index(2 * slot), phase)
        x = x_s.index(slot)
        scales = scale_s.index(slot).reshape([_SCALES])
        if REST > 0:
            if rest_s is None:
                rest = x.slice(TOKENS, REST)
            else:
                rest = rest_s.index(slot)
        x = x.slice(0, TOKENS)
        w = w_s.index(4 * slot + WHICH)
        product = _product(w, x, TOKENS)
        at, other, next_w, next_v = _next_scales(
            step == steps - 1, at, other, words, valid, taken, w_scale_ptr, N, steps, GATED
        )
        if REST > 0:
            more = _product(w, rest, REST)
            product, more = warpgroup_mma_wait(0, deps=(product, more))
            acc0 = _add_scaled(acc0, product, scales, w_scale) + _add_scaled(
                (acc0[-1],), more, scales.slice(TOKENS, REST), w_scale
            )
        else:
            product = warpgroup_mma_wait(0, deps=(product,))
            acc0 = _add_scaled(acc0, product, scales, w_scale)
        mbarrier.wait(full.index(2 * slot + 1), phase)
        w = w_s.index(4 * slot + 2 + WHICH)
        product = _product(w, x, TOKENS)
        if REST > 0:
            more = _product(w, rest, REST)
            product, more = warpgroup_mma_wait(0, deps=(product, more))
            acc1 = _add_scaled(acc1, product, scales, v_scale) + _add_scaled(
                (acc1[-1],), more, scales.slice(TOKENS, REST), v_scale
            )
        else:
            product = warpgroup_mma_wait(0, deps=(product,))
            acc1 = _add_scaled(acc1, product, scales, v_scale)
        mbarrier.arrive(empty.index(slot), count=1)
        w_scale = next_w
        v_scale = next_v
        slot, phase = next_slot(slot, phase)
    return acc0, acc1, slot, phase, at, other, w_scale, v_scale


@gluon.jit
def _store_sums(
    acc0, acc1, buffers, WHICH: gl.constexpr, out, row, end, col, sorted_ptr, weights_ptr, padding
):  # fmt: skip
    """Store both boxes' sums of the tokens before ``end``."""
    for i in gl.static_range(len(acc0)):
        first = row + i * _PART
        if first < end:
            left = weigh_tokens(acc0[i], first, sorted_ptr, weights_ptr, padding)
            store_tokens(left, buffers, 2 * WHICH, out, first, col, 2)
            right = weigh_tokens(acc1[i], first, sorted_ptr, weights_ptr, padding)
            store_tokens(right, buffers, 2 * WHICH + 1, out, first, col + _BOX, 2)


@gluon.jit
def _silu_mul(gate, up):
    """Return silu(gate) * up. Two tokens share a reciprocal: `silu_divisor` is finite even if one
    of them is NaN."""
    below0, below1 = halves_of(silu_divisor(gate))
    inverse = rcp(below0 * below1)
    both = gl.join(inverse * below1, inverse * below0).permute([0, 2, 1]).reshape(gate.shape)
    return gate * up * gl.convert_layout(both, gate.type.layout, assert_trivial=True)


@gluon.jit
def _quantized(
    y, mine, theirs, first, scales, WHICH: gl.constexpr, DTYPE: gl.constexpr
):  # fmt: skip
    """Return a part quantized, with its rows in order; one warp group stores the scales. mine and
    theirs: the largest values of both groups' columns, from ``first`` on."""
    amax = gl.maximum(_of_tokens(y, mine, first), _of_tokens(y, theirs, first))
    amax = gl.maximum(amax, _TINY)
    if WHICH == 0:
        gl.store(scales + gl.arange(0, amax.shape[0], amax.type.layout), amax * (1 / _QMAX))
    inverse = gl.fdiv(gl.full_like(amax, _QMAX), amax)
    y = (y * gl.expand_dims(inverse, 0)).to(DTYPE)
    # Of each 16 rows, the first eight are even ones, the others odd.
    return y.reshape([4, 2, 8, y.shape[1]]).permute([0, 2, 1, 3]).reshape(y.shape)


@gluon.jit
def _store_activated(
    gate, up, buffers, amax_s, amax_bar, done, WHICH: gl.constexpr, out, out_scale_ptr, row, end,
    col, capacity,
):  # fmt: skip
    """Store silu(gate) * up of the tokens before ``end``, quantized, and their scales."""
    mine = amax_s.index(2 * (done & 1) + WHICH)
    theirs = amax_s.index(2 * (done & 1) + 1 - WHICH)
    y = ()
    for i in gl.static_range(len(gate)):
        y += (_silu_mul(gate[i], up[i]),)
        mine.slice(i * _PART, y[i].shape[1]).store(gl.max(gl.abs(y[i]), axis=0))
    mbarrier.arrive(amax_bar, count=1)
    mbarrier.wait(amax_bar, done & 1)
    for i in gl.static_range(len(y)):
        first = row + i * _PART
        if first < end:
            scales = out_scale_ptr + (col // _STEP) * capacity + first
            quantized = _quantized(y[i], mine, theirs, i * _PART, scales, WHICH, out.dtype)
            store_tokens(quantized, buffers, 2 * WHICH + i % 2, out, first, col, 2)


@gluon.jit
def _tile(
    WHICH: gl.constexpr, out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, capacity,
    padding, row, col, pieces, steps, w_s, x_s, rest_s, scale_s, buffers, amax_s, amax_bar, full,
    empty, words, valid, slot, phase, taken, at, other, w_scale, v_scale, GATED: gl.constexpr,
    TOKENS: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Compute and store this warp group's half of a tile of TOKENS + REST tokens."""
    acc0, acc1, slot, phase, at, other, w_scale, v_scale = _multiply(
        WHICH, w_scale_ptr, N, steps, w_s, x_s, rest_s, scale_s, full, empty, words, valid, slot,
        phase, taken, at, other, w_scale, v_scale, GATED, TOKENS, REST)  # fmt: skip
    end = row + pieces * PIECE
    col += WHICH * ROWS
    if GATED:
        _store_activated(acc0, acc1, buffers, amax_s, amax_bar, taken - 1, WHICH, out,
                         out_scale_ptr, row, end, col, capacity)  # fmt: skip
    else:
        _store_sums(acc0, acc1, buffers, WHICH, out, row, end, col, sorted_ptr, weights_ptr,
                    padding)  # fmt: skip
    return slot, phase, at, other, w_scale, v_scale


@gluon.jit
def _consume(
    WHICH: gl.constexpr, out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, K, capacity,
    padding, w_s, x_s, rest_s, scale_s, buffers, amax_s, amax_bar, full, empty, words, valid,
    GATED: gl.constexpr,
):  # fmt: skip
    """Compute 64 weight rows of both boxes of every tile (a consumer warp group).

    Scales of weights are loaded a step ahead, during this step's products; in a tile's last step,
    those of the next tile.
    """
    MOST: gl.constexpr = _TOKENS // PIECE
    steps = gl.cdiv(K, _STEP)
    slot = 0
    phase = 0
    taken = 0
    at, other = _scales_at(words, valid, taken, N, steps, GATED)
    w_scale = _load_scalar(w_scale_ptr + at)
    v_scale = _load_scalar(w_scale_ptr + other)
    row, col, _, pieces = wait_message(words, valid, taken)
    while pieces > 0:
        taken += 1
        if pieces > MOST:
            slot, phase, at, other, w_scale, v_scale = _tile(
                WHICH, out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, capacity,
                padding, row, col, pieces, steps, w_s, x_s, rest_s, scale_s, buffers, amax_s,
                amax_bar, full, empty, words, valid, slot, phase, taken, at, other, w_scale,
                v_scale, GATED, _TOKENS, _REST)  # fmt: skip
        elif pieces > 3 * MOST // 4:
            slot, phase, at, other, w_scale, v_scale = _tile(
                WHICH, out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, capacity,
                padding, row, col, pieces, steps, w_s, x_s, None, scale_s, buffers, amax_s,
                amax_bar, full, empty, words, valid, slot, phase, taken, at, other, w_scale,
                v_scale, GATED, _TOKENS, 0)  # fmt: skip
        elif pieces > MOST // 2:
            slot, phase, at, other, w_scale, v_scale = _tile(
                WHICH, out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, capacity,
                padding, row, col, pieces, steps, w_s, x_s, None, scale_s, buffers, amax_s,
                amax_bar, full, empty, words, valid, slot, phase, taken, at, other, w_scale,
                v_scale, GATED, _TOKENS // 2, _TOKENS // 4)  # fmt: skip
        elif pieces > MOST // 4:
            slot, phase, at, other, w_scale, v_scale = _tile(
                WHICH, out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, capacity,
                padding, row, col, pieces, steps, w_s, x_s, None, scale_s, buffers, amax_s,
                amax_bar, full, empty, words, valid, slot, phase, taken, at, other, w_scale,
                v_scale, GATED, _TOKENS // 2, 0)  # fmt: skip
        else:
            slot, phase, at, other, w_scale, v_scale = _tile(
                WHICH, out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, capacity,
                padding, row, col, pieces, steps, w_s, x_s, None, scale_s, buffers, amax_s,
                amax_bar, full, empty, words, valid, slot, phase, taken, at, other, w_scale,
                v_scale, GATED, _TOKENS // 4, 0)  # fmt: skip
        row, col, _, pieces = wait_message(words, valid, taken)
    tma.store_wait(0)


@gluon.jit
def _upper(out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, K, capacity, padding, w_s,
           x_s, rest_s, scale_s, buffers, amax_s, amax_bar, full, empty, words, valid,
           GATED: gl.constexpr):  # fmt: skip
    _consume(0, out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, K, capacity, padding,
             w_s, x_s, rest_s, scale_s, buffers, amax_s, amax_bar, full, empty, words, valid,
             GATED)  # fmt: skip


@gluon.jit
def _lower(out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, K, capacity, padding, w_s,
           x_s, rest_s, scale_s, buffers, amax_s, amax_bar, full, empty, words, valid,
           GATED: gl.constexpr):  # fmt: skip
    _consume(1, out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, K, capacity, padding,
             w_s, x_s, rest_s, scale_s, buffers, amax_s, amax_bar, full, empty, words, valid,
             GATED)  # fmt: skip


# -- the producer warp --------------------------------------------------------------------------


@gluon.jit
def _commit_tile(
    words, valid, count, tiles_ptr, tile, row_tiles, col_tiles, group_m, N, GATED: gl.constexpr,
):  # fmt: skip
    """Commit what consumers need to know of a tile, with no pieces past the last one. Return its
    row, weight row and pieces."""
    OUT: gl.constexpr = _BOX if GATED else 2 * _BOX
    inside = tile < row_tiles * col_tiles
    at = gl.where(inside, tile, 0)
    row_tile, col_tile = tile_at(at, gl.maximum(row_tiles, 1), col_tiles, group_m)
    row = gl.load(tiles_ptr + 1 + 2 * row_tile)
    word = gl.where(inside, gl.load(tiles_ptr + 2 + 2 * row_tile), 0)
    expert = word // MOST_PIECES
    pieces = word % MOST_PIECES
    commit_message(words, valid, count, (row, col_tile * OUT, expert, pieces))
    return row, expert * (2 * N if GATED else N) + col_tile * OUT, pieces


@gluon.jit
def _load_weights(w, w_row, k, bar, box, GATED: gl.constexpr):
    if GATED:
        tma.async_copy_global_to_shared(w, [w_row // 16, 0, 0, k], bar, box)
    else:
        tma.async_copy_global_to_shared(w, [w_row, k], bar, box)


@gluon.jit
def _load(
    a, rest, a_scale, w, tiles_ptr, counters_ptr, N, K, group_m, w_boxes, x_boxes, rest_s, scale_s,
    full, empty, words, valid, GATED: gl.constexpr,
):  # fmt: skip
    """Load every tile's operands (the producer warp).

    A stage becomes full in two steps: tokens, their scales and the first box of weights; then the
    second. The next tile is committed after the first steps of this one, because its scales are
    loaded in this one's last step.
    """
    BOXES: gl.constexpr = _TOKENS // _TOKEN_BOX
    WEIGHTS: gl.constexpr = _BOX * _STEP
    row_tiles = gl.load(tiles_ptr)
    col_tiles = gl.cdiv(N, _BOX if GATED else 2 * _BOX)
    tiles = row_tiles * col_tiles
    steps = gl.cdiv(K, _STEP)
    look_ahead = gl.minimum(steps, STAGES) - 1
    slot = 0
    phase = 1
    count = 0
    tile = gl.program_id(0)
    row, w_row, pieces = _commit_tile(words, valid, count, tiles_ptr, tile, row_tiles, col_tiles,
                                      group_m, N, GATED)  # fmt: skip
    while tile < tiles:
        count += 1
        next_tile = tile + 0
        next_row = row + 0
        next_w = w_row + 0
        next_pieces = pieces + 0
        boxes = gl.minimum(gl.cdiv(pieces * PIECE, _TOKEN_BOX), BOXES)
        more = pieces > _TOKENS // PIECE  # the rest
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            first = full.index(2 * slot)
            second = full.index(2 * slot + 1)
            k = step * _STEP
            for box in gl.static_range(1, BOXES + 1):
                mbarrier.expect(first, WEIGHTS + box * _TOKEN_BOX * _STEP + _SCALES * 4,
                                pred=(boxes == box) & (more == 0))  # fmt: skip
            mbarrier.expect(first, WEIGHTS + (_TOKENS + _REST) * _STEP + _SCALES * 4, pred=more)
            for box in gl.static_range(BOXES):
                tma.async_copy_global_to_shared(
                    a, [row + box * _TOKEN_BOX, k], first, x_boxes.index(BOXES * slot + box),
                    pred=box < boxes)  # fmt: skip
            tma.async_copy_global_to_shared(
                rest, [row + _TOKENS, k], first, rest_s.index(slot), pred=more
            )
            tma.async_copy_global_to_shared(a_scale, [step, row], first, scale_s.index(slot))
            _load_weights(w, w_row, k, first, w_boxes.index(2 * slot), GATED)
            mbarrier.expect(second, WEIGHTS)
            other = w_row + (N if GATED else _BOX)
            _load_weights(w, other, k, second, w_boxes.index(2 * slot + 1), GATED)
            slot, phase = next_slot(slot, phase)
            if step == look_ahead:
                next_tile = schedule(tile, tiles, counters_ptr, True)
                next_row, next_w, next_pieces = _commit_tile(
                    words, valid, count, tiles_ptr, next_tile, row_tiles, col_tiles, group_m, N,
                    GATED)  # fmt: skip
        # (triton 3.6 does not carry a name that is assigned another carried name: + 0.)
        tile = next_tile + 0
        row = next_row + 0
        w_row = next_w + 0
        pieces = next_pieces + 0


@gluon.jit(do_not_specialize=["capacity", "padding", "group_m"])
def _gemm(
    a, rest, a_scale, w, out, out_scale_ptr, w_scale_ptr, tiles_ptr, sorted_ptr, counters_ptr,
    weights_ptr, N, K, capacity, padding, group_m, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:  # for all warps: the others start after this
        wait_then_launch_dependents()
    w_boxes = gl.allocate_shared_memory(w.dtype, [2 * STAGES] + w.block_shape, w.layout)
    x_s = gl.allocate_shared_memory(a.dtype, [STAGES, _TOKENS, _STEP], a.layout)
    rest_s = gl.allocate_shared_memory(a.dtype, [STAGES] + rest.block_shape, rest.layout)
    scale_s = gl.allocate_shared_memory(
        a_scale.dtype, [STAGES] + a_scale.block_shape, a_scale.layout
    )
    buffers = gl.allocate_shared_memory(out.dtype, [4] + out.block_shape, out.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    amax_s = gl.allocate_shared_memory(gl.float32, [4, _SCALES], plain)
    w_s = w_boxes._reinterpret(w.dtype, [4 * STAGES, _BOX // 2, _STEP], a.layout)
    x_boxes = x_s._reinterpret(a.dtype, [STAGES * (_TOKENS // _TOKEN_BOX), _TOKEN_BOX, _STEP],
                               a.layout)  # fmt: skip
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    amax_bars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    amax_bar = amax_bars.index(0)
    mbarrier.init(amax_bar, count=2)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(2 * slot), count=1)
        mbarrier.init(full.index(2 * slot + 1), count=1)
        mbarrier.init(empty.index(slot), count=2)
    words, valid = messages(4)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_upper, (out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, K, capacity,
                      padding, w_s, x_s, rest_s, scale_s, buffers, amax_s, amax_bar, full, empty,
                      words, valid, GATED)),
            (_lower, (out, out_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr, N, K, capacity,
                      padding, w_s, x_s, rest_s, scale_s, buffers, amax_s, amax_bar, full, empty,
                      words, valid, GATED)),
            (_load, (a, rest, a_scale, w, tiles_ptr, counters_ptr, N, K, group_m, w_boxes, x_boxes,
                     rest_s, scale_s, full, empty, words, valid, GATED)),
        ],
        [4, 1],  # warps of the second and third partition
        [240, 24],  # registers per thread: with the first's 3 * 168 of the launch
    )  # fmt: skip


_launch_gemm = Launcher(_gemm)
