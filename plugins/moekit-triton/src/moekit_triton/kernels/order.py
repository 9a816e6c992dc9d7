"""The order in which programs take a GEMM's tiles."""

import triton
import triton.language as tl


@triton.jit
def tile_at(index, row_blocks, col_blocks, group_m):
    """Return a tile's row and column block; group_m row blocks run next to each other per column
    block."""
    group = index // (group_m * col_blocks)
    group_rows = tl.minimum(row_blocks - group * group_m, group_m)
    in_group = index - group * (group_m * col_blocks)
    return group * group_m + in_group % group_rows, in_group // group_rows
