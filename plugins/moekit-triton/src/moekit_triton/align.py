"""Sort (row, expert) pairs by expert, each expert's share padded to whole GEMM blocks; on device.

The result drives the grouped GEMM: block b works on `pairs_S[b * block_m : (b + 1) * block_m]`, all
of expert `experts_B[b]`. Sizes are static (worst case), so nothing is read back and a
CUDA graph may capture it. The sort is stable and free of racing atomics: the same ids always give
the same order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import Launcher, take_turn
from .numerics import INTERPRETED

CHUNK = 256
"""Pairs ranked together: each is compared with every other of its chunk."""

ONE_PROGRAM_PAIRS = 1024
"""Up to this many pairs one program does everything; above, three kernels spread over the
device."""


@dataclass(frozen=True)
class AlignedPairs:
    """Pairs grouped by expert in blocks of `block_m`.

    pairs_S: int32 (capacity,), pair = row * K + k, and R * K for padding; undefined from num_rows.
    experts_B: int32 (capacity / block_m,), local expert of each block, -1 for unused blocks.
    num_rows: int32 (1,), used entries of pairs_S, padding included.
    """

    pairs_S: torch.Tensor
    experts_B: torch.Tensor
    num_rows: torch.Tensor
    block_m: int


def align_capacity(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Entries that `AlignedPairs.pairs_S` needs in the worst case, a multiple of block_m."""
    worst = num_pairs + min(num_pairs, num_experts) * (block_m - 1)
    return triton.cdiv(worst, block_m) * block_m


def align_scratch(num_pairs: int, num_experts: int) -> int:
    """int32 entries of scratch that `align` needs."""
    chunks = 0 if num_pairs <= ONE_PROGRAM_PAIRS else triton.cdiv(num_pairs, CHUNK)
    return (chunks + 1) * num_experts


def align(ids_RK: torch.Tensor, num_experts: int, out: AlignedPairs, scratch: torch.Tensor) -> None:
    """Fill `out` from ids_RK (int32 or int64, contiguous; local ids in [0, L), -1 = no expert).

    `scratch` is int32 with at least `align_scratch` entries; its contents do not matter. One launch
    for few pairs, three for many.
    """
    n, block_m = ids_RK.numel(), out.block_m
    blocks = out.experts_B.numel()
    assert out.pairs_S.numel() == blocks * block_m >= align_capacity(n, num_experts, block_m)
    assert scratch.numel() >= align_scratch(n, num_experts) and ids_RK.is_contiguous()
    bins = max(triton.next_power_of_2(num_experts), 32)
    if n <= ONE_PROGRAM_PAIRS:
        _launch_align_in_one_program(
        (1,),
            ids_RK, out.pairs_S, out.experts_B, out.num_rows, scratch, n, num_experts, blocks,
            BLOCK_M=block_m, BINS=bins, CHUNK=CHUNK, FILL=1024, num_warps=8, num_stages=1,
        )  # fmt: skip
        return
    chunks = triton.cdiv(n, CHUNK)
    counts, totals = scratch, scratch[chunks * num_experts :]
    _launch_count((chunks,), ids_RK, counts, n, num_experts, BINS=bins, CHUNK=CHUNK, num_warps=4)
    width = 128 if INTERPRETED else 16
    _launch_scan(
        (triton.cdiv(num_experts, width),),
        counts,
        totals,
        chunks,
        num_experts,
        WIDTH=width,
        ROWS=256,
        num_warps=8,
    )
    programs = max(chunks, num_experts)
    _launch_scatter(
        (programs,),
        ids_RK, counts, totals, out.pairs_S, out.experts_B, out.num_rows, n, num_experts, blocks,
        BLOCK_M=block_m, BINS=bins, CHUNK=CHUNK,
        TAIL=triton.next_power_of_2(triton.cdiv(blocks, programs)), num_warps=8,
    )  # fmt: skip


@triton.jit
def _rank_in_chunk(ids_ptr, ids_C, start, n, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """For each pair of the chunk at `start`: how many earlier ones of the chunk have the same
    expert."""
    position_C = tl.arange(0, CHUNK)
    rank_C = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, CHUNK, TILE):
        earlier_T = first + tl.arange(0, TILE)
        id_T = tl.load(ids_ptr + start + earlier_T, mask=start + earlier_T < n, other=-1).to(
            tl.int32
        )
        same = (id_T[None, :] == ids_C[:, None]) & (earlier_T[None, :] < position_C[:, None])
        rank_C += tl.sum(same.to(tl.int32), axis=1)
    return rank_C


@triton.jit
def _load_chunk(ids_ptr, start, n, CHUNK: tl.constexpr):
    pair_C = start + tl.arange(0, CHUNK)
    return pair_C, tl.load(ids_ptr + pair_C, mask=pair_C < n, other=-1).to(tl.int32)


@triton.jit(do_not_specialize=["n", "blocks"])
def _align_in_one_program(
    ids_ptr, pairs_ptr, experts_ptr, num_rows_ptr, next_ptr, n, num_experts, blocks,
    BLOCK_M: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, FILL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """next_ptr: scratch (L,), where the next pair of each expert goes."""
    if PDL:
        take_turn()
    expert_L = tl.arange(0, BINS)
    count_L = tl.zeros((BINS,), tl.int32)
    for start in range(0, n, CHUNK):
        pair_C, id_C = _load_chunk(ids_ptr, start, n, CHUNK)
        count_L += tl.histogram(id_C, BINS, mask=id_C >= 0)
    blocks_L = tl.cdiv(count_L, BLOCK_M)
    last_block_L = tl.cumsum(blocks_L, axis=0)
    first_block_L = last_block_L - blocks_L
    used = tl.sum(blocks_L, axis=0)
    tl.store(num_rows_ptr, used * BLOCK_M)

    for j in range(0, tl.max(blocks_L, axis=0)):
        tl.store(experts_ptr + first_block_L + j, expert_L, mask=j < blocks_L)
    for start in range(0, blocks, FILL):
        block_F = start + tl.arange(0, FILL)
        tl.store(experts_ptr + block_F, -1, mask=(block_F >= used) & (block_F < blocks))
    for start in range(0, used * BLOCK_M, FILL):
        entry_F = start + tl.arange(0, FILL)
        tl.store(pairs_ptr + entry_F, n, mask=entry_F < used * BLOCK_M)

    next_L = first_block_L * BLOCK_M
    tl.store(next_ptr + expert_L, next_L, mask=expert_L < num_experts)
    tl.debug_barrier()  # padding is written before pairs, next_ptr before it is read
    for start in range(0, n, CHUNK):
        pair_C, id_C = _load_chunk(ids_ptr, start, n, CHUNK)
        first_C = tl.load(next_ptr + id_C, mask=id_C >= 0, other=0)
        rank_C = _rank_in_chunk(ids_ptr, id_C, start, n, CHUNK, 32)
        tl.store(pairs_ptr + first_C + rank_C, pair_C, mask=id_C >= 0)
        tl.debug_barrier()
        next_L += tl.histogram(id_C, BINS, mask=id_C >= 0)
        tl.store(next_ptr + expert_L, next_L, mask=expert_L < num_experts)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["n"])
def _count(ids_ptr, counts_ptr, n, num_experts,
           BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """counts (chunks, L): pairs of each chunk that go to each expert."""
    if PDL:
        take_turn()
    chunk = tl.program_id(0)
    expert_L = tl.arange(0, BINS)
    pair_C, id_C = _load_chunk(ids_ptr, chunk * CHUNK, n, CHUNK)
    count_L = tl.histogram(id_C, BINS, mask=id_C >= 0)
    tl.store(counts_ptr + chunk * num_experts + expert_L, count_L, mask=expert_L < num_experts)


@triton.jit(do_not_specialize=["chunks"])
def _scan(counts_ptr, totals_ptr, chunks, num_experts,
          WIDTH: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """counts (chunks, L) becomes the sum over earlier chunks, in place; totals (L,) the sum over
    all."""
    if PDL:
        take_turn()
    expert_W = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total_W = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, chunks, ROWS):
        chunk_R = start + tl.arange(0, ROWS)
        inside = (chunk_R < chunks)[:, None] & (expert_W < num_experts)[None, :]
        pointers = counts_ptr + chunk_R[:, None] * num_experts + expert_W[None, :]
        counts = tl.load(pointers, mask=inside, other=0)
        before = tl.cumsum(counts, axis=0) - counts + total_W[None, :]
        tl.store(pointers, before, mask=inside)
        total_W += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert_W, total_W, mask=expert_W < num_experts)


@triton.jit(do_not_specialize=["n", "blocks"])
def _scatter(
    ids_ptr, before_ptr, totals_ptr, pairs_ptr, experts_ptr, num_rows_ptr, n, num_experts, blocks,
    BLOCK_M: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program p places the pairs of chunk p, the padding and block ids of expert p, and a share of
    the tail."""
    if PDL:
        take_turn()
    p = tl.program_id(0)
    expert_L = tl.arange(0, BINS)
    count_L = tl.load(totals_ptr + expert_L, mask=expert_L < num_experts, other=0)
    blocks_L = tl.cdiv(count_L, BLOCK_M)
    first_block_L = tl.cumsum(blocks_L, axis=0) - blocks_L
    used = tl.sum(blocks_L, axis=0)
    if p == 0:
        tl.store(num_rows_ptr, used * BLOCK_M)

    if p * CHUNK < n:
        pair_C, id_C = _load_chunk(ids_ptr, p * CHUNK, n, CHUNK)
        valid_C = id_C >= 0
        first_C = tl.gather(first_block_L, tl.maximum(id_C, 0), 0) * BLOCK_M
        first_C += tl.load(before_ptr + p * num_experts + id_C, mask=valid_C, other=0)
        rank_C = _rank_in_chunk(ids_ptr, id_C, p * CHUNK, n, CHUNK, 32)
        tl.store(pairs_ptr + first_C + rank_C, pair_C, mask=valid_C)

    if p < num_experts:
        first_block = tl.sum(tl.where(expert_L == p, first_block_L, 0), axis=0)
        num_blocks = tl.sum(tl.where(expert_L == p, blocks_L, 0), axis=0)
        entry_M = tl.sum(tl.where(expert_L == p, count_L, 0), axis=0) + tl.arange(0, BLOCK_M)
        tl.store(
            pairs_ptr + first_block * BLOCK_M + entry_M, n, mask=entry_M < num_blocks * BLOCK_M
        )
        for start in range(0, num_blocks, 128):
            block_B = start + tl.arange(0, 128)
            tl.store(experts_ptr + first_block + block_B, p, mask=block_B < num_blocks)

    tail = p * TAIL + tl.arange(0, TAIL)
    tl.store(experts_ptr + tail, -1, mask=(tail >= used) & (tail < blocks))


_launch_align_in_one_program, _launch_count, _launch_scan, _launch_scatter = map(
    Launcher, (_align_in_one_program, _count, _scan, _scatter)
)
