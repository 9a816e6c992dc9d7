"""Grouped GEMM by specialized warps (Gluon, Hopper): rows in order in, rows in order out.

One warp asks for tiles of both operands, stages ahead and into the next tile; two warp groups
multiply, half of a block's rows each, by 256 rows of weights, and send results off through shared
memory. So a tile's end costs no waiting: what `sorted_gemm` gains by persistent programs where
registers allow, this has with a gate, too.

Where half blocks are left out, programs fetch tiles from a counter: a half costs less only where
nobody waits for the program that had none. The loading warp fetches, one ahead, and tells the
others.

Padding rows may hold anything: rows do not mix, and theirs become undefined.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
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

from .align import AlignedPairs
from .gemm import GemmConfig, tile_at
from .launch import Launcher, take_turn

BLOCK_M, COLUMNS = 128, 256
"""Rows of a block, and rows of weights of a tile: gate and up rows with a gate."""
ROWS = gl.constexpr(64)  # of a warp group
WIDE = gl.constexpr(COLUMNS)
_STEP = gl.constexpr(64)  # of K
STAGES = gl.constexpr(4)
RING = gl.constexpr(8)  # of messages: the loading warp is at most STAGES + 1 tiles ahead


def specialized_gemm(
    a_SK: torch.Tensor,
    w_LNK: torch.Tensor,
    out_SN: torch.Tensor,
    aligned: AlignedPairs,
    config: GemmConfig,
    num_pairs: int,
    num_sms: int,
    *,
    gated: bool = False,
) -> None:
    """out[s] = a[s] @ w[expert of s].T for the entries s of `aligned`; gated: silu(gate) * up.

    a (capacity, K), w and out (capacity, N) of one 16-bit dtype, rows of whole 16 bytes; N is half
    of w's rows with a gate. Rows that belong to no pair become undefined. Of ``config`` group_m and
    halves count, which wants a counter in `aligned`; tiles are BLOCK_M x COLUMNS.
    """
    num_experts, w_rows, k = w_LNK.shape
    wide = 2 if gated else 1
    n, entries = w_rows // wide, aligned.pairs_S.numel()
    assert a_SK.shape == (entries, k) and out_SN.shape == (entries, n)
    assert aligned.block_m == BLOCK_M and w_LNK.is_contiguous()
    assert aligned.counter is not None or not config.halves
    tiles = entries // BLOCK_M * triton.cdiv(n, COLUMNS // wide)
    _launch_gemm(
        (min(tiles, num_sms),),
        descriptor(a_SK, BLOCK_M, 64),
        descriptor(w_LNK.view(num_experts * w_rows, k), COLUMNS // wide, 64),
        descriptor(out_SN, BLOCK_M // 2, COLUMNS // 2),
        aligned.experts_B, aligned.pairs_S, aligned.num_rows, aligned.counter, n, k, num_pairs,
        config.group_m, GATED=gated, HALVES=config.halves, num_warps=4,
    )  # fmt: skip


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of a matrix, in boxes of rows x columns."""
    box = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(box, _DTYPES[tensor.dtype])
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)


_DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


@gluon.jit
def halves_of(x):
    """The left and the right half of x's columns; moves no register."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _ex2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def rcp(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def silu_divisor(gate):
    """1 + exp(-gate), at most 2 ** 60: a product of two is finite, so that two share a
    reciprocal."""
    return 1.0 + _ex2(gl.minimum(gate * -1.4426950408889634, 60.0))


@gluon.jit
def _silu_mul(acc):
    """silu(gate) * up of the left and the right half of acc's columns."""
    gate, up = halves_of(acc)
    below0, below1 = halves_of(silu_divisor(gate))
    inverse = rcp(below0 * below1)
    both = gl.join(inverse * below1, inverse * below0).permute([0, 2, 1]).reshape(gate.shape)
    return gate * up * gl.convert_layout(both, gate.type.layout, assert_trivial=True)


@gluon.jit
def send(x, buffers, index, out, row, col, BUFFERS: gl.constexpr):
    """Through the next of the ring of buffers, when its last store has read it."""
    tma.store_wait(BUFFERS - 1)
    buffer = buffers.index(index)
    buffer.store(x.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, col], buffer)


@gluon.jit
def next_slot(slot, phase):
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def place(tile, row_blocks, col_blocks, group_m, OUT: gl.constexpr):
    block_m, block_n = tile_at(tile, row_blocks, col_blocks, group_m)
    return block_m, block_n * OUT


@gluon.jit
def messages(LENGTH: gl.constexpr):
    """Shared memory for a ring of messages of LENGTH int32 from one warp: words, and barriers that
    say which are told. To be fenced before use."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    told = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    words = gl.allocate_shared_memory(gl.int32, [LENGTH * RING, 1], layout)
    for slot in gl.static_range(RING):
        mbarrier.init(told.index(slot), count=1)
    return words, told


@gluon.jit
def tell(words, told, count, message):
    """Message `count`, a tuple of integers."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    first = count % RING * len(message)
    for n in gl.static_range(len(message)):
        words.index(first + n).store(gl.full([1], 0, gl.int32, layout) + message[n])
    mbarrier.arrive(told.index(count % RING), count=1)


@gluon.jit
def hear(words, told, count):
    """Message `count`, when it has been told."""
    mbarrier.wait(told.index(count % RING), count // RING & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    length: gl.constexpr = words.shape[0] // RING
    message = ()
    for n in gl.static_range(length):
        word = words.index(count % RING * length + n).load(layout)
        message += (gl.max(word, axis=0),)
    return message


@gluon.jit
def _consume(
    WHICH: gl.constexpr, out, num_rows_ptr, N, K, group_m, a_s, w_s, buffers, full, empty, words,
    told, GATED: gl.constexpr,
):  # fmt: skip
    """Half the rows of every tile, if any of them is used."""
    OUT: gl.constexpr = WIDE // 2 if GATED else WIDE
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    half_blocks = a_s._reinterpret(a_s.dtype, [2 * STAGES, ROWS, _STEP], a_s.layout)
    row_blocks = gl.load(num_rows_ptr) // (2 * ROWS)
    col_blocks = gl.cdiv(N, OUT)
    steps = gl.cdiv(K, _STEP)
    slot = 0
    phase = 0
    count = 0
    tile, halves = hear(words, told, count)
    while tile < row_blocks * col_blocks:
        block_m, col = place(tile, row_blocks, col_blocks, group_m, OUT)
        row = (2 * block_m + WHICH) * ROWS
        if halves > WHICH:
            acc = gl.zeros([ROWS, WIDE], gl.float32, layout)
            for step in range(steps):
                mbarrier.wait(full.index(slot), phase)
                w = w_s.index(slot).permute((1, 0))
                acc = warpgroup_mma(half_blocks.index(2 * slot + WHICH), w, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                # The product before this one has been read. (A name that keeps its slot from one
                # step to the next is not carried by triton 3.6.)
                last = (slot + STAGES - 1) % STAGES
                mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
                slot, phase = next_slot(slot, phase)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
            if GATED:
                send(_silu_mul(acc), buffers, WHICH, out, row, col, 1)
            else:
                left, right = halves_of(acc)
                send(left, buffers, WHICH, out, row, col, 1)
                send(right, buffers, WHICH, out, row, col + WIDE // 2, 1)
        else:
            for _ in range(steps):
                mbarrier.wait(full.index(slot), phase)
                mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase)
        count += 1
        tile, halves = hear(words, told, count)
    tma.store_wait(0)


@gluon.jit
def _upper(out, num_rows_ptr, N, K, group_m, a_s, w_s, buffers, full, empty, words, told,
           GATED: gl.constexpr):  # fmt: skip
    _consume(0, out, num_rows_ptr, N, K, group_m, a_s, w_s, buffers, full, empty, words, told,
             GATED)  # fmt: skip


@gluon.jit
def _lower(out, num_rows_ptr, N, K, group_m, a_s, w_s, buffers, full, empty, words, told,
           GATED: gl.constexpr):  # fmt: skip
    _consume(1, out, num_rows_ptr, N, K, group_m, a_s, w_s, buffers, full, empty, words, told,
             GATED)  # fmt: skip


@gluon.jit
def facts(tile, row_blocks, col_blocks, group_m, experts_ptr, pairs_ptr, num_pairs,
          OUT: gl.constexpr, HALVES: gl.constexpr):  # fmt: skip
    """A tile's block, column, expert, and how many of its halves, 1 or 2, have rows; behind the
    last tile, of that."""
    row_blocks = gl.maximum(row_blocks, 1)
    tile = gl.minimum(tile, row_blocks * col_blocks - 1)
    block_m, col = place(tile, row_blocks, col_blocks, group_m, OUT)
    expert = gl.load(experts_ptr + block_m)
    halves = tile * 0 + 2
    if HALVES:
        pair = gl.load(pairs_ptr + (2 * block_m + 1) * ROWS)
        halves = gl.where(pair < num_pairs, 2, 1)
    return block_m, col, expert, halves


@gluon.jit
def fetch(tile, tiles, counter_ptr, HALVES: gl.constexpr):
    """The tile after this one: from the counter, or as given out in advance."""
    if HALVES:
        tile = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        if tile == tiles - 1:  # one for each tile, so the last
            gl.store(counter_ptr, 0)
    return tile + gl.num_programs(0)


@gluon.jit
def _load(
    a, w, experts_ptr, pairs_ptr, num_rows_ptr, counter_ptr, N, K, num_pairs, group_m, a_s, w_boxes,
    full, empty, words, told, GATED: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """w_boxes: for each stage one box, or gate above up. What the next tile needs is looked up
    behind this one's first steps, so that no product waits for it."""
    OUT: gl.constexpr = WIDE // 2 if GATED else WIDE
    BYTES: gl.constexpr = (2 * ROWS + WIDE) * _STEP * 2
    row_blocks = gl.load(num_rows_ptr) // (2 * ROWS)
    col_blocks = gl.cdiv(N, OUT)
    tiles = row_blocks * col_blocks
    steps = gl.cdiv(K, _STEP)
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
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            k = step * _STEP
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
                next_tile = fetch(tile, tiles, counter_ptr, HALVES)
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
    a, w, out, experts_ptr, pairs_ptr, num_rows_ptr, counter_ptr, N, K, num_pairs, group_m,
    GATED: gl.constexpr, HALVES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:  # for all warps, which begin when this one lets them
        take_turn()
    a_s = gl.allocate_shared_memory(a.dtype, [STAGES, 2 * ROWS, _STEP], a.layout)
    w_s = gl.allocate_shared_memory(w.dtype, [STAGES, WIDE, _STEP], w.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    words, told = messages(2)
    fence_async_shared()
    if GATED:
        w_boxes = w_s._reinterpret(w.dtype, [2 * STAGES, WIDE // 2, _STEP], w.layout)
    else:
        w_boxes = w_s
    gl.warp_specialize(
        [
            (_upper, (out, num_rows_ptr, N, K, group_m, a_s, w_s, buffers, full, empty, words, told,
                      GATED)),
            (_lower, (out, num_rows_ptr, N, K, group_m, a_s, w_s, buffers, full, empty, words, told,
                      GATED)),
            (_load, (a, w, experts_ptr, pairs_ptr, num_rows_ptr, counter_ptr, N, K, num_pairs,
                     group_m, a_s, w_boxes, full, empty, words, told, GATED, HALVES)),
        ],
        [4, 1],  # warps of the second and third
        [240, 24],  # and registers of their threads: with the first's, 3 * 168 as at the launch
    )  # fmt: skip


_launch_gemm = Launcher(_gemm)
