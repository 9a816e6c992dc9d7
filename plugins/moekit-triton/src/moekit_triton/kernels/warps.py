"""Pieces that the kernels by specialized warps are made of (Gluon, Hopper).

A ring of STAGES tiles of both operands, of which barriers say which are full and which are empty; a
ring of messages, by which the loading warp tells the others what it loads; tiles of a product
fetched from a counter; what a product's end needs.
"""

from __future__ import annotations

from typing import Any

import torch
from moekit_kernels.align import COUNTERS
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gemm import tile_at

BLOCK_M, COLUMNS = 128, 256
"""Rows of a block, and rows of weights of a tile: gate and up rows with a gate."""
ROWS = gl.constexpr(64)  # of a warp group
WIDE = gl.constexpr(COLUMNS)
STAGES = gl.constexpr(4)
OF_BLOCKS = gl.constexpr(COUNTERS)  # where the counters of blocks begin
# Of messages. The loading warp is at most STAGES + 1 tiles ahead of a warp group, and STAGES + 3 of
# a warp that sends off what such a group hands over: fewer, and a barrier's phase would come again.
RING = gl.constexpr(8)


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
def next_slot(slot, phase):
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


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
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    length: gl.constexpr = words.shape[0] // RING
    message = ()
    for n in gl.static_range(length):
        word = words.index(count % RING * length + n).load(layout)
        message += (gl.max(word, axis=0),)
    return message


@gluon.jit
def place(tile, row_blocks, col_blocks, group_m, OUT: gl.constexpr):
    block_m, block_n = tile_at(tile, row_blocks, col_blocks, group_m)
    return block_m, block_n * OUT


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
def fetch(tile, tiles, counters_ptr, FETCH: gl.constexpr):
    """The tile after this one: from the counter, or as given out in advance."""
    if FETCH:
        tile = gl.atomic_add(counters_ptr, 1, sem="relaxed")
        if tile == tiles - 1:  # one for each tile, so the last
            gl.store(counters_ptr, 0)
    return tile + gl.num_programs(0)


@gluon.jit
def clear(ptr, length):
    """By one warp: zeros for int32 from ptr on."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    for start in range(0, length, 32):
        gl.store(ptr + start + lane, 0, mask=start + lane < length)


@gluon.jit
def fence_proxies():
    """Between a thread's own accesses to memory and asynchronous copies."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def acquired(ptr):
    """The int32 at ptr; what was released with it is there for asynchronous copies, too."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];\n fence.proxy.async;", "=r,l", [ptr], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def halves_of(x):
    """The left and the right half of x's columns; moves no register."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def begin_weighting(acc, weights_ptr, pairs_ptr, row, num_pairs):
    """acc times `weight_before` of the pairs of its rows, which begin at entry `row`; weights_ptr
    None: acc. Padding rows become 0 or NaN."""
    if weights_ptr is not None:
        rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        pair = gl.load(pairs_ptr + row + gl.arange(0, acc.shape[0], rows))
        weight = gl.load(weights_ptr + pair, mask=pair < num_pairs, other=0.0)
        acc = acc * gl.expand_dims(gl.where(gl.abs(weight) > 1.0, 1.0, weight), 1)
    return acc


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
def silu_mul(acc):
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
