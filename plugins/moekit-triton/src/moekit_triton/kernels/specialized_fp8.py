"""`specialized` for e4m3 with scales by blocks of 128 x 128 weights and groups of 128 columns.

Each step of K has its own scales, so its product is scaled and added to sums in fp32 (Hopper's fp8
tensor cores keep about 14 bits, so long sums need that anyway). A consumer warp group multiplies
its 64 rows by 128 weight rows and then by the other 128: while it scales one product, the tensor
cores compute the other group's.

Padding rows and their scales may hold anything: rows do not mix, and their results are undefined.
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

from . import warps
from .operands import SortedLaunch
from .tiles import SpecializedTile
from .warps import BLOCK_M, COLUMNS, ROWS, STAGES, WIDE, descriptor

_BOX = gl.constexpr(COLUMNS // 2)  # weight rows of a product
_STEP = gl.constexpr(SCALE_GROUP)  # of K
_PIECE = gl.constexpr(COLUMNS // 4)  # columns of a piece of the result
_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 2, 32]))
_QMAX = gl.constexpr(QMAX[torch.float8_e4m3fn])
_TINY = gl.constexpr(TINY)


def specialized_fp8_gemm(g: SortedLaunch) -> None:
    """Compute out[s] = a[s] @ w[expert of s].T for the sorted rows s; gated: silu(gate) * up,
    quantized by groups of 128 columns."""
    num_experts, w_rows, n, k = g.sizes()
    aligned, scales, capacity = g.aligned, g.scales, g.aligned.capacity
    assert scales is not None and aligned.block_m == BLOCK_M
    assert isinstance(g.tile, SpecializedTile)
    assert aligned.counters is not None or not g.tile.halves
    tiles = capacity // BLOCK_M * triton.cdiv(n, COLUMNS // (2 if g.gated else 1))
    _launch_gemm(
        (min(tiles, g.num_sms),),
        descriptor(g.a_SK, BLOCK_M // 2, SCALE_GROUP),
        descriptor(g.w_LNK.view(num_experts * w_rows, k), COLUMNS // 2, SCALE_GROUP),
        descriptor(g.out, BLOCK_M // 2, COLUMNS // 4),
        scales.out_GS if g.gated else None, scales.a_GS, scales.w, aligned.experts_B,
        aligned.assignments_S, aligned.num_rows, aligned.counters, g.weights_RK, n, k, capacity,
        g.num_assignments, g.tile.group_m, GATED=g.gated, HALVES=g.tile.halves, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _silu_mul(gate0, gate1, up0, up1):
    """Return silu(gate) * up of two pieces."""
    below0 = warps.silu_divisor(gate0)
    below1 = warps.silu_divisor(gate1)
    inverse = warps.rcp(below0 * below1)
    return gate0 * up0 * (inverse * below1), gate1 * up1 * (inverse * below0)


@gluon.jit
def _product(a, w):
    zeros = gl.zeros([ROWS, _BOX], gl.float32, _LAYOUT)
    return warpgroup_mma(a, w.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _times(x, y):
    """Return x * y, computed here: earlier, it would wait for the loads."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _scales(a_scales, w_scales, a_at, w_at, v_at):
    return gl.load(a_scales + a_at), gl.load(w_scales + w_at), gl.load(w_scales + v_at)


@gluon.jit
def _scales_at(WHICH: gl.constexpr, mail, count, N, steps, GATED: gl.constexpr):
    """Return the offsets of a tile's first scales: of its rows of a and of both weight boxes."""
    block_m, col, expert, _ = warps.wait_message(mail, count)
    blocks = gl.cdiv(2 * N if GATED else N, _STEP)
    block = col // _STEP
    if GATED:
        other = block + N // _STEP
    else:  # columns past N are not stored
        other = gl.minimum(block + 1, blocks - 1)
    row = (2 * block_m + WHICH) * ROWS
    return row, (expert * blocks + block) * steps, (expert * blocks + other) * steps


@gluon.jit
def _consume(
    WHICH: gl.constexpr, results, sizes, memory, barriers, mail, GATED: gl.constexpr
):  # fmt: skip
    """Compute half the rows of every tile, if any of them is used (a consumer warp group).

    Scales are loaded a step ahead, during this step's products; a tile's last step loads the next
    tile's. Scales of a are (K / 128, capacity), so that eight rows of a warp are one sector. Weight
    scales are loaded as vectors of one value, because a scalar load is waited for at once.
    """
    out, out_scale_ptr, a_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr = results
    N, K, capacity, padding = sizes
    a_s, w_s, buffers = memory
    full, empty = barriers
    steps = gl.cdiv(K, _STEP)
    local = gl.arange(0, ROWS, gl.SliceLayout(1, _LAYOUT))
    a_scales = a_scale_ptr + local
    w_scales = w_scale_ptr + local * 0
    slot, phase, count = 0, 0, 0
    a_at, w_at, v_at = _scales_at(WHICH, mail, count, N, steps, GATED)
    a_scale, w_scale, v_scale = _scales(a_scales, w_scales, a_at, w_at, v_at)
    w_factor = a_scale * w_scale
    v_factor = a_scale * v_scale
    block_m, col, _, halves = warps.wait_message(mail, count)
    while halves > 0:
        row = (2 * block_m + WHICH) * ROWS
        count += 1
        if halves > WHICH:
            acc0 = gl.zeros([ROWS, _BOX], gl.float32, _LAYOUT)
            acc1 = gl.zeros([ROWS, _BOX], gl.float32, _LAYOUT)
            for step in range(steps):
                mbarrier.wait(full.index(2 * slot), phase)
                a = a_s.index(2 * slot + WHICH)
                product = _product(a, w_s.index(2 * slot))
                if step == steps - 1:
                    a_at, w_at, v_at = _scales_at(WHICH, mail, count, N, steps, GATED)
                    a_scale, w_scale, v_scale = _scales(a_scales, w_scales, a_at, w_at, v_at)
                else:  # (ptxas moves what follows the branches past the wait.)
                    a_at += capacity
                    w_at += 1
                    v_at += 1
                    a_scale, w_scale, v_scale = _scales(a_scales, w_scales, a_at, w_at, v_at)
                product = warpgroup_mma_wait(0, deps=(product,))
                acc0 = warps.add_scaled(acc0, product, w_factor)
                mbarrier.wait(full.index(2 * slot + 1), phase)
                product = _product(a, w_s.index(2 * slot + 1))
                product = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(empty.index(slot), count=1)
                acc1 = warps.add_scaled(acc1, product, v_factor)
                w_factor = _times(a_scale, w_scale)
                v_factor = _times(a_scale, v_scale)
                slot, phase = warps.next_slot(slot, phase)
            if GATED:
                gate0, gate1 = warps.halves_of(acc0)
                up0, up1 = warps.halves_of(acc1)
                y0, y1 = _silu_mul(gate0, gate1, up0, up1)
                amax = gl.maximum(gl.max(gl.abs(y0), axis=1), gl.max(gl.abs(y1), axis=1))
                amax = gl.maximum(amax, _TINY)
                inverse = gl.expand_dims(gl.fdiv(gl.full_like(amax, _QMAX), amax), 1)
                scales = out_scale_ptr + (col // _STEP) * capacity + row
                gl.store(scales + gl.arange(0, ROWS, amax.type.layout), amax * (1 / _QMAX))
                warps.store_tile(y0 * inverse, buffers, 2 * WHICH, out, row, col, 2)
                warps.store_tile(y1 * inverse, buffers, 2 * WHICH + 1, out, row, col + _PIECE, 2)
            else:
                acc0 = warps.apply_weight_before(acc0, weights_ptr, sorted_ptr, row, padding)
                acc1 = warps.apply_weight_before(acc1, weights_ptr, sorted_ptr, row, padding)
                y0, y1 = warps.halves_of(acc0)
                warps.store_tile(y0, buffers, 2 * WHICH, out, row, col, 2)
                warps.store_tile(y1, buffers, 2 * WHICH + 1, out, row, col + _PIECE, 2)
                y0, y1 = warps.halves_of(acc1)
                warps.store_tile(y0, buffers, 2 * WHICH, out, row, col + 2 * _PIECE, 2)
                warps.store_tile(y1, buffers, 2 * WHICH + 1, out, row, col + 3 * _PIECE, 2)
        else:
            for _ in range(steps):
                mbarrier.wait(full.index(2 * slot), phase)
                mbarrier.wait(full.index(2 * slot + 1), phase)
                mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = warps.next_slot(slot, phase)
            a_at, w_at, v_at = _scales_at(WHICH, mail, count, N, steps, GATED)
            a_scale, w_scale, v_scale = _scales(a_scales, w_scales, a_at, w_at, v_at)
            w_factor = a_scale * w_scale
            v_factor = a_scale * v_scale
        block_m, col, _, halves = warps.wait_message(mail, count)
    tma.store_wait(0)


@gluon.jit
def _commit_tile(
    mail, count, tile, row_blocks, col_blocks, group_m, experts_ptr, sorted_ptr, padding, N,
    GATED: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Commit a tile's block, column, expert and halves (0 past the last tile). Return its block,
    weight row and halves."""
    OUT: gl.constexpr = WIDE // 2 if GATED else WIDE
    block_m, col, expert, halves = warps.tile_info(
        tile, row_blocks, col_blocks, group_m, experts_ptr, sorted_ptr, padding, OUT, HALVES
    )
    expert = gl.maximum(expert, 0)  # -1 without any rows
    halves = gl.where(tile < row_blocks * col_blocks, halves, 0)
    warps.commit_message(mail, count, (block_m, col, expert, halves))
    return block_m, expert * (2 * N if GATED else N) + col, halves


@gluon.jit
def _load(operands, sizes, memory, barriers, mail, GATED: gl.constexpr, HALVES: gl.constexpr):
    """Load every tile's operands (the producer warp).

    A stage becomes full in two parts: a (without its second half if that has no rows) with the
    first weight box (gate, or left), and the second box (up, or right). The next tile is committed
    after this tile's first steps, because consumers load its scales in this tile's last step.
    """
    OUT: gl.constexpr = WIDE // 2 if GATED else WIDE
    a, w, experts_ptr, sorted_ptr, num_rows_ptr, counters_ptr = operands
    N, K, padding, group_m = sizes
    a_s, w_s = memory
    full, empty = barriers
    row_blocks = gl.load(num_rows_ptr) // (2 * ROWS)
    col_blocks = gl.cdiv(N, OUT)
    tiles = row_blocks * col_blocks
    steps = gl.cdiv(K, _STEP)
    look_ahead = gl.minimum(steps, STAGES) - 1
    slot, phase, count = 0, 1, 0
    tile = gl.program_id(0)
    block_m, w_row, halves = _commit_tile(
        mail, count, tile, row_blocks, col_blocks, group_m, experts_ptr, sorted_ptr,
        padding, N, GATED, HALVES)  # fmt: skip
    while tile < tiles:
        count += 1
        following = warps.renamed((tile, block_m, w_row, halves))
        a_row = block_m * 2 * ROWS
        both = halves == 2
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            first = full.index(2 * slot)
            second = full.index(2 * slot + 1)
            k = step * _STEP
            mbarrier.expect(first, (2 * ROWS + _BOX) * _STEP, pred=both)
            mbarrier.expect(first, (ROWS + _BOX) * _STEP, pred=halves < 2)
            warps.async_load(a, [a_row, k], first, a_s.index(2 * slot))
            warps.async_load(
                a, [a_row + ROWS, k], first, a_s.index(2 * slot + 1), pred=both)  # fmt: skip
            warps.async_load(w, [w_row, k], first, w_s.index(2 * slot))
            mbarrier.expect(second, _BOX * _STEP)
            v_row = w_row + (N if GATED else _BOX)
            warps.async_load(w, [v_row, k], second, w_s.index(2 * slot + 1))
            slot, phase = warps.next_slot(slot, phase)
            if step == look_ahead:
                next_tile = warps.schedule(tile, tiles, counters_ptr, HALVES)
                following = (next_tile,) + _commit_tile(
                    mail, count, next_tile, row_blocks, col_blocks, group_m, experts_ptr,
                    sorted_ptr, padding, N, GATED, HALVES)  # fmt: skip
        tile, block_m, w_row, halves = warps.renamed(following)


@gluon.jit(do_not_specialize=["capacity", "padding", "group_m"])
def _gemm(
    a, w, out, out_scale_ptr, a_scale_ptr, w_scale_ptr, experts_ptr, sorted_ptr, num_rows_ptr,
    counters_ptr, weights_ptr, N, K, capacity, padding, group_m, GATED: gl.constexpr,
    HALVES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:  # for all warps: the others start after this
        wait_then_launch_dependents()
    a_s = gl.allocate_shared_memory(a.dtype, [2 * STAGES, ROWS, _STEP], a.layout)
    w_s = gl.allocate_shared_memory(w.dtype, [2 * STAGES, _BOX, _STEP], w.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [4] + out.block_shape, out.layout)
    barriers = warps.ring_barriers(2)
    mail = warps.messages(4)
    fence_async_shared()
    results = (out, out_scale_ptr, a_scale_ptr, w_scale_ptr, sorted_ptr, weights_ptr)
    sizes = (N, K, capacity, padding)
    operands = (a, w, experts_ptr, sorted_ptr, num_rows_ptr, counters_ptr)
    gl.warp_specialize(
        [
            (_consume, (0, results, sizes, (a_s, w_s, buffers), barriers, mail, GATED)),
            (_consume, (1, results, sizes, (a_s, w_s, buffers), barriers, mail, GATED)),
            (_load, (operands, (N, K, padding, group_m), (a_s, w_s), barriers, mail, GATED,
                     HALVES)),
        ],
        [4, 1],  # warps of the second and third partition
        [240, 24],  # registers per thread: with the first's 3 * 168 of the launch
    )  # fmt: skip


_launch_gemm = Launcher(_gemm)
