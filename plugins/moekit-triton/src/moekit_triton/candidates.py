"""Enumerate the tiles and plans that the tuner times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from moekit_kernels.numerics import SCALE_GROUP

from moekit.plugin import MoEProblem

from .capabilities import (
    PACKED_BLOCK_M,
    fusable,
    operand_bits,
    shared_memory,
    specializable,
    swap_ab_pays,
    tma_possible,
)
from .heuristics import sorted_wins, sorting_pays
from .kernels.tiles import (
    CHUNK,
    GemmTile,
    OrderedTile,
    SortedTile,
    SpecializedTile,
    TokenTile,
)
from .plans import Copied, CopiedAhead, Gathered, TilePlan

# Rows per expert up to which token tiles are timed.
_TOKEN_TILES_MOST = 1024

Step = Literal["gemm_1", "gemm_2"]
"""The methods of a plan that are timed apart."""


class Attempt(NamedTuple):
    """A GEMM to time, as a step of a plan; the plan's other tile does not matter."""

    step: Step
    plan: TilePlan


def attempts(problem: MoEProblem, rows: int) -> Iterator[Attempt]:
    """Yield the steps to time for ``rows`` tokens. Gathered rows are left out where expert-sorted
    rows have won in every shape."""
    p, wide = problem, 2 if problem.activation.gated else 1
    per_expert = rows * p.top_k / p.num_experts
    sort = sorting_pays(p, rows, p.top_k)
    if not (sort and sorted_wins(p, per_expert)):
        for tile in candidates(p, per_expert, wide):
            if fusable(p, tile.block_n):
                yield Attempt("gemm_1", Gathered(tile, tile, True))
        for tile in candidates(p, per_expert, 1):
            if p.quant.activation is not None:
                yield Attempt("gemm_1", Gathered(tile, tile, False))
            yield Attempt("gemm_2", Gathered(tile, tile, True))
    if sort:
        for ordered in sorted_candidates(p, per_expert, wide):
            yield Attempt("gemm_1", Copied(ordered, ordered))
            if isinstance(ordered, SpecializedTile) and p.quant.weight is None:
                yield Attempt("gemm_1", CopiedAhead(ordered, ordered))
        for ordered in sorted_candidates(p, per_expert, 1):
            yield Attempt("gemm_2", Copied(ordered, ordered))


def candidates(problem: MoEProblem, per_expert: float, wide: int) -> list[GemmTile]:
    """Return tiles for gathered rows; wide: weight rows behind an output column."""
    a_bits, w_bits = operand_bits(problem)
    blocks_m = [b for b in (16, 32, 64, 128) if b == 16 or per_expert * 3 >= b]
    blocks_m = blocks_m[-2:] if per_expert < 200 else [64, 128]
    if w_bits == 4:
        return _packed_candidates(problem, [8, 16] if per_expert <= 4 else blocks_m, wide)
    found: list[GemmTile] = []
    descriptors = (True, False) if tma_possible(problem) else (False,)
    if swap_ab_pays(problem):
        few = [b for b in blocks_m if b < 64]
        found += _swapped_candidates(problem, few, wide, descriptors)
        blocks_m = [b for b in blocks_m if b >= 64]
    steps = (128,) if problem.quant.name.endswith("_block") or a_bits == 8 else (64, 128)
    for block_m, columns, warps, tma, block_k in itertools.product(
        blocks_m, (64, 128, 256), (4, 8), descriptors, steps
    ):
        if columns // wide < 32 or not _fits_registers(block_m, columns, warps, a_bits):
            continue
        stage = (block_m * a_bits + columns * w_bits) * block_k // 8
        for stages in _stage_counts(block_m, columns, warps, stage, shared_memory(problem)):
            size = block_m, columns // wide, block_k
            found.append(GemmTile(*size, 8, warps, stages, tma, halves=block_m == 128))
    if a_bits == 8 and wide == 1:
        # Two weight tiles side by side share the registers for the sums of a step.
        found += [
            GemmTile(m, 128, 128, 8, warps, stages, tma, halves=m == 128, wide=True)
            for (m, warps), tma, stages in itertools.product(
                ((64, 4), (64, 8), (128, 8)), descriptors, (2, 3, 4)
            )
            if m in blocks_m
        ]
    return found


def _fits_registers(block_m: int, columns: int, warps: int, a_bits: int) -> bool:
    """Return whether each thread has enough sums, and registers for them."""
    per_thread = block_m * columns / (32 * warps) * (2 if a_bits == 8 else 1)
    too_many_warps = block_m < 64 and warps == 8 and columns < 128
    return 8 <= per_thread <= 256 and not too_many_warps


def _stage_counts(block_m: int, columns: int, warps: int, stage: int, shared: int) -> list[int]:
    """Return how many stages of ``stage`` bytes are worth timing."""
    stages = min(5 if block_m <= 32 else 4, (shared - block_m * columns) // stage)
    choices = {stages}
    if block_m >= 64 and warps == 4:  # a second program on the multiprocessor
        choices.add(min(stages, shared // 2 // stage))
    return [stages for stages in choices if stages >= 2]


def _swapped_candidates(
    problem: MoEProblem, blocks_m: Sequence[int], wide: int, descriptors: Sequence[bool]
) -> list[GemmTile]:
    """Return swap-AB tiles for few rows of fp8: weights are wgmma's 64 rows, and up to three
    programs share a multiprocessor."""
    found, shared = [], shared_memory(problem)
    tiles = ((64, 4), (128, 4), (128, 8)) if wide == 2 else ((64, 4), (128, 4), (256, 4), (256, 8))
    for block_m, (block_n, warps), tma in itertools.product(blocks_m, tiles, descriptors):
        stage = (block_m + block_n * wide) * SCALE_GROUP
        most = {min(6, shared // programs // stage) for programs in (1, 2, 3)}
        found += [
            GemmTile(block_m, block_n, SCALE_GROUP, 8, warps, stages, tma, swapped=True)
            for stages in sorted(most)
            if stages >= 3
        ]
    return found


def _packed_candidates(problem: MoEProblem, blocks_m: Sequence[int], wide: int) -> list[GemmTile]:
    """Return tiles for 4 bits: a warp makes 16 weight rows, or 32 for few columns."""
    found = []
    tiles = ((16, 1), (32, 2), (64, 4), (64, 2), (128, 8), (128, 4))
    for block_m, (block_n, warps), stages in itertools.product(
        [b for b in blocks_m if b <= PACKED_BLOCK_M], tiles, (3, 5)
    ):
        per_thread = block_m * block_n * wide / (32 * warps)  # sums; partial sums need as many
        if per_thread <= (32 if block_n > 16 * warps else 64):
            stage = (16 * block_m + 4 * block_n * wide) * CHUNK // 8
            if stages * stage <= shared_memory(problem) and (block_m < 64 or block_n >= 64):
                found.append(GemmTile(block_m, block_n, CHUNK, 8, warps, stages))
    return found


def sorted_candidates(problem: MoEProblem, per_expert: float, wide: int) -> list[OrderedTile]:
    """Return tiles for expert-sorted rows; wide: weight rows behind an output column."""
    found: list[OrderedTile] = []
    if specializable(problem):
        found += [SpecializedTile(g, h) for g in (4, 8, 16) for h in (True, False)]
    if problem.quant.weight is not None:
        return found
    kinds: list[tuple[int, int, int, dict[str, bool]]] = [
        (rows, warps, stages, kind)
        for rows, warps, stages in ((128, 8, 4), (128, 8, 3), (64, 4, 4))
        for kind in ({"halves": rows == 128}, *(() if wide == 2 else ({"persistent": True},)))
    ]
    found += [
        SortedTile(rows, 256 // wide, 64, group_m, warps, stages, **kind)
        for (rows, warps, stages, kind), group_m in itertools.product(kinds, (4, 8, 16))
    ]
    if specializable(problem) and per_expert <= _TOKEN_TILES_MOST:
        found += [TokenTile(n, group_m) for n in (128, 256) for group_m in (1, 4)]
    return found


def variations(best: GemmTile) -> list[GemmTile]:
    """Return neighbours of a good tile."""
    found = [replace(best, group_m=g) for g in (1, 4, 16, 32) if g != best.group_m]
    if best.num_stages > 2:
        found.append(replace(best, num_stages=best.num_stages - 1))
    if best.halves:
        found.append(replace(best, halves=False))
    return found
