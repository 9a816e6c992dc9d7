"""The bytes that the dispatchers take on a rank, computed without the library.

The dispatchers state the transient bytes of their calls by these functions. The library sizes its
buffers itself; the formulas here are those of DeepEP 2.1, and tests compare them with recorded
sizes.
"""

from __future__ import annotations

from moekit.plugin import Footprint, MoEProblem

# Multiprocessors for transfers, of an H200's 132: they fill the links.
NUM_SMS = 24
LEGACY_WORKSPACE_BYTES = 32 << 20
# Up to here, padding rows cost the experts less than waiting for their number costs the host.
FEW_ROWS = 4096

# Tokens in an NVLink queue. Metadata has room for the largest top_k and all scales.
_QUEUE = 256
_META = 8 + 128 * (8 + 4) + 128 * 4
_ELASTIC_PAGE = 2 << 20
_SOURCE = "the library's formula"


# -- a call -------------------------------------------------------------------------------------


def ht_tokens(problem: MoEProblem, num_tokens: int) -> int:
    """Return the tokens of each rank that `deepep_ht` has room for, outside of CUDA graphs."""
    most = problem.max_num_tokens
    few = problem.parallel.ep_size * (most or 0) <= FEW_ROWS
    return most if most is not None and few else num_tokens


def even(num_tokens: int) -> int:
    """Round up to an even number, so that C is a multiple of 4 with 2 ranks too."""
    return num_tokens + num_tokens % 2


def ht_transient(problem: MoEProblem, num_tokens: int, rows: int) -> int:
    p = problem
    row = 2 * p.hidden_size + 4 * p.scales_per_row
    received = rows * (row + p.top_k * (8 + 4) + 4)
    # Quantized and combined tokens; for each token and rank, whether and where it goes.
    sent = num_tokens * (row + 2 * p.hidden_size + 5 * p.parallel.ep_size)
    return received + sent


def ll_transient(problem: MoEProblem, num_tokens: int, rows: int) -> int:
    p = problem
    slots = p.num_local_experts * rows
    row = 2 * p.hidden_size + 4 * p.scales_per_row
    ranges = p.num_local_experts * p.parallel.ep_size * 8
    return slots * (row + 4) + ranges + num_tokens * 2 * p.hidden_size


def elastic_transient(problem: MoEProblem, num_tokens: int, rows: int) -> int:
    p = problem
    row = 2 * p.hidden_size + 4 * p.scales_per_row
    # Ids as received and as handed on, and the source of each row.
    received = rows * (row + p.top_k * (8 + 8 + 4) + 1 + 4 * (p.top_k + 2))
    # Quantized and combined tokens; ids and their destinations.
    sent = num_tokens * (row + 2 * p.hidden_size + p.top_k * (8 + 4))
    return received + sent


# -- buffers -------------------------------------------------------------------------------------


def normal_buffers(hidden_size: int, ranks: int) -> dict[str, int]:
    """Return the parts of a `deep_ep.Buffer` for bf16 rows."""
    channels, row = NUM_SMS // 2, 2 * hidden_size + _META
    queues = channels * ranks * (5 * 4 + _QUEUE * row)
    return {"NVLink queues": _up(queues, 128), "workspace": LEGACY_WORKSPACE_BYTES}


def low_latency_buffers(capacity: int, hidden_size: int, num_experts: int) -> dict[str, int]:
    """Return the parts of a `deep_ep.Buffer` in low-latency mode: two sets of rows."""
    groups = hidden_size // 128
    there = 16 + max(2 * hidden_size, hidden_size + 4 * groups)
    back = 4 * groups + 2 * hidden_size
    rows = num_experts * capacity
    send, receive = max(capacity * there, rows * back), rows * max(there, back)
    nbytes = 2 * (send + receive + _up(4 * num_experts, 128))
    return {"rows (NVSHMEM)": _up(nbytes + 1, 128), "workspace": LEGACY_WORKSPACE_BYTES}


def elastic_buffer(capacity: int, hidden_size: int, top_k: int, ranks: int) -> int:
    """Return the bytes of a `deep_ep.ElasticBuffer` for bf16 tokens."""
    there = 2 * hidden_size + _up(8 * top_k + 4 * (1 + top_k), 32)
    back = 2 * hidden_size + _up(8 * top_k, 32)
    return _up(max(ranks * capacity * there, min(ranks, top_k) * capacity * back), _ELASTIC_PAGE)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# -- footprints ----------------------------------------------------------------------------------


def ht(problem: MoEProblem) -> Footprint:
    p, (T, ranks) = problem, _sizes(problem)
    rows = ranks * ht_tokens(p, T)
    return Footprint(
        rows=rows,
        buffers=normal_buffers(p.hidden_size, ranks),
        transient=ht_transient(p, T, rows),
        source=_SOURCE,
    )


def ll(problem: MoEProblem) -> Footprint:
    p, (T, ranks) = problem, _sizes(problem)
    rows = ranks * even(T)
    return Footprint(
        rows=rows,
        buffers=low_latency_buffers(even(T), p.hidden_size, p.num_physical_experts),
        transient=ll_transient(p, T, rows),
        source=_SOURCE,
    )


def elastic(problem: MoEProblem) -> Footprint:
    p, (T, ranks) = problem, _sizes(problem)
    rows = ranks * T
    buffer = elastic_buffer(T, p.hidden_size, p.top_k, ranks)
    return Footprint(
        rows=rows,
        buffers={"rows (NCCL windows)": buffer},
        transient=elastic_transient(p, T, rows),
        source=_SOURCE,
    )


def _sizes(problem: MoEProblem) -> tuple[int, int]:
    assert problem.max_num_tokens is not None
    return problem.max_num_tokens, problem.parallel.ep_size
