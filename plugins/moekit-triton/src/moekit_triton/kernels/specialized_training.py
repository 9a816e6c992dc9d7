"""The products of a training step by specialized warps (Gluon, Hopper), 16 bits.

    specialized_rows     `training_gemm.rows_gemm` without gathers
    specialized_outer    `training_gemm.outer_gemm` without gathers

Roles of the warps are as in `specialized`: a producer warp, which is also the tile scheduler, and
two consumer warp groups, of which each multiplies half of a tile of 128 x 256. Rows are compact, so
loads run past an expert's end into rows of the next one. In the products of rows these do not mix
with the expert's rows, and are not stored. In outer products they are set to zero in shared memory:
the partial step comes first, so that it delays no step behind it.

The product for q ("pull") has a further warp for each consumer group. It loads h ahead of the
epilogue, by chunks of columns, and the epilogue's results leave through the same memory.
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

from .tiles import SpecializedTile
from .training_gemm import CompactRows, Epilogue
from .warps import (
    BLOCK_M,
    COLUMNS,
    ROWS,
    WIDE,
    async_load,
    async_store,
    commit_message,
    descriptor,
    halves_of,
    messages,
    next_slot,
    position,
    reinterpret,
    renamed,
    ring_barriers,
    sigmoid,
    silu_mul,
    store_tile,
    wait_message,
)

STEP = gl.constexpr(64)  # of K, or of rows in outer products
_CHUNK = gl.constexpr(64)  # columns that the epilogue for q takes at a time
_CHUNKS = gl.constexpr(4)
_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of a chunk
_STAGES = {"store": 4, "activation": 4, "pull": 3}  # what leaves memory for the epilogue

_STORE = Epilogue()


def specialized_rows(
    a_SK: torch.Tensor,
    w_LKN: torch.Tensor,
    out: torch.Tensor | None,
    rows: CompactRows,
    tile: SpecializedTile,
    num_sms: int,
    epilogue: Epilogue = _STORE,
) -> None:
    """Compute `rows_gemm` of rows in order, with silu and a gate, without clamp and bias.

    All tensors are contiguous, except that ``w_LKN`` may have its matrices transposed. N and K are
    multiples of 128. Other kinds than "pull" need ``out``; "pull" needs ``dh`` and weights.
    """
    kind, e = epilogue.kind, epilogue
    across = w_LKN.stride(2) != 1
    w = w_LKN.mT if across else w_LKN
    k, columns = w_LKN.shape[1:]
    n = columns // 2 if kind == "activation" else columns
    assert rows.block_m == BLOCK_M and n % 128 == 0 and k % 128 == 0 and a_SK.shape[1] == k
    assert a_SK.is_contiguous() and w.is_contiguous() and e.bias is None
    width = COLUMNS // 2 if kind == "activation" else COLUMNS
    wide = 64 if kind == "pull" else 128
    stored = None if out is None else descriptor(out, 64, wide)
    counter = torch.zeros(1, dtype=torch.int32, device=a_SK.device)
    _launch_rows(
        (min(rows.most_blocks * triton.cdiv(n, width), num_sms),),
        descriptor(a_SK, 64, 64),
        descriptor(w.view(-1, w.shape[2]), width if across else 64, 64 if across else COLUMNS),
        stored, *_halves(e.h, wide), *_halves(e.dh, wide), out, e.dh if kind == "pull" else e.h,
        rows.order_S, rows.blocks, rows.ends_L, e.weights, e.partials, counter, n, k,
        rows.most_blocks, tile.group_m, KIND=kind, ACROSS=across, LENGTH=_STAGES[kind], num_warps=4,
    )  # fmt: skip


def specialized_outer(
    a_SM: torch.Tensor,
    b_SN: torch.Tensor,
    out_LMN: torch.Tensor,
    rows: CompactRows,
    tile: SpecializedTile,
    num_sms: int,
    add: bool,
) -> None:
    """Compute `outer_gemm` of rows in order.

    All tensors are contiguous; M and N are multiples of 128.
    """
    experts, m, n = out_LMN.shape
    assert m % 128 == 0 and n % 128 == 0 and a_SM.shape[1] == m and b_SN.shape[1] == n
    assert a_SM.is_contiguous() and b_SN.is_contiguous() and out_LMN.is_contiguous()
    direct = add or out_LMN.dtype != a_SM.dtype
    out = out_LMN.view(experts * m, n)
    counter = torch.zeros(1, dtype=torch.int32, device=a_SM.device)
    _launch_outer(
        (min(experts * (m // BLOCK_M) * triton.cdiv(n, COLUMNS), num_sms),),
        descriptor(a_SM, 64, 64), descriptor(b_SN, 64, COLUMNS),
        out if direct else descriptor(out, 64, 128),
        rows.ends_L, counter, m, n, experts, tile.group_m, DIRECT=direct, ADD=add, LENGTH=4,
        num_warps=4,
    )  # fmt: skip


def _halves(pairs_SW: torch.Tensor | None, columns: int) -> list[TensorDescriptor | None]:
    """Return descriptors of the gate's columns and of up's."""
    if pairs_SW is None:
        return [None, None]
    return [descriptor(half, 64, columns) for half in pairs_SW.chunk(2, dim=1)]


# -- consumer warp groups -----------------------------------------------------------------------


@gluon.jit
def _operands(WHICH: gl.constexpr, a_s, b_s, slot, OUTER: gl.constexpr, ACROSS: gl.constexpr):
    """Return both operands of a consumer group in a stage: a (ROWS, STEP), b (STEP, WIDE)."""
    a = a_s.index(2 * slot + WHICH)
    b = b_s.index(slot)
    if OUTER:
        a = a.permute((1, 0))
    if ACROSS:
        b = b.permute((1, 0))
    return a, b


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, a_s, b_s, barriers, slot, phase, steps, partial, OUTER: gl.constexpr,
    ACROSS: gl.constexpr, LENGTH: gl.constexpr,
):  # fmt: skip
    """Return a @ b (ROWS, WIDE) over all steps, a consumer group's half of a tile. Of the first
    step, ``partial`` rows exist if that is not 0; negative: none."""
    full, empty = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    acc = gl.zeros([ROWS, WIDE], gl.float32, layout)
    if OUTER:
        if partial != 0:
            mbarrier.wait(full.index(slot), phase)
            _clear_rows(a_s, 2 * slot + WHICH, 1, partial)
            _clear_rows(b_s, slot, WIDE // 64, partial)
            fence_async_shared()
            a, b = _operands(WHICH, a_s, b_s, slot, OUTER, ACROSS)
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(slot), count=1)
            slot, phase = next_slot(slot, phase, LENGTH)
            steps -= 1
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        a, b = _operands(WHICH, a_s, b_s, slot, OUTER, ACROSS)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # The previous product's stage has been read. (triton 3.6 does not carry a name that keeps
        # its slot from one step to the next.)
        last = (slot + LENGTH - 1) % LENGTH
        mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
        slot, phase = next_slot(slot, phase, LENGTH)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((slot + LENGTH - 1) % LENGTH), count=1, pred=steps > 0)
    return acc, slot, phase


@gluon.jit
def _clear_rows(memory, index, PANELS: gl.constexpr, rows):
    """Set the rows of a stage from ``rows`` on to zero. Both groups do so for b, which they share:
    values that exist stay as they are."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # Panels of 64 columns lie one after another; swizzling moves nothing to another row.
    panels = reinterpret(memory, memory.dtype, [memory.shape[0] * PANELS, STEP, 64], plain)
    exists = gl.arange(0, STEP, gl.SliceLayout(1, layout))[:, None] < rows
    for panel in gl.static_range(PANELS):
        part = panels.index(index * PANELS + panel)
        value = part.load(layout)
        part.store(gl.where(exists, value, 0.0).to(memory.dtype))


@gluon.jit
def _consume_outer(
    WHICH: gl.constexpr, out, N, memory, barriers, mail, DIRECT: gl.constexpr, ADD: gl.constexpr,
    LENGTH: gl.constexpr,
):  # fmt: skip
    """Compute half the rows of every tile of the matrices."""
    a_s, b_s, buffers = memory
    slot, phase, count = 0, 0, 0
    row, col, length = wait_message(mail, count)
    while row >= 0:
        steps = gl.maximum(gl.cdiv(length, STEP), 1)
        partial = gl.where(length > 0, length % STEP, -1)
        acc, slot, phase = _multiply(WHICH, a_s, b_s, barriers, slot, phase, steps, partial, True,
                                     False, LENGTH)  # fmt: skip
        row += WHICH * ROWS
        left, right = halves_of(acc)
        if DIRECT:
            _store_parts(left, out, row, col, N, N, ROWS, ADD)
            _store_parts(right, out, row, col + WIDE // 2, N, N, ROWS, ADD)
        else:
            store_tile(left, buffers, WHICH, out, row, col, 1)
            store_tile(right, buffers, WHICH, out, row, col + WIDE // 2, 1)
        count += 1
        row, col, length = wait_message(mail, count)
    tma.store_wait(0)


@gluon.jit
def _store_parts(x, ptr, row, col, stride, N, rows, ADD: gl.constexpr):
    """Store or add x at (row, col) of a matrix, ``rows`` rows and the columns below N; half of x at
    a time, because registers do not hold more."""
    left, right = halves_of(x)
    _store_rows(left, ptr, row, col, stride, N, rows, ADD)
    _store_rows(right, ptr, row, col + x.shape[1] // 2, stride, N, rows, ADD)


@gluon.jit
def _store_rows(x, ptr, row, col, stride, N, rows, ADD: gl.constexpr):
    layout: gl.constexpr = x.type.layout
    row_R = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))[:, None]
    col_C = col + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    ptrs = ptr + (row + row_R).to(gl.int64) * stride + col_C
    ok = (row_R < rows) & (col_C < N)
    if ADD:
        x += gl.load(ptrs, mask=ok, other=0.0).to(gl.float32)
    gl.store(ptrs, x.to(ptr.dtype.element_ty), mask=ok)


@gluon.jit
def _consume_rows(
    WHICH: gl.constexpr, results, lists, sizes, memory, barriers, mail, KIND: gl.constexpr,
    ACROSS: gl.constexpr, LENGTH: gl.constexpr,
):  # fmt: skip
    """Compute half the rows of every tile, if any of them exists."""
    out, first, second, dfirst, dsecond, out_ptr, h_ptr = results
    order_ptr, weights_ptr, partials_ptr = lists
    N, K = sizes
    a_s, b_s, buffers, h_full, h_empty = memory
    full, empty = barriers
    steps = gl.cdiv(K, STEP)
    slot, phase, count = 0, 0, 0
    row, col, rows = wait_message(mail, count)
    while rows > 0:
        row += WHICH * ROWS
        rows -= WHICH * ROWS
        if rows > 0:
            if KIND == "pull":
                weight_R = _row_weights(order_ptr, weights_ptr, row, rows)
            acc, slot, phase = _multiply(WHICH, a_s, b_s, barriers, slot, phase, steps, 0, False,
                                         ACROSS, LENGTH)  # fmt: skip
            if KIND == "pull":
                _pull(WHICH, acc, weight_R, results, partials_ptr, row, col, rows, N, buffers,
                      h_full, h_empty)  # fmt: skip
            elif KIND == "activation":
                gate, up = halves_of(acc)
                _store(WHICH, gate, first, h_ptr, row, col, 2 * N, N, rows, buffers)
                a = silu_mul(gate, up)
                _store(WHICH, up, second, h_ptr + N, row, col, 2 * N, N, rows, buffers)
                _store(WHICH, a, out, out_ptr, row, col, N, N, rows, buffers)
            else:
                left, right = halves_of(acc)
                _store(WHICH, left, out, out_ptr, row, col, N, N, rows, buffers)
                _store(WHICH, right, out, out_ptr, row, col + WIDE // 2, N, N, rows, buffers)
        else:  # release the stages unread
            for _ in range(steps):
                mbarrier.wait(full.index(slot), phase)
                mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase, LENGTH)
        count += 1
        row, col, rows = wait_message(mail, count)
    tma.store_wait(0)


@gluon.jit
def _store(WHICH: gl.constexpr, x, out, ptr, row, col, stride, N, rows, buffers):
    """Store x at (row, col) of the tensor at ptr, which ``out`` describes."""
    if rows >= ROWS:
        store_tile(x, buffers, WHICH, out, row, col, 1)
    else:
        _store_parts(x, ptr, row, col, stride, N, rows, False)


@gluon.jit
def _row_weights(order_ptr, weights_ptr, row, rows):
    """Return the router weights of ROWS rows, 0 for rows that do not exist."""
    row_R = gl.arange(0, ROWS, gl.SliceLayout(1, _LAYOUT))
    assignment_R = gl.load(order_ptr + row + row_R, mask=row_R < rows, other=0)
    return gl.load(weights_ptr + assignment_R, mask=row_R < rows, other=0.0)


@gluon.jit
def _pull(
    WHICH: gl.constexpr, acc, weight_R, results, partials_ptr, row, col, rows, N, buffers, h_full,
    h_empty,
):  # fmt: skip
    """Pull weights * q back through silu and the gate, where q is ``acc``.

    Buffers of a group: two for gate, two for up, and one more. Chunks of columns take turns in the
    first ones, each twice a tile.
    """
    out, _, _, dfirst, dsecond, out_ptr, dh_ptr = results
    weight = gl.expand_dims(weight_R, 1)
    left, right = halves_of(acc)
    chunks = halves_of(left) + halves_of(right)
    sum_R = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, _LAYOUT))
    for chunk in gl.static_range(_CHUNKS):
        turn = 2 * WHICH + chunk % 2
        at = col + chunk * _CHUNK
        gate_s = buffers.index(2 * turn)
        up_s = buffers.index(2 * turn + 1)
        mbarrier.wait(h_full.index(turn), chunk // 2)
        gate = gate_s.load(_LAYOUT).to(gl.float32)
        up = up_s.load(_LAYOUT).to(gl.float32)
        q = gl.convert_layout(chunks[chunk], _LAYOUT, assert_trivial=True)
        share = sigmoid(gate)
        act = gate * share
        sum_R += gl.sum(q * act * up, axis=1)
        pulled = q * weight
        dgate = pulled * up * (share + act * (1.0 - share))
        dup = pulled * act
        pa = weight * act * up
        # The previous chunk's results have left.
        tma.store_wait(0)
        if chunk > 0:
            mbarrier.arrive(h_empty.index(2 * WHICH + (chunk - 1) % 2), count=1)
        if rows >= ROWS:
            gate_s.store(dgate.to(dfirst.dtype))
            up_s.store(dup.to(dfirst.dtype))
            if out is not None:
                buffers.index(8 + WHICH).store(pa.to(dfirst.dtype))
            fence_async_shared()
            async_store(dfirst, [row, at], gate_s)
            async_store(dsecond, [row, at], up_s)
            if out is not None:
                async_store(out, [row, at], buffers.index(8 + WHICH))
        else:
            _store_rows(dgate, dh_ptr, row, at, 2 * N, N, rows, False)
            _store_rows(dup, dh_ptr + N, row, at, 2 * N, N, rows, False)
            if out is not None:
                _store_rows(pa, out_ptr, row, at, N, N, rows, False)
    tma.store_wait(0)
    mbarrier.arrive(h_empty.index(2 * WHICH + 1), count=1)
    if partials_ptr is not None:
        row_R = gl.arange(0, ROWS, gl.SliceLayout(1, _LAYOUT))
        ptrs = partials_ptr + (row + row_R).to(gl.int64) * gl.cdiv(N, WIDE) + col // WIDE
        gl.store(ptrs, sum_R, mask=row_R < rows)


# -- warps that load ----------------------------------------------------------------------------


@gluon.jit
def _outer_tile(tile, tiles, sizes, ends_ptr):
    """Return a tile's row and column in the matrices, its column of a, its expert's first row and
    their number; past the last tile, return the last tile's."""
    M, N, group_m = sizes
    row_blocks = M // (2 * ROWS)
    col_blocks = gl.cdiv(N, WIDE)
    tile = gl.minimum(tile, tiles - 1)
    expert = tile // (row_blocks * col_blocks)
    tile = tile % (row_blocks * col_blocks)
    block_m, col = position(tile, row_blocks, col_blocks, group_m, WIDE)
    start = gl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    length = gl.load(ends_ptr + expert) - start
    m = block_m * 2 * ROWS
    return expert * M + m, col, m, start, length


@gluon.jit
def _load_outer(operands, sizes, experts, memory, barriers, mail, LENGTH: gl.constexpr):
    """Load every tile's rows (the producer warp); the last rows of an expert first."""
    BYTES: gl.constexpr = (2 * ROWS + WIDE) * STEP * 2
    a, b, ends_ptr, counter_ptr = operands
    M, N, group_m = sizes
    a_s, b_s = memory
    full, empty = barriers
    tiles = experts * (M // (2 * ROWS)) * gl.cdiv(N, WIDE)
    slot, phase, count = 0, 1, 0
    tile = gl.program_id(0)
    row, col, m, start, length = _outer_tile(tile, tiles, sizes, ends_ptr)
    while tile < tiles:
        commit_message(mail, count, (row, col, length))
        count += 1
        steps = gl.maximum(gl.cdiv(length, STEP), 1)
        look_ahead = gl.minimum(steps, LENGTH) - 1
        following = renamed((tile, row, col, m, start, length))
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            k = start + (step + steps - 1) % steps * STEP
            async_load(a, [k, m], bar, a_s.index(2 * slot))
            async_load(a, [k, m + ROWS], bar, a_s.index(2 * slot + 1))
            async_load(b, [k, col], bar, b_s.index(slot))
            slot, phase = next_slot(slot, phase, LENGTH)
            if step == look_ahead:
                next_tile = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
                next_row, next_col, next_m, next_start, next_length = _outer_tile(
                    next_tile, tiles, sizes, ends_ptr)  # fmt: skip
                following = (next_tile, next_row, next_col, next_m, next_start, next_length)
        tile, row, col, m, start, length = renamed(following)
    commit_message(mail, count, (-1, 0, 0))


@gluon.jit
def _row_tile(tile, row_blocks, sizes, lists, OUT: gl.constexpr):
    """Return a tile's first row, its number of rows, its column and expert; past the last tile,
    return the last tile's."""
    N, K, most_blocks, group_m = sizes
    blocks_ptr, ends_ptr, counter_ptr = lists
    col_blocks = gl.cdiv(N, OUT)
    blocks = gl.maximum(row_blocks, 1)
    tile = gl.minimum(tile, blocks * col_blocks - 1)
    block_m, col = position(tile, blocks, col_blocks, group_m, OUT)
    expert = gl.load(blocks_ptr + 1 + block_m, mask=row_blocks > 0, other=0)
    row = gl.load(blocks_ptr + 1 + most_blocks + block_m, mask=row_blocks > 0, other=0)
    rows = gl.minimum(gl.load(ends_ptr + expert) - row, 2 * ROWS)
    return row, rows, col, expert


@gluon.jit
def _load_rows(
    operands, sizes, lists, memory, barriers, mail, KIND: gl.constexpr, ACROSS: gl.constexpr,
    LENGTH: gl.constexpr,
):  # fmt: skip
    """Load every tile's operands (the producer warp)."""
    TWO: gl.constexpr = KIND == "activation"
    OUT: gl.constexpr = WIDE // 2 if TWO else WIDE
    BYTES: gl.constexpr = (2 * ROWS + WIDE) * STEP * 2
    a, w = operands
    N, K, most_blocks, group_m = sizes
    blocks_ptr, ends_ptr, counter_ptr = lists
    a_s, w_boxes = memory
    full, empty = barriers
    row_blocks = gl.load(blocks_ptr)
    tiles = row_blocks * gl.cdiv(N, OUT)
    steps = gl.cdiv(K, STEP)
    look_ahead = gl.minimum(steps, LENGTH) - 1
    slot, phase, count = 0, 1, 0
    tile = gl.program_id(0)
    row, rows, col, expert = _row_tile(tile, row_blocks, sizes, lists, OUT)
    while tile < tiles:
        commit_message(mail, count, (row, col, rows))
        count += 1
        following = renamed((tile, row, rows, col, expert))
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            k = step * STEP
            async_load(a, [row, k], bar, a_s.index(2 * slot))
            async_load(a, [row + ROWS, k], bar, a_s.index(2 * slot + 1))
            if TWO:
                w_row = expert * 2 * N + col
                gate = w_boxes.index(2 * slot)
                up = w_boxes.index(2 * slot + 1)
                async_load(w, [w_row, k], bar, gate)
                async_load(w, [w_row + N, k], bar, up)
            elif ACROSS:
                async_load(w, [expert * N + col, k], bar, w_boxes.index(slot))
            else:
                async_load(w, [expert * K + k, col], bar, w_boxes.index(slot))
            slot, phase = next_slot(slot, phase, LENGTH)
            if step == look_ahead:
                next_tile = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
                next_row, next_rows, next_col, next_expert = _row_tile(
                    next_tile, row_blocks, sizes, lists, OUT)  # fmt: skip
                following = (next_tile, next_row, next_rows, next_col, next_expert)
        tile, row, rows, col, expert = renamed(following)
    commit_message(mail, count, (0, 0, 0))


@gluon.jit
def _load_h(WHICH: gl.constexpr, of_h, mail, KIND: gl.constexpr):
    """Load h for the epilogue of one consumer group, two chunks ahead."""
    BYTES: gl.constexpr = 2 * ROWS * _CHUNK * 2
    if KIND == "pull":
        first, second, buffers, h_full, h_empty = of_h
        count = 0
        row, col, rows = wait_message(mail, count)
        while rows > 0:
            if rows > WHICH * ROWS:
                for chunk in gl.static_range(_CHUNKS):
                    turn = 2 * WHICH + chunk % 2
                    mbarrier.wait(h_empty.index(turn), 1 - chunk // 2)
                    bar = h_full.index(turn)
                    mbarrier.expect(bar, BYTES)
                    at = [row + WHICH * ROWS, col + chunk * _CHUNK]
                    async_load(first, at, bar, buffers.index(2 * turn))
                    async_load(second, at, bar, buffers.index(2 * turn + 1))
            count += 1
            row, col, rows = wait_message(mail, count)


# -- kernels ------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["experts", "group_m"])
def _outer(
    a, b, out, ends_ptr, counter_ptr, M, N, experts, group_m, DIRECT: gl.constexpr,
    ADD: gl.constexpr, LENGTH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        wait_then_launch_dependents()
    a_s = gl.allocate_shared_memory(a.dtype, [2 * LENGTH, STEP, ROWS], a.layout)
    b_s = gl.allocate_shared_memory(b.dtype, [LENGTH, STEP, WIDE], b.layout)
    if DIRECT:
        buffers = b_s  # not used
    else:
        buffers = gl.allocate_shared_memory(out.dtype, [2, ROWS, WIDE // 2], out.layout)
    barriers = ring_barriers(1, LENGTH)
    mail = messages(3)
    fence_async_shared()
    memory = (a_s, b_s, buffers)
    operands = (a, b, ends_ptr, counter_ptr)
    gl.warp_specialize(
        [
            (_consume_outer, (0, out, N, memory, barriers, mail, DIRECT, ADD, LENGTH)),
            (_consume_outer, (1, out, N, memory, barriers, mail, DIRECT, ADD, LENGTH)),
            (_load_outer, (operands, (M, N, group_m), experts, (a_s, b_s), barriers, mail, LENGTH)),
        ],
        [4, 1],  # warps of the second and third partition
        [232, 40],  # registers per thread: with the first's 3 * 168 of the launch
    )  # fmt: skip


@gluon.jit(do_not_specialize=["most_blocks", "group_m"])
def _rows(
    a, w, out, first, second, dfirst, dsecond, out_ptr, h_ptr, order_ptr, blocks_ptr, ends_ptr,
    weights_ptr, partials_ptr, counter_ptr, N, K, most_blocks, group_m,
    KIND: gl.constexpr, ACROSS: gl.constexpr, LENGTH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        wait_then_launch_dependents()
    a_s = gl.allocate_shared_memory(a.dtype, [2 * LENGTH, ROWS, STEP], a.layout)
    if ACROSS:
        w_s = gl.allocate_shared_memory(w.dtype, [LENGTH, WIDE, STEP], w.layout)
    else:
        w_s = gl.allocate_shared_memory(w.dtype, [LENGTH, STEP, WIDE], w.layout)
    if KIND == "activation":
        w_boxes = reinterpret(w_s, w.dtype, [2 * LENGTH, WIDE // 2, STEP], w.layout)
    else:
        w_boxes = w_s
    barriers = ring_barriers(1, LENGTH)
    mail = messages(3)
    if KIND == "pull":
        buffers = gl.allocate_shared_memory(first.dtype, [10, ROWS, _CHUNK], first.layout)
        h_full, h_empty = ring_barriers(1, 4, 1)
    else:
        buffers = gl.allocate_shared_memory(out.dtype, [2, ROWS, WIDE // 2], out.layout)
        h_full, h_empty = barriers  # not used
    fence_async_shared()
    memory = (a_s, w_s, buffers, h_full, h_empty)
    results = (out, first, second, dfirst, dsecond, out_ptr, h_ptr)
    lists = (order_ptr, weights_ptr, partials_ptr)
    sizes = (N, K, most_blocks, group_m)
    blocks = (blocks_ptr, ends_ptr, counter_ptr)
    of_h = (first, second, buffers, h_full, h_empty)
    gl.warp_specialize(
        [
            (_consume_rows, (0, results, lists, (N, K), memory, barriers, mail, KIND, ACROSS,
                             LENGTH)),
            (_consume_rows, (1, results, lists, (N, K), memory, barriers, mail, KIND, ACROSS,
                             LENGTH)),
            (_load_rows, ((a, w), sizes, blocks, (a_s, w_boxes), barriers, mail, KIND, ACROSS,
                          LENGTH)),
            (_load_h, (0, of_h, mail, KIND)),
            (_load_h, (1, of_h, mail, KIND)),
        ],
        [4, 1, 1, 1], [232, 40, 40, 40],
    )  # fmt: skip


_launch_outer, _launch_rows = map(Launcher, (_outer, _rows))
