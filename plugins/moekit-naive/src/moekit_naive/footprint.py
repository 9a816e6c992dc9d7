"""The bytes that the dispatcher takes on a rank."""

from __future__ import annotations

from moekit.plugin import MoEProblem


def transient_bytes(problem: MoEProblem, num_tokens: int) -> int:
    """Return the bytes of a call in which every rank passes ``num_tokens``."""
    p, parallel = problem, problem.parallel
    rows = num_tokens * parallel.dp_size
    row_bytes = p.hidden_size * p.dtype.itemsize
    scales = p.scales_per_row
    meta_bytes = 4 * (2 * p.top_k + scales)
    # int64 ids: as gathered, shifted, and selected, with two masks; weights and scales again.
    unpacked_bytes = p.top_k * (3 * 8 + 2 + 4) + 4 * scales
    gathered = rows * (row_bytes + meta_bytes + unpacked_bytes) + num_tokens * meta_bytes
    ranks = parallel.num_ranks
    if p.batch_invariant:  # rows by assignment, as sent, received and summed
        wide = 4 if p.dtype_name == "float16" else p.dtype.itemsize
        shared = ranks if ranks != parallel.dp_size else 0
        returned = (ranks + shared) * num_tokens * p.top_k * p.hidden_size * wide
        return gathered + returned + num_tokens * (4 * 4 * p.hidden_size + 2 * 8 * p.top_k)
    returned = ranks * num_tokens * row_bytes * (2 if ranks != parallel.dp_size else 1)
    summed = num_tokens * p.hidden_size * 4 if ranks > 2 else 0  # two are added at once
    return gathered + returned + summed
