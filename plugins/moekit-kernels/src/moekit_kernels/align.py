"""Sort (token, expert) assignments by expert, on the device, each expert padded to whole blocks.

A grouped GEMM follows the result: block b computes the sorted rows ``[b * block_m, (b + 1) *
block_m)``, all of expert ``experts_B[b]``. Sizes are static (worst case), so the host reads nothing
back and a CUDA graph may capture the sort. The sort is stable and free of racing atomics: the same
ids always give the same order.

Latency dominates here, so each program loads everything it needs at once and no program waits for
another's stores: exactly one program writes each entry, whether assignment or padding.

Shape suffixes: A assignments (rows * K), S expert-sorted rows (padding included), B blocks,
L local experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import Launcher, cdiv, next_power_of_2, wait_then_launch_dependents
from .numerics import INTERPRETED

__all__ = [
    "COUNTERS", "SortedAssignments", "align", "align_capacity", "align_scratch",
]  # fmt: skip

FEW_ASSIGNMENTS = 32
"""Assignments up to which one program compares each with each."""

ONE_LAUNCH_ASSIGNMENTS = 512 if INTERPRETED else 2048
"""Assignments up to which every program counts all of them, so that none waits for another. Above,
a first kernel counts each program's share."""

PROGRAMS = 8 if INTERPRETED else 128
"""Most programs of a launch."""

COMPARED = 128
"""Assignments that are ranked by comparing each with each; also the smallest share of a program
when there are two launches."""

TILE = 1024
"""Most assignments that a program ranks at once."""

COUNTED_TILE = 128 if INTERPRETED else 256
"""The tile where the device counts the rows: few rows take less time, many take more iterations."""

COUNTERS = 3
"""Index of the first block's counter in `SortedAssignments.counters`."""


@dataclass(frozen=True)
class SortedAssignments:
    """The lists that `align` fills: assignments sorted by expert, in blocks of ``block_m`` rows.

    Pass None for a list that is not needed. The first three may be None only if ``ends_L`` is
    given. Without ``experts_B``, the padding in ``assignments_S`` is not written.

    Args:
        assignments_S: int32 (capacity,), the assignment row * K + k of each sorted row, R * K for
            padding; undefined from ``num_rows`` on.
        experts_B: int32 (capacity / block_m,), the local expert of each block, -1 for unused
            blocks.
        num_rows: int32 (1,), sorted rows in use, padding included.
        block_m: rows of a block.
        rows_A: int32 (R * K,), the sorted row of each assignment, -1 without an expert.
        ends_L: int32 (L,), the sorted row after each expert's last one; for an expert without
            rows, its first one.
        counters: int32 (COUNTERS + capacity / block_m,), zeroed by `align`. Programs of
            specialized GEMMs share work through them: the next tile, the next row to copy, the
            number of copiers that have finished, and the progress of each block. Each GEMM leaves
            them zero.
        live_R: int32 (1,), `Dispatched.num_rows`, read. Rows from it on have no expert, and their
            entries in ``rows_A`` may stay undefined. None: all R rows may have an expert.
    """

    assignments_S: torch.Tensor | None
    experts_B: torch.Tensor | None
    num_rows: torch.Tensor | None
    block_m: int
    rows_A: torch.Tensor | None = None
    ends_L: torch.Tensor | None = None
    counters: torch.Tensor | None = None
    live_R: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Sorted rows that ``assignments_S`` has room for."""
        assert self.assignments_S is not None, "assignments_S is not wanted"
        return self.assignments_S.numel()


def align_capacity(num_assignments: int, num_experts: int, block_m: int) -> int:
    """Return the sorted rows needed in the worst case, a multiple of ``block_m``."""
    worst = num_assignments + min(num_assignments, num_experts) * (block_m - 1)
    return -(-worst // block_m) * block_m


def align_scratch(num_assignments: int, num_experts: int) -> int:
    """Return the int32 entries of scratch that `align` needs for at most ``num_assignments``."""
    if num_assignments <= ONE_LAUNCH_ASSIGNMENTS:
        return 0
    programs = min(-(-num_assignments // COMPARED), _programs(num_experts))
    return programs * _bins(num_experts)


def align(
    ids_RK: torch.Tensor,
    num_experts: int,
    out: SortedAssignments,
    scratch: torch.Tensor,
    zeros: torch.Tensor | None = None,
) -> None:
    """Sort the assignments in ``ids_RK`` by expert into ``out``, in one launch or (many) two.

    Args:
        ids_RK: int32 or int64 (R, K), contiguous: local expert ids in [0, L), -1 = no expert.
        num_experts: local experts L.
        out: the lists to fill, see `SortedAssignments`.
        scratch: int32, at least `align_scratch` entries; its contents do not matter.
        zeros: int32, contiguous, or None: further memory to set to zero. Not together with
            ``out.counters``.
    """
    assert zeros is None or out.counters is None
    zeros = out.counters if zeros is None else zeros
    n, block_m = ids_RK.numel(), out.block_m
    blocks = 0 if out.experts_B is None else out.experts_B.numel()
    capacity = align_capacity(n, num_experts, block_m)
    assert out.assignments_S is None or out.assignments_S.numel() >= capacity
    assert out.experts_B is None or out.capacity == blocks * block_m
    assert out.ends_L is None or out.ends_L.numel() == num_experts
    assert out.rows_A is None or out.rows_A.numel() == n
    assert out.counters is None or out.counters.numel() == COUNTERS + blocks
    assert scratch.numel() >= align_scratch(n, num_experts) and ids_RK.is_contiguous()
    lists = out.assignments_S, out.experts_B, out.num_rows, out.rows_A
    form: dict[str, Any] = {"BLOCK_M": block_m, "STORE_ROWS": out.rows_A is not None}
    clear = zeros, 0 if zeros is None else zeros.numel()
    if n <= FEW_ASSIGNMENTS and out.ends_L is None:
        count = max(16, next_power_of_2(n))
        _launch_align_few(
            (1,), ids_RK, *lists, *clear, n, blocks, **form, ASSIGNMENTS=count,
            num_warps=max(count // 8, 4),
        )  # fmt: skip
        return
    form["ENDS"] = 0 if out.ends_L is None else num_experts
    bins, share = _bins(num_experts), next_power_of_2(cdiv(n, _programs(num_experts)))
    if n <= ONE_LAUNCH_ASSIGNMENTS:
        chunk, tile = max(share, 32), max(next_power_of_2(n), 256)
        _launch_align_all(
            (max(1, cdiv(n, chunk)),), ids_RK, *lists, out.ends_L, *clear, n, blocks, **form,
            BINS=bins, CHUNK=chunk, TILE=tile, num_warps=min(max(tile // 128, 4), 16),
        )  # fmt: skip
        return
    chunk, top_k = max(share, COMPARED), ids_RK.shape[1]
    grid, tile = (cdiv(n, chunk),), min(chunk, TILE if out.live_R is None else COUNTED_TILE)
    _launch_count(
        grid, ids_RK, scratch, *clear, n, out.live_R, top_k, BINS=bins, CHUNK=chunk, TILE=tile,
        num_warps=max(tile // 128, 4),
    )  # fmt: skip
    # As many warps and as large pieces as registers hold. With more threads than ids in a piece,
    # Triton would have each thread load all ids that it compares.
    warps = 16 if tile > 512 else min(tile // 32, 8)
    _launch_place(
        grid, ids_RK, scratch, *lists, out.ends_L, n, blocks, out.live_R, top_k, **form, BINS=bins,
        CHUNK=chunk, TILE=tile, SUB=COMPARED, PIECE=COMPARED if tile <= 256 else 64,
        ROWS=min(128, min(warps, 8) * 4096 // bins), num_warps=warps,
    )  # fmt: skip


def _bins(num_experts: int) -> int:
    return max(int(next_power_of_2(num_experts)), 32)


def _programs(num_experts: int) -> int:
    """Return the most programs: all run at once, and each reads the counts of all, <= 128 KiB."""
    return min(PROGRAMS, 2**15 // _bins(num_experts))


@triton.jit
def _load_ids(ids_ptr, assignment_A, n):
    return tl.load(ids_ptr + assignment_A, mask=assignment_A < n, other=-1).to(tl.int32)


@triton.jit
def _share(live_ptr, top_k, n, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Return the end of the live rows' assignments, and the number of assignments a program."""
    if live_ptr is None:
        end, share = n, CHUNK
    else:
        end = tl.minimum(n, tl.load(live_ptr) * top_k)
        share = tl.cdiv(tl.cdiv(end, tl.num_programs(0)), TILE) * TILE
    return end, share


@triton.jit
def _zero(zeros_ptr, zeros):
    if zeros_ptr is not None:
        for start in range(tl.program_id(0) * 256, zeros, tl.num_programs(0) * 256):
            entry = start + tl.arange(0, 256)
            tl.store(zeros_ptr + entry, 0, mask=entry < zeros)


@triton.jit
def _store_assignments(
    assignments_ptr, rows_ptr, assignment_A, id_A, row_A, n, STORE_ROWS: tl.constexpr
):
    if assignments_ptr is not None:
        tl.store(assignments_ptr + row_A, assignment_A, mask=id_A >= 0)
    if STORE_ROWS:
        tl.store(rows_ptr + assignment_A, tl.where(id_A >= 0, row_A, -1), mask=assignment_A < n)


@triton.jit
def _first_blocks(count_L, num_rows_ptr, ends_ptr, BLOCK_M: tl.constexpr, BINS: tl.constexpr,
                  ENDS: tl.constexpr):  # fmt: skip
    """Return the first block of each expert; program 0 stores the ends of the ENDS experts."""
    blocks_L = tl.cdiv(count_L, BLOCK_M)
    behind_L = tl.cumsum(blocks_L, axis=0)
    expert_L = tl.arange(0, BINS)
    if num_rows_ptr is not None:
        last_L = expert_L == BINS - 1 + tl.program_id(0)  # only in program 0
        tl.store(num_rows_ptr + 0 * expert_L, behind_L * BLOCK_M, mask=last_L)
    if ENDS > 0:
        end_L = (behind_L - blocks_L) * BLOCK_M + count_L
        tl.store(ends_ptr + expert_L, end_L, mask=expert_L + tl.program_id(0) * BINS < ENDS)
    return behind_L - blocks_L


@triton.jit
def _store_blocks(assignments_ptr, experts_ptr, count_L, first_L, n, blocks,
                  BLOCK_M: tl.constexpr, BINS: tl.constexpr):  # fmt: skip
    """Store the expert of each block in this program's share, and the padding of these blocks."""
    behind_L = first_L + tl.cdiv(count_L, BLOCK_M)
    end_L = first_L * BLOCK_M + count_L
    for start in range(tl.program_id(0) * 32, blocks, tl.num_programs(0) * 32):
        block_B = start + tl.arange(0, 32)
        smaller_B = tl.sum((behind_L[:, None] <= block_B[None, :]).to(tl.int32), axis=0)
        used_B = smaller_B < BINS
        end_B = tl.gather(end_L, tl.minimum(smaller_B, BINS - 1), 0)
        tl.store(experts_ptr + block_B, tl.where(used_B, smaller_B, -1), mask=block_B < blocks)
        row_BM = block_B[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        padding = used_B[:, None] & (row_BM >= end_B[:, None])
        tl.store(assignments_ptr + row_BM, tl.zeros(row_BM.shape, tl.int32) + n, mask=padding)


@triton.jit(do_not_specialize=["zeros", "n", "blocks"])
def _align_few(
    ids_ptr, assignments_ptr, experts_ptr, num_rows_ptr, rows_ptr, zeros_ptr, zeros, n, blocks,
    BLOCK_M: tl.constexpr, STORE_ROWS: tl.constexpr, ASSIGNMENTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sort by comparing each assignment with each, in one program.

    A block begins with each assignment whose rank in its expert is a multiple of BLOCK_M; the
    number of these among smaller experts is an expert's first block. The lane of an expert's last
    assignment stores the padding.
    """
    if PDL:
        wait_then_launch_dependents()
    assignment_A = tl.arange(0, ASSIGNMENTS)
    id_A = _load_ids(ids_ptr, assignment_A, n)
    real_A = id_A >= 0
    same = id_A[:, None] == id_A[None, :]
    rank_A = tl.sum((same & (assignment_A[None, :] < assignment_A[:, None])).to(tl.int32), axis=1)
    rank_across_A = tl.sum(
        (same & (assignment_A[:, None] < assignment_A[None, :])).to(tl.int32), axis=0
    )
    count_A = tl.sum(same.to(tl.int32), axis=1)
    begins_A = (rank_across_A % BLOCK_M == 0) & real_A
    earlier = begins_A[None, :] & (id_A[None, :] < id_A[:, None])
    first_A = tl.sum(earlier.to(tl.int32), axis=1)
    used = tl.sum(begins_A.to(tl.int32), axis=0)
    tl.store(num_rows_ptr, used * BLOCK_M)

    row_A = first_A * BLOCK_M + rank_A
    _store_assignments(assignments_ptr, rows_ptr, assignment_A, id_A, row_A, n, STORE_ROWS)
    tl.store(experts_ptr + row_A // BLOCK_M, id_A, mask=real_A & (rank_A % BLOCK_M == 0))
    for start in range(0, blocks, ASSIGNMENTS):
        block_B = start + tl.arange(0, ASSIGNMENTS)
        tl.store(experts_ptr + block_B, -1, mask=(block_B >= used) & (block_B < blocks))
    last_A = real_A & (rank_A == count_A - 1)
    left_A = tl.cdiv(count_A, BLOCK_M) * BLOCK_M - count_A
    ahead_M = tl.arange(0, BLOCK_M)
    padding = last_A[:, None] & (ahead_M[None, :] < left_A[:, None])
    pointers = assignments_ptr + row_A[:, None] + 1 + ahead_M[None, :]
    tl.store(pointers, tl.zeros(padding.shape, tl.int32) + n, mask=padding)
    _zero(zeros_ptr, zeros)


@triton.jit(do_not_specialize=["zeros", "n", "blocks"])
def _align_all(
    ids_ptr, assignments_ptr, experts_ptr, num_rows_ptr, rows_ptr, ends_ptr, zeros_ptr, zeros,
    n, blocks, BLOCK_M: tl.constexpr, STORE_ROWS: tl.constexpr, ENDS: tl.constexpr,
    BINS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count all n <= TILE assignments in every program; program c stores the rows of chunk c."""
    if PDL:
        wait_then_launch_dependents()
    start = tl.program_id(0) * CHUNK
    assignment_T, assignment_C = tl.arange(0, TILE), start + tl.arange(0, CHUNK)
    id_T, id_C = _load_ids(ids_ptr, assignment_T, n), _load_ids(ids_ptr, assignment_C, n)
    _zero(zeros_ptr, zeros)
    before_L = tl.histogram(id_T, BINS, mask=(id_T >= 0) & (assignment_T < start))
    count_L = tl.histogram(id_T, BINS, mask=id_T >= 0)
    first_L = _first_blocks(count_L, num_rows_ptr, ends_ptr, BLOCK_M, BINS, ENDS)

    earlier = (id_C[None, :] == id_C[:, None]) & (assignment_C[None, :] < assignment_C[:, None])
    rank_C = tl.sum(earlier.to(tl.int32), axis=1)
    row_C = tl.gather(first_L * BLOCK_M + before_L, tl.maximum(id_C, 0), 0) + rank_C
    _store_assignments(assignments_ptr, rows_ptr, assignment_C, id_C, row_C, n, STORE_ROWS)
    if experts_ptr is not None:
        _store_blocks(assignments_ptr, experts_ptr, count_L, first_L, n, blocks, BLOCK_M, BINS)


@triton.jit(do_not_specialize=["zeros", "n", "top_k"])
def _count(
    ids_ptr, counts_ptr, zeros_ptr, zeros, n, live_ptr, top_k, BINS: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store counts (programs, BINS): how many assignments of each chunk go to each expert."""
    if PDL:
        wait_then_launch_dependents()
    chunk = tl.program_id(0)
    end, share = _share(live_ptr, top_k, n, CHUNK, TILE)
    count_L = tl.zeros((BINS,), tl.int32)
    for start in range(0, share, TILE):
        id_T = _load_ids(ids_ptr, chunk * share + start + tl.arange(0, TILE), end)
        count_L += tl.histogram(id_T, BINS, mask=id_T >= 0)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), count_L)
    _zero(zeros_ptr, zeros)


@triton.jit
def _rank(ids_ptr, start, id_T, n, BINS: tl.constexpr, TILE: tl.constexpr, SUB: tl.constexpr,
          PIECE: tl.constexpr):  # fmt: skip
    """Return how many earlier assignments of the tile beginning at ``start`` have the same
    expert."""
    position_S = tl.arange(0, TILE // SUB) * SUB
    position_P = tl.arange(0, SUB)
    id_SP = tl.reshape(id_T, (TILE // SUB, SUB))
    rank_SP = tl.zeros((TILE // SUB, SUB), tl.int32)
    for first in range(0, SUB, PIECE):  # more than one piece at once needs too many registers
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


@triton.jit(do_not_specialize=["n", "blocks", "top_k"])
def _place(
    ids_ptr, counts_ptr, assignments_ptr, experts_ptr, num_rows_ptr, rows_ptr, ends_ptr, n, blocks,
    live_ptr, top_k,
    BLOCK_M: tl.constexpr, STORE_ROWS: tl.constexpr, ENDS: tl.constexpr, BINS: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, SUB: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the sorted rows of chunk c in program c, from the counts of all chunks."""
    chunk = tl.program_id(0)
    # Ids and rows were written before the counts, so no wait is needed.
    end, share = _share(live_ptr, top_k, n, CHUNK, TILE)
    assignment_T = chunk * share + tl.arange(0, TILE)
    id_T = _load_ids(ids_ptr, assignment_T, end)
    rank_T = _rank(ids_ptr, chunk * share, id_T, end, BINS, TILE, SUB, PIECE)
    if PDL:
        wait_then_launch_dependents()
    count_L, before_L = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for start in range(0, tl.num_programs(0), ROWS):
        row_R = start + tl.arange(0, ROWS)[:, None]
        pointers = counts_ptr + row_R * BINS + tl.arange(0, BINS)[None, :]
        count_RL = tl.load(pointers, mask=row_R < tl.num_programs(0), other=0)
        count_L += tl.sum(count_RL, axis=0)
        before_L += tl.sum(tl.where(row_R < chunk, count_RL, 0), axis=0)
    first_L = _first_blocks(count_L, num_rows_ptr, ends_ptr, BLOCK_M, BINS, ENDS)
    base_L = first_L * BLOCK_M + before_L
    row_T = tl.gather(base_L, tl.maximum(id_T, 0), 0) + rank_T
    _store_assignments(assignments_ptr, rows_ptr, assignment_T, id_T, row_T, end, STORE_ROWS)
    if CHUNK > TILE:
        for start in range(chunk * share + TILE, (chunk + 1) * share, TILE):
            base_L += tl.histogram(id_T, BINS, mask=id_T >= 0)
            assignment_T = start + tl.arange(0, TILE)
            id_T = _load_ids(ids_ptr, assignment_T, end)
            rank_T = _rank(ids_ptr, start, id_T, end, BINS, TILE, SUB, PIECE)
            row_T = tl.gather(base_L, tl.maximum(id_T, 0), 0) + rank_T
            _store_assignments(
                assignments_ptr, rows_ptr, assignment_T, id_T, row_T, end, STORE_ROWS
            )
    if experts_ptr is not None:
        _store_blocks(assignments_ptr, experts_ptr, count_L, first_L, n, blocks, BLOCK_M, BINS)


_launch_align_few, _launch_align_all, _launch_count, _launch_place = map(
    Launcher, (_align_few, _align_all, _count, _place)
)
