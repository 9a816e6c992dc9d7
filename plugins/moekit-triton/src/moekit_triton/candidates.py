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
from .kernels.tiles import CHUNK, GemmConfig, token_tile
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
        for tile in _sorted_tiles(p, per_expert, wide):
            yield Attempt("gemm_1", Copied(tile, tile))
            if tile.specialized and not tile.token_tile and p.quant.weight is None:
                yield Attempt("gemm_1", CopiedAhead(tile, tile))
        for tile in _sorted_tiles(p, per_expert, 1):
            yield Attempt("gemm_2", Copied(tile, tile))


def _sorted_tiles(problem: MoEProblem, per_expert: float, wide: int) -> list[GemmConfig]:
    usual = sorted_candidates(problem, wide)
    of_tokens = per_expert <= _TOKEN_TILES_MOST
    return usual + token_candidates(problem, wide) if of_tokens else usual


def candidates(problem: MoEProblem, per_expert: float, wide: int) -> list[GemmConfig]:
    """Return tiles for gathered rows; wide: weight rows behind an output column."""
    a_bits, w_bits = operand_bits(problem)
    blocks_m = [b for b in (16, 32, 64, 128) if b == 16 or per_expert * 3 >= b]
    blocks_m = blocks_m[-2:] if per_expert < 200 else [64, 128]
    if w_bits == 4:
        return _packed_candidates(problem, [8, 16] if per_expert <= 4 else blocks_m, wide)
    found: list[GemmConfig] = []
    if swap_ab_pays(problem):
        found += _swapped_candidates(problem, [b for b in blocks_m if b < 64], wide)
        blocks_m = [b for b in blocks_m if b >= 64]
    steps = (128,) if problem.quant.name.endswith("_block") or a_bits == 8 else (64, 128)
    for block_m, columns, warps, tma, block_k in itertools.product(
        blocks_m, (64, 128, 256), (4, 8), _descriptors(problem), steps
    ):
        if columns // wide < 32 or not _fits_registers(block_m, columns, warps, a_bits):
            continue
        stage = (block_m * a_bits + columns * w_bits) * block_k // 8
        for stages in _stage_counts(block_m, columns, warps, stage, shared_memory(problem)):
            tile = GemmConfig(block_m, columns // wide, block_k, 8, warps, stages, tma)
            found.append(replace(tile, halves=block_m == 128))
    return found + (_wide_candidates(problem, blocks_m) if a_bits == 8 and wide == 1 else [])


def _descriptors(problem: MoEProblem) -> tuple[bool, ...]:
    return (True, False) if tma_possible(problem) else (False,)


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


def _wide_candidates(problem: MoEProblem, blocks_m: Sequence[int]) -> list[GemmConfig]:
    """Return tiles of 8 bits with two weight tiles side by side, which share the registers for the
    sums of a step."""
    return [
        GemmConfig(m, 128, 128, 8, warps, stages, tma, halves=m == 128, wide=True)
        for (m, warps), tma, stages in itertools.product(
            ((64, 4), (64, 8), (128, 8)), _descriptors(problem), (2, 3, 4)
        )
        if m in blocks_m
    ]


def _swapped_candidates(
    problem: MoEProblem, blocks_m: Sequence[int], wide: int
) -> list[GemmConfig]:
    """Return swap-AB tiles for few rows of fp8: weights are wgmma's 64 rows, and up to three
    programs share a multiprocessor."""
    found, shared = [], shared_memory(problem)
    tiles = ((64, 4), (128, 4), (128, 8)) if wide == 2 else ((64, 4), (128, 4), (256, 4), (256, 8))
    for block_m, (block_n, warps), tma in itertools.product(blocks_m, tiles, _descriptors(problem)):
        stage = (block_m + block_n * wide) * SCALE_GROUP
        most = {min(6, shared // programs // stage) for programs in (1, 2, 3)}
        found += [
            GemmConfig(block_m, block_n, SCALE_GROUP, 8, warps, stages, tma, swapped=True)
            for stages in sorted(most)
            if stages >= 3
        ]
    return found


def _packed_candidates(problem: MoEProblem, blocks_m: Sequence[int], wide: int) -> list[GemmConfig]:
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
                found.append(GemmConfig(block_m, block_n, CHUNK, 8, warps, stages))
    return found


def sorted_candidates(problem: MoEProblem, wide: int) -> list[GemmConfig]:
    """Return tiles for expert-sorted rows, see `kernels.sorted_gemm`."""
    scaled = problem.quant.weight is not None
    block_k = SCALE_GROUP if scaled else 64
    specialized = []
    if specializable(problem):
        tile = GemmConfig(128, 256 // wide, block_k, 8, 8, 4, tma=True, specialized=True)
        specialized = [
            replace(tile, group_m=group, halves=halves)
            for group in (4, 8, 16)
            for halves in (True, False)
        ]
    if scaled:
        return specialized
    shapes = [(128, 256, 8, 4), (128, 256, 8, 3), (64, 256, 4, 4)]
    return specialized + [
        GemmConfig(m, columns // wide, block_k, group, warps, stages, True, kind == "persistent",
                   halves=kind == "halves")
        for m, columns, warps, stages in shapes
        for group in (4, 8, 16)
        for kind in ("halves" if m == 128 else "plain", *(() if wide == 2 else ("persistent",)))
    ]  # fmt: skip


def token_candidates(problem: MoEProblem, wide: int) -> list[GemmConfig]:
    """Return specialized swap-AB tiles of 16 bits, see `kernels.token_tiles`."""
    if problem.quant.weight is not None or not specializable(problem):
        return []
    return [
        token_tile(weights // wide, group)
        for weights, group in itertools.product((128, 256), (1, 4))
    ]


def variations(best: GemmConfig) -> list[GemmConfig]:
    """Return neighbours of a good tile."""
    found = [replace(best, group_m=g) for g in (1, 4, 16, 32) if g != best.group_m]
    if best.num_stages > 2:
        found.append(replace(best, num_stages=best.num_stages - 1))
    if best.halves:
        found.append(replace(best, halves=False))
    return found
