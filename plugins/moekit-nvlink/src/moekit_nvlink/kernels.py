"""Device code of `nvlink_ht`: rows to the ranks of their experts, and the experts' output back.

Every rank has the same buffer (`footprint.Layout`), and ``peers`` holds the address of each rank's.
Row ``source * capacity + slot`` of a rank's buffer belongs to the token with that slot on rank
``source``. Slots are given in the order of tokens, one for each rank that a token goes to, so that
a row travels once for each rank and equal inputs give equal rows.

Memory order. A program writes rows to other ranks, then adds to a counter with acquire and release.
The program that finds all others there releases one flag to each rank, at system scope: whoever
acquires that flag sees all rows. A flag holds the number of the call and the number of rows. A
rank's buffer is written again only after its flag of the combine, which it releases when its
experts are done; other ranks stop reading y before they dispatch again, and a rank's experts write
y only after they acquired that dispatch's flags.

Shape letters: T tokens of this rank, K top-k, E ranks that share the experts, W words of a row.
"""

import triton
import triton.language as tl

_LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _owner(expert, SHARE: tl.constexpr, LARGER: tl.constexpr):
    """Return the rank that holds an expert: the first LARGER ranks hold SHARE + 1."""
    in_larger = expert // (SHARE + 1)
    in_others = LARGER + (expert - LARGER * (SHARE + 1)) // SHARE
    return tl.where(expert < LARGER * (SHARE + 1), in_larger, in_others)


@triton.jit
def _at(peers_ptr, rank, offset, type: tl.constexpr):
    """Return a pointer into another rank's buffer, where regions are aligned to 256 bytes."""
    return tl.multiple_of((tl.load(peers_ptr + rank) + offset).to(tl.pointer_type(type)), 16)


@triton.jit
def _goes_to(
    ids_ptr, token, exists, ranks, RANKS: tl.constexpr, K: tl.constexpr, K_2: tl.constexpr,
    SHARE: tl.constexpr, LARGER: tl.constexpr,
):  # fmt: skip
    """Return (tokens, ranks) int32: 1 where a token has an expert on the rank."""
    k = tl.arange(0, K_2)
    there = exists[:, None] & (k < K)[None, :]
    expert = tl.load(ids_ptr + token[:, None] * K + k[None, :], mask=there, other=-1)
    owner = tl.where(expert >= 0, _owner(expert, SHARE, LARGER), -1)
    found = tl.zeros([token.shape[0], ranks.shape[0]], tl.int32)
    for r in tl.static_range(RANKS):
        one = tl.max((owner == r).to(tl.int32), axis=1)
        found = tl.where((ranks == r)[None, :], one[:, None], found)
    return found


@triton.jit
def dispatch_rows(
    x_ptr, scale_ptr, ids_ptr, weights_ptr, peers_ptr, slots_ptr, counters_ptr, epoch_ptr,
    T, rank, capacity, x_at, scale_at, ids_at, weights_at, flags_at,
    RANKS: tl.constexpr, RANKS_2: tl.constexpr, TP: tl.constexpr, SHARE: tl.constexpr,
    LARGER: tl.constexpr, K: tl.constexpr, K_2: tl.constexpr, WORDS: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_2: tl.constexpr, TOKENS: tl.constexpr, WORDS_TILE: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """Write each token's row, scales, ids and weights to the ranks of its experts.

    Args:
        x_ptr: int32 words (T, W), a row as it travels. scale_ptr: fp32 (T, GROUPS).
        ids_ptr: int32 (T, K) physical experts, -1 for none. weights_ptr: fp32 (T, K).
        peers_ptr: int64 (RANKS * TP,) addresses. slots_ptr: int32 (T, RANKS), written: the slot on
            each rank, or -1. counters_ptr: int32 (1 + RANKS,), zero before and after.
        epoch_ptr: int64 (1,), the number of calls that were combined.
        x_at ... flags_at: byte offsets in a buffer.
        RANKS: ranks that share the experts; TP: ranks that slice each of them. The _2 are the next
            powers of two.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    share = tl.cdiv(tl.cdiv(T, programs), TOKENS) * TOKENS
    start = tl.minimum(program * share, T)
    end = tl.minimum(start + share, T)
    ranks = tl.arange(0, RANKS_2)

    before = tl.zeros([RANKS_2], tl.int32)
    for at in range(0, start, SCAN):
        token = at + tl.arange(0, SCAN)
        goes = _goes_to(ids_ptr, token, token < start, ranks, RANKS, K, K_2, SHARE, LARGER)
        before += tl.sum(goes, axis=0)
    first = before

    word, step = tl.arange(0, WORDS_TILE), tl.arange(0, TOKENS)
    lower = (step[None, :] < step[:, None]).to(tl.int32)
    for at in range(start, end, TOKENS):
        token = at + tl.arange(0, TOKENS)
        exists = token < end
        goes = _goes_to(ids_ptr, token, exists, ranks, RANKS, K, K_2, SHARE, LARGER)
        # Not tl.cumsum, which Triton 3.6 does not compile for fewer rows than warps.
        earlier = tl.sum(lower[:, :, None] * goes[None, :, :], axis=1)
        slot = tl.where(goes != 0, before[None, :] + earlier, -1)
        tl.store(
            slots_ptr + token[:, None] * RANKS + ranks[None, :], slot,
            mask=exists[:, None] & (ranks < RANKS)[None, :],
        )  # fmt: skip
        before += tl.sum(goes, axis=0)

        for w in range(0, WORDS, WORDS_TILE):
            inside = exists[:, None] & ((w + word) < WORDS)[None, :]
            x = tl.load(x_ptr + token[:, None].to(tl.int64) * WORDS + w + word[None, :],
                        mask=inside, other=0)  # fmt: skip
            for r in tl.static_range(RANKS):
                mine = tl.sum(tl.where((ranks == r)[None, :], slot, 0), axis=1)
                row = (rank * capacity + mine).to(tl.int64)
                for t in tl.static_range(TP):
                    to = _at(peers_ptr, r * TP + t, x_at, tl.int32)
                    tl.store(to + row[:, None] * WORDS + w + word[None, :], x,
                             mask=inside & (mine >= 0)[:, None])  # fmt: skip

        k = tl.arange(0, K_2)
        assigned = exists[:, None] & (k < K)[None, :]
        expert = tl.load(ids_ptr + token[:, None] * K + k[None, :], mask=assigned, other=-1)
        weight = tl.load(weights_ptr + token[:, None] * K + k[None, :], mask=assigned, other=0.0)
        owner = tl.where(expert >= 0, _owner(expert, SHARE, LARGER), -1)
        for r in tl.static_range(RANKS):
            mine = tl.sum(tl.where((ranks == r)[None, :], slot, 0), axis=1)
            row = (rank * capacity + mine).to(tl.int64)
            sent = assigned & (mine >= 0)[:, None]
            local = tl.where(owner == r, expert - r * SHARE - tl.minimum(r, LARGER), -1)
            for t in tl.static_range(TP):
                to = _at(peers_ptr, r * TP + t, ids_at, tl.int32)
                tl.store(to + row[:, None] * K + k[None, :], local, mask=sent)
                to = _at(peers_ptr, r * TP + t, weights_at, tl.float32)
                tl.store(to + row[:, None] * K + k[None, :], weight, mask=sent)
            if GROUPS:
                g = tl.arange(0, GROUPS_2)
                has = exists[:, None] & (g < GROUPS)[None, :]
                scale = tl.load(scale_ptr + token[:, None] * GROUPS + g[None, :], mask=has)
                for t in tl.static_range(TP):
                    to = _at(peers_ptr, r * TP + t, scale_at, tl.float32)
                    tl.store(to + row[:, None] * GROUPS + g[None, :], scale,
                             mask=has & (mine >= 0)[:, None])  # fmt: skip

    tl.atomic_add(counters_ptr + 1 + ranks, before - first, mask=ranks < RANKS, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr, 1, sem="acq_rel", scope="sys") == programs - 1:
        number = tl.load(epoch_ptr) + 1
        for r in tl.static_range(RANKS):
            count = tl.atomic_xchg(counters_ptr + 1 + r, 0, sem="relaxed").to(tl.int64)
            for t in tl.static_range(TP):
                to = _at(peers_ptr, r * TP + t, flags_at, tl.int64)
                tl.atomic_xchg(to + rank, (number << 32) | count, sem="release", scope="sys")
        tl.store(counters_ptr, 0)


@triton.jit
def _wait(flag_ptr, number, spins):
    """Return the flag once it has reached ``number``, or as it is after so many ``spins``."""
    flag = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    spun = 0
    while ((flag >> 32) < number) & (spun < spins):
        flag = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        spun += 1
    return flag


@triton.jit
def receive_rows(
    buffer, used_ptr, epoch_ptr, error_ptr, capacity, spins, ids_at, flags_at,
    K: tl.constexpr, K_2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Wait for the rows of one rank, and give the rows behind them no expert.

    Args:
        buffer: this rank's address. used_ptr: int32 (ranks,), rows of the call before, updated.
        error_ptr: int32 (ranks,), set to 1 where a rank did not come.
    """
    source = tl.program_id(0)
    number = tl.load(epoch_ptr) + 1
    flag = _wait((buffer + flags_at).to(tl.pointer_type(tl.int64)) + source, number, spins)
    came = (flag >> 32) >= number
    if not came:
        tl.store(error_ptr + source, 1)
    count = tl.where(came, flag & _LOW, 0).to(tl.int32)
    ids = (buffer + ids_at).to(tl.pointer_type(tl.int32))
    k = tl.arange(0, K_2)
    for at in range(count, tl.load(used_ptr + source), ROWS):
        row = at + tl.arange(0, ROWS)
        place = (source * capacity + row)[:, None].to(tl.int64) * K + k[None, :]
        tl.store(ids + place, -1, mask=(row < capacity)[:, None] & (k < K)[None, :])
    tl.store(used_ptr + source, count)


@triton.jit
def combine_rows(
    out_ptr, peers_ptr, slots_ptr, counters_ptr, epoch_ptr, error_ptr,
    T, out_stride, rank, capacity, spins, y_at, flags_at,
    RANKS: tl.constexpr, TP: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum each token's rows of all ranks, in rank order in fp32.

    out_ptr: (T, H), rows ``out_stride`` apart; NaN where a rank did not come. Other arguments as
    above.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    number = tl.load(epoch_ptr) + 1
    if program == 0:  # this rank's experts are done, as they come before on the stream
        for r in tl.static_range(RANKS * TP):
            to = _at(peers_ptr, r, flags_at, tl.int64)
            tl.atomic_xchg(to + RANKS * TP + rank, number << 32, sem="release", scope="sys")
    lost = 0
    own = _at(peers_ptr, rank, flags_at, tl.int64) + RANKS * TP
    for r in tl.static_range(RANKS * TP):
        if (_wait(own + r, number, spins) >> 32) < number:
            tl.store(error_ptr + r, 1)
            lost = 1
    tl.debug_barrier()

    column = tl.arange(0, COLUMNS)
    for at in range(program * TOKENS, T, programs * TOKENS):
        token = at + tl.arange(0, TOKENS)
        exists = token < T
        for h in range(0, H, COLUMNS):
            inside = (h + column) < H
            total = tl.zeros([TOKENS, COLUMNS], tl.float32)
            for r in tl.static_range(RANKS):
                slot = tl.load(slots_ptr + token * RANKS + r, mask=exists, other=-1)
                row = (rank * capacity + slot).to(tl.int64)
                there = (slot >= 0)[:, None] & inside[None, :]
                for t in tl.static_range(TP):
                    y = _at(peers_ptr, r * TP + t, y_at, out_ptr.dtype.element_ty)
                    got = tl.load(y + row[:, None] * H + h + column[None, :], mask=there,
                                  other=0.0, cache_modifier=".cg")  # fmt: skip
                    total += got.to(tl.float32)
            total = tl.where(lost != 0, float("nan"), total)
            tl.store(
                out_ptr + token[:, None].to(tl.int64) * out_stride + h + column[None, :],
                total.to(out_ptr.dtype.element_ty), mask=exists[:, None] & inside[None, :],
            )  # fmt: skip

    tl.debug_barrier()
    if tl.atomic_add(counters_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(counters_ptr, 0)
        tl.store(epoch_ptr, number)
