"""Weighted sum and combine in one kernel, for experts that leave the sum to the dispatcher.

Some programs sum the rows that other ranks wait for, chunk by chunk of their slots, and raise a
flag for each chunk. The others combine this rank's tokens: they sum the rows that lie here, and
read the other ranks' sums as their flags come. So reads over NVLink run beside sums, which are
bound by this GPU's memory, and sums that only this rank needs are never written. A token's slot on
a rank is never above its number among the rank's tokens, so the rows of a chunk's tokens lie in
this chunk or in earlier ones.

Programs that combine wait for other ranks' programs that sum, which wait for none and start first,
as GPUs start programs in the order of their numbers.
"""

import triton
import triton.language as tl
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

# Rows that are loaded before the first is added.
_TOGETHER = tl.constexpr(8)


@triton.jit
def _summed(
    rows_ptr, sorted_ptr, ids_ptr, weights_ptr, row, exists, columns, inside, stride,
    K: tl.constexpr, SORTED: tl.constexpr, type: tl.constexpr,
):  # fmt: skip
    """Return (n, columns): what `moekit.plugin.weight_and_reduce` returns for n rows."""
    total = tl.zeros([row.shape[0], columns.shape[0]], tl.float32)
    for first in tl.static_range(0, K, _TOGETHER):
        loaded, experts = (), ()
        for k in tl.static_range(first, min(first + _TOGETHER, K)):
            experts += (tl.load(ids_ptr + row * K + k, mask=exists, other=-1),)
        for k in tl.static_range(first, min(first + _TOGETHER, K)):
            there = experts[k - first] >= 0
            place = (row * K + k).to(tl.int64)
            if SORTED:
                place = tl.load(sorted_ptr + row * K + k, mask=exists, other=0).to(tl.int64)
            loaded += (
                tl.load(rows_ptr + place[:, None] * stride + columns[None, :],
                        mask=there[:, None] & inside[None, :], other=0.0),
            )  # fmt: skip
        tl.debug_barrier()  # ptxas would wait for each row before it loads the next one
        for k in tl.static_range(first, min(first + _TOGETHER, K)):
            # Loaded again, as registers are few.
            there = tl.load(ids_ptr + row * K + k, mask=exists, other=-1) >= 0
            weight = tl.load(weights_ptr + row * K + k, mask=there, other=0.0)
            total += loaded[k - first].to(tl.float32) * weight[:, None]
    return convert(total, type)


@triton.jit
def reduce_rows(
    out_ptr, peers_ptr, rows_ptr, sorted_ptr, ids_ptr, weights_ptr, used_ptr, places_ptr,
    counters_ptr, epoch_ptr, refused_ptr, error_ptr, lost_ptr, T, out_stride, rows_stride, rank,
    chunk, spins, summing, y_at, flags_at,
    RANKS: tl.constexpr, RANKS_2: tl.constexpr, SHARES: tl.constexpr, TP: tl.constexpr,
    K: tl.constexpr, SORTED: tl.constexpr, CHUNKS: tl.constexpr, H: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum the K rows of each row that arrived, and each token's sums of all ranks.

    No two ranks hold the same batch. Sums over K are rounded to the output's dtype, as if experts
    had returned them, and the ranks' sums are added in the order of ranks. Compile it without fused
    products and sums: each is rounded, as in the sum of the experts.

    Args:
        out_ptr: (T, H), rows ``out_stride`` apart; NaN where a rank did not come.
        rows_ptr: (N, H), rows ``rows_stride`` apart. sorted_ptr: int32 (R * K,), read if SORTED:
            the row of each assignment; else it is the assignment's number.
        ids_ptr: int32 (R, K), -1 for none. weights_ptr: fp32 (R, K). used_ptr: int32 (RANKS,), the
            rows of each batch. places_ptr: int32 (T, SHARES) from the dispatch.
        counters_ptr: int32 (1 + RANKS + CHUNKS,), zero before and after.
        chunk: tokens, and slots of a batch, of a chunk. CHUNKS: chunks of the most tokens.
        summing: programs that sum for other ranks; the others combine.
    """
    wait_for_kernel(PDL)
    program = tl.program_id(0)
    number = tl.load(epoch_ptr) + 1
    r = tl.arange(0, RANKS_2)
    type: tl.constexpr = out_ptr.dtype.element_ty
    column, line = tl.arange(0, COLUMNS), tl.arange(0, TOKENS)
    PARTS: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    if program < summing:
        used = tl.load(used_ptr + r, mask=(r < RANKS) & (r != rank), other=0)
        sent = tl.maximum(1, tl.cdiv(tl.max(used, axis=0), chunk))
        y = at(peers_ptr, rank, y_at, type)
        turn = program  # of the next batch's steps
        for c in range(0, sent):
            for i in range(1, RANKS):
                batch = (rank + i) % RANKS
                end = tl.minimum(tl.load(used_ptr + batch), (c + 1) * chunk)
                steps = tl.cdiv(tl.maximum(end - c * chunk, 0), TOKENS) * PARTS
                for step in range(turn, steps, summing):
                    slot = c * chunk + step // PARTS * TOKENS + line
                    h = step % PARTS * COLUMNS + column
                    row, exists, inside = slot * RANKS + batch, slot < end, h < H
                    total = _summed(rows_ptr, sorted_ptr, ids_ptr, weights_ptr, row, exists, h,
                                    inside, rows_stride, K, SORTED, type)  # fmt: skip
                    tl.store(y + row[:, None].to(tl.int64) * H + h[None, :], total,
                             mask=exists[:, None] & inside[None, :])  # fmt: skip
                turn = (turn + summing - steps % summing) % summing
            if is_last(counters_ptr + 1 + RANKS + c, summing):
                value = (number << 32) | tl.load(lost_ptr) | tl.load(refused_ptr)
                # Behind the last chunk with rows for other ranks, all are complete.
                raise_flags(peers_ptr, rank, value, flags_at, COMBINE, RANKS, RANKS_2, c,
                            tl.where(c == sent - 1, CHUNKS, c + 1), CHUNKS)  # fmt: skip
    else:
        combining = tl.num_programs(0) - summing
        came, failed = 0, 0
        for step in range(program - summing, tl.cdiv(T, TOKENS) * PARTS, combining):
            start = step // PARTS * TOKENS
            needed = (tl.minimum(T, start + TOKENS) - 1) // chunk + 1
            if needed > came:
                flag, complete = wait_for(
                    peers_ptr, lost_ptr, error_ptr, rank, r, r < RANKS, number, spins,
                    flags_at, COMBINE, RANKS, needed - 1,
                )  # fmt: skip
                gave_up = tl.max(tl.where(r < RANKS, flag & 1, 0), axis=0)
                failed = ((complete == 0) | (gave_up != 0)).to(tl.int32)
                came = needed
            token, h = start + line, step % PARTS * COLUMNS + column
            exists, inside = token < T, h < H
            place = tl.load(places_ptr + token * SHARES + rank // TP, mask=exists, other=-1)
            own = _summed(rows_ptr, sorted_ptr, ids_ptr, weights_ptr, tl.maximum(place, 0),
                          place >= 0, h, inside, rows_stride, K, SORTED, type)  # fmt: skip
            total = tl.zeros([TOKENS, COLUMNS], tl.float32)
            for source in tl.static_range(RANKS):
                place = tl.load(places_ptr + token * SHARES + source // TP, mask=exists, other=-1)
                there = tl.where(source == rank, -1, place) >= 0
                theirs = region(tl.load(peers_ptr + source), y_at, type)
                theirs += tl.maximum(place, 0)[:, None].to(tl.int64) * H + h[None, :]
                got = tl.load(theirs, mask=there[:, None] & inside[None, :], other=0.0,
                              cache_modifier=".cg")  # fmt: skip
                total += tl.where(source == rank, own, got).to(tl.float32)
            total = tl.where(failed != 0, float("nan"), total)
            tl.store(
                out_ptr + token[:, None].to(tl.int64) * out_stride + h[None, :],
                convert(total, type), mask=exists[:, None] & inside[None, :],
            )  # fmt: skip
        # A rank may send the next call's tokens only when all ranks have read this one's.
        if came < CHUNKS:
            wait_for(peers_ptr, lost_ptr, error_ptr, rank, r, r < RANKS, number, spins,
                     flags_at, COMBINE, RANKS, CHUNKS - 1)  # fmt: skip
        launch_dependents(PDL)
        if is_last(counters_ptr, combining):
            tl.store(epoch_ptr, number)
            tl.store(refused_ptr, 0)
