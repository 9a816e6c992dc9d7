"""Combine: every token's rows come back from the ranks of its experts and are summed in fp32.

Each rank raises a flag when its experts are done, and then reads its tokens' rows from the others.
The reverse, where each rank writes its experts' rows to the ranks of their tokens, takes one kernel
more, which reads and writes every row once more: on two H200 it took longer at every number of
programs (docs/measured.md).

LISTED: the rows of a token are one for each of its K assignments (`nvlink_ll`), with weights, and
not one for each share of the experts (`nvlink_ht`).
"""

import triton
import triton.language as tl
from moekit_kernels.numerics import convert

from .flags import (
    COMBINE,
    is_last,
    launch_dependents,
    raise_flags,
    region,
    wait_for,
    wait_for_kernel,
)

# Tokens of a step that sums router gradients.
_STEP = tl.constexpr(64)


@triton.jit
def _sum_rows(
    out_ptr, peers_ptr, places_ptr, weights_ptr, failed, T, out_stride, per_rank, rows_at,
    TP: tl.constexpr, LISTED: tl.constexpr, ROWS_EACH: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write each token's sum over its rows of WIDTH values, which lie at ``rows_at`` on ranks."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    type: tl.constexpr = out_ptr.dtype.element_ty
    column = tl.arange(0, COLUMNS)
    PARTS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    for step in tl.range(program, tl.cdiv(T, TOKENS) * PARTS, programs, num_stages=STAGES):
        token = step // PARTS * TOKENS + tl.arange(0, TOKENS)
        h = step % PARTS * COLUMNS
        exists = token < T
        inside = (h + column) < WIDTH
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for j in tl.static_range(ROWS_EACH):
            place = tl.load(places_ptr + token * ROWS_EACH + j, mask=exists, other=-1)
            there = (place >= 0)[:, None] & inside[None, :]
            row = tl.maximum(place, 0) % per_rank if LISTED else tl.maximum(place, 0)
            for t in tl.static_range(TP):
                source = tl.maximum(place, 0) // per_rank * TP + t if LISTED else j * TP + t
                y = region(tl.load(peers_ptr + source), rows_at, type)
                rows = (y[:, None] if LISTED else y) + row.to(tl.int64)[:, None] * WIDTH
                got = tl.load(rows + h + column[None, :], mask=there, other=0.0,
                              cache_modifier=".cg").to(tl.float32)  # fmt: skip
                if LISTED:
                    weight = tl.load(weights_ptr + token * ROWS_EACH + j, mask=exists, other=0.0)
                    got *= tl.where(place >= 0, weight, 0.0)[:, None]
                total += got
        total = tl.where(failed, float("nan"), total)
        tl.store(
            out_ptr + token[:, None].to(tl.int64) * out_stride + h + column[None, :],
            convert(total, type), mask=exists[:, None] & inside[None, :],
        )  # fmt: skip


@triton.jit
def combine_rows(
    out_ptr, grads_ptr, peers_ptr, places_ptr, weights_ptr, counters_ptr, epoch_ptr, refused_ptr,
    error_ptr, lost_ptr, T, out_stride, rank, per_rank, spins, y_at, grads_at, flags_at,
    RANKS: tl.constexpr, RANKS_2: tl.constexpr, TP: tl.constexpr, LISTED: tl.constexpr,
    ROWS_EACH: tl.constexpr, CHUNKS: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    K_2: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sum each token's rows in fp32, in the order of its places.

    Args:
        out_ptr: (T, H), rows ``out_stride`` apart; NaN where a rank did not come.
        grads_ptr: fp32 (T, K), the same of the rows' router gradients; K is 0 if there are none.
        places_ptr: int32 (T, ROWS_EACH) from the dispatch. weights_ptr: fp32 (T, ROWS_EACH), read
            with LISTED.
        per_rank: rows of y on a rank. CHUNKS: flags, see `reduce_rows`; the last one says that
            all of y is there.
    """
    wait_for_kernel(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    number = tl.load(epoch_ptr) + 1
    if program == 0:  # this rank's experts are done, as they come before on the stream
        value = (number << 32) | tl.load(lost_ptr) | tl.load(refused_ptr)
        raise_flags(peers_ptr, rank, value, flags_at, COMBINE, RANKS, RANKS_2, 0, CHUNKS, CHUNKS)
    if is_last(counters_ptr, programs):  # all programs have read the number
        tl.store(epoch_ptr, number)
        tl.store(refused_ptr, 0)
    r = tl.arange(0, RANKS_2)
    flag, complete = wait_for(peers_ptr, lost_ptr, error_ptr, rank, r, r < RANKS, number, spins,
                              flags_at, COMBINE, RANKS, CHUNKS - 1)  # fmt: skip
    launch_dependents(PDL)
    # If any rank timed out on another one, the output is invalid.
    gave_up = tl.max(tl.where(r < RANKS, flag & 1, 0), axis=0)
    failed = (complete == 0) | (gave_up != 0)
    _sum_rows(out_ptr, peers_ptr, places_ptr, weights_ptr, failed, T, out_stride, per_rank, y_at,
              TP, LISTED, ROWS_EACH, H, TOKENS, COLUMNS, STAGES)  # fmt: skip
    if K:
        _sum_rows(grads_ptr, peers_ptr, places_ptr, weights_ptr, failed, T, K, per_rank, grads_at,
                  TP, LISTED, ROWS_EACH, K, _STEP, K_2, 1)  # fmt: skip
