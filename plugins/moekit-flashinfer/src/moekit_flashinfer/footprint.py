"""The bytes that the dispatchers and the experts take on a rank, computed without the library.

The library sizes its buffers itself; the formulas here are those of FlashInfer 0.6.8 and 0.7.2, and
tests compare them with sizes that were recorded with 0.6.8.
"""

from __future__ import annotations

from moekit.plugin import Footprint, MoEProblem

# The FIFOs carry words of 16 bytes, so the scales of a row are padded to 4.
SCALES = 4

# Constants of the library's kernels: the largest top_k; a FIFO between two ranks and its state; the
# same for `prepare`; ranks that a thread block serves. The last one is an H200's multiprocessors.
_MOST_TOP_K = 22
_FIFO, _FIFO_STATE = 8 * (256 << 10), 256
_COUNTS_FIFO = (1 << 20) + 256
_RANKS_PER_BLOCK = 8
_MULTIPROCESSORS = 132


def pages(nbytes: int) -> int:
    """Round up to the driver's granularity."""
    return _up(nbytes, 2 << 20)


# -- one-sided -------------------------------------------------------------------------------------


def one_sided_row_bytes(problem: MoEProblem) -> tuple[int, int]:
    """Return the most bytes of one token on its way to the experts, and back."""
    p = problem
    there = back = p.hidden_size * p.dtype.itemsize
    if (activation := p.quant.activation) is not None:
        quantized = p.hidden_size * activation.torch_dtype.itemsize + 4 * p.scales_per_row
        there = max(back, quantized)
    return there + 8 * p.top_k, back


def one_sided_transient(problem: MoEProblem, num_tokens: int, rows: int) -> int:
    """Return the bytes of local ids, ids and scales to send, and combined rows."""
    p = problem
    ids = 4 * p.top_k * (rows + num_tokens)
    return ids + num_tokens * (4 + p.hidden_size * p.dtype.itemsize)


def one_sided_workspace(ranks: int, capacity: int, row_bytes: tuple[int, int]) -> int:
    """Return the bytes for one in-flight call, not rounded to pages."""
    counters = _up(8 + 2 * 4 * ranks) + 2 * _up(4 * ranks) + 2 * _up(4 * capacity * _MOST_TOP_K)
    return counters + sum(_up(ranks * capacity * n) for n in row_bytes)


def one_sided_output(ranks: int, capacity: int, row_bytes: tuple[int, int]) -> int:
    """Return the bytes of the experts' output, at the end of the workspace."""
    return _up(ranks * capacity * row_bytes[1])


def one_sided(problem: MoEProblem) -> Footprint:
    p, (T, ranks) = problem, _sizes(problem)
    workspace = pages(one_sided_workspace(ranks, T, one_sided_row_bytes(p)))
    return Footprint(
        rows=ranks * T,
        buffers={"workspace, for each in-flight call": workspace},
        transient=one_sided_transient(p, T, ranks * T),
        source="the library's formula",
    )


# -- two-sided -------------------------------------------------------------------------------------


def two_sided_transient(problem: MoEProblem, num_tokens: int, rows: int, capacity: int) -> int:
    """Return the bytes of received rows, their sources, and a returned row per assignment."""
    p = problem
    x = p.hidden_size * p.dtype.itemsize
    wide = 0 if p.quant.activation is None else 8 * (p.scales_per_row + SCALES)
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
    )


# -- all-gather ------------------------------------------------------------------------------------


def allgather_transient(problem: MoEProblem, num_tokens: int, rows: int, capacity: int) -> int:
    """Return the bytes of gathered and returned rows, this rank's padded rows, and the fp32 sum."""
    p = problem
    x = p.hidden_size * p.dtype.itemsize
    meta = 4 * (2 * p.top_k + p.scales_per_row)
    # Gathered rows; ids, weights and scales apart; ids shifted, selected, and two masks.
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
        source="it keeps no buffers",
    )


# -- experts ---------------------------------------------------------------------------------------

# Bounds for the tensor maps of each SM, and for the pointers and strides of each expert.
_GEMM_WORKSPACE = 1 << 20
_PER_EXPERT = 1024


def experts_transient(problem: MoEProblem, rows: int) -> int:
    """Return what one call of the fused MoE allocates for ``rows`` rows of top_k assignments."""
    if not rows:
        return 0
    p, L, pairs = problem, problem.num_local_experts, rows * problem.top_k
    block = p.quant.name == "fp8_block"
    out = p.dtype.itemsize
    a = 1 if p.quant.activation is not None and not block else out
    hidden, inner = pairs * p.hidden_size, pairs * p.local_intermediate_size
    # GEMM 1 and the activation have separate outputs where there is a gate or a quantization.
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
        4 * L * rows,  # for another mode, but allocated in this one too
    ]
    if block:
        parts.append(
            max(_quantized(pairs, k, L) for k in (p.hidden_size, p.local_intermediate_size))
        )
    return sum(map(_up, parts))


def _blocks(rows: int, experts: int) -> int:
    """Return the number of token blocks of the counting sort."""
    for size in (32, 64, 128, 256, 512, 1024):
        if -(-rows // size) * experts <= size:
            return -(-rows // size)
    return -(-rows // 1024)


def _quantized(pairs: int, k: int, experts: int) -> int:
    """Return the bytes of a GEMM's fp8 input and its scales, padded expert by expert."""
    rows = -(-pairs // 4) * 4
    padded = (pairs + experts * 31) // 32 * 32
    return rows * k + 4 * padded * -(-k // 128)


def _up(n: int, multiple: int = 128) -> int:
    return -(-n // multiple) * multiple


def _sizes(problem: MoEProblem) -> tuple[int, int]:
    assert problem.max_num_tokens is not None
    return problem.max_num_tokens, problem.parallel.ep_size
