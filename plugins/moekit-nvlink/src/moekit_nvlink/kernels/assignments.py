"""Dispatch of `nvlink_ll`: a token's row goes to the place of each of its experts.

Row ``expert * slots + slot`` of a rank's buffer belongs to one assignment. The slots of an expert
are given by batch, then by token, so that its rows lie together and equal inputs give equal rows.
Every rank first tells all ranks how many rows it has for each expert (counts). Then each knows
where its own rows begin, and writes them there.
"""

import triton
import triton.language as tl
from moekit_kernels.launch import wait_then_launch_dependents

from .flags import (
    COUNTS,
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
def count_assignments(
    ids_ptr, positions_ptr, peers_ptr, counters_ptr, epoch_ptr, assignments, rank, slots,
    counts_at, flags_at,
    RANKS: tl.constexpr, RANKS_2: tl.constexpr, COPIES: tl.constexpr, EXPERTS: tl.constexpr,
    TILE: tl.constexpr, SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count this rank's assignments of each expert, and tell every rank.

    Args:
        ids_ptr: int32 or int64 (T * K,) of EXPERTS physical experts. positions_ptr: int32
            (T * K,), written: how many earlier assignments have the same expert.
        slots: rows of an expert, which all ranks must agree on.
    """
    if PDL:
        wait_then_launch_dependents()
    expert = tl.program_id(0) * TILE + tl.arange(0, TILE)
    before = tl.zeros([TILE], tl.int32)
    for first in range(0, assignments, SCAN):
        place = first + tl.arange(0, SCAN)
        there = place < assignments
        id = load_ids(ids_ptr + place, there)
        hit = ((id[:, None] == expert[None, :]) & (expert < EXPERTS)[None, :]).to(tl.int32)
        order = tl.cumsum(hit, axis=0) - hit + before[None, :]
        found = tl.max(hit, axis=1) > 0
        tl.store(positions_ptr + place, tl.sum(hit * order, axis=1), mask=there & found)
        before += tl.sum(hit, axis=0)
    for r in tl.static_range(RANKS):
        counts = at(peers_ptr, r, counts_at, tl.int32) + rank // COPIES * EXPERTS
        tells = (rank + r) % COPIES + 0 * expert == 0  # one of the ranks with these tokens
        tl.store(counts + expert, before, mask=(expert < EXPERTS) & tells)
    if is_last(counters_ptr, tl.num_programs(0)):
        number = tl.load(epoch_ptr) + 1
        raise_flags(peers_ptr, rank, (number << 32) | slots, flags_at, COUNTS, RANKS, RANKS_2)


@triton.jit
def dispatch_assignments(
    x_ptr, scale_ptr, ids_ptr, positions_ptr, peers_ptr, places_ptr, counters_ptr, epoch_ptr,
    refused_ptr, error_ptr, lost_ptr, T, rank, slots, per_rank, spins, x_at, scale_at, counts_at,
    flags_at,
    RANKS: tl.constexpr, RANKS_2: tl.constexpr, TP: tl.constexpr, COPIES: tl.constexpr,
    BATCHES_2: tl.constexpr, EXPERTS: tl.constexpr, SHARE: tl.constexpr, LARGER: tl.constexpr,
    K: tl.constexpr, K_2: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_2: tl.constexpr, WORDS_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write each token's row and scales to the places of its experts.

    Args:
        x_ptr ... counters_ptr: as in `dispatch_rows`, and positions_ptr as in `count_assignments`.
        places_ptr: int32 (T, K), written: share * per_rank + row, or -1.
        refused_ptr: int32 (1,), set if another rank has another number of slots.
        slots: rows of an expert; per_rank: rows of a rank.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    number, r = call_number(epoch_ptr), tl.arange(0, RANKS_2)
    flag, complete = wait_for(peers_ptr, lost_ptr, error_ptr, rank, r, r < RANKS, number, spins,
                              flags_at, COUNTS, RANKS)  # fmt: skip
    wait_for_kernel(PDL)
    launch_dependents(PDL)
    if tl.max(((r < RANKS) & (flag & LOW != slots)).to(tl.int32), axis=0) * complete != 0:
        tl.store(refused_ptr, 1)
        complete = 0

    batch = rank // COPIES
    b, k, word = tl.arange(0, BATCHES_2), tl.arange(0, K_2), tl.arange(0, WORDS_TILE)
    counts = at(peers_ptr, rank, counts_at, tl.int32)
    CHUNKS: tl.constexpr = (WORDS + WORDS_TILE - 1) // WORDS_TILE
    for step in range(program, T * CHUNKS, programs):
        token, w = step // CHUNKS, step % CHUNKS * WORDS_TILE
        expert = load_ids(ids_ptr + token * K + k, k < K)
        # Without all counts, no place is known: nothing is sent, and the output will be NaN.
        # An id beyond the last expert, which checked calls refuse, goes nowhere.
        expert = tl.where((complete != 0) & (expert < EXPERTS), expert, -1)
        real = expert >= 0
        others = tl.load(counts + b[:, None] * EXPERTS + expert[None, :],
                         mask=(b < batch)[:, None] & real[None, :], other=0)  # fmt: skip
        position = tl.load(positions_ptr + token * K + k, mask=real, other=0)
        owner = tl.where(real, owner_of(expert, SHARE, LARGER), 0)
        local = expert - owner * SHARE - tl.minimum(owner, LARGER)
        row = local * slots + tl.sum(others, axis=0) + position
        if w == 0:
            place = tl.where(real, owner * per_rank + row, -1)
            tl.store(places_ptr + token * K + k, place, mask=k < K)
        if COPIES > 1:
            real = tl.where(token % COPIES == rank % COPIES, expert, -1) >= 0
        inside = (w + word) < WORDS
        x = tl.load(x_ptr + tl.cast(token, tl.int64) * WORDS + w + word, mask=inside, other=0)
        wide = row.to(tl.int64)
        for t in tl.static_range(TP):
            peer = tl.load(peers_ptr + owner * TP + t)
            to = region(peer, x_at, tl.int32)
            tl.store(to[:, None] + wide[:, None] * WORDS + w + word[None, :], x[None, :],
                     mask=real[:, None] & inside[None, :])  # fmt: skip
            if GROUPS:
                if w == 0:
                    g = tl.arange(0, GROUPS_2)
                    scale = tl.load(scale_ptr + token * GROUPS + g, mask=g < GROUPS, other=0.0)
                    scales = (peer + scale_at).to(tl.pointer_type(tl.float32))
                    tl.store(scales[:, None] + wide[:, None] * GROUPS + g[None, :], scale[None, :],
                             mask=real[:, None] & (g < GROUPS)[None, :])  # fmt: skip
    if is_last(counters_ptr, tl.num_programs(0)):
        raise_flags(peers_ptr, rank, number << 32, flags_at, ROWS, RANKS, RANKS_2)


@triton.jit
def receive_assignments(
    peers_ptr, counts_ptr, epoch_ptr, refused_ptr, error_ptr, lost_ptr, rank, first, experts,
    spins, counts_at, flags_at,
    RANKS: tl.constexpr, RANKS_2: tl.constexpr, BATCHES: tl.constexpr, EXPERTS: tl.constexpr,
    LOCAL_2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Wait for the rows of all ranks, and sum the counts of this rank's experts over the batches.

    Args:
        counts_ptr: int32 (experts,), written: the rows of each local expert. first: the first local
            expert.
    """
    number, r = call_number(epoch_ptr), tl.arange(0, RANKS_2)
    _, complete = wait_for(peers_ptr, lost_ptr, error_ptr, rank, r, r < RANKS, number, spins,
                           flags_at, ROWS, RANKS)  # fmt: skip
    wait_for_kernel(PDL)
    launch_dependents(PDL)
    expert = tl.arange(0, LOCAL_2)
    there = expert < experts
    total = tl.zeros([LOCAL_2], tl.int32)
    counts = at(peers_ptr, rank, counts_at, tl.int32)
    for b in tl.static_range(BATCHES):
        total += tl.load(counts + b * EXPERTS + first + expert, mask=there, other=0)
    taken = (complete != 0) & (tl.load(refused_ptr) == 0)
    tl.store(counts_ptr + expert, tl.where(taken, total, 0), mask=there)
