"""`specialized` for fp8 with scales by blocks of 128 x 128 weights and by 128 columns of a row.

A step of K has scales of its own, so its products are scaled and added to sums in fp32 (which
Hopper's fp8 tensor cores, with about 14 bits, want anyhow). A warp group multiplies its 64 rows by
128 rows of weights and then by the other 128: while it scales one product, the tensor cores have
the other warp group's.

Padding rows and their scales may hold anything: rows do not mix, and theirs become undefined.
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

from .tiles import GemmConfig
from .warps import (
    BLOCK_M,
    COLUMNS,
    ROWS,
    STAGES,
    WIDE,
    begin_weighting,
    descriptor,
    facts,
    fetch,
    halves_of,
    hear,
    messages,
    next_slot,
    rcp,
    send,
    silu_divisor,
    tell,
)

_BOX = gl.constexpr(COLUMNS // 2)  # rows of weights of a product
_STEP = gl.constexpr(SCALE_GROUP)  # of K
_PIECE = gl.constexpr(COLUMNS // 4)  # columns of a piece of the result
_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 2, 32]))
_QMAX = gl.constexpr(QMAX[torch.float8_e4m3fn])
_TINY = gl.constexpr(TINY)


def specialized_fp8_gemm(
    a_SK: torch.Tensor,
    a_scale_GS: torch.Tensor,
    w_LNK: torch.Tensor,
    w_scale_LBG: torch.Tensor,
    out_SN: torch.Tensor,
    aligned: SortedAssignments,
    config: GemmConfig,
    num_pairs: int,
    num_sms: int,
    *,
    out_scale_GS: torch.Tensor | None = None,
    weights_RK: torch.Tensor | None = None,
) -> None:
    """out[s] = a[s] @ w[expert of s].T for the entries s of `aligned`; with ``out_scale`` their
    silu(gate) * up, quantized by groups of 128 columns.

    a (capacity, K) and w e4m3, K a multiple of 16; fp32 scales: of a (ceil(K / 128), capacity), of
    w (L, ceil(rows of w / 128), ceil(K / 128)). out (capacity, N): of 16 bits, N = w's rows, a
    multiple of 8; or e4m3, N half of them, a multiple of 128, with out_scale (N / 128, capacity).
    Rows that belong to no pair become undefined. Of ``config`` group_m and halves count, which
    wants a counter in `aligned`; tiles are BLOCK_M x COLUMNS. With weights, fp32 by pair and
    without out_scale, out[s] is multiplied by `weight_before` of its pair's.
    """
    num_experts, w_rows, k = w_LNK.shape
    gated = out_scale_GS is not None
    wide = 2 if gated else 1
    n, entries, groups = w_rows // wide, aligned.capacity, triton.cdiv(k, SCALE_GROUP)
    assert a_SK.shape == (entries, k) and out_SN.shape == (entries, n) and k % 16 == 0
    assert a_scale_GS.shape == (groups, entries) and a_scale_GS.is_contiguous()
    assert w_scale_LBG.shape == (num_experts, triton.cdiv(w_rows, SCALE_GROUP), groups)
    assert w_scale_LBG.is_contiguous() and w_LNK.is_contiguous() and aligned.block_m == BLOCK_M
    assert groups * entries < 2**31 and w_scale_LBG.numel() < 2**31
    assert aligned.counters is not None or not config.halves
    assert weights_RK is None or not gated
    if gated:
        assert n % SCALE_GROUP == 0 and out_scale_GS is not None
        assert out_scale_GS.shape == (n // SCALE_GROUP, entries) and out_scale_GS.is_contiguous()
    tiles = entries // BLOCK_M * triton.cdiv(n, COLUMNS // wide)
    _launch_gemm(
        (min(tiles, num_sms),),
        descriptor(a_SK, BLOCK_M // 2, SCALE_GROUP),
        descriptor(w_LNK.view(num_experts * w_rows, k), COLUMNS // 2, SCALE_GROUP),
        descriptor(out_SN, BLOCK_M // 2, COLUMNS // 4),
        out_scale_GS, a_scale_GS, w_scale_LBG, aligned.experts_B, aligned.assignments_S,
        aligned.num_rows, aligned.counters, weights_RK, n, k, entries, num_pairs, config.group_m,
        GATED=gated, HALVES=config.halves, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _silu_mul(gate0, gate1, up0, up1):
    """silu(gate) * up of two pieces."""
    below0 = silu_divisor(gate0)
    below1 = silu_divisor(gate1)
    inverse = rcp(below0 * below1)
    return gate0 * up0 * (inverse * below1), gate1 * up1 * (inverse * below0)


@gluon.jit
def _product(a, w):
    zeros = gl.zeros([ROWS, _BOX], gl.float32, _LAYOUT)
    return warpgroup_mma(a, w.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _added(acc, product, factor):
    """acc + product * factor of the row, here and not later: LLVM would put it off past the next
    product, and double the registers of products."""
    factor = gl.expand_dims(factor, 1).broadcast_to(product.shape)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=r,r,r,r", [product, factor, acc], dtype=gl.float32,
        is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _times(x, y):
    """x * y, here and not earlier, where it would wait for what was asked for."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _scales(a_scales, w_scales, a_at, w_at, v_at):
    return gl.load(a_scales + a_at), gl.load(w_scales + w_at), gl.load(w_scales + v_at)


@gluon.jit
def _scales_at(WHICH: gl.constexpr, words, told, count, N, steps, GATED: gl.constexpr):
    """Where the scales begin of a tile's rows of a, and of both halves of its weights."""
    block_m, col, expert, _ = hear(words, told, count)
    blocks = gl.cdiv(2 * N if GATED else N, _STEP)
    block = col // _STEP
    if GATED:
        other = block + N // _STEP
    else:  # nothing is stored of columns past N
        other = gl.minimum(block + 1, blocks - 1)
    row = (2 * block_m + WHICH) * ROWS
    return row, (expert * blocks + block) * steps, (expert * blocks + other) * steps


@gluon.jit
def _consume(
    WHICH: gl.constexpr, out, out_scale_ptr, a_scale_ptr, w_scale_ptr, pairs_ptr, weights_ptr, N, K,
    entries, num_pairs, a_s, w_s, buffers, full, empty, words, told, GATED: gl.constexpr,
):  # fmt: skip
    """Half the rows of every tile, if any of them is used.

    Scales are asked for a step ahead, while this step's products are under way, and so in a tile's
    last step those of the next tile. Scales of a lie (K / 128, entries), so that eight rows of a
    warp are one sector. Those of weights are loaded as vectors of one value: what is loaded as a
    scalar is waited for at once."""
    steps = gl.cdiv(K, _STEP)
    local = gl.arange(0, ROWS, gl.SliceLayout(1, _LAYOUT))
    a_scales = a_scale_ptr + local
    w_scales = w_scale_ptr + local * 0
    slot = 0
    phase = 0
    count = 0
    a_at, w_at, v_at = _scales_at(WHICH, words, told, count, N, steps, GATED)
    a_scale, w_scale, v_scale = _scales(a_scales, w_scales, a_at, w_at, v_at)
    w_factor = a_scale * w_scale
    v_factor = a_scale * v_scale
    block_m, col, _, halves = hear(words, told, count)
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
                    a_at, w_at, v_at = _scales_at(WHICH, words, told, count, N, steps, GATED)
                    a_scale, w_scale, v_scale = _scales(a_scales, w_scales, a_at, w_at, v_at)
                else:  # (What comes behind the branches, ptxas puts behind the wait.)
                    a_at += entries
                    w_at += 1
                    v_at += 1
                    a_scale, w_scale, v_scale = _scales(a_scales, w_scales, a_at, w_at, v_at)
                product = warpgroup_mma_wait(0, deps=(product,))
                acc0 = _added(acc0, product, w_factor)
                mbarrier.wait(full.index(2 * slot + 1), phase)
                product = _product(a, w_s.index(2 * slot + 1))
                product = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(empty.index(slot), count=1)
                acc1 = _added(acc1, product, v_factor)
                w_factor = _times(a_scale, w_scale)
                v_factor = _times(a_scale, v_scale)
                slot, phase = next_slot(slot, phase)
            if GATED:
                gate0, gate1 = halves_of(acc0)
                up0, up1 = halves_of(acc1)
                y0, y1 = _silu_mul(gate0, gate1, up0, up1)
                amax = gl.maximum(gl.max(gl.abs(y0), axis=1), gl.max(gl.abs(y1), axis=1))
                amax = gl.maximum(amax, _TINY)
                inverse = gl.expand_dims(gl.fdiv(gl.full_like(amax, _QMAX), amax), 1)
                scales = out_scale_ptr + (col // _STEP) * entries + row
                gl.store(scales + gl.arange(0, ROWS, amax.type.layout), amax * (1 / _QMAX))
                send(y0 * inverse, buffers, 2 * WHICH, out, row, col, 2)
                send(y1 * inverse, buffers, 2 * WHICH + 1, out, row, col + _PIECE, 2)
            else:
                acc0 = begin_weighting(acc0, weights_ptr, pairs_ptr, row, num_pairs)
                acc1 = begin_weighting(acc1, weights_ptr, pairs_ptr, row, num_pairs)
                y0, y1 = halves_of(acc0)
                send(y0, buffers, 2 * WHICH, out, row, col, 2)
                send(y1, buffers, 2 * WHICH + 1, out, row, col + _PIECE, 2)
                y0, y1 = halves_of(acc1)
                send(y0, buffers, 2 * WHICH, out, row, col + 2 * _PIECE, 2)
                send(y1, buffers, 2 * WHICH + 1, out, row, col + 3 * _PIECE, 2)
        else:
            for _ in range(steps):
                mbarrier.wait(full.index(2 * slot), phase)
                mbarrier.wait(full.index(2 * slot + 1), phase)
                mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase)
            a_at, w_at, v_at = _scales_at(WHICH, words, told, count, N, steps, GATED)
            a_scale, w_scale, v_scale = _scales(a_scales, w_scales, a_at, w_at, v_at)
            w_factor = a_scale * w_scale
            v_factor = a_scale * v_scale
        block_m, col, _, halves = hear(words, told, count)
    tma.store_wait(0)


@gluon.jit
def _upper(out, out_scale_ptr, a_scale_ptr, w_scale_ptr, pairs_ptr, weights_ptr, N, K, entries,
           num_pairs, a_s, w_s, buffers, full, empty, words, told,
           GATED: gl.constexpr):  # fmt: skip
    _consume(0, out, out_scale_ptr, a_scale_ptr, w_scale_ptr, pairs_ptr, weights_ptr, N, K, entries,
             num_pairs, a_s, w_s, buffers, full, empty, words, told, GATED)  # fmt: skip


@gluon.jit
def _lower(out, out_scale_ptr, a_scale_ptr, w_scale_ptr, pairs_ptr, weights_ptr, N, K, entries,
           num_pairs, a_s, w_s, buffers, full, empty, words, told,
           GATED: gl.constexpr):  # fmt: skip
    _consume(1, out, out_scale_ptr, a_scale_ptr, w_scale_ptr, pairs_ptr, weights_ptr, N, K, entries,
             num_pairs, a_s, w_s, buffers, full, empty, words, told, GATED)  # fmt: skip


@gluon.jit
def _tell_facts(
    words, told, count, tile, row_blocks, col_blocks, group_m, experts_ptr, pairs_ptr, num_pairs, N,
    GATED: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Tells what consumers need of a tile, behind the last one that it has no halves. Block, row of
    the weights, and halves."""
    OUT: gl.constexpr = WIDE // 2 if GATED else WIDE
    block_m, col, expert, halves = facts(tile, row_blocks, col_blocks, group_m, experts_ptr,
                                         pairs_ptr, num_pairs, OUT, HALVES)  # fmt: skip
    expert = gl.maximum(expert, 0)  # without any rows
    halves = gl.where(tile < row_blocks * col_blocks, halves, 0)
    tell(words, told, count, (block_m, col, expert, halves))
    return block_m, expert * (2 * N if GATED else N) + col, halves


@gluon.jit
def _load(
    a, w, experts_ptr, pairs_ptr, num_rows_ptr, counters_ptr, N, K, num_pairs, group_m, a_s, w_s,
    full, empty, words, told, GATED: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """A stage is full in two steps: a, without its second half if that has no row, and the first
    box of weights (gate, or left), then the second (up, or right). The next tile is told behind
    this one's first steps, as its scales are asked for in this one's last."""
    OUT: gl.constexpr = WIDE // 2 if GATED else WIDE
    row_blocks = gl.load(num_rows_ptr) // (2 * ROWS)
    col_blocks = gl.cdiv(N, OUT)
    tiles = row_blocks * col_blocks
    steps = gl.cdiv(K, _STEP)
    looks = gl.minimum(steps, STAGES) - 1
    slot = 0
    phase = 1
    count = 0
    tile = gl.program_id(0)
    block_m, w_row, halves = _tell_facts(
        words, told, count, tile, row_blocks, col_blocks, group_m, experts_ptr, pairs_ptr,
        num_pairs, N, GATED, HALVES)  # fmt: skip
    while tile < tiles:
        count += 1
        next_tile = tile + 0
        next_m = block_m + 0
        next_row = w_row + 0
        next_halves = halves + 0
        a_row = block_m * 2 * ROWS
        both = halves == 2
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            first = full.index(2 * slot)
            second = full.index(2 * slot + 1)
            k = step * _STEP
            mbarrier.expect(first, (2 * ROWS + _BOX) * _STEP, pred=both)
            mbarrier.expect(first, (ROWS + _BOX) * _STEP, pred=halves < 2)
            tma.async_copy_global_to_shared(a, [a_row, k], first, a_s.index(2 * slot))
            tma.async_copy_global_to_shared(
                a, [a_row + ROWS, k], first, a_s.index(2 * slot + 1), pred=both)  # fmt: skip
            tma.async_copy_global_to_shared(w, [w_row, k], first, w_s.index(2 * slot))
            mbarrier.expect(second, _BOX * _STEP)
            v_row = w_row + (N if GATED else _BOX)
            tma.async_copy_global_to_shared(w, [v_row, k], second, w_s.index(2 * slot + 1))
            slot, phase = next_slot(slot, phase)
            if step == looks:
                next_tile = fetch(tile, tiles, counters_ptr, HALVES)
                next_m, next_row, next_halves = _tell_facts(
                    words, told, count, next_tile, row_blocks, col_blocks, group_m, experts_ptr,
                    pairs_ptr, num_pairs, N, GATED, HALVES)  # fmt: skip
        # (A name that is given another carried name's value is not carried by triton 3.6: + 0.)
        tile = next_tile + 0
        block_m = next_m + 0
        w_row = next_row + 0
        halves = next_halves + 0


@gluon.jit(do_not_specialize=["entries", "num_pairs", "group_m"])
def _gemm(
    a, w, out, out_scale_ptr, a_scale_ptr, w_scale_ptr, experts_ptr, pairs_ptr, num_rows_ptr,
    counters_ptr, weights_ptr, N, K, entries, num_pairs, group_m, GATED: gl.constexpr,
    HALVES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:  # for all warps, which begin when this one lets them
        wait_then_launch_dependents()
    a_s = gl.allocate_shared_memory(a.dtype, [2 * STAGES, ROWS, _STEP], a.layout)
    w_s = gl.allocate_shared_memory(w.dtype, [2 * STAGES, _BOX, _STEP], w.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [4] + out.block_shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(2 * slot), count=1)
        mbarrier.init(full.index(2 * slot + 1), count=1)
        mbarrier.init(empty.index(slot), count=2)
    words, told = messages(4)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_upper, (out, out_scale_ptr, a_scale_ptr, w_scale_ptr, pairs_ptr, weights_ptr, N, K,
                      entries, num_pairs, a_s, w_s, buffers, full, empty, words, told, GATED)),
            (_lower, (out, out_scale_ptr, a_scale_ptr, w_scale_ptr, pairs_ptr, weights_ptr, N, K,
                      entries, num_pairs, a_s, w_s, buffers, full, empty, words, told, GATED)),
            (_load, (a, w, experts_ptr, pairs_ptr, num_rows_ptr, counters_ptr, N, K, num_pairs,
                     group_m, a_s, w_s, full, empty, words, told, GATED, HALVES)),
        ],
        [4, 1],  # warps of the second and third
        [240, 24],  # and registers of their threads: with the first's, 3 * 168 as at the launch
    )  # fmt: skip


_launch_gemm = Launcher(_gemm)
