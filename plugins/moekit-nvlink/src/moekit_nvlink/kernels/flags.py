"""Flags between ranks, and the memory order that they keep.

A flag is an int64: the number of the call (1, 2, ...) in the upper half, a value in the lower half.
Every rank has one for each phase of a call and each rank, and only that rank writes it. Flags only
grow, so nothing is reset between calls, and a replayed CUDA graph counts on. Numbers are compared
modulo 2**32, which a day of decoding reaches.

Writes happen before the flag. All threads of a program write rows, in other ranks' memory. The
barrier in `is_last` orders them before one thread's add (acquire and release, at system scope) to a
counter in this rank's memory. The program that finds all others there has acquired their adds, so
its release of a flag at system scope covers every program's writes. Causality in PTX's model is
transitive through barriers and through adds of one location.

Reads happen after the flag. One thread acquires the flag at system scope, and a barrier orders the
reads of the program's other threads behind it. The kernels that follow on the stream start when
that kernel has ended, so they see the rows, too.

Memory is written again only when nobody reads it:

    x, ids, weights, sources, counts   A rank sends the rows of call n + 1 after its combine of call
                                       n, which waited for the flag COMBINE of all ranks. A rank
                                       raises that flag when its experts, which read x, are done.
    y (read by other ranks)            Experts write y of call n + 1 after they have acquired the
                                       flag ROWS of all ranks, which each rank raises after its
                                       combine of call n.
    back (written by other ranks)      A rank pushes rows of call n + 1 after it has acquired the
                                       flag ROWS of their owner, who raised it after its combine of
                                       call n had read ``back``.

Calls in flight at the same time have separate buffers and flags.
"""

import triton
import triton.language as tl

# The phases of a call, which have a flag for each rank.
COUNTS = tl.constexpr(0)
ROWS = tl.constexpr(1)
COMBINE = tl.constexpr(2)
LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def at(peers_ptr, rank, offset, type: tl.constexpr):
    """Return a pointer into a rank's buffer, where regions are aligned to 256 bytes."""
    return tl.multiple_of((tl.load(peers_ptr + rank) + offset).to(tl.pointer_type(type)), 16)


@triton.jit
def is_last(counters_ptr):
    """Return whether all other programs of this kernel came here before, with all their writes."""
    tl.debug_barrier()
    last = tl.atomic_add(counters_ptr, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1
    if last:
        tl.store(counters_ptr, 0)
    return last


@triton.jit
def raise_flag(peers_ptr, to, rank, value, flags_at, PHASE: tl.constexpr, RANKS: tl.constexpr):
    """Release this rank's flag on rank ``to``."""
    flags = at(peers_ptr, to, flags_at, tl.int64)
    tl.atomic_xchg(flags + PHASE * RANKS + rank, value, sem="release", scope="sys")


@triton.jit
def reached(flag, number):
    """Return whether a flag has the number of a call, or a later one."""
    return flag - (number << 32) >= 0


@triton.jit
def wait(flag_ptr, lost, number, spins):
    """Return the flag once it has reached ``number``, or as it is after so many ``spins``.

    lost: 1 if its rank was given up before, which takes one look.
    """
    flag = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    spun = lost * spins
    while (not reached(flag, number)) & (spun < spins):
        flag = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        spun += 1
    return flag


@triton.jit
def wait_for(
    peers_ptr, lost_ptr, error_ptr, rank, source, number, spins, flags_at,
    PHASE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Return (flag of rank ``source``, whether it came and never was given up).

    lost_ptr: int32 (1 + RANKS,): whether any rank was given up, and which. error_ptr: int32
    (RANKS,) in host memory, the same for the host.
    """
    lost = tl.load(lost_ptr + 1 + source)
    own = at(peers_ptr, rank, flags_at, tl.int64)
    flag = wait(own + PHASE * RANKS + source, lost, number, spins)
    came = reached(flag, number)
    if not came:
        tl.store(lost_ptr, 1)
        tl.store(lost_ptr + 1 + source, 1)
        tl.store(error_ptr + source, 1)
    return flag, came & (lost == 0)


@triton.jit
def owner_of(expert, SHARE: tl.constexpr, LARGER: tl.constexpr):
    """Return which share an expert belongs to: the first LARGER shares hold SHARE + 1."""
    in_larger = expert // (SHARE + 1)
    in_others = LARGER + (expert - LARGER * (SHARE + 1)) // tl.maximum(SHARE, 1)
    return tl.where(expert < LARGER * (SHARE + 1), in_larger, in_others)
