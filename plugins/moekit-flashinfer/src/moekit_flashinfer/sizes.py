"""What one call of the library's fused MoE allocates, by its own rules (0.6.8)."""

from __future__ import annotations

from moekit.plugin import MoEProblem

_ALIGN = 128
# Tensor maps for each SM, pointers and strides for each expert: known bounds, not worth a formula.
_GEMM_WORKSPACE = 1 << 20
_PER_EXPERT = 1024


def library_bytes(problem: MoEProblem, rows: int) -> int:
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
    return sum(-(-n // _ALIGN) * _ALIGN for n in parts)


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
