"""Combine: every token's rows come back from the ranks of its experts and are summed in fp32.

Pull: ranks say that their experts are done, and each rank reads its tokens' rows from the others.
Push: each rank writes the rows of its experts to the ranks of their tokens (``back``), and says
that they are there; then each rank reads its own memory alone. That is one kernel more, which reads
and writes every row once more: on two H200 push took longer than pull at every number of programs.

LISTED: the rows of a token are one for each of its K assignments (`nvlink_ll`), with weights, and
not one for each share of the experts (`nvlink_ht`).
"""

import triton
import triton.language as tl
from moekit_kernels.launch import wait_then_launch_dependents
from moekit_kernels.numerics import convert

from .flags import (
    COMBINE,
    at,
    is_last,
    launch_dependents,
    raise_flags,
    region,
    wait_for,
    wait_for_kernel,
)


@triton.jit
def push_rows(
    peers_ptr, counts_ptr, counters_ptr, epoch_ptr, lost_ptr, rank, capacity, slots, y_at, back_at,
    sources_at, flags_at,
    RANKS: tl.constexpr, RANKS_2: tl.constexpr, TP: tl.constexpr, COPIES: tl.constexpr,
    K: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENTS_2: tl.constexpr, LISTED: tl.constexpr,
    WORDS: tl.constexpr, TOKENS: tl.constexpr, WORDS_TILE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the rows of y to the ranks of their tokens; rows of this rank's own tokens stay.

    Args:
        counts_ptr: int32 (SEGMENTS,): the rows of each batch, or with LISTED the rows of all local
            experts up to each. slots: rows between the segments of y.
    """
    if PDL:
        wait_then_launch_dependents()
    program, programs = tl.program_id(0), tl.num_programs(0)
    segments = tl.arange(0, SEGMENTS_2)
    in_range = segments < SEGMENTS
    if LISTED:
        ends = tl.load(counts_ptr + segments, mask=in_range, other=0)
    else:
        count = tl.load(counts_ptr + segments, mask=in_range, other=0)
        if COPIES == 1:
            count = tl.where(segments == rank, 0, count)
        lower = (segments[:, None] >= segments[None, :]).to(tl.int32)
        ends = tl.sum(lower * count[None, :], axis=1)
    total = tl.max(ends, axis=0)

    word = tl.arange(0, WORDS_TILE)
    y = at(peers_ptr, rank, y_at, tl.int32)
    PARTS: tl.constexpr = (WORDS + WORDS_TILE - 1) // WORDS_TILE
    for step in tl.range(program, tl.cdiv(total, TOKENS) * PARTS, programs, num_stages=STAGES):
        index = step // PARTS * TOKENS + tl.arange(0, TOKENS)
        w = step % PARTS * WORDS_TILE
        exists = index < total
        earlier = (ends[None, :] <= index[:, None]) & in_range[None, :]
        segment = tl.sum(earlier.to(tl.int32), axis=1)
        slot = index - tl.max(tl.where(earlier, ends[None, :], 0), axis=1)
        row = segment * slots + slot
        if LISTED:
            sources = at(peers_ptr, rank, sources_at, tl.int32)
            source = tl.load(sources + row, mask=exists, other=0)
            batch = source // (capacity * K)
            to_row = rank % TP * capacity * K + source % (capacity * K)
        else:
            batch = segment
            to_row = rank * capacity + slot
        if COPIES == 1:
            exists &= batch != rank
        inside = exists[:, None] & ((w + word) < WORDS)[None, :]
        x = tl.load(y + row[:, None].to(tl.int64) * WORDS + w + word[None, :], mask=inside)
        for c in tl.static_range(COPIES):
            peer = tl.load(peers_ptr + batch * COPIES + c, mask=exists, other=0)
            to = region(peer, back_at, tl.int32)
            tl.store(to[:, None] + to_row[:, None].to(tl.int64) * WORDS + w + word[None, :], x,
                     mask=inside & (batch * COPIES + c != rank)[:, None])  # fmt: skip
    if is_last(counters_ptr, tl.num_programs(0)):
        value = ((tl.load(epoch_ptr) + 1) << 32) | tl.load(lost_ptr)
        raise_flags(peers_ptr, rank, value, flags_at, COMBINE, RANKS, RANKS_2)


@triton.jit
def combine_rows(
    out_ptr, peers_ptr, places_ptr, weights_ptr, counters_ptr, epoch_ptr, error_ptr,
    lost_ptr, T, out_stride, rank, capacity, spins, y_at, back_at, flags_at,
    RANKS: tl.constexpr, RANKS_2: tl.constexpr, TP: tl.constexpr, COPIES: tl.constexpr,
    ROWS_EACH: tl.constexpr, PER_RANK: tl.constexpr, LISTED: tl.constexpr, PUSHED: tl.constexpr,
    CHUNKS: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum each token's rows in fp32, in the order of its places.

    Args:
        out_ptr: (T, H), rows ``out_stride`` apart; NaN where a rank did not come.
        places_ptr: int32 (T, ROWS_EACH) from the dispatch. weights_ptr: fp32 (T, ROWS_EACH), read
            with LISTED.
        PER_RANK: rows of y on a rank. PUSHED: `push_rows` has run. CHUNKS: flags, see
            `reduce_rows`; the last one says that all of y is there.
    """
    wait_for_kernel(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    number = tl.load(epoch_ptr) + 1
    if not PUSHED:
        if program == 0:  # this rank's experts are done, as they come before on the stream
            value = (number << 32) | tl.load(lost_ptr)
            raise_flags(peers_ptr, rank, value, flags_at, COMBINE, RANKS, RANKS_2, 0, CHUNKS,
                        CHUNKS)  # fmt: skip
    if is_last(counters_ptr, programs):  # all programs have read the number
        tl.store(epoch_ptr, number)
    r = tl.arange(0, RANKS_2)
    flag, complete = wait_for(peers_ptr, lost_ptr, error_ptr, rank, r, r < RANKS, number, spins,
                              flags_at, COMBINE, RANKS, CHUNKS - 1)  # fmt: skip
    launch_dependents(PDL)
    # A rank that gave up another one has no right output.
    gave_up = tl.max(tl.where(r < RANKS, flag & 1, 0), axis=0)
    failed = (complete == 0) | (gave_up != 0)

    type: tl.constexpr = out_ptr.dtype.element_ty
    column = tl.arange(0, COLUMNS)
    PARTS: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    for step in tl.range(program, tl.cdiv(T, TOKENS) * PARTS, programs, num_stages=STAGES):
        token = step // PARTS * TOKENS + tl.arange(0, TOKENS)
        h = step % PARTS * COLUMNS
        exists = token < T
        inside = (h + column) < H
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for j in tl.static_range(ROWS_EACH):
            place = tl.load(places_ptr + token * ROWS_EACH + j, mask=exists, other=-1)
            there = (place >= 0)[:, None] & inside[None, :]
            row = tl.maximum(place, 0) % PER_RANK
            for t in tl.static_range(TP):
                # Rank ``source`` computed the row; others' PUSHED rows are in this rank's back.
                if LISTED:
                    source = tl.maximum(place, 0) // PER_RANK * TP + t
                    back_row = (t * capacity + token) * ROWS_EACH + j
                else:
                    source = j * TP + t
                    back_row = row + (source - rank // COPIES) * capacity
                if PUSHED:
                    stays = source == rank
                    peer, offset = tl.load(peers_ptr + rank), tl.where(stays, y_at, back_at)
                    from_row = tl.where(stays, row, back_row).to(tl.int64)
                else:
                    peer, offset = tl.load(peers_ptr + source), y_at
                    from_row = row.to(tl.int64)
                y = region(peer, offset, type)
                rows = (y[:, None] if LISTED else y) + from_row[:, None] * H
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
