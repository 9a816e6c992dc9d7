"""The bytes that the dispatchers and the experts take on a rank, computed without the library.

The library sizes its buffers itself; the formulas here are FlashInfer 0.6.8's and 0.7.2's, and
tests compare them with sizes that were recorded with 0.6.8.
"""

from __future__ import annotations

from moekit.plugin import Footprint, MoEProblem, round_up

# The FIFOs carry words of 16 bytes, so the scales of a row are padded to 4.
SCALES = 4

# Constants of the library's kernels: the largest top_k; a FIFO between two ranks and its state; the
# same for `prepare`; ranks that a thread block serves. The last one is an H200's multiprocessors.
_MOST_TOP_K = 22
_FIFO, _FIFO_STATE = 8 * (256 << 10), 256
_COUNTS_FIFO = (1 << 20) + 256
_RANKS_PER_BLOCK = 8
_MULTIPROCESSORS = 132


# -- dispatchers, for calls of ``num_tokens``, by default max_num_tokens ---------------------------


def one_sided(problem: MoEProblem, num_tokens: int | None = None) -> Footprint:
    p, (capacity, ranks, tokens) = problem, _sizes(problem, num_tokens)
    rows = ranks * capacity
    workspace = pages(one_sided_workspace(ranks, capacity, one_sided_row_bytes(p)))
    # Local ids, ids and scales to send, and combined rows.
    ids = 4 * p.top_k * (rows + tokens)
    return Footprint(
        rows=rows,
        buffers={"workspace, for each in-flight call": workspace},
        transient=ids + tokens * (4 + p.hidden_size * p.dtype.itemsize),
        source="the library's formula",
    )


def two_sided(problem: MoEProblem, num_tokens: int | None = None) -> Footprint:
    p, (capacity, ranks, tokens) = problem, _sizes(problem, num_tokens)
    rows, x = ranks * capacity, p.hidden_size * p.dtype.itemsize
    # Received rows, their sources, and a returned row per assignment.
    wide = 0 if p.quant.activation is None else 8 * (p.scales_per_row + SCALES)
    indices = rows * 4 * (3 * p.top_k + 2) + capacity * max(ranks, p.top_k) * 4 * 4
    back = tokens * (p.top_k * x + 4 * p.top_k + x)
    return Footprint(
        rows=rows,
        buffers=two_sided_buffers(ranks),
        transient=rows * (x + wide) + indices + back,
        source=f"the library's formula, for {_MULTIPROCESSORS} multiprocessors",
    )


def allgather(problem: MoEProblem, num_tokens: int | None = None) -> Footprint:
    p, (capacity, ranks, tokens) = problem, _sizes(problem, num_tokens)
    rows, x = ranks * capacity, p.hidden_size * p.dtype.itemsize
    meta = 4 * (2 * p.top_k + p.scales_per_row)
    # Gathered rows; ids, weights and scales apart; ids shifted, selected, and two masks.
    arriving = rows * (x + 2 * meta + p.top_k * (3 * 4 + 2))
    # This rank's padded rows, returned rows, and the fp32 sum.
    sent = capacity * (x + 2 * meta)
    return Footprint(
        rows=rows,
        buffers={},
        transient=arriving + sent + rows * x + tokens * p.hidden_size * 4,
        source="it keeps no buffers",
    )


def _sizes(problem: MoEProblem, num_tokens: int | None) -> tuple[int, int, int]:
    """Return max_num_tokens, the ranks, and the tokens of a call."""
    capacity = problem.max_num_tokens
    assert capacity is not None
    return capacity, problem.parallel.num_ranks, capacity if num_tokens is None else num_tokens


# -- buffers of the all-to-alls --------------------------------------------------------------------


def pages(nbytes: int) -> int:
    """Round up to the driver's granularity."""
    return round_up(nbytes, 2 << 20)


def one_sided_row_bytes(problem: MoEProblem) -> tuple[int, int]:
    """Return the most bytes of one token on its way to the experts, and back."""
    p = problem
    there = back = p.hidden_size * p.dtype.itemsize
    if (activation := p.quant.activation) is not None:
        quantized = p.hidden_size * activation.torch_dtype.itemsize + 4 * p.scales_per_row
        there = max(back, quantized)
    return there + 8 * p.top_k, back


def one_sided_workspace(ranks: int, capacity: int, row_bytes: tuple[int, int]) -> int:
    """Return the bytes for one in-flight call, not rounded to pages."""
    parts = [8 + 2 * 4 * ranks, *[4 * ranks] * 2, *[4 * capacity * _MOST_TOP_K] * 2]
    return _total(*parts, *(ranks * capacity * nbytes for nbytes in row_bytes))


def one_sided_output(ranks: int, capacity: int, row_bytes: tuple[int, int]) -> int:
    """Return the bytes of the experts' output, at the end of the workspace."""
    return _total(ranks * capacity * row_bytes[1])


def two_sided_buffers(ranks: int) -> dict[str, int]:
    blocks = 2 * -(-ranks // _RANKS_PER_BLOCK)
    channels = max(1, _MULTIPROCESSORS // 2 // blocks)
    data = ranks * channels * (_FIFO + _FIFO_STATE)
    return {"FIFOs": pages(data), "FIFOs for counts": pages(ranks * _COUNTS_FIFO)}


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
    quantized = [_quantized(pairs, k, L) for k in (p.hidden_size, p.local_intermediate_size)]
    return _total(
        *[4 * pairs] * 4,  # two maps, experts in order, router weights in order
        *[4 * L * -(-rows // 32)] * 2,  # token blocks of the counting sort, at most
        4 * L * rows,
        8 * (L + 1),
        first,
        second,
        _PER_EXPERT * L,
        _GEMM_WORKSPACE,
        4 * L * rows,  # for another mode, but allocated in this one as well
        max(quantized) if block else 0,
    )


def _quantized(pairs: int, k: int, experts: int) -> int:
    """Return the bytes of a GEMM's fp8 input and its scales, padded expert by expert."""
    padded = (pairs + experts * 31) // 32 * 32
    return round_up(pairs, 4) * k + 4 * padded * -(-k // 128)


def _total(*parts: int) -> int:
    """Return the bytes of a workspace, each part of which begins at a multiple of 128."""
    return sum(round_up(part, 128) for part in parts)
