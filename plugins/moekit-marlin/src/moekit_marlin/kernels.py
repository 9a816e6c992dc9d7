"""Triton kernels around the operator: lists of blocks, sorted columns.

The operator works on blocks of rows of one expert. For each block it reads the expert, and as many
entries as a block has rows: assignments first, then padding, which is any number from the number of
assignments on. `moekit_kernels.align` makes such lists from ids, and `list_slabs` from the batched
layout.
"""

import torch
import triton
import triton.language as tl
from moekit_kernels.align import SortedAssignments


def slab_capacity(num_experts: int, slab: int, block: int) -> int:
    """Return the entries that `list_slabs` needs."""
    return num_experts * -(-slab // block) * block


def list_slabs(
    counts_L: torch.Tensor, slab: int, out: SortedAssignments, locks: torch.Tensor
) -> None:
    """Fill ``out`` with the rows l * slab + c for c < counts_L[l] (int32), and clear the locks."""
    num_experts = counts_L.numel()
    assert out.capacity >= slab_capacity(num_experts, slab, out.block_m)
    _list_slabs[(num_experts,)](
        counts_L, out.assignments_S, out.experts_B, out.num_rows, locks, num_experts, slab,
        BLOCK=out.block_m, BINS=triton.next_power_of_2(num_experts), CHUNK=256,
        LOCKS=locks.numel(), num_warps=4,
    )  # fmt: skip


def gather_columns(
    x_RH: torch.Tensor, columns_LH: torch.Tensor, out_SH: torch.Tensor, lists: SortedAssignments,
    top_k: int,
) -> None:  # fmt: skip
    """Write ``out[s, i] = x[s // top_k, columns[expert of s, i]]`` for assignments s."""
    pairs, cols = out_SH.shape
    block = min(1024, triton.next_power_of_2(cols))
    _gather_columns[(lists.capacity, triton.cdiv(cols, block))](
        x_RH, columns_LH, out_SH, lists.assignments_S, lists.experts_B, lists.num_rows, pairs, cols,
        top_k, ROWS=lists.block_m, BLOCK=block, num_warps=4,
    )  # fmt: skip


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
