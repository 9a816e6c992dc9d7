"""Tell which problems the operator has kernels for, and pad I for its tiles.

The operator's tiles are (K, N) = (128, 128), (64, 128), (64, 256) and (128, 64), of which one must
divide the weight matrix; its scale groups along K are 32, 64 or 128 (fp8: 128; mxfp4: 32; nvfp4:
16), or all of K (but mxfp4 and nvfp4).
"""

from __future__ import annotations

import math

from moekit.plugin import MoEProblem, round_up

BLOCKS = (8, 16, 32, 64)  # rows of a block; the operator also supports 48
LOCKS = 1024  # int32 entries that the thread blocks of a call wait on: at least 4 per SM
MAX_TILE_N = 256
BLOCKS_PER_SM = 4


def choose_block(rows_per_expert: float) -> int:
    """Return the smallest block that mostly fits an expert's rows; never decreases with rows."""
    return next((b for b in BLOCKS if rows_per_expert < 0.9 * b), BLOCKS[-1])


def group_of(problem: MoEProblem) -> int:
    """Return the columns (along K) that share a scale; -1 for all of them."""
    weight = problem.quant.weight
    return -1 if weight is None else weight.group[1]


def padded_intermediate(problem: MoEProblem) -> int:
    """Return this rank's I, padded with zero weights so that tiles divide both GEMMs, or 0."""

    def fits(n: int, k: int) -> bool:
        return (n % 128 == 0 and k % 64 == 0) or (n % 64 == 0 and k % 128 == 0)

    hidden, group = problem.hidden_size, max(1, group_of(problem))
    halves = 2 if problem.activation.gated else 1
    step = math.lcm(64, group)
    first = round_up(problem.local_intermediate_size, step)
    for inner in (first, first + step):
        if hidden % group == 0 and fits(halves * inner, hidden) and fits(hidden, inner):
            return inner
    return 0


def multiples(problem: MoEProblem) -> tuple[int, int]:
    """Return the multiples of H and I that moekit pads to; `padded_intermediate` pads I here."""
    return math.lcm(64, max(1, group_of(problem))), 1


def unsupported(problem: MoEProblem) -> list[str]:
    """Return why the operator does not support the problem's sizes or dtype."""
    weight = problem.quant.weight
    if weight is not None and weight.microscaled and problem.dtype_name == "float16":
        return ["the operator multiplies power-of-two (e8m0) scales in bfloat16 only, not float16"]
    if problem.quant.name.startswith("int4_w4a16_channel") and problem.dtype_name == "float16":
        return ["the operator rounds sums to float16 before it scales channels: they may overflow"]
    if not padded_intermediate(problem):
        return [
            f"no tile of the operator divides hidden_size={problem.hidden_size}, padded "
            "intermediate_size"
        ]
    return []
