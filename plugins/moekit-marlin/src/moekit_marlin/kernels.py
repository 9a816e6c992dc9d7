"""Triton kernels around the operator: lists of blocks, activation, sorted columns.

The operator works on blocks of `block` rows of one expert. It reads, per block, the expert and
`block` entries: real ones first, then padding, any number from the number of pairs on.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from moekit_triton.align import AlignedPairs, align, align_capacity, align_scratch
from moekit_triton.numerics import INTERPRETED, activate, activate_gated, convert
from moekit_triton.rows import Activation

FEW_PAIRS = 32
"""Up to this many pairs one program compares each with each, which takes no loop."""

ONE_LAUNCH_PAIRS = 512 if INTERPRETED else 8192
"""Up to this many pairs every program counts all of them by itself."""

CHUNK = 64
"""Pairs that such a program places."""


@dataclass(frozen=True)
class Blocks:
    """Rows grouped by expert.

    entries: int32 (capacity,), pair numbers, from num_rows[0] on undefined. experts: int32
    (capacity / block,). num_rows: int32 (1,). locks: int32, zeros (the operator leaves them so).
    """

    entries: torch.Tensor
    experts: torch.Tensor
    num_rows: torch.Tensor
    locks: torch.Tensor
    block: int

    @property
    def capacity(self) -> int:
        return self.entries.numel()


def pairs_capacity(pairs: int, num_experts: int, block: int) -> int:
    """Entries that `list_pairs` needs."""
    return align_capacity(pairs, num_experts, block)


def pairs_scratch(pairs: int, num_experts: int) -> int:
    """int32 scratch that `list_pairs` needs."""
    return 0 if pairs <= ONE_LAUNCH_PAIRS else align_scratch(pairs, num_experts)


def list_pairs(ids_RK: torch.Tensor, num_experts: int, out: Blocks, scratch: torch.Tensor) -> None:
    """Fills ``out``, locks included, from ids_RK (contiguous; -1 = no expert)."""
    n = ids_RK.numel()
    if n > ONE_LAUNCH_PAIRS:
        out.locks.zero_()
        align(
            ids_RK,
            num_experts,
            AlignedPairs(out.entries, out.experts, out.num_rows, out.block),
            scratch,
        )
        return
    assert out.capacity >= pairs_capacity(n, num_experts, out.block)
    if n <= FEW_PAIRS:
        _list_few[(1,)](
            ids_RK, out.entries, out.experts, out.num_rows, out.locks, n,
            BLOCK=out.block, PAIRS=max(16, triton.next_power_of_2(n)), LOCKS=out.locks.numel(),
            num_warps=4,
        )  # fmt: skip
        return
    tile = max(256, triton.next_power_of_2(min(n, 256 if INTERPRETED else 2048)))
    _list_pairs[(triton.cdiv(n, CHUNK),)](
        ids_RK, out.entries, out.experts, out.num_rows, out.locks, n,
        BLOCK=out.block, BINS=max(32, triton.next_power_of_2(num_experts)), CHUNK=CHUNK,
        TILE=tile, LOCKS=out.locks.numel(), num_warps=8 if tile > 512 else 4,
    )  # fmt: skip


def slab_capacity(num_experts: int, slab: int, block: int) -> int:
    """Entries that `list_slabs` needs."""
    return num_experts * triton.cdiv(slab, block) * block


def list_slabs(counts_L: torch.Tensor, slab: int, out: Blocks) -> None:
    """Fills ``out``, locks included: rows l * slab + c, c < counts_L[l] (int32)."""
    num_experts = counts_L.numel()
    assert out.capacity >= slab_capacity(num_experts, slab, out.block)
    _list_slabs[(num_experts,)](
        counts_L, out.entries, out.experts, out.num_rows, out.locks, num_experts, slab,
        BLOCK=out.block, BINS=triton.next_power_of_2(num_experts), CHUNK=256,
        LOCKS=out.locks.numel(), num_warps=4,
    )  # fmt: skip


def activate_columns(
    h: torch.Tensor,
    out: torch.Tensor,
    activation: Activation,
    *,
    ids: torch.Tensor | None = None,
    counts_L: torch.Tensor | None = None,
    slab: int = 1,
) -> None:
    """h (rows, 2I if gated else I) -> out (rows, I), in fp32; several programs a row.

    Rows with a negative id (ids: one per row), or at or beyond counts_L of their slab, are left.
    """
    rows, cols = out.shape
    assert h.is_contiguous() and out.is_contiguous()
    if rows == 0:
        return
    block = min(1024, triton.next_power_of_2(cols))
    _activate[(rows, triton.cdiv(cols, block))](
        h, out, ids if counts_L is None else counts_L, cols, slab,
        activation.alpha, 0.0 if activation.limit is None else activation.limit,
        ACTIVATION=activation.name, GATED=activation.gated, CLAMP=activation.limit is not None,
        BATCHED=counts_L is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


def gather_columns(
    x_RH: torch.Tensor, columns_LH: torch.Tensor, out_SH: torch.Tensor, blocks: Blocks, top_k: int
) -> None:
    """out[pair, i] = x[pair // top_k, columns[expert of pair, i]] for the pairs in ``blocks``."""
    pairs, cols = out_SH.shape
    block = min(1024, triton.next_power_of_2(cols))
    _gather_columns[(blocks.capacity, triton.cdiv(cols, block))](
        x_RH, columns_LH, out_SH, blocks.entries, blocks.experts, blocks.num_rows, pairs, cols,
        top_k, ROWS=blocks.block, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def _list_few(
    ids_ptr, entries_ptr, experts_ptr, num_rows_ptr, locks_ptr, n,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, LOCKS: tl.constexpr,
):  # fmt: skip
    """A block begins with each pair whose rank in its expert is a multiple of BLOCK: counting these
    among smaller experts gives an expert's first block.
    """
    pair = tl.arange(0, PAIRS)
    id = tl.load(ids_ptr + pair, mask=pair < n, other=-1).to(tl.int32)
    same = id[:, None] == id[None, :]
    rank = tl.sum((same & (pair[None, :] < pair[:, None])).to(tl.int32), axis=1)
    rank_across = tl.sum((same & (pair[:, None] < pair[None, :])).to(tl.int32), axis=0)
    count = tl.sum(same.to(tl.int32), axis=1)
    begins = (rank_across % BLOCK == 0) & (id >= 0)
    earlier = begins[None, :] & (id[None, :] < id[:, None])
    first_block = tl.sum(earlier.to(tl.int32), axis=1)
    _fill_blocks(entries_ptr, experts_ptr, pair, id, rank, count, first_block, n, BLOCK)
    tl.store(num_rows_ptr, tl.sum(begins.to(tl.int32), axis=0) * BLOCK)
    tl.store(locks_ptr + tl.arange(0, LOCKS), tl.zeros((LOCKS,), tl.int32))


@triton.jit(do_not_specialize=["n"])
def _list_pairs(
    ids_ptr, entries_ptr, experts_ptr, num_rows_ptr, locks_ptr, n, BLOCK: tl.constexpr,
    BINS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, LOCKS: tl.constexpr,
):  # fmt: skip
    """Program c places chunk c; each counts all pairs, so that none waits for another."""
    start = tl.program_id(0) * CHUNK
    before_L = _count_between(ids_ptr, 0, start, BINS, TILE)
    count_L = before_L + _count_between(ids_ptr, start, n, BINS, TILE)
    blocks_L = tl.cdiv(count_L, BLOCK)
    first_block_L = tl.cumsum(blocks_L, axis=0) - blocks_L
    pair = start + tl.arange(0, CHUNK)
    id = tl.load(ids_ptr + pair, mask=pair < n, other=-1).to(tl.int32)
    bin = tl.maximum(id, 0)
    earlier = (id[None, :] == id[:, None]) & (pair[None, :] < pair[:, None])
    rank = tl.gather(before_L, bin, 0) + tl.sum(earlier.to(tl.int32), axis=1)
    count, first_block = tl.gather(count_L, bin, 0), tl.gather(first_block_L, bin, 0)
    _fill_blocks(entries_ptr, experts_ptr, pair, id, rank, count, first_block, n, BLOCK)
    if start == 0:
        tl.store(num_rows_ptr, tl.sum(blocks_L, axis=0) * BLOCK)
        tl.store(locks_ptr + tl.arange(0, LOCKS), tl.zeros((LOCKS,), tl.int32))


@triton.jit
def _count_between(ids_ptr, start, end, BINS: tl.constexpr, TILE: tl.constexpr):
    """How many of these pairs go to each expert."""
    count_L = tl.zeros((BINS,), tl.int32)
    for first in range(start, end, TILE):
        pair = first + tl.arange(0, TILE)
        id = tl.load(ids_ptr + pair, mask=pair < end, other=-1).to(tl.int32)
        count_L += tl.histogram(id, BINS, mask=id >= 0)
    return count_L


@triton.jit
def _fill_blocks(
    entries_ptr, experts_ptr, pair, id, rank, count, first_block, n, BLOCK: tl.constexpr
):
    """Stores these pairs; an expert's last one stores the padding behind it. No store depends on
    another, so nothing has to wait."""
    real = id >= 0
    tl.store(entries_ptr + first_block * BLOCK + rank, pair, mask=real)
    tl.store(experts_ptr + first_block + rank // BLOCK, id, mask=real & (rank % BLOCK == 0))
    end = tl.cdiv(count, BLOCK) * BLOCK
    entry = count[:, None] + tl.arange(0, BLOCK)[None, :]
    padding = (real & (rank == count - 1))[:, None] & (entry < end[:, None])
    filler = tl.zeros(entry.shape, tl.int32) + n
    tl.store(entries_ptr + first_block[:, None] * BLOCK + entry, filler, mask=padding)


@triton.jit(do_not_specialize=["slab"])
def _list_slabs(
    counts_ptr, entries_ptr, experts_ptr, num_rows_ptr, locks_ptr, num_experts, slab,
    BLOCK: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, LOCKS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    bin = tl.arange(0, BINS)
    blocks = tl.cdiv(tl.load(counts_ptr + bin, mask=bin < num_experts, other=0), BLOCK)
    first_block = tl.sum(tl.where(bin < expert, blocks, 0), axis=0)
    count = tl.load(counts_ptr + expert)
    mine = tl.cdiv(count, BLOCK)
    for start in range(0, mine * BLOCK, CHUNK):
        row = start + tl.arange(0, CHUNK)
        entry = tl.where(row < count, expert * slab + row, num_experts * slab)
        tl.store(entries_ptr + first_block * BLOCK + row, entry, mask=row < mine * BLOCK)
    for start in range(0, mine, CHUNK):
        block = start + tl.arange(0, CHUNK)
        tl.store(experts_ptr + first_block + block, expert, mask=block < mine)
    if expert == 0:
        tl.store(num_rows_ptr, tl.sum(blocks, axis=0) * BLOCK)
        tl.store(locks_ptr + tl.arange(0, LOCKS), tl.zeros((LOCKS,), tl.int32))


@triton.jit(do_not_specialize=["slab"])
def _activate(
    h_ptr, out_ptr, valid_ptr, cols, slab, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr, BATCHED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if BATCHED:
        if row % slab >= tl.load(valid_ptr + row // slab):
            return
    else:
        if tl.load(valid_ptr + row) < 0:
            return
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < cols
    if GATED:
        gate = tl.load(h_ptr + row * 2 * cols + col, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(h_ptr + row * 2 * cols + cols + col, mask=inside, other=0.0).to(tl.float32)
        value = activate_gated(gate, up, alpha, limit, ACTIVATION, CLAMP)
    else:
        x = tl.load(h_ptr + row * cols + col, mask=inside, other=0.0).to(tl.float32)
        value = activate(x, ACTIVATION)
    tl.store(out_ptr + row * cols + col, convert(value, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def _gather_columns(
    x_ptr, columns_ptr, out_ptr, entries_ptr, experts_ptr, num_rows_ptr, pairs, cols, top_k,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    if entry >= tl.load(num_rows_ptr):
        return
    pair = tl.load(entries_ptr + entry).to(tl.int64)
    if pair >= pairs:
        return
    expert = tl.load(experts_ptr + entry // ROWS).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < cols
    source = tl.load(columns_ptr + expert * cols + col, mask=inside, other=0)
    x = tl.load(x_ptr + pair // top_k * cols + source, mask=inside, other=0.0)
    tl.store(out_ptr + pair * cols + col, x, mask=inside)
