"""Triton kernels around the operator: lists of blocks, activation, sorted columns.

The operator works on blocks of `block` rows of one expert. For each block it reads the expert and
`block` entries: assignments first, then padding, which is any number from their number on.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from moekit_kernels.align import SortedAssignments, align
from moekit_kernels.numerics import Activation, activate, activate_gated, convert


@dataclass(frozen=True)
class Blocks:
    """Assignments grouped by expert, in blocks.

    Attributes:
        entries: int32 (capacity,), numbers of assignments, undefined from num_rows[0] on.
        experts: int32 (capacity / block,), the expert of each block.
        num_rows: int32 (1,).
        locks: int32, zeros; the operator leaves them zero.
    """

    entries: torch.Tensor
    experts: torch.Tensor
    num_rows: torch.Tensor
    locks: torch.Tensor
    block: int

    @property
    def capacity(self) -> int:
        return self.entries.numel()


def list_pairs(ids_RK: torch.Tensor, num_experts: int, out: Blocks, scratch: torch.Tensor) -> None:
    """Fill ``out`` and clear its locks, from ids_RK (contiguous; -1 for no expert)."""
    pairs = SortedAssignments(out.entries, out.experts, out.num_rows, out.block)
    align(ids_RK, num_experts, pairs, scratch, zeros=out.locks)


def slab_capacity(num_experts: int, slab: int, block: int) -> int:
    """Return the entries that `list_slabs` needs."""
    return num_experts * -(-slab // block) * block


def list_slabs(counts_L: torch.Tensor, slab: int, out: Blocks) -> None:
    """Fill ``out`` and clear its locks: rows l * slab + c for c < counts_L[l] (int32)."""
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
    """Activate h (rows, 2I if gated, else I) to out (rows, I), in fp32; several programs per row.

    Rows with a negative id (``ids``, one per row), or from counts_L of their expert on, stay
    unchanged.
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
    """Write ``out[s, i] = x[s // top_k, columns[expert of s, i]]`` for assignments s."""
    pairs, cols = out_SH.shape
    block = min(1024, triton.next_power_of_2(cols))
    _gather_columns[(blocks.capacity, triton.cdiv(cols, block))](
        x_RH, columns_LH, out_SH, blocks.entries, blocks.experts, blocks.num_rows, pairs, cols,
        top_k, ROWS=blocks.block, BLOCK=block, num_warps=4,
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
