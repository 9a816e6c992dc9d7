"""Tiles that the tuner times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from moekit_kernels.numerics import SCALE_GROUP

from moekit.plugin import MoEProblem

from .config import PACKED_BLOCK_M, operand_bits, specializable, swapping_pays, tma_possible
from .gemm import GemmConfig
from .packed import CHUNK

_SHARED = 227 << 10


def candidates(problem: MoEProblem, per_expert: float, wide: int) -> list[GemmConfig]:
    """Tiles worth timing; wide: rows of weights behind an output column."""
    a_bits, w_bits = operand_bits(problem)
    blocks_m = [b for b in (16, 32, 64, 128) if b == 16 or per_expert * 3 >= b]
    blocks_m = blocks_m[-2:] if per_expert < 200 else [64, 128]
    if w_bits == 4:
        return _packed_candidates([8, 16] if per_expert <= 4 else blocks_m, wide)
    found: list[GemmConfig] = []
    if swapping_pays(problem):
        found += _swapped_candidates(problem, [b for b in blocks_m if b < 64], wide)
        blocks_m = [b for b in blocks_m if b >= 64]
    block_scales = problem.quant.name.endswith("_block")
    for block_m, columns, warps, tma in itertools.product(
        blocks_m, (64, 128, 256), (4, 8), (True, False)
    ):
        for block_k in (128,) if block_scales or a_bits == 8 else (64, 128):
            block_n = columns // wide
            if tma and not tma_possible(problem) or block_n < 32:
                continue
            per_thread = block_m * columns / (32 * warps)
            promoted = 2 if a_bits == 8 else 1
            if not 8 <= per_thread * promoted <= 256 or (
                block_m < 64 and warps == 8 and columns < 128
            ):
                continue
            stage = (block_m * a_bits + columns * w_bits) * block_k // 8
            stages = min(5 if block_m <= 32 else 4, (_SHARED - block_m * columns) // stage)
            choices = {stages}
            if block_m >= 64 and warps == 4:  # a second program on the multiprocessor
                choices.add(min(stages, _SHARED // 2 // stage))
            for stages in choices:
                if stages >= 2:
                    tile = GemmConfig(block_m, block_n, block_k, 8, warps, stages, tma)
                    found.append(replace(tile, halves=block_m == 128))
    if a_bits == 8 and wide == 1:
        # Steps' sums beside the sums want registers, and two tiles side by side share them.
        found += [
            GemmConfig(m, 128, 128, 8, warps, stages, tma, halves=m == 128, wide=True)
            for (m, warps), tma, stages in itertools.product(
                ((64, 4), (64, 8), (128, 8)), (True, False), (2, 3, 4)
            )
            if m in blocks_m and (not tma or tma_possible(problem))
        ]
    return found


def _swapped_candidates(
    problem: MoEProblem, blocks_m: Sequence[int], wide: int
) -> list[GemmConfig]:
    """Few rows of fp8: weights are wgmma's 64 rows, and up to three programs share a
    multiprocessor."""
    found = []
    tiles = ((64, 4), (128, 4), (128, 8)) if wide == 2 else ((64, 4), (128, 4), (256, 4), (256, 8))
    for block_m, (block_n, warps), tma in itertools.product(blocks_m, tiles, (True, False)):
        stage = (block_m + block_n * wide) * SCALE_GROUP
        most = {min(6, _SHARED // programs // stage) for programs in (1, 2, 3)}
        if tma_possible(problem) or not tma:
            found += [
                GemmConfig(block_m, block_n, SCALE_GROUP, 8, warps, stages, tma, swapped=True)
                for stages in sorted(most)
                if stages >= 3
            ]
    return found


def _packed_candidates(blocks_m: Sequence[int], wide: int) -> list[GemmConfig]:
    """4 bits: a warp makes 16 rows of weights, or 32 of them for few columns."""
    found = []
    tiles = ((16, 1), (32, 2), (64, 4), (64, 2), (128, 8), (128, 4))
    for block_m, (block_n, warps), stages in itertools.product(
        [b for b in blocks_m if b <= PACKED_BLOCK_M], tiles, (3, 5)
    ):
        per_thread = block_m * block_n * wide / (32 * warps)  # sums, and partial ones besides
        if per_thread <= (32 if block_n > 16 * warps else 64):
            stage = (16 * block_m + 4 * block_n * wide) * CHUNK // 8
            if stages * stage <= _SHARED and (block_m < 64 or block_n >= 64):
                found.append(GemmConfig(block_m, block_n, CHUNK, 8, warps, stages))
    return found


def sorted_candidates(problem: MoEProblem, wide: int) -> list[GemmConfig]:
    """Tiles for rows in order, see `sorted_gemm`."""
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


def variations(best: GemmConfig) -> list[GemmConfig]:
    """Neighbours of a good tile."""
    found = [replace(best, group_m=g) for g in (1, 4, 16, 32) if g != best.group_m]
    if best.num_stages > 2:
        found.append(replace(best, num_stages=best.num_stages - 1))
    if best.halves:
        found.append(replace(best, halves=False))
    return found
