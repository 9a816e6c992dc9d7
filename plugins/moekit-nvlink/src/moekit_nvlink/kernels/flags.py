"""Flags between ranks, and the memory order that they keep.

A flag is an int64: the number of the call (1, 2, ...) in the upper half, a value in the lower half.
Every rank has one for each phase of a call and each rank, and only that rank writes it; the last
phase has one for each chunk (`kernels.reduce`). Flags only grow, so nothing is reset between calls,
and a replayed CUDA graph counts on. Numbers are compared modulo 2**32, which a day of decoding
reaches.

Writes happen before the flag. All threads of a program write rows, in other ranks' memory. The
barrier in `is_last` orders them before one thread's add (acquire and release) to a counter in this
rank's memory. The program that finds all others there has acquired their adds, and a second barrier
orders its other threads behind that one, so their releases of flags at system scope, one for each
rank, cover every program's writes. Causality in PTX's model is transitive through barriers and
through adds of one location, at any scope that includes both threads. Only threads of one
GPU add, so their scope is the GPU, which takes less time than the system.

Reads happen after the flag. A thread for each rank acquires its flag at system scope, and a barrier
orders the reads of the program's other threads behind it. The kernels that follow on the stream
wait until that kernel has ended, so they also see the rows.

Kernels that wait for flags let the next kernel start only when the flags have come
(`launch_dependents`): it would otherwise occupy multiprocessors for as long as a rank is late.

A kernel whose flags the previous kernel raises (COUNTS, ROWS) waits for them while that one runs,
and only then for its end. The previous kernel lets it start after its own wait for all kernels
before, so what those wrote may be read at once, here by volatile loads, which bypass the L1 cache.
A rank that the previous kernel gives up in this time may be waited for once more.

Memory is written again only when nobody reads it:

    x, ids, weights, counts            A rank sends the rows of call n + 1 after its combine of call
                                       n, which waited for the flag COMBINE of all ranks. A rank
                                       raises that flag when its experts, which read x, are done,
                                       and its sums for other ranks, which read their ids.
    y, grads (read by other ranks)     Experts write y of call n + 1 after they have acquired the
                                       flag ROWS of all ranks, which each rank raises after its
                                       combine of call n.

Calls in flight at the same time have separate buffers and flags.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

# The phases of a call, which have a flag for each rank.
COUNTS = tl.constexpr(0)
ROWS = tl.constexpr(1)
COMBINE = tl.constexpr(2)
LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def region(peer, offset, type: tl.constexpr):
    """Return pointers into buffers at addresses, where regions are aligned to 256 bytes."""
    return tl.multiple_of((peer + offset).to(tl.pointer_type(type)), 16)


@triton.jit
def at(peers_ptr, rank, offset, type: tl.constexpr):
    """Return a pointer into a rank's buffer."""
    return region(tl.load(peers_ptr + rank), offset, type)


@triton.jit
def wait_for_kernel(PDL: tl.constexpr):
    """Wait until the previous kernel has ended, see `moekit_kernels.launch`."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start, which waits until this one has ended."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def call_number(epoch_ptr):
    """Return the number of the call, also before the previous kernel has ended."""
    return tl.load(epoch_ptr, volatile=True) + 1


@triton.jit
def is_last(counters_ptr, programs):
    """Return whether the other ``programs`` came here before, with all their writes."""
    tl.debug_barrier()
    last = tl.atomic_add(counters_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counters_ptr, 0)
    tl.debug_barrier()
    return last


@triton.jit
def raise_flags(peers_ptr, rank, value, flags_at, PHASE: tl.constexpr, RANKS: tl.constexpr,
                RANKS_2: tl.constexpr, first=0, end=1, CHUNKS: tl.constexpr = 1):  # fmt: skip
    """Release this rank's flag on every rank. value: int64, or one for each rank.

    Of COMBINE, the flags of the chunks from ``first`` to ``end``, see `reduce.reduce_rows`.
    """
    r, c = tl.arange(0, RANKS_2), tl.arange(0, CHUNKS)
    peer = tl.load(peers_ptr + r, mask=r < RANKS, other=0)
    flags = (peer + flags_at).to(tl.pointer_type(tl.int64)) + PHASE * RANKS + rank
    value += tl.zeros([RANKS_2], tl.int64)
    raised = (r < RANKS)[:, None] & ((c >= first) & (c < end))[None, :]
    tl.atomic_xchg(flags[:, None] + (c * RANKS)[None, :], value[:, None], mask=raised,
                   sem="release", scope="sys")  # fmt: skip


@triton.jit
def reached(flag, number):
    """Return whether a flag has the number of a call, or a later one."""
    return flag - (number << 32) >= 0


@triton.jit
def look_at(flags, there):
    """Acquire flags."""
    nothing = tl.zeros(there.shape, tl.int64)
    return tl.atomic_add(flags, nothing, mask=there, sem="acquire", scope="sys")


@triton.jit
def wait_for(
    peers_ptr, lost_ptr, error_ptr, rank, sources, there, number, spins, flags_at,
    PHASE: tl.constexpr, RANKS: tl.constexpr, chunk=0,
):  # fmt: skip
    """Return the flags of ranks, and whether all came and none of them was ever given up.

    Flags are looked at until they have reached ``number``, at most ``spins`` times more. A
    rank that was given up before is not waited for.

    Args:
        lost_ptr: int32 (1 + RANKS,): whether any rank was given up, and which. error_ptr: int32
            (RANKS,) in host memory, the same for the host.
        sources: (n,) ranks, where ``there`` (n,) is true. chunk: of COMBINE.
    """
    lost = tl.load(lost_ptr + 1 + sources, mask=there, other=0, volatile=True)
    flags = at(peers_ptr, rank, flags_at, tl.int64) + (PHASE + chunk) * RANKS + sources
    flag = look_at(flags, there)
    missing = there & ~reached(flag, number)
    spun = 0
    while (tl.max((missing & (lost == 0)).to(tl.int32), axis=0) != 0) & (spun < spins):
        flag = look_at(flags, there)
        missing = there & ~reached(flag, number)
        spun += 1
    tl.store(lost_ptr + 0 * sources, 1, mask=missing)
    tl.store(lost_ptr + 1 + sources, 1, mask=missing)
    tl.store(error_ptr + sources, 1, mask=missing)
    complete = 1 - tl.max((missing | there & (lost != 0)).to(tl.int32), axis=0)
    tl.debug_barrier()
    return flag, complete


@triton.jit
def load_ids(ids_ptr, there):
    """Return ids as int32, -1 where ``there`` is false."""
    return tl.load(ids_ptr, mask=there, other=-1).to(tl.int32)


@triton.jit
def owner_of(expert, SHARE: tl.constexpr, LARGER: tl.constexpr):
    """Return which share an expert belongs to: the first LARGER shares hold SHARE + 1."""
    in_larger = expert // (SHARE + 1)
    in_others = LARGER + (expert - LARGER * (SHARE + 1)) // tl.maximum(SHARE, 1)
    return tl.where(expert < LARGER * (SHARE + 1), in_larger, in_others)
