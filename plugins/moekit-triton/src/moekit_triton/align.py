"""Sort (row, expert) pairs by expert, each expert's share padded to whole GEMM blocks; on device.

The result drives the grouped GEMM: block b works on `pairs_S[b * block_m : (b + 1) * block_m]`, all
of expert `experts_B[b]`. Sizes are static (worst case), so nothing is read back and a
CUDA graph may capture it. The sort is stable and free of racing atomics: the same ids always give
the same order.

What takes time here is waiting, so each program reads what it needs at once and nobody waits for
what it stores: every entry is written by one program, pairs and padding alike.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import Launcher, take_turn
from .numerics import INTERPRETED

FEW_PAIRS = 32
"""Up to this many pairs one program compares each with each."""

ONE_LAUNCH_PAIRS = 512 if INTERPRETED else 2048
"""Up to this many pairs every program counts all of them by itself, so that none waits for
another. Above, a first kernel counts each program's share."""

PROGRAMS = 8 if INTERPRETED else 128
"""Most programs of a launch."""

COMPARED = 128
"""Pairs compared each with each to be ranked, and the least share of a program in two launches."""

TILE = 1024
"""Most pairs that a program ranks at once."""

COUNTERS = 3
"""Where those of blocks begin in `AlignedPairs.counters`."""


@dataclass(frozen=True)
class AlignedPairs:
    """Pairs grouped by expert in blocks of `block_m`. Lists that are None are not asked for; the
    first three may be None only with ends_L.

    pairs_S: int32 (capacity,), pair = row * K + k, and R * K for padding; undefined from num_rows.
    experts_B: int32 (capacity / block_m,), local expert of each block, -1 for unused blocks.
    num_rows: int32 (1,), used entries of pairs_S, padding included.
    entries_P: int32 (R * K,), the entry of each pair in pairs_S, -1 without an expert.
    ends_L: int32 (L,), the entry behind each expert's last pair; without any, its first entry.
    counters: int32 (COUNTERS + capacity / block_m,), zero and left so, by which programs of
        specialized GEMMs share their work: tiles, rows to be copied into order, copiers that have
        found no more of them, and for each block what is done of it.

    Without experts_B the padding in pairs_S stays as it is.
    """

    pairs_S: torch.Tensor | None
    experts_B: torch.Tensor | None
    num_rows: torch.Tensor | None
    block_m: int
    entries_P: torch.Tensor | None = None
    ends_L: torch.Tensor | None = None
    counters: torch.Tensor | None = None


def align_capacity(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Entries that `AlignedPairs.pairs_S` needs in the worst case, a multiple of block_m."""
    worst = num_pairs + min(num_pairs, num_experts) * (block_m - 1)
    return triton.cdiv(worst, block_m) * block_m


def align_scratch(num_pairs: int, num_experts: int) -> int:
    """int32 entries of scratch that `align` needs, for fewer pairs too."""
    if num_pairs <= ONE_LAUNCH_PAIRS:
        return 0
    programs = min(triton.cdiv(num_pairs, COMPARED), _programs(num_experts))
    return programs * _bins(num_experts)


def align(
    ids_RK: torch.Tensor,
    num_experts: int,
    out: AlignedPairs,
    scratch: torch.Tensor,
    zeros: torch.Tensor | None = None,
) -> None:
    """Fill `out` from ids_RK (int32 or int64, contiguous; local ids in [0, L), -1 = no expert).

    `scratch` is int32 with at least `align_scratch` entries; its contents do not matter. `zeros`
    (int32, contiguous; not beside counters) is set to zero. One launch, or two for many pairs.
    """
    assert zeros is None or out.counters is None
    zeros = out.counters if zeros is None else zeros
    n, block_m = ids_RK.numel(), out.block_m
    blocks = 0 if out.experts_B is None else out.experts_B.numel()
    capacity = align_capacity(n, num_experts, block_m)
    assert out.pairs_S is None or out.pairs_S.numel() >= capacity
    assert out.experts_B is None or out.pairs_S.numel() == blocks * block_m
    assert out.ends_L is None or out.ends_L.numel() == num_experts
    assert out.entries_P is None or out.entries_P.numel() == n
    assert out.counters is None or out.counters.numel() == COUNTERS + blocks
    assert scratch.numel() >= align_scratch(n, num_experts) and ids_RK.is_contiguous()
    lists = out.pairs_S, out.experts_B, out.num_rows, out.entries_P
    form = {"BLOCK_M": block_m, "ENTRIES": out.entries_P is not None}
    clear = zeros, 0 if zeros is None else zeros.numel()
    if n <= FEW_PAIRS and out.ends_L is None:
        pairs = max(16, triton.next_power_of_2(n))
        _launch_align_few(
            (1,), ids_RK, *lists, *clear, n, blocks, **form, PAIRS=pairs,
            num_warps=max(pairs // 8, 4),
        )  # fmt: skip
        return
    form["ENDS"] = 0 if out.ends_L is None else num_experts
    bins, share = _bins(num_experts), triton.next_power_of_2(triton.cdiv(n, _programs(num_experts)))
    if n <= ONE_LAUNCH_PAIRS:
        chunk, tile = max(share, 32), max(triton.next_power_of_2(n), 256)
        _launch_align_all(
            (max(1, triton.cdiv(n, chunk)),), ids_RK, *lists, out.ends_L, *clear, n, blocks, **form,
            BINS=bins, CHUNK=chunk, TILE=tile, num_warps=min(max(tile // 128, 4), 16),
        )  # fmt: skip
        return
    chunk = max(share, COMPARED)
    grid, tile = (triton.cdiv(n, chunk),), min(chunk, TILE)
    _launch_count(
        grid, ids_RK, scratch, *clear, n, BINS=bins, CHUNK=chunk, TILE=tile,
        num_warps=max(tile // 128, 4),
    )  # fmt: skip
    # As many warps and as large pieces as registers hold. With more threads than ids in a piece,
    # Triton would have each thread load all ids that it compares.
    warps = 16 if tile > 512 else min(tile // 32, 8)
    _launch_place(
        grid, ids_RK, scratch, *lists, out.ends_L, n, blocks, **form, BINS=bins, CHUNK=chunk,
        TILE=tile, SUB=COMPARED, PIECE=COMPARED if tile <= 256 else 64,
        ROWS=min(128, min(warps, 8) * 4096 // bins), num_warps=warps,
    )  # fmt: skip


def _bins(num_experts: int) -> int:
    return max(triton.next_power_of_2(num_experts), 32)


def _programs(num_experts: int) -> int:
    """Most programs: all run at once, and each reads the counts of all, at most 128 KiB."""
    return min(PROGRAMS, 2**15 // _bins(num_experts))


@triton.jit
def _load_ids(ids_ptr, pair_P, n):
    return tl.load(ids_ptr + pair_P, mask=pair_P < n, other=-1).to(tl.int32)


@triton.jit
def _zero(zeros_ptr, zeros):
    if zeros_ptr is not None:
        for start in range(tl.program_id(0) * 256, zeros, tl.num_programs(0) * 256):
            entry = start + tl.arange(0, 256)
            tl.store(zeros_ptr + entry, 0, mask=entry < zeros)


@triton.jit
def _store_pairs(pairs_ptr, entries_ptr, pair_P, id_P, entry_P, n, ENTRIES: tl.constexpr):
    if pairs_ptr is not None:
        tl.store(pairs_ptr + entry_P, pair_P, mask=id_P >= 0)
    if ENTRIES:
        tl.store(entries_ptr + pair_P, tl.where(id_P >= 0, entry_P, -1), mask=pair_P < n)


@triton.jit
def _first_blocks(count_L, num_rows_ptr, ends_ptr, BLOCK_M: tl.constexpr, BINS: tl.constexpr,
                  ENDS: tl.constexpr):  # fmt: skip
    """The first block of each expert; program 0 stores the ends of the ENDS experts."""
    blocks_L = tl.cdiv(count_L, BLOCK_M)
    behind_L = tl.cumsum(blocks_L, axis=0)
    expert_L = tl.arange(0, BINS)
    if num_rows_ptr is not None:
        last_L = expert_L == BINS - 1 + tl.program_id(0)  # nowhere but in program 0
        tl.store(num_rows_ptr + 0 * expert_L, behind_L * BLOCK_M, mask=last_L)
    if ENDS > 0:
        end_L = (behind_L - blocks_L) * BLOCK_M + count_L
        tl.store(ends_ptr + expert_L, end_L, mask=expert_L + tl.program_id(0) * BINS < ENDS)
    return behind_L - blocks_L


@triton.jit
def _store_blocks(pairs_ptr, experts_ptr, count_L, first_L, n, blocks,
                  BLOCK_M: tl.constexpr, BINS: tl.constexpr):  # fmt: skip
    """Of this program's share of the blocks: the experts, and the padding behind the pairs."""
    behind_L = first_L + tl.cdiv(count_L, BLOCK_M)
    end_L = first_L * BLOCK_M + count_L
    for start in range(tl.program_id(0) * 32, blocks, tl.num_programs(0) * 32):
        block_B = start + tl.arange(0, 32)
        smaller_B = tl.sum((behind_L[:, None] <= block_B[None, :]).to(tl.int32), axis=0)
        used_B = smaller_B < BINS
        end_B = tl.gather(end_L, tl.minimum(smaller_B, BINS - 1), 0)
        tl.store(experts_ptr + block_B, tl.where(used_B, smaller_B, -1), mask=block_B < blocks)
        entry_BM = block_B[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        padding = used_B[:, None] & (entry_BM >= end_B[:, None])
        tl.store(pairs_ptr + entry_BM, tl.zeros(entry_BM.shape, tl.int32) + n, mask=padding)


@triton.jit(do_not_specialize=["zeros", "n", "blocks"])
def _align_few(
    ids_ptr, pairs_ptr, experts_ptr, num_rows_ptr, entries_ptr, zeros_ptr, zeros, n, blocks,
    BLOCK_M: tl.constexpr, ENTRIES: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block begins with each pair whose rank in its expert is a multiple of BLOCK_M: counting
    these among smaller experts gives an expert's first block. Its last pair stores the padding.
    """
    if PDL:
        take_turn()
    pair_P = tl.arange(0, PAIRS)
    id_P = _load_ids(ids_ptr, pair_P, n)
    real_P = id_P >= 0
    same = id_P[:, None] == id_P[None, :]
    rank_P = tl.sum((same & (pair_P[None, :] < pair_P[:, None])).to(tl.int32), axis=1)
    rank_across_P = tl.sum((same & (pair_P[:, None] < pair_P[None, :])).to(tl.int32), axis=0)
    count_P = tl.sum(same.to(tl.int32), axis=1)
    begins_P = (rank_across_P % BLOCK_M == 0) & real_P
    earlier = begins_P[None, :] & (id_P[None, :] < id_P[:, None])
    first_P = tl.sum(earlier.to(tl.int32), axis=1)
    used = tl.sum(begins_P.to(tl.int32), axis=0)
    tl.store(num_rows_ptr, used * BLOCK_M)

    entry_P = first_P * BLOCK_M + rank_P
    _store_pairs(pairs_ptr, entries_ptr, pair_P, id_P, entry_P, n, ENTRIES)
    tl.store(experts_ptr + entry_P // BLOCK_M, id_P, mask=real_P & (rank_P % BLOCK_M == 0))
    for start in range(0, blocks, PAIRS):
        block_B = start + tl.arange(0, PAIRS)
        tl.store(experts_ptr + block_B, -1, mask=(block_B >= used) & (block_B < blocks))
    last_P = real_P & (rank_P == count_P - 1)
    left_P = tl.cdiv(count_P, BLOCK_M) * BLOCK_M - count_P
    ahead_M = tl.arange(0, BLOCK_M)
    padding = last_P[:, None] & (ahead_M[None, :] < left_P[:, None])
    pointers = pairs_ptr + entry_P[:, None] + 1 + ahead_M[None, :]
    tl.store(pointers, tl.zeros(padding.shape, tl.int32) + n, mask=padding)
    _zero(zeros_ptr, zeros)


@triton.jit(do_not_specialize=["zeros", "n", "blocks"])
def _align_all(
    ids_ptr, pairs_ptr, experts_ptr, num_rows_ptr, entries_ptr, ends_ptr, zeros_ptr, zeros,
    n, blocks, BLOCK_M: tl.constexpr, ENTRIES: tl.constexpr, ENDS: tl.constexpr,
    BINS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program c places chunk c of the n <= TILE pairs and counts all of them."""
    if PDL:
        take_turn()
    start = tl.program_id(0) * CHUNK
    pair_T, pair_C = tl.arange(0, TILE), start + tl.arange(0, CHUNK)
    id_T, id_C = _load_ids(ids_ptr, pair_T, n), _load_ids(ids_ptr, pair_C, n)
    _zero(zeros_ptr, zeros)
    before_L = tl.histogram(id_T, BINS, mask=(id_T >= 0) & (pair_T < start))
    count_L = tl.histogram(id_T, BINS, mask=id_T >= 0)
    first_L = _first_blocks(count_L, num_rows_ptr, ends_ptr, BLOCK_M, BINS, ENDS)

    earlier = (id_C[None, :] == id_C[:, None]) & (pair_C[None, :] < pair_C[:, None])
    rank_C = tl.sum(earlier.to(tl.int32), axis=1)
    entry_C = tl.gather(first_L * BLOCK_M + before_L, tl.maximum(id_C, 0), 0) + rank_C
    _store_pairs(pairs_ptr, entries_ptr, pair_C, id_C, entry_C, n, ENTRIES)
    if experts_ptr is not None:
        _store_blocks(pairs_ptr, experts_ptr, count_L, first_L, n, blocks, BLOCK_M, BINS)


@triton.jit(do_not_specialize=["zeros", "n"])
def _count(
    ids_ptr, counts_ptr, zeros_ptr, zeros, n, BINS: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts (programs, BINS): pairs of each chunk that go to each expert."""
    if PDL:
        take_turn()
    chunk = tl.program_id(0)
    count_L = tl.zeros((BINS,), tl.int32)
    for start in range(0, CHUNK, TILE):
        id_T = _load_ids(ids_ptr, chunk * CHUNK + start + tl.arange(0, TILE), n)
        count_L += tl.histogram(id_T, BINS, mask=id_T >= 0)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), count_L)
    _zero(zeros_ptr, zeros)


@triton.jit
def _rank(ids_ptr, start, id_T, n, BINS: tl.constexpr, TILE: tl.constexpr, SUB: tl.constexpr,
          PIECE: tl.constexpr):  # fmt: skip
    """How many earlier pairs of the tile that begins at pair `start` have the same expert."""
    position_S = tl.arange(0, TILE // SUB) * SUB
    position_P = tl.arange(0, SUB)
    id_SP = tl.reshape(id_T, (TILE // SUB, SUB))
    rank_SP = tl.zeros((TILE // SUB, SUB), tl.int32)
    for first in range(0, SUB, PIECE):  # more than a piece at once needs too many registers
        position_J = first + tl.arange(0, PIECE)
        id_JS = _load_ids(ids_ptr, start + position_S[None, :] + position_J[:, None], n)
        same = id_JS[:, :, None] == id_SP[None, :, :]
        earlier = same & (position_J[:, None] < position_P[None, :])[:, None, :]
        rank_SP += tl.sum(earlier.to(tl.int32), axis=0)
    rank_T = tl.reshape(rank_SP, (TILE,))
    if TILE > SUB:
        bin_T = tl.arange(0, TILE) // SUB * BINS + tl.maximum(id_T, 0)
        counts = tl.histogram(bin_T, TILE // SUB * BINS, mask=id_T >= 0)
        count_SL = tl.reshape(counts, (TILE // SUB, BINS))
        before_SL = tl.cumsum(count_SL, axis=0) - count_SL
        rank_T += tl.gather(tl.reshape(before_SL, (TILE // SUB * BINS,)), bin_T, 0)
    return rank_T


@triton.jit(do_not_specialize=["n", "blocks"])
def _place(
    ids_ptr, counts_ptr, pairs_ptr, experts_ptr, num_rows_ptr, entries_ptr, ends_ptr, n, blocks,
    BLOCK_M: tl.constexpr, ENTRIES: tl.constexpr, ENDS: tl.constexpr, BINS: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, SUB: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program c places chunk c."""
    chunk = tl.program_id(0)
    pair_T = chunk * CHUNK + tl.arange(0, TILE)
    id_T = _load_ids(ids_ptr, pair_T, n)  # older than the counts
    rank_T = _rank(ids_ptr, chunk * CHUNK, id_T, n, BINS, TILE, SUB, PIECE)
    if PDL:
        take_turn()
    count_L, before_L = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for start in range(0, tl.num_programs(0), ROWS):
        row_R = start + tl.arange(0, ROWS)[:, None]
        pointers = counts_ptr + row_R * BINS + tl.arange(0, BINS)[None, :]
        count_RL = tl.load(pointers, mask=row_R < tl.num_programs(0), other=0)
        count_L += tl.sum(count_RL, axis=0)
        before_L += tl.sum(tl.where(row_R < chunk, count_RL, 0), axis=0)
    first_L = _first_blocks(count_L, num_rows_ptr, ends_ptr, BLOCK_M, BINS, ENDS)
    base_L = first_L * BLOCK_M + before_L
    entry_T = tl.gather(base_L, tl.maximum(id_T, 0), 0) + rank_T
    _store_pairs(pairs_ptr, entries_ptr, pair_T, id_T, entry_T, n, ENTRIES)
    if CHUNK > TILE:
        for start in range(chunk * CHUNK + TILE, (chunk + 1) * CHUNK, TILE):
            base_L += tl.histogram(id_T, BINS, mask=id_T >= 0)
            pair_T = start + tl.arange(0, TILE)
            id_T = _load_ids(ids_ptr, pair_T, n)
            rank_T = _rank(ids_ptr, start, id_T, n, BINS, TILE, SUB, PIECE)
            entry_T = tl.gather(base_L, tl.maximum(id_T, 0), 0) + rank_T
            _store_pairs(pairs_ptr, entries_ptr, pair_T, id_T, entry_T, n, ENTRIES)
    if experts_ptr is not None:
        _store_blocks(pairs_ptr, experts_ptr, count_L, first_L, n, blocks, BLOCK_M, BINS)


_launch_align_few, _launch_align_all, _launch_count, _launch_place = map(
    Launcher, (_align_few, _align_all, _count, _place)
)
