"""Building blocks of the kernels by specialized warps (Gluon, Hopper).

The producer warp loads tiles of both operands into a ring of STAGES, with a full and an empty
barrier for each stage. It is also the tile scheduler: it takes tiles from a counter and commits a
message about each to a second ring, on which the consumer warps wait. The other functions are
epilogues.

Tuples group what functions pass on: ``barriers`` is (full, empty) of the ring, ``mail`` is (words,
barriers) of the messages. (In triton 3.6 a constant in a tuple with a name becomes a variable, so
constants are passed apart.)
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from moekit_kernels.align import COUNTERS
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

from .order import tile_at

BLOCK_M, COLUMNS = 128, 256
"""Rows of a block; weight rows of a tile, half of them gate and half up with a gate."""
ROWS = gl.constexpr(64)  # of a consumer warp group
WIDE = gl.constexpr(COLUMNS)
STAGES = gl.constexpr(4)
UNIT = gl.constexpr(8)  # rows copied at a time
UNITS = gl.constexpr(BLOCK_M // 8)  # units of a block
COPIED = gl.constexpr(BLOCK_M // 8 * 128)  # the counter of a copied block: 128 per unit
OF_BLOCKS = gl.constexpr(COUNTERS)  # index of the first block's counter
# Messages. The producer is at most STAGES + 1 tiles ahead of a consumer warp group, and STAGES + 3
# ahead of a warp that stores such a group's results: with a shorter ring, a barrier's parity would
# come round again before a waiting warp has seen it.
RING = gl.constexpr(8)


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the tensor descriptor of a matrix, in boxes of rows x columns."""
    assert tensor.data_ptr() % 16 == 0
    shape, strides, layout = tensor.shape, tensor.stride(), _layout(rows, columns, tensor.dtype)
    return TensorDescriptor(tensor, list(shape), list(strides), [rows, columns], layout)


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _DTYPES[dtype])


# Two of these have other names before triton 3.8, the last one before 3.9.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_MEMORY = gl.shared_memory_descriptor
reinterpret = getattr(_MEMORY, "reinterpret", None) or _MEMORY._reinterpret

_DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float32: gl.float32,
}


@gluon.jit
def next_slot(slot, phase, LENGTH: gl.constexpr = STAGES):
    """Return the ring's next stage and its phase."""
    slot += 1
    if slot == LENGTH:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def renamed(integers):
    """Return a tuple of integers under new names: in triton 3.6 a name that is assigned another
    loop-carried name keeps its first value."""
    found = ()
    for i in gl.static_range(len(integers)):
        found += (integers[i] + 0,)
    return found


@gluon.jit
def ring_barriers(EACH: gl.constexpr, LENGTH: gl.constexpr = STAGES, READERS: gl.constexpr = 2):
    """Allocate each stage's barriers: EACH full ones, for parts of the stage, and an empty one,
    which READERS consumer groups release. Fence before use."""
    full = gl.allocate_shared_memory(gl.int64, [EACH * LENGTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [LENGTH, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(LENGTH):
        for part in gl.static_range(EACH):
            mbarrier.init(full.index(EACH * slot + part), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return full, empty


@gluon.jit
def messages(LENGTH: gl.constexpr):
    """Allocate a ring of messages of LENGTH int32 from one warp, with a barrier for each message.
    Fence before use."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    valid = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    words = gl.allocate_shared_memory(gl.int32, [LENGTH * RING, 1], layout)
    for slot in gl.static_range(RING):
        mbarrier.init(valid.index(slot), count=1)
    return words, valid


@gluon.jit
def commit_message(mail, count, message):
    """Commit message ``count``, a tuple of integers."""
    words, valid = mail
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    first = count % RING * len(message)
    for n in gl.static_range(len(message)):
        words.index(first + n).store(gl.full([1], 0, gl.int32, layout) + message[n])
    mbarrier.arrive(valid.index(count % RING), count=1)


@gluon.jit
def wait_message(mail, count):
    """Wait for message ``count`` and return it."""
    words, valid = mail
    mbarrier.wait(valid.index(count % RING), count // RING & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    length: gl.constexpr = words.shape[0] // RING
    message = ()
    for n in gl.static_range(length):
        word = words.index(count % RING * length + n).load(layout)
        message += (gl.max(word, axis=0),)
    return message


@gluon.jit
def position(tile, row_blocks, col_blocks, group_m, OUT: gl.constexpr):
    """Return a tile's block and first column."""
    block_m, block_n = tile_at(tile, row_blocks, col_blocks, group_m)
    return block_m, block_n * OUT


@gluon.jit
def tile_info(tile, row_blocks, col_blocks, group_m, experts_ptr, sorted_ptr, padding,
          OUT: gl.constexpr, HALVES: gl.constexpr):  # fmt: skip
    """Return a tile's block, column, expert and number of halves that have rows (1 or 2); past the
    last tile, return the last tile's."""
    row_blocks = gl.maximum(row_blocks, 1)
    tile = gl.minimum(tile, row_blocks * col_blocks - 1)
    block_m, col = position(tile, row_blocks, col_blocks, group_m, OUT)
    expert = gl.load(experts_ptr + block_m)
    halves = tile * 0 + 2
    if HALVES:
        assignment = gl.load(sorted_ptr + (2 * block_m + 1) * ROWS)
        halves = gl.where(assignment < padding, 2, 1)
    return block_m, col, expert, halves


@gluon.jit
def schedule(tile, tiles, counters_ptr, COUNTED: gl.constexpr):
    """Return the tile after this one: from the counter, or by a fixed stride."""
    if COUNTED:
        tile = gl.atomic_add(counters_ptr, 1, sem="relaxed")
        if tile == tiles - 1:  # each tile is taken once, so this is the last
            gl.store(counters_ptr, 0)
    return tile + gl.num_programs(0)


@gluon.jit
def clear(ptr, length):
    """Store ``length`` int32 zeros from ptr on, by one warp."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    for start in range(0, length, 32):
        gl.store(ptr + start + lane, 0, mask=start + lane < length)


@gluon.jit
def fence_proxies():
    """Order this thread's memory accesses before asynchronous copies (TMA), another proxy."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_acquire(ptr):
    """Load the int32 at ptr with acquire semantics, also for asynchronous copies."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];\n fence.proxy.async;", "=r,l", [ptr], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def copy_unit(
    unit, end, copied_ptr, rows, AT_ONCE: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Copy a[s] = x[assignment of s // top_k] for a unit's rows s before ``end``.

    It copies AT_ONCE x WIDTH elements at a time, and releases the rows by the counter of their
    block of BLOCK_M rows.
    """
    layout: gl.constexpr = gl.BlockedLayout([AT_ONCE // WARPS, 8], [1, 32], [WARPS, 1], [1, 0])
    x_ptr, a_ptr, sorted_ptr, padding, top_k, K, x_stride = rows
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    for first in range(0, UNIT, AT_ONCE):
        sorted_row = unit * UNIT + first + gl.arange(0, AT_ONCE, gl.SliceLayout(1, layout))
        assignment = gl.load(sorted_ptr + sorted_row, mask=sorted_row < end, other=padding)
        row = (assignment // top_k).to(gl.int64)
        x_ptrs = x_ptr + (row * x_stride)[:, None] + cols
        a_ptrs = a_ptr + (sorted_row.to(gl.int64) * K)[:, None] + cols
        used = (assignment < padding)[:, None]
        for col in range(0, K, WIDTH):
            mask = used & (col + cols < K)
            gl.store(a_ptrs + col, gl.load(x_ptrs + col, mask=mask), mask=mask)
    # Asynchronous copies, another proxy, read these rows: each thread fences its own writes and
    # releases them by its share of the block's count.
    fence_proxies()
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    block = gl.full([32 * WARPS], 0, gl.int32, threads) + unit // UNITS
    share = gl.full([32 * WARPS], COPIED // (32 * WARPS * UNITS), gl.int32, threads)
    gl.atomic_add(copied_ptr + block, share, sem="release")


@gluon.jit
def copy_units(units, end, taken_ptr, copied_ptr, rows):
    """Copy units by one warp until the counter of taken units says that there are no more."""
    next_unit = gl.atomic_add(taken_ptr, 1, sem="relaxed")
    while next_unit < units:
        unit = next_unit + 0
        next_unit = gl.atomic_add(taken_ptr, 1, sem="relaxed")
        copy_unit(unit, end, copied_ptr, rows, 1, 1024, 1)


@gluon.jit
def zeros():
    """Return the sums of a consumer group (ROWS, WIDE) before the first product."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    return gl.zeros([ROWS, WIDE], gl.float32, layout)


@gluon.jit
def start_product(WHICH: gl.constexpr, memory, slot, acc, OUTER: gl.constexpr):
    """Start to add a stage's a @ b (OUTER: a' @ b), of a consumer group's half of a. b may lie in
    memory as (WIDE, STEP)."""
    a, b = memory[0].index(2 * slot + WHICH), memory[1].index(slot)
    if OUTER:
        a = a.permute((1, 0))
    if b.shape[0] == WIDE:
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def multiply(
    WHICH: gl.constexpr, acc, memory, barriers, slot, phase, steps, OUTER: gl.constexpr = False
):  # fmt: skip
    """Return acc plus the products of the next stages, `start_product`, and release the stages."""
    for step in range(steps):
        mbarrier.wait(barriers[0].index(slot), phase)
        acc = start_product(WHICH, memory, slot, acc, OUTER)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        release_before(barriers, slot, step > 0)  # the previous product has read its stage
        slot, phase = next_slot(slot, phase)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release_before(barriers, slot, steps > 0)
    return acc, slot, phase


@gluon.jit
def release_before(barriers, slot, pred):
    """Release the stage before slot. (triton 3.6 does not carry a name that keeps a step's slot to
    the next step.)"""
    mbarrier.arrive(barriers[1].index((slot + STAGES - 1) % STAGES), count=1, pred=pred)


@gluon.jit
def skip(barriers, slot, phase, steps):
    """Release the next stages unread."""
    for _ in range(steps):
        mbarrier.wait(barriers[0].index(slot), phase)
        mbarrier.arrive(barriers[1].index(slot), count=1)
        slot, phase = next_slot(slot, phase)
    return slot, phase


@gluon.jit
def halves_of(x):
    """Return the left and the right half of x's columns; moves no register."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def apply_weight_before(acc, weights_ptr, sorted_ptr, row, padding, AXIS: gl.constexpr = 0):
    """Return acc, whose rows (AXIS 1: columns) begin at sorted row ``row``, times `weight_before`
    of their router weights; acc itself without weights. Padding becomes 0 or NaN."""
    if weights_ptr is not None:
        rows: gl.constexpr = gl.SliceLayout(1 - AXIS, acc.type.layout)
        assignment = gl.load(sorted_ptr + row + gl.arange(0, acc.shape[AXIS], rows))
        weight = gl.load(weights_ptr + assignment, mask=assignment < padding, other=0.0)
        acc = acc * gl.expand_dims(gl.where(gl.abs(weight) > 1.0, 1.0, weight), 1 - AXIS)
    return acc


@gluon.jit
def add_scaled(acc, product, factor):
    """Return acc + product * factor[:, None], computed at this point: LLVM would delay it past the
    next product, and two products would need registers."""
    factor = gl.expand_dims(factor, 1).broadcast_to(product.shape)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=r,r,r,r", [product, factor, acc], dtype=gl.float32,
        is_pure=False, pack=1)  # fmt: skip


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
    """Return 1 + exp(-gate), at most 2 ** 60, also for NaN: then the product of two is finite, and
    they can share a reciprocal."""
    return 1.0 + _ex2(gl.minimum(gate * -1.4426950408889634, 60.0))


@gluon.jit
def sigmoid(gate):
    """Return sigmoid(gate). Two columns share a reciprocal; NaN in one does not reach the other,
    because `silu_divisor` is finite."""
    below0, below1 = halves_of(silu_divisor(gate))
    inverse = rcp(below0 * below1)
    both = gl.join(inverse * below1, inverse * below0).permute([0, 2, 1]).reshape(gate.shape)
    return gl.convert_layout(both, gate.type.layout, assert_trivial=True)


@gluon.jit
def silu_mul(gate, up):
    """Return silu(gate) * up."""
    return gate * up * sigmoid(gate)


@gluon.jit
def store_tile(x, buffers, index, out, row, col, BUFFERS: gl.constexpr, AXIS: gl.constexpr = 0):
    """Store x at out[row, col] through a buffer, after the buffer's previous store was read. AXIS
    1: store x.T, which may have fewer rows than the buffer."""
    tma.store_wait(BUFFERS - 1)
    buffer = buffers.index(index)
    if AXIS == 0:
        buffer.store(x.to(out.dtype))
    else:  # rows of the buffer beyond x's hold anything
        buffer.slice(0, x.shape[1]).store(x.to(out.dtype).permute((1, 0)))
    fence_async_shared()
    async_store(out, [row, col], buffer)
