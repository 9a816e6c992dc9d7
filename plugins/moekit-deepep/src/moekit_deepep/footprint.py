"""The bytes that the dispatchers take on a rank, computed without the library.

The library sizes its buffers itself; the formulas here are DeepEP 2.1's, and tests compare them
with recorded sizes.
"""

from __future__ import annotations

from moekit.plugin import Footprint, MoEProblem, round_up

# Multiprocessors for transfers, of an H200's 132: they fill the links.
NUM_SMS = 24
LEGACY_WORKSPACE_BYTES = 32 << 20
# Up to here, padding rows cost the experts less than waiting for their number costs the host.
FEW_ROWS = 4096

# Tokens in an NVLink queue. Metadata has room for the largest top_k and all scales.
_QUEUE = 256
_META = 8 + 128 * (8 + 4) + 128 * 4
_SOURCE = "the library's formula"


# -- dispatchers, for calls of ``num_tokens``, by default max_num_tokens ---------------------------


def ht(problem: MoEProblem, num_tokens: int | None = None) -> Footprint:
    p, (capacity, ranks, tokens) = problem, _sizes(problem, num_tokens)
    # Outside of CUDA graphs, R is fixed only where it is small.
    few = capacity is not None and ranks * capacity <= FEW_ROWS
    rows, row = ranks * (capacity if capacity is not None and few else tokens), _row_bytes(p)
    received = rows * (row + p.top_k * (8 + 4) + 4)
    # Quantized and combined tokens; for each token and rank, whether and where it goes.
    sent = tokens * (row + 2 * p.hidden_size + 5 * ranks)
    return Footprint(
        rows=rows,
        buffers=normal_buffers(p.hidden_size, ranks),
        transient=received + sent,
        source=_SOURCE,
    )


def ll(problem: MoEProblem, num_tokens: int | None = None) -> Footprint:
    p, (capacity, ranks, tokens) = problem, _sizes(problem, num_tokens)
    assert capacity is not None
    local, rows = p.num_local_experts, ranks * even(capacity)
    received = local * rows * (_row_bytes(p) + 4) + local * ranks * 8
    return Footprint(
        rows=rows,
        buffers=low_latency_buffers(even(capacity), p.hidden_size, p.num_physical_experts),
        transient=received + tokens * 2 * p.hidden_size,
        source=_SOURCE,
    )


def elastic(problem: MoEProblem, num_tokens: int | None = None) -> Footprint:
    p, (capacity, ranks, tokens) = problem, _sizes(problem, num_tokens)
    assert capacity is not None
    rows, row = ranks * capacity, _row_bytes(p)
    # Ids as received and as handed on, and the source of each row.
    received = rows * (row + p.top_k * (8 + 8 + 4) + 1 + 4 * (p.top_k + 2))
    # Quantized and combined tokens; ids and their destinations.
    sent = tokens * (row + 2 * p.hidden_size + p.top_k * (8 + 4))
    buffer = elastic_buffer(capacity, p.hidden_size, p.top_k, ranks)
    return Footprint(
        rows=rows,
        buffers={"rows (NCCL windows)": buffer},
        transient=received + sent,
        source=_SOURCE,
    )


def _sizes(problem: MoEProblem, num_tokens: int | None) -> tuple[int | None, int, int]:
    """Return max_num_tokens, the ranks, and the tokens of a call."""
    capacity = problem.max_num_tokens
    tokens = capacity if num_tokens is None else num_tokens
    assert tokens is not None
    return capacity, problem.parallel.ep_size, tokens


def _row_bytes(problem: MoEProblem) -> int:
    return 2 * problem.hidden_size + 4 * problem.scales_per_row


def even(num_tokens: int) -> int:
    """Round up to an even number, so that C is a multiple of 4 also with 2 ranks."""
    return round_up(num_tokens, 2)


# -- buffers -------------------------------------------------------------------------------------


def normal_buffers(hidden_size: int, ranks: int) -> dict[str, int]:
    """Return the parts of a `deep_ep.Buffer` for bf16 rows."""
    channels, row = NUM_SMS // 2, 2 * hidden_size + _META
    queues = channels * ranks * (5 * 4 + _QUEUE * row)
    return {"NVLink queues": round_up(queues, 128), "workspace": LEGACY_WORKSPACE_BYTES}


def low_latency_buffers(capacity: int, hidden_size: int, num_experts: int) -> dict[str, int]:
    """Return the parts of a `deep_ep.Buffer` in low-latency mode: two sets of rows."""
    groups = hidden_size // 128
    there = 16 + max(2 * hidden_size, hidden_size + 4 * groups)
    back = 4 * groups + 2 * hidden_size
    rows = num_experts * capacity
    send, receive = max(capacity * there, rows * back), rows * max(there, back)
    nbytes = 2 * (send + receive + round_up(4 * num_experts, 128))
    return {"rows (NVSHMEM)": round_up(nbytes + 1, 128), "workspace": LEGACY_WORKSPACE_BYTES}


def elastic_buffer(capacity: int, hidden_size: int, top_k: int, ranks: int) -> int:
    """Return the bytes of a `deep_ep.ElasticBuffer` for bf16 tokens."""
    there = 2 * hidden_size + round_up(8 * top_k + 4 * (1 + top_k), 32)
    back = 2 * hidden_size + round_up(8 * top_k, 32)
    rows = max(ranks * capacity * there, min(ranks, top_k) * capacity * back)
    return round_up(rows, 2 << 20)
