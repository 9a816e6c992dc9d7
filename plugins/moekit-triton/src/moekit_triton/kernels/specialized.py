"""Grouped GEMM by specialized warps (Gluon, Hopper): rows in order in, rows in order out.

One warp asks for tiles of both operands, stages ahead and into the next tile; two warp groups
multiply, half of a block's rows each, by 256 rows of weights, and send results off through shared
memory. So a tile's end costs no waiting: what `sorted_gemm` gains by persistent programs where
registers allow, this has with a gate, too.

Where half blocks are left out, programs fetch tiles from a counter: a half costs less only where
nobody waits for the program that had none. The loading warp fetches, one ahead, and tells the
others.

Rows may be copied into order by three more warps, ahead of the tiles that read them: first by
each program a share of what the first tiles read, then a unit of rows at a time, fetched from a
counter, so that no unit waits for a program that has not begun. What of a block has been copied is
counted for it, and the loading warp waits for that.

Padding rows may hold anything: rows do not mix, and theirs become undefined.
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
    facts,
    fence_proxies,
    fetch,
    halves_of,
    hear,
    messages,
    next_slot,
    place,
    send,
    silu_mul,
    tell,
)

STEP = gl.constexpr(64)  # of K
_UNIT = gl.constexpr(8)  # rows copied at a time
_UNITS = gl.constexpr(BLOCK_M // 8)  # of a block
_COPIERS = gl.constexpr(3)
_COPIED = gl.constexpr(BLOCK_M // 8 * 128)  # counted of a copied block: 128 for a unit


def specialized_gemm(
    a_SK: torch.Tensor,
    w_LNK: torch.Tensor,
    out_SN: torch.Tensor,
    aligned: SortedAssignments,
    config: GemmConfig,
    num_pairs: int,
    num_sms: int,
    *,
    gated: bool = False,
    x_RK: torch.Tensor | None = None,
    weights_RK: torch.Tensor | None = None,
) -> None:
    """out[s] = a[s] @ w[expert of s].T for the entries s of `aligned`; gated: silu(gate) * up.

    a (capacity, K), w and out (capacity, N) of one 16-bit dtype, rows of whole 16 bytes; N is half
    of w's rows with a gate. Rows that belong to no pair become undefined. Of ``config`` group_m and
    halves count; tiles are BLOCK_M x COLUMNS. halves, and x, want counters in `aligned`.

    With x (R, K), a is written on the way, as `copy_rows` does it: rows are copied ahead of the
    tiles that read them. With weights, fp32 by pair and not gated, out[s] is multiplied by
    `weight_before` of its pair's.
    """
    num_experts, w_rows, k = w_LNK.shape
    wide = 2 if gated else 1
    n, entries = w_rows // wide, aligned.capacity
    assert a_SK.shape == (entries, k) and out_SN.shape == (entries, n)
    assert aligned.block_m == BLOCK_M and w_LNK.is_contiguous()
    assert aligned.counters is not None or not config.halves and x_RK is None
    assert weights_RK is None or not gated
    assert x_RK is None or x_RK.shape[1] == k and x_RK.stride(1) == 1
    tiles = entries // BLOCK_M * triton.cdiv(n, COLUMNS // wide)
    _launch_gemm(
        (min(tiles, num_sms),),
        descriptor(a_SK, BLOCK_M, 64),
        descriptor(w_LNK.view(num_experts * w_rows, k), COLUMNS // wide, 64),
        descriptor(out_SN, BLOCK_M // 2, COLUMNS // 2),
        x_RK, None if x_RK is None else a_SK, aligned.experts_B, aligned.assignments_S,
        aligned.num_rows, aligned.counters, weights_RK, n, k, num_pairs, config.group_m,
        *((1, 0) if x_RK is None else (num_pairs // len(x_RK), x_RK.stride(0))),
        GATED=gated, HALVES=config.halves, COPY=x_RK is not None, num_warps=4,
    )  # fmt: skip


@gluon.jit
def stages(a, w, out):
    """Shared memory: the ring of both operands' tiles, a buffer for each warp group's results, and
    the ring's barriers: full for all, empty when both groups say so. To be fenced before use."""
    a_s = gl.allocate_shared_memory(a.dtype, [STAGES, 2 * ROWS, STEP], a.layout)
    w_s = gl.allocate_shared_memory(w.dtype, [STAGES, WIDE, STEP], w.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    return a_s, w_s, buffers, full, empty


@gluon.jit
def multiply(WHICH: gl.constexpr, half_blocks, w_s, full, empty, slot, phase, steps):
    """The product of a half block and a tile of weights, by all steps of K."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    acc = gl.zeros([ROWS, WIDE], gl.float32, layout)
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        w = w_s.index(slot).permute((1, 0))
        acc = warpgroup_mma(half_blocks.index(2 * slot + WHICH), w, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # The product before this one has been read. (A name that keeps its slot from one step to
        # the next is not carried by triton 3.6.)
        last = (slot + STAGES - 1) % STAGES
        mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
        slot, phase = next_slot(slot, phase)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
    return acc, slot, phase


@gluon.jit
def skip(full, empty, slot, phase, steps):
    """Gives all steps' tiles back as they come."""
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase)
    return slot, phase


@gluon.jit
def _consume(
    WHICH: gl.constexpr, out, pairs_ptr, num_rows_ptr, weights_ptr, N, K, num_pairs, group_m, a_s,
    w_s, buffers, full, empty, words, told, GATED: gl.constexpr,
):  # fmt: skip
    """Half the rows of every tile, if any of them is used."""
    OUT: gl.constexpr = WIDE // 2 if GATED else WIDE
    half_blocks = a_s._reinterpret(a_s.dtype, [2 * STAGES, ROWS, STEP], a_s.layout)
    row_blocks = gl.load(num_rows_ptr) // (2 * ROWS)
    col_blocks = gl.cdiv(N, OUT)
    steps = gl.cdiv(K, STEP)
    slot = 0
    phase = 0
    count = 0
    tile, halves = hear(words, told, count)
    while tile < row_blocks * col_blocks:
        block_m, col = place(tile, row_blocks, col_blocks, group_m, OUT)
        row = (2 * block_m + WHICH) * ROWS
        if halves > WHICH:
            acc, slot, phase = multiply(WHICH, half_blocks, w_s, full, empty, slot, phase, steps)
            if GATED:
                send(silu_mul(acc), buffers, WHICH, out, row, col, 1)
            else:
                acc = begin_weighting(acc, weights_ptr, pairs_ptr, row, num_pairs)
                left, right = halves_of(acc)
                send(left, buffers, WHICH, out, row, col, 1)
                send(right, buffers, WHICH, out, row, col + WIDE // 2, 1)
        else:
            slot, phase = skip(full, empty, slot, phase, steps)
        count += 1
        tile, halves = hear(words, told, count)
    tma.store_wait(0)


@gluon.jit
def _upper(out, pairs_ptr, num_rows_ptr, weights_ptr, N, K, num_pairs, group_m, a_s, w_s, buffers,
           full, empty, words, told, GATED: gl.constexpr):  # fmt: skip
    _consume(0, out, pairs_ptr, num_rows_ptr, weights_ptr, N, K, num_pairs, group_m, a_s, w_s,
             buffers, full, empty, words, told, GATED)  # fmt: skip


@gluon.jit
def _lower(out, pairs_ptr, num_rows_ptr, weights_ptr, N, K, num_pairs, group_m, a_s, w_s, buffers,
           full, empty, words, told, GATED: gl.constexpr):  # fmt: skip
    _consume(1, out, pairs_ptr, num_rows_ptr, weights_ptr, N, K, num_pairs, group_m, a_s, w_s,
             buffers, full, empty, words, told, GATED)  # fmt: skip


@gluon.jit
def _copy(
    unit, x_ptr, a_ptr, pairs_ptr, copied_ptr, num_pairs, slots, K, x_stride,
    AT_ONCE: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A unit of rows of a, AT_ONCE of them and WIDTH columns at once."""
    layout: gl.constexpr = gl.BlockedLayout([AT_ONCE // WARPS, 8], [1, 32], [WARPS, 1], [1, 0])
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    for first in range(0, _UNIT, AT_ONCE):
        entry = unit * _UNIT + first + gl.arange(0, AT_ONCE, gl.SliceLayout(1, layout))
        pair = gl.load(pairs_ptr + entry)
        row = (pair // slots).to(gl.int64)
        x_ptrs = x_ptr + (row * x_stride)[:, None] + cols
        a_ptrs = a_ptr + (entry.to(gl.int64) * K)[:, None] + cols
        end = gl.where(pair < num_pairs, K, 0)[:, None]
        for col in range(0, K, WIDTH):
            mask = col + cols < end
            gl.store(a_ptrs + col, gl.load(x_ptrs + col, mask=mask), mask=mask)
    # Every thread releases what it has written.
    fence_proxies()
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    block = gl.full([32 * WARPS], 0, gl.int32, threads) + unit // _UNITS
    share = gl.full([32 * WARPS], _COPIED // (32 * WARPS * _UNITS), gl.int32, threads)
    gl.atomic_add(copied_ptr + block, share, sem="release")


@gluon.jit
def _copy_first(
    blocks, x_ptr, a_ptr, pairs_ptr, num_rows_ptr, counters_ptr, num_pairs, slots, K, x_stride,
):  # fmt: skip
    """This program's share of the first blocks' units."""
    each = gl.cdiv(blocks * _UNITS, gl.num_programs(0))
    first = gl.atomic_add(counters_ptr + 1, each, sem="relaxed")
    units = gl.load(num_rows_ptr) // _UNIT
    for unit in range(first, gl.minimum(first + each, units)):
        _copy(unit, x_ptr, a_ptr, pairs_ptr, counters_ptr + OF_BLOCKS, num_pairs, slots, K,
              x_stride, _UNIT, 2048, 4)  # fmt: skip


@gluon.jit
def _copy_ahead(
    x_ptr, a_ptr, pairs_ptr, num_rows_ptr, counters_ptr, num_pairs, slots, K, x_stride,
    COPY: gl.constexpr,
):  # fmt: skip
    """Units, until there are no more."""
    if COPY:
        units = gl.load(num_rows_ptr) // _UNIT
        next_unit = gl.atomic_add(counters_ptr + 1, 1, sem="relaxed")
        while next_unit < units:
            unit = next_unit + 0
            next_unit = gl.atomic_add(counters_ptr + 1, 1, sem="relaxed")
            _copy(unit, x_ptr, a_ptr, pairs_ptr, counters_ptr + OF_BLOCKS, num_pairs, slots, K,
                  x_stride, 1, 1024, 1)  # fmt: skip
        ended = gl.atomic_add(counters_ptr + 2, 1, sem="acq_rel")
        if ended == _COPIERS * gl.num_programs(0) - 1:  # the last: nobody will fetch a unit again
            gl.store(counters_ptr + 1, 0)
            gl.store(counters_ptr + 2, 0)


@gluon.jit
def _load(
    a, w, experts_ptr, pairs_ptr, num_rows_ptr, counters_ptr, N, K, num_pairs, group_m, a_s,
    w_boxes, full, empty, words, told, GATED: gl.constexpr, HALVES: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """w_boxes: for each stage one box, or gate above up. What the next tile needs is looked up
    behind this one's first steps, so that no product waits for it."""
    OUT: gl.constexpr = WIDE // 2 if GATED else WIDE
    BYTES: gl.constexpr = (2 * ROWS + WIDE) * STEP * 2
    row_blocks = gl.load(num_rows_ptr) // (2 * ROWS)
    col_blocks = gl.cdiv(N, OUT)
    tiles = row_blocks * col_blocks
    steps = gl.cdiv(K, STEP)
    looks = gl.minimum(steps, STAGES) - 1
    slot = 0
    phase = 1
    count = 0
    tile = gl.program_id(0)
    block_m, col, expert, halves = facts(tile, row_blocks, col_blocks, group_m, experts_ptr,
                                         pairs_ptr, num_pairs, OUT, HALVES)  # fmt: skip
    w_row = expert * (2 * N if GATED else N) + col
    while tile < tiles:
        tell(words, told, count, (tile, halves))
        count += 1
        next_tile = tile + 0
        next_m = block_m + 0
        next_row = w_row + 0
        next_halves = halves + 0
        if COPY:
            copied = 0
            while copied < _COPIED:
                copied = acquired(counters_ptr + OF_BLOCKS + block_m)
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            k = step * STEP
            tma.async_copy_global_to_shared(a, [block_m * 2 * ROWS, k], bar, a_s.index(slot))
            if GATED:
                gate = w_boxes.index(2 * slot)
                up = w_boxes.index(2 * slot + 1)
                tma.async_copy_global_to_shared(w, [w_row, k], bar, gate)
                tma.async_copy_global_to_shared(w, [w_row + N, k], bar, up)
            else:
                tma.async_copy_global_to_shared(w, [w_row, k], bar, w_boxes.index(slot))
            slot, phase = next_slot(slot, phase)
            if step == looks:
                next_tile = fetch(tile, tiles, counters_ptr, HALVES or COPY)
                if COPY and next_tile == tiles - 1 + gl.num_programs(0):
                    clear(counters_ptr + OF_BLOCKS, row_blocks)  # nobody waits for a block any more
                next_m, next_col, next_expert, next_halves = facts(
                    next_tile, row_blocks, col_blocks, group_m, experts_ptr, pairs_ptr, num_pairs,
                    OUT, HALVES)  # fmt: skip
                next_row = next_expert * (2 * N if GATED else N) + next_col
        # (A name that is given another carried name's value is not carried by triton 3.6: + 0.)
        tile = next_tile + 0
        block_m = next_m + 0
        w_row = next_row + 0
        halves = next_halves + 0
    tell(words, told, count, (tile, halves))


@gluon.jit(do_not_specialize=["num_pairs", "group_m"])
def _gemm(
    a, w, out, x_ptr, a_ptr, experts_ptr, pairs_ptr, num_rows_ptr, counters_ptr, weights_ptr, N, K,
    num_pairs, group_m, slots, x_stride,
    GATED: gl.constexpr, HALVES: gl.constexpr, COPY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:  # for all warps, which begin when this one lets them
        wait_then_launch_dependents()
    a_s, w_s, buffers, full, empty = stages(a, w, out)
    words, told = messages(2)
    fence_async_shared()
    if GATED:
        w_boxes = w_s._reinterpret(w.dtype, [2 * STAGES, WIDE // 2, STEP], w.layout)
    else:
        w_boxes = w_s
    if COPY:
        col_blocks = gl.cdiv(N, WIDE // 2 if GATED else WIDE)
        first_blocks = group_m * gl.cdiv(gl.num_programs(0), group_m * col_blocks)
        _copy_first(first_blocks, x_ptr, a_ptr, pairs_ptr, num_rows_ptr, counters_ptr, num_pairs,
                    slots, K, x_stride)  # fmt: skip
    # (A tuple with a name would make variables of constants in triton 3.6.)
    gl.warp_specialize(
        [
            (_upper, (out, pairs_ptr, num_rows_ptr, weights_ptr, N, K, num_pairs, group_m, a_s, w_s,
                      buffers, full, empty, words, told, GATED)),
            (_lower, (out, pairs_ptr, num_rows_ptr, weights_ptr, N, K, num_pairs, group_m, a_s, w_s,
                      buffers, full, empty, words, told, GATED)),
            (_load, (a, w, experts_ptr, pairs_ptr, num_rows_ptr, counters_ptr, N, K, num_pairs,
                     group_m, a_s, w_boxes, full, empty, words, told, GATED, HALVES, COPY)),
            (_copy_ahead, (x_ptr, a_ptr, pairs_ptr, num_rows_ptr, counters_ptr, num_pairs, slots, K,
                           x_stride, COPY)),
            (_copy_ahead, (x_ptr, a_ptr, pairs_ptr, num_rows_ptr, counters_ptr, num_pairs, slots, K,
                           x_stride, COPY)),
            (_copy_ahead, (x_ptr, a_ptr, pairs_ptr, num_rows_ptr, counters_ptr, num_pairs, slots, K,
                           x_stride, COPY)),
        ],
        [4, 1, 1, 1, 1],  # warps of all but the first
        [232, 40, 40, 40, 40],  # and registers of a thread: 232 + 232 + 40 = 3 * 168 of the launch
    )  # fmt: skip


_launch_gemm = Launcher(_gemm)
