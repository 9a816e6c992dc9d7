"""Dispatch of `nvlink_ht`: a token's row goes once to every rank that has one of its experts.

Row ``slot * batches + batch`` of a rank's buffer belongs to the token with that slot in ``batch``:
its place does not depend on how many tokens a call may have.
Slots are given in the order of tokens, for each share of the experts, so that equal inputs give
equal rows. Ranks with the same batch find the same slots, and each of them sends every COPIES-th
token.
"""

import triton
import triton.language as tl
from moekit_kernels.launch import wait_then_launch_dependents

from .flags import (
    LOW,
    ROWS,
    at,
    call_number,
    is_last,
    launch_dependents,
    load_ids,
    owner_of,
    raise_flags,
    region,
    wait_for,
    wait_for_kernel,
)


@triton.jit
def _goes_to(
    ids_ptr, token, exists, shares, SHARES: tl.constexpr, K: tl.constexpr, K_2: tl.constexpr,
    SHARE: tl.constexpr, LARGER: tl.constexpr,
):  # fmt: skip
    """Return (tokens, shares) int32: 1 where a token has an expert of the share."""
    k = tl.arange(0, K_2)
    there = exists[:, None] & (k < K)[None, :]
    expert = load_ids(ids_ptr + token[:, None] * K + k[None, :], there)
    owner = tl.where(expert >= 0, owner_of(expert, SHARE, LARGER), -1)
    found = tl.zeros([token.shape[0], shares.shape[0]], tl.int32)
    for s in tl.static_range(SHARES):
        one = tl.max((owner == s).to(tl.int32), axis=1)
        found = tl.where((shares == s)[None, :], one[:, None], found)
    return found


@triton.jit
def dispatch_rows(
    x_ptr, scale_ptr, ids_ptr, weights_ptr, peers_ptr, places_ptr, counters_ptr, epoch_ptr,
    T, rank, x_at, scale_at, ids_at, weights_at, flags_at,
    SHARES: tl.constexpr, SHARES_2: tl.constexpr, RANKS_2: tl.constexpr, TP: tl.constexpr,
    COPIES: tl.constexpr, SHARE: tl.constexpr, LARGER: tl.constexpr, K: tl.constexpr,
    K_2: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_2: tl.constexpr,
    SPREAD: tl.constexpr, TOKENS: tl.constexpr, WORDS_TILE: tl.constexpr, STAGES: tl.constexpr,
    SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write each token's row, scales, ids and weights to the ranks of its experts.

    Args:
        x_ptr: int32 words (T, W), a row as it travels. scale_ptr: fp32 (T, GROUPS).
        ids_ptr: int32 or int64 (T, K) physical experts, -1 for none. weights_ptr: fp32 (T, K).
        peers_ptr: int64 (RANKS,) addresses. places_ptr: int32 (T, SHARES), written: the row on the
            ranks of each share, or -1. counters_ptr: int32 (1 + SHARES,), zero before and after.
        epoch_ptr: int64 (1,), the number of calls that were combined.
        SHARES: ranks that share the experts; SHARE experts each, LARGER of them one more.
        SPREAD: program p of rank r begins with rank r + p, modulo the number of ranks, so that all
            ranks receive equally much at any time.
    """
    if PDL:
        wait_then_launch_dependents()
    program, programs = tl.program_id(0), tl.num_programs(0)
    share = tl.cdiv(tl.cdiv(T, programs), TOKENS) * TOKENS
    start = tl.minimum(program * share, T)
    end = tl.minimum(start + share, T)
    shares = tl.arange(0, SHARES_2)
    BATCHES: tl.constexpr = SHARES * TP // COPIES

    before = tl.zeros([SHARES_2], tl.int32)
    for first in range(0, start, SCAN):
        token = first + tl.arange(0, SCAN)
        goes = _goes_to(ids_ptr, token, token < start, shares, SHARES, K, K_2, SHARE, LARGER)
        before += tl.sum(goes, axis=0)
    earlier_programs = before

    word, step = tl.arange(0, WORDS_TILE), tl.arange(0, TOKENS)
    lower = (step[None, :] < step[:, None]).to(tl.int32)
    for first in range(start, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        exists = token < end
        goes = _goes_to(ids_ptr, token, exists, shares, SHARES, K, K_2, SHARE, LARGER)
        # Not tl.cumsum, which Triton 3.6 does not compile for fewer rows than warps.
        earlier = tl.sum(lower[:, :, None] * goes[None, :, :], axis=1)
        place = (before[None, :] + earlier) * BATCHES + rank // COPIES
        place = tl.where(goes != 0, place, -1)
        tl.store(
            places_ptr + token[:, None] * SHARES + shares[None, :], place,
            mask=exists[:, None] & (shares < SHARES)[None, :],
        )  # fmt: skip
        before += tl.sum(goes, axis=0)
        if COPIES > 1:
            exists &= token % COPIES == rank % COPIES

        # No load of an address may follow a store, which would hold it back.
        to_shares, to_rows, peers = (), (), ()
        for i in tl.static_range(SHARES * TP):
            to = (i + rank + program) % (SHARES * TP) if SPREAD else i
            row = tl.sum(tl.where((shares == to // TP)[None, :], place, 0), axis=1).to(tl.int64)
            to_shares += (to // TP,)
            to_rows += (row,)
            peers += (tl.load(peers_ptr + to),)
        k = tl.arange(0, K_2)
        assigned = exists[:, None] & (k < K)[None, :]
        expert = load_ids(ids_ptr + token[:, None] * K + k[None, :], assigned)
        weight = tl.load(weights_ptr + token[:, None] * K + k[None, :], mask=assigned, other=0.0)
        if GROUPS:
            g = tl.arange(0, GROUPS_2)
            has = exists[:, None] & (g < GROUPS)[None, :]
            scale = tl.load(scale_ptr + token[:, None] * GROUPS + g[None, :], mask=has)

        for w in tl.range(0, WORDS, WORDS_TILE, num_stages=STAGES):
            inside = exists[:, None] & ((w + word) < WORDS)[None, :]
            x = tl.load(x_ptr + token[:, None].to(tl.int64) * WORDS + w + word[None, :],
                        mask=inside, other=0)  # fmt: skip
            for i in tl.static_range(SHARES * TP):
                row, rows = to_rows[i], region(peers[i], x_at, tl.int32)
                tl.store(rows + row[:, None] * WORDS + w + word[None, :], x,
                         mask=inside & (row >= 0)[:, None])  # fmt: skip

        owner = tl.where(expert >= 0, owner_of(expert, SHARE, LARGER), -1)
        local = expert - owner * SHARE - tl.minimum(owner, LARGER)
        for i in tl.static_range(SHARES * TP):
            row = to_rows[i]
            sent, entry = assigned & (row >= 0)[:, None], row[:, None] * K + k[None, :]
            theirs = tl.where(owner == to_shares[i], local, -1)
            tl.store(region(peers[i], ids_at, tl.int32) + entry, theirs, mask=sent)
            tl.store(region(peers[i], weights_at, tl.float32) + entry, weight, mask=sent)
            if GROUPS:
                tl.store(region(peers[i], scale_at, tl.float32) + row[:, None] * GROUPS
                         + g[None, :], scale, mask=has & (row >= 0)[:, None])  # fmt: skip

    tl.atomic_add(
        counters_ptr + 1 + shares, before - earlier_programs, mask=shares < SHARES, sem="relaxed"
    )
    if is_last(counters_ptr, tl.num_programs(0)):
        r = tl.arange(0, RANKS_2)
        count = tl.load(counters_ptr + 1 + r // TP, mask=r < SHARES * TP, other=0)
        value = (tl.load(epoch_ptr) + 1 << 32) | count.to(tl.int64)
        raise_flags(peers_ptr, rank, value, flags_at, ROWS, SHARES * TP, RANKS_2)
        tl.debug_barrier()  # all counts are read
        tl.store(counters_ptr + 1 + shares, 0, mask=shares < SHARES)


@triton.jit
def receive_rows(
    peers_ptr, used_ptr, rows_ptr, refused_ptr, epoch_ptr, error_ptr, lost_ptr, rank, most, spins,
    ids_at, flags_at, RANKS: tl.constexpr, RANKS_2: tl.constexpr, COPIES: tl.constexpr,
    K: tl.constexpr, K_2: tl.constexpr, SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Wait for all rows, and give the rows behind the last one of a batch no expert.

    Args:
        used_ptr: int32 (batches,), rows of the call before, updated. rows_ptr: int32 (1,), written:
            the end of the rows of all batches.
        refused_ptr: int32 (1,), set if the batch has more than ``most`` rows: another rank has
            another max_tokens, and experts do not see the rows behind it.
    """
    batch, r = tl.program_id(0), tl.arange(0, RANKS_2)
    flag, complete = wait_for(
        peers_ptr, lost_ptr, error_ptr, rank, r, r < RANKS, call_number(epoch_ptr), spins, flags_at,
        ROWS, RANKS,
    )  # fmt: skip
    wait_for_kernel(PDL)
    launch_dependents(PDL)
    # Ranks with the same tokens send the same count.
    counts = tl.where(r < RANKS, flag & LOW, 0).to(tl.int32) * complete
    count = tl.max(tl.where(r // COPIES == batch, counts, 0), axis=0)
    if count > most:
        tl.store(refused_ptr, 1)
    ids, used = at(peers_ptr, rank, ids_at, tl.int32), tl.load(used_ptr + batch)
    k = tl.arange(0, K_2)
    BATCHES: tl.constexpr = RANKS // COPIES
    tl.store(rows_ptr, tl.minimum(tl.max(counts, axis=0), most) * BATCHES, mask=batch == 0)
    for first in range(count, used, SCAN):
        slot = first + tl.arange(0, SCAN)
        place = (slot * BATCHES + batch)[:, None].to(tl.int64) * K + k[None, :]
        tl.store(ids + place, -1, mask=(slot < used)[:, None] & (k < K)[None, :])
    tl.debug_barrier()  # all threads have read the old number
    tl.store(used_ptr + batch, count)
