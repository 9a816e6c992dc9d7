"""Bytes on a rank of the three dispatchers: for their calls, and on paper.

Workspaces are sized by the library's helpers where it runs; here by the formulas behind these
(0.6.8), which tests hold to recorded sizes.
"""

from __future__ import annotations

from moekit.plugin import Footprint, MoEProblem

# What the driver hands out memory in.
PAGE = 2 << 20
# Scales of a row are padded to what the FIFOs carry: 16 bytes.
SCALES = 4

# Of the library's kernels: most slots of a token; a FIFO between two ranks, and its state; what
# `prepare` has between two ranks, with its state; ranks served by a block; and an H200's
# multiprocessors.
_MOST_TOP_K = 22
_FIFO, _FIFO_STATE = 8 * (256 << 10), 256
_COUNTS_FIFO = (1 << 20) + 256
_RANKS_PER_BLOCK = 8
_MULTIPROCESSORS = 132

_HOSTS = (
    "memory is mapped by file descriptors, which do not leave a host; by fabric handles only "
    "within an NVLink domain that spans hosts (GB200 NVL72, aarch64)",
    "no network path: neither RDMA nor NVSHMEM",
)


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def scales(problem: MoEProblem) -> int:
    activation = problem.quant.activation
    return 0 if activation is None else activation.scale_shape(1, problem.hidden_size)[1]


# -- one-sided -------------------------------------------------------------------------------------


def one_sided_row_bytes(problem: MoEProblem) -> tuple[int, int]:
    """Most bytes of one token on its way to the experts, and back."""
    p = problem
    there = back = p.hidden_size * p.dtype.itemsize
    if (activation := p.quant.activation) is not None:
        quantized = p.hidden_size * activation.torch_dtype.itemsize + 4 * scales(p)
        there = max(back, quantized)
    return there + 8 * p.top_k, back


def one_sided_transient(problem: MoEProblem, num_tokens: int, rows: int) -> int:
    """Local ids, ids to send by, scales to send, and the combined rows."""
    p = problem
    ids = 4 * p.top_k * (rows + num_tokens)
    return ids + num_tokens * (4 + p.hidden_size * p.dtype.itemsize)


def one_sided_workspace(ranks: int, capacity: int, row_bytes: tuple[int, int]) -> int:
    """Bytes for one call in flight, without rounding to pages."""
    counters = _up(8 + 2 * 4 * ranks) + 2 * _up(4 * ranks) + 2 * _up(4 * capacity * _MOST_TOP_K)
    return counters + sum(_up(ranks * capacity * n) for n in row_bytes)


def one_sided(problem: MoEProblem) -> Footprint:
    p, (T, ranks) = problem, _sizes(problem)
    workspace = pages(one_sided_workspace(ranks, T, one_sided_row_bytes(p)))
    return Footprint(
        rows=ranks * T,
        buffers={"workspace, for each call in flight": workspace},
        transient=one_sided_transient(p, T, ranks * T),
        source="the library's formula",
        across=_HOSTS,
    )


# -- two-sided -------------------------------------------------------------------------------------


def two_sided_transient(problem: MoEProblem, num_tokens: int, rows: int, capacity: int) -> int:
    """What arrives, the indices of who sent what, and a row for each slot on the way back."""
    p = problem
    x = p.hidden_size * p.dtype.itemsize
    wide = 0 if p.quant.activation is None else 8 * (scales(p) + SCALES)
    slots = max(p.parallel.ep_size, p.top_k)
    indices = rows * 4 * (3 * p.top_k + 2) + capacity * slots * 4 * 4
    back = num_tokens * (p.top_k * x + 4 * p.top_k + x)
    return rows * (x + wide) + indices + back


def two_sided_buffers(ranks: int) -> dict[str, int]:
    blocks = 2 * -(-ranks // _RANKS_PER_BLOCK)
    channels = max(1, _MULTIPROCESSORS // 2 // blocks)
    data = ranks * channels * (_FIFO + _FIFO_STATE)
    return {"FIFOs": pages(data), "FIFOs for counts": pages(ranks * _COUNTS_FIFO)}


def two_sided(problem: MoEProblem) -> Footprint:
    p, (T, ranks) = problem, _sizes(problem)
    return Footprint(
        rows=ranks * T,
        buffers=two_sided_buffers(ranks),
        transient=two_sided_transient(p, T, ranks * T, T),
        source=f"the library's formula, for {_MULTIPROCESSORS} multiprocessors",
        across=_HOSTS,
    )


# -- all-gather ------------------------------------------------------------------------------------


def allgather_transient(problem: MoEProblem, num_tokens: int, rows: int, capacity: int) -> int:
    """What arrives and what comes back, this rank's padded part of it, and the fp32 sum."""
    p = problem
    x = p.hidden_size * p.dtype.itemsize
    meta = 4 * (2 * p.top_k + scales(p))
    # as gathered; ids, weights and scales apart; ids shifted, with two masks, and selected
    arriving = rows * (x + 2 * meta + p.top_k * (3 * 4 + 2))
    sent = capacity * (x + 2 * meta)
    return arriving + sent + rows * x + num_tokens * p.hidden_size * 4


def allgather(problem: MoEProblem) -> Footprint:
    p, (T, _) = problem, _sizes(problem)
    ranks = p.parallel.num_ranks
    return Footprint(
        rows=ranks * T,
        buffers={},
        transient=allgather_transient(p, T, ranks * T, T),
        source="it keeps none",
        across=(
            f"one NCCL communicator of {ranks} ranks, in any order over the hosts: NCCL finds the "
            "NVLink and network paths; InfiniBand, RoCE or plain TCP, no NVSHMEM",
            f"every token goes to all {ranks} ranks: traffic and rows grow with them",
        ),
    )


# -- experts ---------------------------------------------------------------------------------------

# Tensor maps for each SM, pointers and strides for each expert: known bounds, not worth a formula.
_GEMM_WORKSPACE = 1 << 20
_PER_EXPERT = 1024


def experts_transient(problem: MoEProblem, rows: int) -> int:
    """Bytes for a call of ``rows`` rows of top_k slots each."""
    if not rows:
        return 0
    p, L, pairs = problem, problem.num_local_experts, rows * problem.top_k
    block = p.quant.name == "fp8_block"
    out = p.dtype.itemsize
    a = 1 if p.quant.activation is not None and not block else out
    hidden, inner = pairs * p.hidden_size, pairs * p.local_intermediate_size
    # GEMM 1's output is apart from the activation's where there is a gate or a quantization.
    apart = p.activation.gated or a != out or block
    first = max(hidden * a, hidden * out, inner * a if apart else 0)
    second = max(pairs * p.w13_rows * out, hidden * out) if apart else inner * a
    parts = [
        *[4 * pairs] * 4,  # two maps, experts in order, router weights in order
        *[4 * L * _blocks(rows, L)] * 2,
        4 * L * rows,
        8 * (L + 1),
        first,
        second,
        _PER_EXPERT * L,
        _GEMM_WORKSPACE,
        4 * L * rows,  # of another mode, allocated in this one too
    ]
    if block:
        parts.append(
            max(_quantized(pairs, k, L) for k in (p.hidden_size, p.local_intermediate_size))
        )
    return sum(map(_up, parts))


def _blocks(rows: int, experts: int) -> int:
    """Blocks of tokens that the counting sort works in."""
    for size in (32, 64, 128, 256, 512, 1024):
        if -(-rows // size) * experts <= size:
            return -(-rows // size)
    return -(-rows // 1024)


def _quantized(pairs: int, k: int, experts: int) -> int:
    """A GEMM's input in fp8 and its scales, whose rows are padded expert by expert."""
    rows = -(-pairs // 4) * 4
    padded = (pairs + experts * 31) // 32 * 32
    return rows * k + 4 * padded * -(-k // 128)


def _up(n: int) -> int:
    return -(-n // 128) * 128


def _sizes(problem: MoEProblem) -> tuple[int, int]:
    assert problem.max_num_tokens is not None
    return problem.max_num_tokens, problem.parallel.ep_size
