"""Choose launch plans from sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from moekit_kernels.launch import next_power_of_2

SLAB_MULTIPLE = 128
"""The capacity is a multiple of this: the masked GEMM stores whole blocks of 64 or 128 rows."""

_FEW_PAIRS = (8, 16, 32)


@dataclass(frozen=True)
class Plan:
    """The layout of a contiguous GEMM."""

    block_m: int  # rows of a block; every expert's rows start at a multiple of it
    rows: int  # M, the rows of the padded layout in the worst case
    # The rows per expert for which the library chooses tiles; None: as many blocks as fit in M.
    expected_m: int | None

    @property
    def kind(self) -> tuple[int, int, int]:
        """The values that determine the library's tiles, and so its compiled kernels."""
        return (self.block_m, self.expected_m or 0, 0 if self.expected_m else self.rows)


@lru_cache(maxsize=4096)
def make_plan(pairs: int, local: int, physical: int, block_m: int | None = None) -> Plan:
    """Return the plan for assignments spread over ``physical`` experts, ``local`` of them here.

    There are few kinds of plans, as the library compiles another kernel where its heuristics, which
    see expected_m (or M) and block_m, choose other tiles.
    """
    per_expert = pairs / physical
    # 64 rows while reading weights bounds the time. Blocks never get smaller with more rows, so a
    # workspace for more rows fits fewer.
    block_m = block_m or (64 if per_expert <= 96 else 128)
    for few in _FEW_PAIRS:
        if pairs <= few and 2 * few <= local:  # a block per assignment, most experts idle
            return Plan(block_m, few * block_m, None)
    worst = pairs + min(pairs, local) * (block_m - 1)
    expected = next_power_of_2(-(-int(per_expert + 1) // block_m)) * block_m
    return Plan(block_m, worst // block_m * block_m, expected)


def expected_slab_rows(slab: int, top_k: int, physical: int) -> int:
    """Return the expected rows of an expert at a capacity, rounded to a power of two."""
    return next_power_of_2(-(-slab * top_k // physical))
