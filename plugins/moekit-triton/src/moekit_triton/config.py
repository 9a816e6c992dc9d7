"""Tile sizes by shape: a heuristic for Hopper, until a tuned table says better."""

import triton

from .gemm import GemmConfig

_SMS = 132
# Shared memory one program may use, in bytes, where it is not Hopper's 227 KiB.
_SHARED = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10, (12, 0): 99 << 10}


def choose_block_m(rows_per_expert: float, bits: int) -> int:
    """Rows of a tile: twice the expected rows while weights bound the time, then 128.

    Never shrinks as rows_per_expert grows, so workspaces sized for more rows fit fewer. bits: of an
    activation; fp32 goes without tensor cores and stops at 64.
    """
    for block_m, most in ((16, 8), (32, 24), (64, 64)):
        if rows_per_expert <= most:
            return block_m
    return 64 if bits == 32 else 128


def choose_config(
    block_m: int,
    row_blocks: int,
    n: int,
    k: int,
    a_bits: int,
    w_bits: int,
    capability: tuple[int, int] | None = None,
) -> GemmConfig:
    """For `row_blocks` busy blocks of rows times (N, K) weights of `w_bits`, activations
    `a_bits`."""
    if a_bits == 32:
        block_n, block_k, warps, stages = 64, 32, 4, 3
    elif block_m <= 32:  # bound by reading weights: keep every SM streaming
        block_n = 128 if row_blocks * triton.cdiv(n, 128) >= 2 * _SMS else 64
        block_k, warps, stages = 128, 4, 4
    elif block_m == 64:
        block_n, block_k, warps, stages = 128, 1024 // a_bits, 4, 4
    elif a_bits == w_bits == 16:
        block_n, block_k, warps, stages = 256, 64, 8, 3
    else:
        block_n, block_k, warps, stages = 128, 1024 // a_bits, 8, 4
    block_n = min(block_n, max(32, triton.next_power_of_2(n)))
    block_k = min(block_k, max(32, triton.next_power_of_2(k)))
    stage = (block_m * a_bits + block_n * w_bits) * block_k // 8
    stages = max(2, min(stages, _SHARED.get(capability or (9, 0), 227 << 10) // stage))
    return GemmConfig(block_m, block_n, block_k, num_warps=warps, num_stages=stages)
