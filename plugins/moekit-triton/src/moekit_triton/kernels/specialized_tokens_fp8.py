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

from .operands import SortedOperands
from .token_tiles import PIECE, TokenSizes, most_tiles, token_sizes
from .token_warps import BOX, load_tiles, on_least_tokens, token_stages
from .warps import (
    ROWS,
    STAGES,
    add_scaled,
    apply_weight_before,
    descriptor,
    halves_of,
    messages,
    next_slot,
    ring_barriers,
    silu_mul,
    store_tile,
    wait_message,
)

_STEP = gl.constexpr(SCALE_GROUP)  # of K
_WEIGHTS = gl.constexpr(128)  # weight rows of a load
_TOKENS = gl.constexpr(128)
_REST = gl.constexpr(16)
_PART = gl.constexpr(32)  # tokens that are scaled, and stored, at a time
_SCALES = gl.constexpr(256)  # tokens whose scales are loaded
_QMAX = gl.constexpr(QMAX[torch.float8_e4m3fn])
_TINY = gl.constexpr(TINY)


def specialized_tokens_fp8_gemm(g: SortedOperands) -> None:
    """Compute out[s] = a[s] @ w[expert of s].T for the sorted rows s; gated: silu(gate) * up,
    quantized by groups of 128 columns."""
    num_experts, w_rows, n, k = g.sizes()
    aligned, scales = g.aligned, g.scales
    assert scales is not None and aligned.block_m % BOX.value == 0 and aligned.counters is not None
    assert token_sizes(g.config, g.gated) == TokenSizes(_TOKENS.value, _REST.value)
    if g.gated:
        w = _paired(g.w_LNK)
    else:
        w = descriptor(g.w_LNK.view(num_experts * w_rows, k), _WEIGHTS.value, SCALE_GROUP)
    most = most_tiles(g.num_assignments, num_experts, _TOKENS.value)
    _launch_gemm(
        (min(most * triton.cdiv(w_rows, 2 * _WEIGHTS.value), g.num_sms),),
        descriptor(g.a_SK, BOX.value, SCALE_GROUP),
        descriptor(g.a_SK, _REST.value, SCALE_GROUP),
        descriptor(scales.a_GS, 1, _SCALES.value), w, descriptor(g.out, _PART.value, 64),
        scales.out_GS if g.gated else None, scales.w, g.token_tiles, aligned.assignments_S,
        aligned.counters, g.weights_RK, n, k, aligned.capacity, g.num_assignments, g.config.group_m,
        GATED=g.gated, num_warps=4,
    )  # fmt: skip


def _paired(w_LNK: torch.Tensor) -> TensorDescriptor:
    """Return the descriptor of boxes of 128 rows, of each 16 the even ones before the odd ones:
    wgmma's rows r and r + 8, which a thread holds both, are then neighbours."""
    num_experts, w_rows, k = w_LNK.shape
    shape, strides = [num_experts * w_rows // 16, 2, 8, k], [16 * k, k, 2 * k, 1]
    box = [_WEIGHTS.value // 16, 2, 8, SCALE_GROUP]
    layout = gl.NVMMASharedLayout(128, 8, rank=4)
    return TensorDescriptor(w_LNK, shape, strides, box, layout)


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
        found += (add_scaled(acc[i], parts[i], factor, 1),)
    return found


@gluon.jit
def _load_scalar(ptr):
    """Load an fp32, and wait for it where it is used: `gl.load` of a scalar would wait at once."""
    return gl.inline_asm_elementwise(
        "ld.global.f32 $0, [$1];", "=f,l", [ptr], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _scales_at(mail, count, N, steps, GATED: gl.constexpr):
    """Return where the scales of both boxes of a tile's weights begin."""
    _, col, expert, _ = wait_message(mail, count)
    blocks = gl.cdiv(2 * N if GATED else N, _STEP)
    block = col // _STEP
    if GATED:
        other = block + N // _STEP
    else:  # columns past N are not stored
        other = gl.minimum(block + 1, blocks - 1)
    return (expert * blocks + block) * steps, (expert * blocks + other) * steps


@gluon.jit
def _next_scales(last, at, other, weights, mail, taken, steps, GATED: gl.constexpr):
    """Return where the next step's scales of weights are, and both; after a tile's ``last`` step
    those of the next tile."""
    w_scale_ptr, N = weights
    if last:
        at, other = _scales_at(mail, taken, N, steps, GATED)
        scale, other_scale = _load_scalar(w_scale_ptr + at), _load_scalar(w_scale_ptr + other)
    else:  # (ptxas moves what follows the branches past the wait.)
        at += 1
        other += 1
        scale, other_scale = _load_scalar(w_scale_ptr + at), _load_scalar(w_scale_ptr + other)
    return at, other, scale, other_scale


@gluon.jit
def _wait_added(acc, product, more, scales, w_scale, TOKENS: gl.constexpr, REST: gl.constexpr):
    """Wait for a product, and for that of the rest, and add both to the parts ``acc``."""
    if REST > 0:
        product, more = warpgroup_mma_wait(0, deps=(product, more))
        rest = _add_scaled((acc[-1],), more, scales.slice(TOKENS, REST), w_scale)
        return _add_scaled(acc, product, scales, w_scale) + rest
    else:
        product = warpgroup_mma_wait(0, deps=(product,))
        return _add_scaled(acc, product, scales, w_scale)


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, weights, tile, memory, barriers, mail, state, GATED: gl.constexpr,
    TOKENS: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Return the parts of the products of 64 rows of both boxes, and the next state. The rest's
    part is the last."""
    w_s, x_s, rest_s, scale_s = memory
    full, empty = barriers
    steps, taken = tile
    slot, phase, at, other, w_scale, v_scale = state
    acc0 = _parts(_zeros(TOKENS))
    if REST > 0:
        acc0 += (_zeros(REST),)
    acc1 = acc0
    for step in range(steps):
        mbarrier.wait(full.index(2 * slot), phase)
        scales = scale_s.index(slot).reshape([_SCALES])
        x = x_s.index(slot)
        if REST > 0:
            if TOKENS < _TOKENS:
                rest = x.slice(TOKENS, REST)
            else:
                rest = rest_s.index(slot)
        x = x.slice(0, TOKENS)
        w = w_s.index(4 * slot + WHICH)
        product = _product(w, x, TOKENS)
        at, other, next_w, next_v = _next_scales(step == steps - 1, at, other, weights, mail, taken,
                                                 steps, GATED)  # fmt: skip
        more = _product(w, rest, REST) if REST > 0 else product
        acc0 = _wait_added(acc0, product, more, scales, w_scale, TOKENS, REST)
        mbarrier.wait(full.index(2 * slot + 1), phase)
        w = w_s.index(4 * slot + 2 + WHICH)
        product = _product(w, x, TOKENS)
        more = _product(w, rest, REST) if REST > 0 else product
        acc1 = _wait_added(acc1, product, more, scales, v_scale, TOKENS, REST)
        mbarrier.arrive(empty.index(slot), count=1)
        w_scale = next_w
        v_scale = next_v
        slot, phase = next_slot(slot, phase)
    return acc0, acc1, (slot, phase, at, other, w_scale, v_scale)


@gluon.jit
def _store_sums(WHICH: gl.constexpr, acc0, acc1, results, buffers, row, end, col):
    """Store both boxes' sums of the tokens before ``end``."""
    out, sorted_ptr, weights_ptr, padding = results
    for i in gl.static_range(len(acc0)):
        first = row + i * _PART
        if first < end:
            left = apply_weight_before(acc0[i], weights_ptr, sorted_ptr, first, padding, 1)
            store_tile(left, buffers, 2 * WHICH, out, first, col, 2, 1)
            right = apply_weight_before(acc1[i], weights_ptr, sorted_ptr, first, padding, 1)
            store_tile(right, buffers, 2 * WHICH + 1, out, first, col + _WEIGHTS, 2, 1)


@gluon.jit
def _quantized(
    WHICH: gl.constexpr, y, mine, theirs, first, scales, DTYPE: gl.constexpr
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
    WHICH: gl.constexpr, gate, up, out, scales_ptr, buffers, done, row, end, col
):  # fmt: skip
    """Store silu(gate) * up of the tokens before ``end``, quantized, and their scales. buffers:
    memory for the warp groups' largest values, their barrier, and memory for results."""
    amax_s, amax_bar, results_s = buffers
    mine = amax_s.index(2 * (done & 1) + WHICH)
    theirs = amax_s.index(2 * (done & 1) + 1 - WHICH)
    y = ()
    for i in gl.static_range(len(gate)):
        y += (silu_mul(gate[i], up[i]),)
        mine.slice(i * _PART, y[i].shape[1]).store(gl.max(gl.abs(y[i]), axis=0))
    mbarrier.arrive(amax_bar, count=1)
    mbarrier.wait(amax_bar, done & 1)
    for i in gl.static_range(len(y)):
        first = row + i * _PART
        if first < end:
            quantized = _quantized(WHICH, y[i], mine, theirs, i * _PART, scales_ptr + first,
                                   out.dtype)  # fmt: skip
            store_tile(quantized, results_s, 2 * WHICH + i % 2, out, first, col, 2, 1)


@gluon.jit
def _tile(
    WHICH: gl.constexpr, GATED: gl.constexpr, given, state, TOKENS: gl.constexpr,
    REST: gl.constexpr,
):  # fmt: skip
    """Compute and store this warp group's half of a tile of TOKENS + REST tokens."""
    results, weights, tile, memory, buffers, barriers, mail = given
    out, out_scale_ptr, capacity, sorted_ptr, weights_ptr, padding = results
    row, col, pieces, steps, taken = tile
    acc0, acc1, state = _multiply(WHICH, weights, (steps, taken), memory, barriers, mail, state,
                                  GATED, TOKENS, REST)  # fmt: skip
    end = row + pieces * PIECE
    col += WHICH * ROWS
    if GATED:
        scales_ptr = out_scale_ptr + (col // _STEP) * capacity
        _store_activated(WHICH, acc0, acc1, out, scales_ptr, buffers, taken - 1, row, end, col)
    else:
        sums = (out, sorted_ptr, weights_ptr, padding)
        _store_sums(WHICH, acc0, acc1, sums, buffers[2], row, end, col)
    return state


@gluon.jit
def _consume(
    WHICH: gl.constexpr, results, weights, K, memory, buffers, barriers, mail, GATED: gl.constexpr
):  # fmt: skip
    """Compute 64 weight rows of both boxes of every tile (a consumer warp group).

    Scales of weights are loaded a step ahead, during this step's products; in a tile's last step,
    those of the next tile.
    """
    w_scale_ptr, N = weights
    steps = gl.cdiv(K, _STEP)
    taken = 0
    at, other = _scales_at(mail, taken, N, steps, GATED)
    w_scale = _load_scalar(w_scale_ptr + at)
    v_scale = _load_scalar(w_scale_ptr + other)
    state = (0, 0, at, other, w_scale, v_scale)
    row, col, _, pieces = wait_message(mail, taken)
    while pieces > 0:
        taken += 1
        tile = (row, col, pieces, steps, taken)
        given = (results, weights, tile, memory, buffers, barriers, mail)
        state = on_least_tokens(_tile, WHICH, GATED, pieces, given, state, _TOKENS, _REST,
                                _TOKENS)  # fmt: skip
        row, col, _, pieces = wait_message(mail, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["capacity", "padding", "group_m"])
def _gemm(
    a, rest, a_scale, w, out, out_scale_ptr, w_scale_ptr, tiles_ptr, sorted_ptr, counters_ptr,
    weights_ptr, N, K, capacity, padding, group_m, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:  # for all warps: the others start after this
        wait_then_launch_dependents()
    w_boxes, w_s, x_s, tokens = token_stages(a, rest, w, _WEIGHTS, _TOKENS, 2)
    scale_s = gl.allocate_shared_memory(
        a_scale.dtype, [STAGES] + a_scale.block_shape, a_scale.layout
    )
    results_s = gl.allocate_shared_memory(out.dtype, [4] + out.block_shape, out.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    amax_s = gl.allocate_shared_memory(gl.float32, [4, _SCALES], plain)
    amax_bars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    amax_bar = amax_bars.index(0)
    mbarrier.init(amax_bar, count=2)
    barriers = ring_barriers(2)
    mail = messages(4)
    fence_async_shared()
    results = (out, out_scale_ptr, capacity, sorted_ptr, weights_ptr, padding)
    weights = (w_scale_ptr, N)
    memory = (w_s, x_s, tokens[3], scale_s)
    buffers = (amax_s, amax_bar, results_s)
    gl.warp_specialize(
        [
            (_consume, (0, results, weights, K, memory, buffers, barriers, mail, GATED)),
            (_consume, (1, results, weights, K, memory, buffers, barriers, mail, GATED)),
            (load_tiles, (tokens, (a_scale, scale_s), (w, w_boxes), (tiles_ptr, group_m),
                          counters_ptr, N, K, barriers, mail, _WEIGHTS, 2, GATED)),
        ],
        [4, 1],  # warps of the second and third partition
        [240, 24],  # registers per thread: with the first's 3 * 168 of the launch
    )  # fmt: skip


_launch_gemm = Launcher(_gemm)
