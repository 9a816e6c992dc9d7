"""The products of a training step by specialized warps (Gluon, Hopper), 16 bits.

    specialized_rows     `training_gemm.rows_gemm` without gathers
    specialized_outer    `training_gemm.outer_gemm` without gathers

Roles of the warps are as in `specialized`: a producer warp, which is also the tile scheduler, and
two consumer warp groups, of which each multiplies half of a tile of 128 x 256. Rows are compact, so
loads run past an expert's end into rows of the next one. In the products of rows these do not mix
with the expert's rows, and are not stored. In outer products they are set to zero in shared memory:
the partial step comes first, so that it delays no step behind it.

Two epilogues read memory: the product for q ("pull") reads h, and an outer product that adds reads
the sums so far. Both come through the ring in chunks of 64 columns, as further steps of the tile,
so they are loaded before the product ends. Results replace them in the same stage.

Three more warps can copy rows into the order of the experts: what the product reads, ahead of its
tiles, as in `specialized`, or what a later product reads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from moekit_kernels.launch import Launcher, wait_then_launch_dependents
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from . import warps
from .tiles import SpecializedTile
from .training_gemm import CompactRows, Epilogue
from .warps import BLOCK_M, COLUMNS, COPIED, ROWS, STAGES, UNITS, WIDE, descriptor

STEP = gl.constexpr(64)  # of K, or of rows in outer products
_CHUNK = gl.constexpr(64)  # columns of an epilogue that reads memory
_CHUNKS = gl.constexpr(4)
_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of a chunk
_STORE = Epilogue()


def specialized_rows(
    a_SK: torch.Tensor,
    w_LKN: torch.Tensor,
    out: torch.Tensor | None,
    rows: CompactRows,
    tile: SpecializedTile,
    num_sms: int,
    epilogue: Epilogue = _STORE,
    source_RK: torch.Tensor | None = None,
) -> None:
    """Compute `rows_gemm` of rows in order, with silu and a gate, without clamp and bias.

    All tensors are contiguous, except that ``w_LKN`` may have its matrices transposed, and
    ``source_RK`` only needs contiguous rows. N and K are multiples of 128. Other kinds than "pull"
    need ``out``; "pull" needs ``dh`` and weights. source_RK: ``a_SK`` is filled from it, one row
    for each assignment.
    """
    kind, e = epilogue.kind, epilogue
    w = w_LKN.mT if (across := w_LKN.stride(2) != 1) else w_LKN
    k, columns = w_LKN.shape[1:]
    n, width = (columns // 2, COLUMNS // 2) if kind == "activation" else (columns, COLUMNS)
    assert rows.block_m == BLOCK_M and n % 128 == 0 and k % 128 == 0 and a_SK.shape[1] == k
    assert a_SK.is_contiguous() and w.is_contiguous() and e.bias is None
    pull = kind == "pull"
    loaded, stored = (e.h, e.dh) if pull else (None, e.h)
    wide = 64 if pull else 128
    _launch(
        (min(rows.most_blocks * triton.cdiv(n, width), num_sms),), descriptor(a_SK, 64, 64),
        descriptor(w.view(-1, w.shape[2]), width if across else 64, 64 if across else COLUMNS),
        *_halves(loaded, wide), None if out is None else descriptor(out, 64, wide),
        *_halves(stored, wide), out, stored, rows.order_S, e.weights, e.partials, rows.blocks,
        rows.ends_L, _counters(rows), 0, n, k, rows.most_blocks, tile.group_m,
        *_copied(source_RK, a_SK, rows), KIND=kind, num_warps=4,
    )  # fmt: skip


def specialized_outer(
    a_SM: torch.Tensor,
    b_SN: torch.Tensor,
    out_LMN: torch.Tensor,
    rows: CompactRows,
    tile: SpecializedTile,
    num_sms: int,
    add: bool,
    copy: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Compute `outer_gemm` of rows in order.

    All tensors are contiguous; M and N are multiples of 128. copy: a source (R, H), and memory (S,
    H) that is filled from it meanwhile, one row for each assignment.
    """
    experts, m, n = out_LMN.shape
    assert m % 128 == 0 and n % 128 == 0 and a_SM.shape[1] == m and b_SN.shape[1] == n
    assert a_SM.is_contiguous() and b_SN.is_contiguous() and out_LMN.is_contiguous()
    source, filled = copy or (None, b_SN)
    out = descriptor(out_LMN.view(-1, n), 64, 64 if add or out_LMN.dtype.itemsize == 4 else 128)
    _launch(
        (min(experts * (m // BLOCK_M) * triton.cdiv(n, COLUMNS), num_sms),),
        descriptor(a_SM, 64, 64), descriptor(b_SN, 64, COLUMNS), out if add else None, None, out,
        *[None] * 4, rows.order_S, *[None] * 3, rows.ends_L, _counters(rows), m, n, 0, experts,
        tile.group_m, *_copied(source, filled, rows), KIND="add" if add else "outer", num_warps=4,
    )  # fmt: skip


def _counters(rows: CompactRows) -> torch.Tensor:
    """Return a launch's counters: of tiles, of copied units, and of each block's copied rows."""
    size = 2 + triton.cdiv(len(rows.order_S), BLOCK_M)
    return torch.zeros(size, dtype=torch.int32, device=rows.order_S.device)


def _copied(source: torch.Tensor | None, into: torch.Tensor, rows: CompactRows) -> list[Any]:
    """Return the kernel's arguments for a copy of ``source``, which may be None."""
    assert source is None or source.stride(1) == 1 and source.shape[1] == into.shape[1]
    stride = 0 if source is None else source.stride(0)
    sizes = len(rows.order_S), rows.top_k, into.shape[1], stride, len(rows.ends_L)
    return [source, None if source is None else into, *sizes]


def _halves(pairs_SW: torch.Tensor | None, columns: int) -> list[Any]:
    """Return descriptors of the gate's columns and of up's."""
    halves = (None, None) if pairs_SW is None else pairs_SW.chunk(2, dim=1)
    return [None if half is None else descriptor(half, 64, columns) for half in halves]


# -- consumer warp groups -----------------------------------------------------------------------


@gluon.jit
def _multiply_partial(WHICH: gl.constexpr, memory, barriers, slot, phase, rows):
    """Return a' @ b of a stage, of which ``rows`` rows exist, or none if that is negative. Release
    the stage."""
    mbarrier.wait(barriers[0].index(slot), phase)
    _clear_rows(memory[0], 2 * slot + WHICH, 1, rows)
    _clear_rows(memory[1], slot, WIDE // 64, rows)
    fence_async_shared()
    acc = warps.start_product(WHICH, memory, slot, warps.zeros(), True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    slot, phase = warps.next_slot(slot, phase)
    warps.release_before(barriers, slot, True)
    return acc, slot, phase


@gluon.jit
def _clear_rows(memory, index, PANELS: gl.constexpr, rows):
    """Set the rows of a stage from ``rows`` on to zero. Both groups do so for b, which they share:
    values that exist stay as they are."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # Panels of 64 columns lie one after another; swizzling moves nothing to another row.
    panels = warps.reinterpret(memory, memory.dtype, [memory.shape[0] * PANELS, STEP, 64], plain)
    exists = gl.arange(0, STEP, gl.SliceLayout(1, layout))[:, None] < rows
    for panel in gl.static_range(PANELS):
        part = panels.index(index * PANELS + panel)
        part.store(gl.where(exists, part.load(layout), 0.0).to(memory.dtype))


@gluon.jit
def _consume(WHICH: gl.constexpr, results, N, K, memory, barriers, mail, KIND: gl.constexpr):
    """Compute half the rows of every tile, if any of them exists."""
    OUTER: gl.constexpr = KIND == "outer" or KIND == "add"
    out, gate_out, up_out, out_ptr, pair_ptr, order_ptr, weights_ptr, partials_ptr = results
    buffers = memory[2]
    slot, phase, count = 0, 0, 0
    row, col, length = warps.wait_message(mail, count)
    while length >= 0:
        row += WHICH * ROWS
        rows, steps, partial = length - WHICH * ROWS, gl.cdiv(K, STEP), 0
        if OUTER:
            rows, steps = length * 0 + ROWS, gl.maximum(gl.cdiv(length, STEP), 1)
            partial = gl.where(length > 0, length % STEP, -1)
        if rows > 0:
            if KIND == "pull":
                row_R = gl.arange(0, ROWS, gl.SliceLayout(1, _LAYOUT))
                assignment_R = gl.load(order_ptr + row + row_R, mask=row_R < rows, other=0)
                weight_R = gl.load(weights_ptr + assignment_R, mask=row_R < rows, other=0.0)
            acc = warps.zeros()
            if OUTER:
                if partial != 0:
                    acc, slot, phase = _multiply_partial(WHICH, memory, barriers, slot, phase,
                                                         partial)  # fmt: skip
                    steps -= 1
            acc, slot, phase = warps.multiply(
                WHICH, acc, memory, barriers, slot, phase, steps, OUTER
            )
            if KIND == "pull":
                slot, phase = _pull(WHICH, acc, weight_R, results, row, col, rows, N, memory,
                                    barriers, slot, phase)  # fmt: skip
            elif KIND == "add":
                slot, phase = _add(WHICH, acc, out, row, col, memory, barriers, slot, phase)
            elif KIND == "outer":
                boxes = warps.halves_of(acc) if out.block_shape[1] == WIDE // 2 else _chunks(acc)
                for n in gl.static_range(len(boxes)):
                    at = col + n * out.block_shape[1]
                    warps.store_tile(boxes[n], buffers, WHICH, out, row, at, 1)
            elif KIND == "activation":
                gate, up = warps.halves_of(acc)
                _store(WHICH, gate, gate_out, pair_ptr, row, col, 2 * N, N, rows, buffers)
                a = warps.silu_mul(gate, up)
                _store(WHICH, up, up_out, pair_ptr + N, row, col, 2 * N, N, rows, buffers)
                _store(WHICH, a, out, out_ptr, row, col, N, N, rows, buffers)
            else:
                left, right = warps.halves_of(acc)
                _store(WHICH, left, out, out_ptr, row, col, N, N, rows, buffers)
                _store(WHICH, right, out, out_ptr, row, col + WIDE // 2, N, N, rows, buffers)
        else:
            stages = steps + _CHUNKS if KIND == "pull" else steps
            slot, phase = warps.skip(barriers, slot, phase, stages)
        count += 1
        row, col, length = warps.wait_message(mail, count)
    tma.store_wait(0)


@gluon.jit
def _store(WHICH: gl.constexpr, x, out, ptr, row, col, stride, N, rows, buffers):
    """Store x at (row, col) of the tensor at ptr, which ``out`` describes."""
    if rows >= ROWS:
        warps.store_tile(x, buffers, WHICH, out, row, col, 1)
    else:  # half of x at a time, because registers do not hold more addresses
        left, right = warps.halves_of(x)
        _store_rows(left, ptr, row, col, stride, N, rows)
        _store_rows(right, ptr, row, col + x.shape[1] // 2, stride, N, rows)


@gluon.jit
def _store_rows(x, ptr, row, col, stride, N, rows):
    layout: gl.constexpr = x.type.layout
    row_R = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))[:, None]
    col_C = col + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    ptrs = ptr + (row + row_R).to(gl.int64) * stride + col_C
    gl.store(ptrs, x.to(ptr.dtype.element_ty), mask=(row_R < rows) & (col_C < N))


@gluon.jit
def _chunks(acc):
    """Return the columns of acc in four parts; moves no register."""
    left, right = warps.halves_of(acc)
    return warps.halves_of(left) + warps.halves_of(right)


@gluon.jit
def _part(memory, tensor, slot, place):
    """Return one of the parts of b's stage, each ROWS x _CHUNK of the tensor that ``tensor``
    describes."""
    EACH: gl.constexpr = STEP * WIDE * 16 // (ROWS * _CHUNK * tensor.dtype.primitive_bitwidth)
    shape: gl.constexpr = [EACH * STAGES, ROWS, _CHUNK]
    parts = warps.reinterpret(memory[1], tensor.dtype, shape, tensor.layout)
    return parts.index(EACH * slot + place)


@gluon.jit
def _add(WHICH: gl.constexpr, acc, out, row, col, memory, barriers, slot, phase):
    """Add acc to the sums at (row, col) of ``out``, which are in the next stages."""
    chunks = _chunks(acc)
    for chunk in gl.static_range(_CHUNKS):
        part = _part(memory, out, slot, WHICH)
        mbarrier.wait(barriers[0].index(slot), phase)
        added = gl.convert_layout(chunks[chunk], _LAYOUT, assert_trivial=True)
        total = part.load(_LAYOUT).to(gl.float32) + added
        tma.store_wait(0)
        warps.release_before(barriers, slot, chunk > 0)
        part.store(total.to(out.dtype))
        fence_async_shared()
        warps.async_store(out, [row, col + chunk * _CHUNK], part)
        slot, phase = warps.next_slot(slot, phase)
    tma.store_wait(0)
    warps.release_before(barriers, slot, True)
    return slot, phase


@gluon.jit
def _pull(
    WHICH: gl.constexpr, acc, weight_R, results, row, col, rows, N, memory, barriers, slot, phase
):  # fmt: skip
    """Pull weights * q back through silu and the gate, where q is ``acc``; h is in the next stages,
    in place of b. The activation leaves in place of a."""
    out, dgate_out, dup_out, out_ptr, dh_ptr, order_ptr, weights_ptr, partials_ptr = results
    weight = gl.expand_dims(weight_R, 1)
    chunks = _chunks(acc)
    sum_R = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, _LAYOUT))
    for chunk in gl.static_range(_CHUNKS):
        at = col + chunk * _CHUNK
        gate_s = _part(memory, dgate_out, slot, WHICH)
        up_s = _part(memory, dgate_out, slot, 2 + WHICH)
        pa_s = memory[0].index(2 * slot + WHICH)
        mbarrier.wait(barriers[0].index(slot), phase)
        gate = gate_s.load(_LAYOUT).to(gl.float32)
        up = up_s.load(_LAYOUT).to(gl.float32)
        q = gl.convert_layout(chunks[chunk], _LAYOUT, assert_trivial=True)
        share = warps.sigmoid(gate)
        act = gate * share
        sum_R += gl.sum(q * act * up, axis=1)
        pulled = q * weight
        dgate = pulled * up * (share + act * (1.0 - share))
        dup = pulled * act
        pa = weight * act * up
        tma.store_wait(0)
        warps.release_before(barriers, slot, chunk > 0)
        if rows >= ROWS:
            gate_s.store(dgate.to(dgate_out.dtype))
            up_s.store(dup.to(dgate_out.dtype))
            if out is not None:
                pa_s.store(pa.to(dgate_out.dtype))
            fence_async_shared()
            warps.async_store(dgate_out, [row, at], gate_s)
            warps.async_store(dup_out, [row, at], up_s)
            if out is not None:
                warps.async_store(out, [row, at], pa_s)
        else:
            _store_rows(dgate, dh_ptr, row, at, 2 * N, N, rows)
            _store_rows(dup, dh_ptr + N, row, at, 2 * N, N, rows)
            if out is not None:
                _store_rows(pa, out_ptr, row, at, N, N, rows)
        slot, phase = warps.next_slot(slot, phase)
    tma.store_wait(0)
    warps.release_before(barriers, slot, True)
    if partials_ptr is not None:
        row_R = gl.arange(0, ROWS, gl.SliceLayout(1, _LAYOUT))
        ptrs = partials_ptr + (row + row_R).to(gl.int64) * gl.cdiv(N, WIDE) + col // WIDE
        gl.store(ptrs, sum_R, mask=row_R < rows)
    return slot, phase


# -- the producer warp --------------------------------------------------------------------------


@gluon.jit
def _tile(tile, tiles, row_blocks, sizes, blocks, ACROSS: gl.constexpr, KIND: gl.constexpr):
    """Return a tile's row, column and number of rows (outer: its expert's), and where a and b
    begin: a at a row, b at a row. Outer: a at a column, both at a row. Past the last tile, return
    the last tile's."""
    OUTER: gl.constexpr = KIND == "outer" or KIND == "add"
    OUT: gl.constexpr = WIDE // 2 if KIND == "activation" else WIDE
    M, N, K, units, group_m = sizes
    blocks_ptr, ends_ptr, counter_ptr = blocks
    col_blocks = gl.cdiv(N, OUT)
    tile = gl.minimum(tile, tiles - 1)
    if OUTER:
        expert = tile // (row_blocks * col_blocks)
        tile = tile % (row_blocks * col_blocks)
    block_m, col = warps.position(tile, row_blocks, col_blocks, group_m, OUT)
    if OUTER:
        b_at = gl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        length = gl.load(ends_ptr + expert) - b_at
        a_at = block_m * 2 * ROWS
        row = expert * M + a_at
    else:
        expert = gl.load(blocks_ptr + 1 + block_m)
        row = gl.load(blocks_ptr + 1 + units + block_m)
        length = gl.minimum(gl.load(ends_ptr + expert) - row, 2 * ROWS)
        a_at = row
        if KIND == "activation":
            b_at = expert * 2 * N + col
        else:
            b_at = expert * N + col if ACROSS else expert * K
    return row, col, length, a_at, b_at


@gluon.jit
def _load(operands, sizes, blocks, memory, barriers, mail, COPY: gl.constexpr, KIND: gl.constexpr):
    """Load every tile's operands, and what its epilogue reads. Outer: an expert's last rows come
    first. Products of rows: wait until the rows are copied."""
    OUTER: gl.constexpr = KIND == "outer" or KIND == "add"
    BYTES: gl.constexpr = (2 * ROWS + WIDE) * STEP * 2
    a, b, first, second = operands
    ACROSS: gl.constexpr = b.block_shape[1] == STEP
    M, N, K, units, group_m = sizes
    counter_ptr = blocks[2]
    a_s, b_s, buffers = memory
    full, empty = barriers
    row_blocks = M // (2 * ROWS) if OUTER else gl.load(blocks[0])
    tiles = row_blocks * gl.cdiv(N, WIDE // 2 if KIND == "activation" else WIDE)
    if OUTER:
        tiles *= units
    if first is not None:
        BOX: gl.constexpr = ROWS * _CHUNK * first.dtype.primitive_bitwidth // 8
        READ: gl.constexpr = 2 * BOX if second is None else 4 * BOX
    slot, phase, count = 0, 1, 0
    tile = gl.program_id(0)
    if tile < tiles:
        row, col, length, a_at, b_at = _tile(tile, tiles, row_blocks, sizes, blocks, ACROSS, KIND)
    else:
        row, col, length, a_at, b_at = tile, tile, tile, tile, tile
    while tile < tiles:
        warps.commit_message(mail, count, (row, col, length))
        count += 1
        if COPY and not OUTER:
            for block in range(row // (2 * ROWS), gl.cdiv(row + length, 2 * ROWS)):
                copied = 0
                while copied < COPIED:
                    copied = warps.load_acquire(counter_ptr + 2 + block)
        steps = gl.maximum(gl.cdiv(length, STEP), 1) if OUTER else gl.cdiv(K, STEP)
        look_ahead = gl.minimum(steps, STAGES) - 1
        following = warps.renamed((tile, row, col, length, a_at, b_at))
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            k = step * STEP
            if OUTER:
                k = b_at + (step + steps - 1) % steps * STEP
                warps.async_load(a, [k, a_at], bar, a_s.index(2 * slot))
                warps.async_load(a, [k, a_at + ROWS], bar, a_s.index(2 * slot + 1))
                warps.async_load(b, [k, col], bar, b_s.index(slot))
            else:
                warps.async_load(a, [a_at, k], bar, a_s.index(2 * slot))
                warps.async_load(a, [a_at + ROWS, k], bar, a_s.index(2 * slot + 1))
                if KIND == "activation":
                    w_s = warps.reinterpret(b_s, b.dtype, [2 * STAGES, WIDE // 2, STEP], b.layout)
                    warps.async_load(b, [b_at, k], bar, w_s.index(2 * slot))
                    warps.async_load(b, [b_at + N, k], bar, w_s.index(2 * slot + 1))
                else:
                    at = [b_at, k] if ACROSS else [b_at + k, col]
                    warps.async_load(b, at, bar, b_s.index(slot))
            slot, phase = warps.next_slot(slot, phase)
            if step == look_ahead:
                next_tile = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
                following = (next_tile,) + _tile(next_tile, tiles, row_blocks, sizes, blocks,
                                                 ACROSS, KIND)  # fmt: skip
        if first is not None:
            for chunk in gl.static_range(_CHUNKS):
                mbarrier.wait(empty.index(slot), phase)
                bar = full.index(slot)
                mbarrier.expect(bar, READ)
                for which in gl.static_range(2):
                    at = [row + which * ROWS, col + chunk * _CHUNK]
                    warps.async_load(first, at, bar, _part(memory, first, slot, which))
                    if second is not None:
                        warps.async_load(second, at, bar, _part(memory, first, slot, 2 + which))
                slot, phase = warps.next_slot(slot, phase)
        tile, row, col, length, a_at, b_at = warps.renamed(following)
    warps.commit_message(mail, count, (0, 0, -1))


# -- the copying warps --------------------------------------------------------------------------


@gluon.jit
def _copy(rows, experts, ends_ptr, counter_ptr, COPY: gl.constexpr):
    """Copy units of rows until there are no more."""
    if COPY:
        end = gl.load(ends_ptr + experts - 1)
        units = gl.cdiv(end, 2 * ROWS) * UNITS
        warps.copy_units(units, end, counter_ptr + 1, counter_ptr + 2, rows)


# -- the kernel ---------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["units", "group_m", "assignments", "experts"])
def _products(
    a, b, first, second, out, gate_out, up_out, out_ptr, pair_ptr, order_ptr, weights_ptr,
    partials_ptr, blocks_ptr, ends_ptr, counter_ptr, M, N, K, units, group_m, source_ptr, copy_ptr,
    assignments, top_k, width, stride, experts,
    KIND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``units``: the capacity of blocks; outer: experts. M is of outer products, K of others.
    ``first`` and ``second`` are loaded for epilogues, ``gate_out`` and ``up_out`` stored."""
    if PDL:
        wait_then_launch_dependents()
    TALL: gl.constexpr = WIDE if b.block_shape[1] == STEP else STEP
    a_s = gl.allocate_shared_memory(a.dtype, [2 * STAGES, ROWS, STEP], a.layout)
    b_s = gl.allocate_shared_memory(b.dtype, [STAGES, TALL, STEP * WIDE // TALL], b.layout)
    if first is None:
        buffers = gl.allocate_shared_memory(out.dtype, [2, ROWS, out.block_shape[1]], out.layout)
    else:
        buffers = a_s  # not used
    barriers = warps.ring_barriers(1)
    mail = warps.messages(3)
    fence_async_shared()
    memory = (a_s, b_s, buffers)
    results = (out, gate_out, up_out, out_ptr, pair_ptr, order_ptr, weights_ptr, partials_ptr)
    operands, sizes = (a, b, first, second), (M, N, K, units, group_m)
    blocks = (blocks_ptr, ends_ptr, counter_ptr)
    COPY: gl.constexpr = source_ptr is not None
    rows = (source_ptr, copy_ptr, order_ptr, assignments, top_k, width, stride)
    gl.warp_specialize(
        [
            (_consume, (0, results, N, K, memory, barriers, mail, KIND)),
            (_consume, (1, results, N, K, memory, barriers, mail, KIND)),
            (_load, (operands, sizes, blocks, memory, barriers, mail, COPY, KIND)),
            (_copy, (rows, experts, ends_ptr, counter_ptr, COPY)),
            (_copy, (rows, experts, ends_ptr, counter_ptr, COPY)),
            (_copy, (rows, experts, ends_ptr, counter_ptr, COPY)),
        ],
        [4, 1, 1, 1, 1],  # warps of all partitions but the first
        [232, 40, 40, 40, 40],  # registers per thread: 232 + 232 + 40 = 3 * 168 of the launch
    )  # fmt: skip


_launch = Launcher(_products)
