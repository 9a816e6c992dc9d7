"""Gives every (row, expert) pair a row in the layout that DeepGEMM's grouped GEMM reads; on device.

Rows of one expert are consecutive, each expert's share starts at a multiple of `block_m`, and the
library is told where the shares end. So it works on used blocks only, whatever the worst case
that the buffers are sized for. Sizes are static and nothing is read back: a CUDA graph may capture
it. The order is stable and free of racing atomics: equal ids give equal rows.
"""

import torch
import triton
import triton.language as tl
from moekit_triton.numerics import INTERPRETED

CHUNK = 256
"""Pairs ranked together: each is compared with every other of its chunk."""

ONE_LAUNCH_PAIRS = 1024 if INTERPRETED else 8192
"""Up to this many pairs every program counts all of them by itself; above, three kernels."""


def align_scratch(num_pairs: int, num_experts: int) -> int:
    """int32 entries of scratch that `align` needs."""
    return (triton.cdiv(num_pairs, CHUNK) + 1) * num_experts


def align(
    ids_S: torch.Tensor,
    block_m: int,
    rows_S: torch.Tensor,
    ends_L: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Fill rows_S and ends_L from ids_S (S integers, contiguous; local ids in [0, L), < 0 = none).

    rows_S: int32 (S,), the pair's row in the padded layout, -1 without expert.
    ends_L: int32 (L,), where the expert's rows end; they start at the previous end, rounded up to
    block_m. An expert without rows ends where it starts.
    scratch: int32, `align_scratch` entries, contents do not matter.
    """
    n, num_experts = ids_S.numel(), ends_L.numel()
    assert ids_S.is_contiguous() and rows_S.numel() == n
    assert scratch.numel() >= align_scratch(n, num_experts)
    bins = max(triton.next_power_of_2(num_experts), 32)
    if n <= ONE_LAUNCH_PAIRS:
        tile = max(256, triton.next_power_of_2(min(n, 256 if INTERPRETED else 2048)))
        _align_small[(max(1, triton.cdiv(n, 64)),)](
            ids_S, rows_S, ends_L, n, num_experts,
            BLOCK_M=block_m, BINS=bins, CHUNK=64, TILE=tile, num_warps=8 if tile > 512 else 4,
        )  # fmt: skip
        return
    chunks = triton.cdiv(n, CHUNK)
    counts, totals = scratch, scratch[chunks * num_experts :]
    _count[(chunks,)](ids_S, counts, n, num_experts, BINS=bins, CHUNK=CHUNK, num_warps=4)
    width = 128 if INTERPRETED else 16
    _sum_before[(triton.cdiv(num_experts, width),)](
        counts, totals, chunks, num_experts, WIDTH=width, ROWS=256, num_warps=8
    )
    _place[(chunks,)](
        ids_S, counts, totals, rows_S, ends_L, n, num_experts,
        BLOCK_M=block_m, BINS=bins, CHUNK=CHUNK, TILE=32, num_warps=8,
    )  # fmt: skip


@triton.jit
def _load_ids(ids_ptr, pair_C, n):
    return tl.load(ids_ptr + pair_C, mask=pair_C < n, other=-1).to(tl.int32)


@triton.jit
def _starts(count_L, BLOCK_M: tl.constexpr):
    """First row of each expert."""
    blocks_L = tl.cdiv(count_L, BLOCK_M)
    return (tl.cumsum(blocks_L, axis=0) - blocks_L) * BLOCK_M


@triton.jit
def _earlier_equals(id_C, pair_C, id_T, pair_T):
    """For each pair of C: how many of T come before it and have the same expert."""
    same = (id_T[None, :] == id_C[:, None]) & (pair_T[None, :] < pair_C[:, None])
    return tl.sum(same.to(tl.int32), axis=1)


@triton.jit
def _count_between(ids_ptr, start, end, BINS: tl.constexpr, TILE: tl.constexpr):
    """How many of these pairs go to each expert."""
    count_L = tl.zeros((BINS,), tl.int32)
    for first in range(start, end, TILE):
        id_T = _load_ids(ids_ptr, first + tl.arange(0, TILE), end)
        count_L += tl.histogram(id_T, BINS, mask=id_T >= 0)
    return count_L


@triton.jit(do_not_specialize=["n"])
def _align_small(
    ids_ptr, rows_ptr, ends_ptr, n, num_experts,
    BLOCK_M: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program c places chunk c; each counts all pairs, so that none waits for another."""
    expert_L = tl.arange(0, BINS)
    start = tl.program_id(0) * CHUNK
    before_L = _count_between(ids_ptr, 0, start, BINS, TILE)
    count_L = before_L + _count_between(ids_ptr, start, n, BINS, TILE)
    start_L = _starts(count_L, BLOCK_M)
    if start == 0:
        tl.store(ends_ptr + expert_L, start_L + count_L, mask=expert_L < num_experts)
    pair_C = start + tl.arange(0, CHUNK)
    id_C = _load_ids(ids_ptr, pair_C, n)
    row_C = tl.gather(start_L + before_L, tl.maximum(id_C, 0), 0)
    row_C += _earlier_equals(id_C, pair_C, id_C, pair_C)
    tl.store(rows_ptr + pair_C, tl.where(id_C >= 0, row_C, -1), mask=pair_C < n)


@triton.jit(do_not_specialize=["n"])
def _count(ids_ptr, counts_ptr, n, num_experts, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """counts (chunks, L): pairs of each chunk that go to each expert."""
    chunk = tl.program_id(0)
    expert_L = tl.arange(0, BINS)
    id_C = _load_ids(ids_ptr, chunk * CHUNK + tl.arange(0, CHUNK), n)
    count_L = tl.histogram(id_C, BINS, mask=id_C >= 0)
    tl.store(counts_ptr + chunk * num_experts + expert_L, count_L, mask=expert_L < num_experts)


@triton.jit(do_not_specialize=["chunks"])
def _sum_before(
    counts_ptr, totals_ptr, chunks, num_experts, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """counts (chunks, L) becomes the sum over earlier chunks, in place; totals (L,) the sum over
    all."""
    expert_W = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total_W = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, chunks, ROWS):
        chunk_R = start + tl.arange(0, ROWS)
        inside = (chunk_R < chunks)[:, None] & (expert_W < num_experts)[None, :]
        pointers = counts_ptr + chunk_R[:, None] * num_experts + expert_W[None, :]
        counts = tl.load(pointers, mask=inside, other=0)
        tl.store(pointers, tl.cumsum(counts, axis=0) - counts + total_W[None, :], mask=inside)
        total_W += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert_W, total_W, mask=expert_W < num_experts)


@triton.jit(do_not_specialize=["n"])
def _place(
    ids_ptr, before_ptr, totals_ptr, rows_ptr, ends_ptr, n, num_experts,
    BLOCK_M: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    expert_L = tl.arange(0, BINS)
    count_L = tl.load(totals_ptr + expert_L, mask=expert_L < num_experts, other=0)
    start_L = _starts(count_L, BLOCK_M)
    if chunk == 0:
        tl.store(ends_ptr + expert_L, start_L + count_L, mask=expert_L < num_experts)
    pair_C = chunk * CHUNK + tl.arange(0, CHUNK)
    id_C = _load_ids(ids_ptr, pair_C, n)
    valid_C = id_C >= 0
    row_C = tl.gather(start_L, tl.maximum(id_C, 0), 0)
    row_C += tl.load(before_ptr + chunk * num_experts + id_C, mask=valid_C, other=0)
    for first in range(0, CHUNK, TILE):
        pair_T = chunk * CHUNK + first + tl.arange(0, TILE)
        row_C += _earlier_equals(id_C, pair_C, _load_ids(ids_ptr, pair_T, n), pair_T)
    tl.store(rows_ptr + pair_C, tl.where(valid_C, row_C, -1), mask=pair_C < n)
