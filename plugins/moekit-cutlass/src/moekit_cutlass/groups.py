"""Sort (row, expert) pairs by expert, on the device: the form that grouped GEMMs read.

Sizes are static (worst case) and offsets stay on the device, so a CUDA graph may capture it. The
sort is stable and without racing atomics: equal ids give equal orders.

Shape suffixes: R rows, K slots of a row, S = R * K pairs, L local experts, C rows of a slab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from moekit_triton.numerics import INTERPRETED
from torch import Tensor

CHUNK = 128 if INTERPRETED else 1024
"""Pairs that one program sorts."""


@dataclass(frozen=True)
class Groups:
    """Pairs in order of their expert. All int32.

    rows_S: the source row of each sorted pair. experts_S: its expert. From `total` on both are
    defined but mean nothing. slots_RK: where a pair went, -1 for pairs without an expert.
    offsets_L1: (L + 1,), expert l has the sorted pairs offsets[l] to offsets[l + 1].
    """

    rows_S: Tensor
    experts_S: Tensor
    slots_RK: Tensor
    offsets_L1: Tensor

    @property
    def num_experts(self) -> int:
        return self.offsets_L1.shape[0] - 1

    @property
    def total(self) -> Tensor:
        """(1,): the number of pairs with an expert."""
        return self.offsets_L1[self.num_experts :]


def sort_scratch(num_pairs: int, num_experts: int) -> int:
    """int32 entries of scratch that `sort_pairs` needs."""
    return 0 if num_pairs <= CHUNK else triton.cdiv(num_pairs, CHUNK) * (num_experts + 1)


def sort_pairs(ids_RK: Tensor, groups: Groups, scratch: Tensor) -> None:
    """Fills ``groups`` from ids (int32 or int64, contiguous; in [0, L), -1 = no expert).

    One launch for up to CHUNK pairs, two for more.
    """
    n, top_k, num_experts = ids_RK.numel(), ids_RK.shape[1], groups.num_experts
    assert ids_RK.is_contiguous() and groups.slots_RK.numel() == groups.rows_S.numel() == n
    assert scratch.numel() >= sort_scratch(n, num_experts)
    chunks = triton.cdiv(n, CHUNK)
    bins = max(32, triton.next_power_of_2(num_experts + 2))
    chunk = CHUNK if chunks > 1 else max(32, triton.next_power_of_2(n))
    if chunks > 1:
        _count[(chunks,)](
            ids_RK, scratch, n, num_experts, CHUNK=chunk, BINS=bins, num_warps=4
        )  # fmt: skip
    _place[(chunks,)](
        ids_RK, scratch, groups.rows_S, groups.experts_S, groups.slots_RK, groups.offsets_L1,
        n, num_experts, chunks, TOP_K=top_k, CHUNK=chunk, BINS=bins, TILE=16,
        MANY=chunks > 1, num_warps=8 if chunk >= 512 else 4,
    )  # fmt: skip


def group_slab(counts_L: Tensor, slab: int, groups: Groups) -> None:
    """Fills ``groups`` from a BATCHED slab: expert l has the rows l * C + c, c < counts_L[l].

    counts_L int32; groups.slots_RK is (L * C, 1), -1 for padding.
    """
    n = groups.num_experts * slab
    assert counts_L.dtype == torch.int32 and groups.slots_RK.shape == (n, 1)
    _group_slab[(triton.cdiv(n, CHUNK),)](
        counts_L.contiguous(), groups.rows_S, groups.experts_S, groups.slots_RK,
        groups.offsets_L1, n, slab, groups.num_experts,
        CHUNK=CHUNK, BINS=max(32, triton.next_power_of_2(groups.num_experts + 1)), num_warps=4,
    )  # fmt: skip


def problem_sizes(
    groups: Groups, starts_L: Tensor, sizes_L3: Tensor, n: int, k: int, swap: bool
) -> None:
    """Fills starts_L (int64), each expert's first row, and sizes_L3 (int32): rows, n, k.

    swap: n, rows, k.
    """
    num_experts = groups.num_experts
    _problem_sizes[(1,)](
        groups.offsets_L1, starts_L, sizes_L3, num_experts, n, k, SWAP=swap,
        BINS=triton.next_power_of_2(num_experts), num_warps=4,
    )  # fmt: skip


@triton.jit
def _load_bins(ids_ptr, start, n, num_experts, CHUNK: tl.constexpr):
    """The expert of each pair of a chunk: L for none, L + 1 beyond the end."""
    pair_C = start + tl.arange(0, CHUNK)
    id_C = tl.load(ids_ptr + pair_C, mask=pair_C < n, other=-1).to(tl.int32)
    bin_C = tl.where(id_C >= 0, id_C, num_experts)
    return tl.where(pair_C < n, bin_C, num_experts + 1)


@triton.jit(do_not_specialize=["n"])
def _count(ids_ptr, counts_ptr, n, num_experts, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """counts (chunks, L + 1): pairs of each chunk by expert, those without one last."""
    chunk = tl.program_id(0)
    bin_C = _load_bins(ids_ptr, chunk * CHUNK, n, num_experts, CHUNK)
    count_B = tl.histogram(bin_C, BINS)
    bin_B = tl.arange(0, BINS)
    pointers = counts_ptr + chunk * (num_experts + 1) + bin_B
    tl.store(pointers, count_B, mask=bin_B <= num_experts)


@triton.jit(do_not_specialize=["n", "chunks"])
def _place(
    ids_ptr, counts_ptr, rows_ptr, experts_ptr, slots_ptr, offsets_ptr, n, num_experts, chunks,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    """Sorts one chunk and places each of its pairs behind those of earlier chunks."""
    chunk = tl.program_id(0)
    bin_C = _load_bins(ids_ptr, chunk * CHUNK, n, num_experts, CHUNK)
    count_B = tl.histogram(bin_C, BINS)
    bin_B = tl.arange(0, BINS)
    if MANY:
        total_TB = tl.zeros((TILE, BINS), tl.int32)  # summed over T behind the loop, not in it
        before_TB = tl.zeros((TILE, BINS), tl.int32)
        for first in range(0, chunks, TILE):
            other_T = first + tl.arange(0, TILE)
            inside = (other_T < chunks)[:, None] & (bin_B <= num_experts)[None, :]
            pointers = counts_ptr + other_T[:, None] * (num_experts + 1) + bin_B[None, :]
            counts = tl.load(pointers, mask=inside, other=0)
            total_TB += counts
            before_TB += tl.where((other_T < chunk)[:, None], counts, 0)
        total_B, before_B = tl.sum(total_TB, axis=0), tl.sum(before_TB, axis=0)
    else:
        total_B = tl.where(bin_B <= num_experts, count_B, 0)
        before_B = tl.zeros((BINS,), tl.int32)
    offset_B = tl.cumsum(total_B, axis=0) - total_B
    if chunk == 0:
        tl.store(offsets_ptr + bin_B, offset_B, mask=bin_B <= num_experts)

    # Keys are distinct, so any sort is a stable one.
    position_C = tl.arange(0, CHUNK)
    key_C = tl.sort(bin_C * CHUNK + position_C)
    sorted_C = key_C // CHUNK
    pair_C = chunk * CHUNK + key_C % CHUNK
    shift_B = offset_B + before_B - (tl.cumsum(count_B, axis=0) - count_B)
    slot_C = position_C + tl.gather(shift_B, sorted_C, 0)
    real_C = sorted_C <= num_experts
    tl.store(rows_ptr + slot_C, pair_C // TOP_K, mask=real_C)
    tl.store(experts_ptr + slot_C, tl.minimum(sorted_C, num_experts - 1), mask=real_C)
    tl.store(slots_ptr + pair_C, tl.where(sorted_C < num_experts, slot_C, -1), mask=real_C)


@triton.jit(do_not_specialize=["n", "slab"])
def _group_slab(
    counts_ptr, rows_ptr, experts_ptr, slots_ptr, offsets_ptr, n, slab, num_experts,
    CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    bin_B = tl.arange(0, BINS)
    count_B = tl.load(counts_ptr + bin_B, mask=bin_B < num_experts, other=0)
    count_B = tl.minimum(count_B, slab)
    offset_B = tl.cumsum(count_B, axis=0) - count_B
    if tl.program_id(0) == 0:
        tl.store(offsets_ptr + bin_B, offset_B, mask=bin_B <= num_experts)
    total = tl.sum(count_B, axis=0)

    row_C = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert_C = row_C // slab
    inside_C = row_C < n
    bin_C = tl.minimum(expert_C, num_experts - 1)
    used_C = inside_C & (row_C % slab < tl.gather(count_B, bin_C, 0))
    slot_C = tl.gather(offset_B, bin_C, 0) + row_C % slab
    tl.store(slots_ptr + row_C, tl.where(used_C, slot_C, -1), mask=inside_C)
    tl.store(rows_ptr + slot_C, row_C, mask=used_C)
    tl.store(experts_ptr + slot_C, expert_C, mask=used_C)
    tail_C = inside_C & (row_C >= total)
    tl.store(rows_ptr + row_C, 0, mask=tail_C)
    tl.store(experts_ptr + row_C, 0, mask=tail_C)


@triton.jit
def _problem_sizes(
    offsets_ptr, starts_ptr, sizes_ptr, num_experts, n, k, SWAP: tl.constexpr, BINS: tl.constexpr
):
    expert_B = tl.arange(0, BINS)
    inside_B = expert_B < num_experts
    start_B = tl.load(offsets_ptr + expert_B, mask=inside_B, other=0)
    rows_B = tl.load(offsets_ptr + expert_B + 1, mask=inside_B, other=0) - start_B
    tl.store(starts_ptr + expert_B, start_B.to(tl.int64), mask=inside_B)
    tl.store(sizes_ptr + 3 * expert_B + SWAP, rows_B, mask=inside_B)
    tl.store(sizes_ptr + 3 * expert_B + (1 - SWAP), n + 0 * rows_B, mask=inside_B)
    tl.store(sizes_ptr + 3 * expert_B + 2, k + 0 * rows_B, mask=inside_B)
