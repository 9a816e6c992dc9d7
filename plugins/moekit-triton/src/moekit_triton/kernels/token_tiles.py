"""Divide every expert's rows into token tiles, for swap-AB over expert-sorted rows.

With tokens on wgmma's N, a tile's width is a multiple of 16 tokens (pieces), up to a maximum. A
rest of at most REST rows joins the tile before it: its own tile would read the weights again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from moekit_kernels.align import SortedAssignments
from moekit_kernels.launch import Launcher, wait_then_launch_dependents

PIECE = tl.constexpr(16)
"""Rows of a piece."""
MOST_PIECES = tl.constexpr(32)
"""A tile's word is expert * MOST_PIECES + pieces."""
REST = tl.constexpr(32)
"""Most rows that join the tile before."""


def most_tiles(num_assignments: int, num_experts: int, tokens: int = 128) -> int:
    """Return an upper bound on the number of tiles, of at least ``tokens`` tokens when full."""
    return num_assignments // tokens + min(num_assignments, num_experts)


def tile_list_entries(num_assignments: int, num_experts: int) -> int:
    """Return the int32 entries of a list: a count, and a first row and a word for each tile."""
    return 1 + 2 * most_tiles(num_assignments, num_experts)


def list_token_tiles(aligned: SortedAssignments, tiles: torch.Tensor, tokens: int) -> None:
    """Fill the list of tiles: their number, then (first row, expert * MOST_PIECES + pieces) each.

    Args:
        aligned: the sorted assignments, with ``ends_L``.
        tiles: int32, at least `tile_list_entries` entries.
        tokens: rows of a full tile.
    """
    assert aligned.ends_L is not None and aligned.block_m % 64 == 0
    experts = aligned.ends_L.numel()
    _launch_list(
        (1,), aligned.ends_L, tiles, experts, BLOCK_M=aligned.block_m,
        TOKENS=tokens, BINS=max(int(triton.next_power_of_2(experts)), 32), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["experts"])
def _list(
    ends_ptr, tiles_ptr, experts, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr, BINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_then_launch_dependents()
    expert_L = tl.arange(0, BINS)
    known_L = expert_L < experts
    end_L = tl.load(ends_ptr + expert_L, mask=known_L, other=0)
    before_L = tl.load(ends_ptr + expert_L - 1, mask=known_L & (expert_L > 0), other=0)
    start_L = tl.cdiv(before_L, BLOCK_M) * BLOCK_M
    count_L = tl.where(known_L, end_L - start_L, 0)
    full_L = count_L // TOKENS
    rest_L = count_L % TOKENS
    alone_L = (rest_L > REST) | ((rest_L > 0) & (full_L == 0))
    tiles_L = full_L + alone_L.to(tl.int32)
    first_L = tl.cumsum(tiles_L, axis=0) - tiles_L
    tl.store(tiles_ptr, tl.sum(tiles_L, axis=0))
    for i in range(tl.max(tiles_L, axis=0)):
        rows_L = tl.where(i == tiles_L - 1, count_L - i * TOKENS, TOKENS)
        word_L = expert_L * MOST_PIECES + tl.cdiv(rows_L, PIECE)
        entry_L = tiles_ptr + 1 + 2 * (first_L + i)
        tl.store(entry_L, start_L + i * TOKENS, mask=i < tiles_L)
        tl.store(entry_L + 1, word_L, mask=i < tiles_L)


_launch_list = Launcher(_list)
