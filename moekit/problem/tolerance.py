"""Bounds on the relative errors of a correct backend, by dtype and scheme.

An error is RMS(out - oracle) / RMS(oracle), where the oracle computes in fp32 with dequantized
weights. The conformance kit and the benchmarks take their bounds from these tables.
"""

from __future__ import annotations

import torch

from moekit.problem import MoEProblem

# About twice what a correct kernel shows:
#
# bfloat16  8 significant bits: rounding one tensor costs 1.7e-3. h, act(h) and out are rounded,
#           and biases round again: 4.3e-3 seen with a rounded h, 2.9e-3 with a fused activation.
# float16   11 bits: the same chain shows 6e-4.
# float32   1e-6 from the order of summation. TF32 (4e-4) is not fp32 and does not pass.
_DTYPES = {torch.bfloat16: 8e-3, torch.float16: 1.2e-3, torch.float32: 1e-5}

# For schemes that quantize activations, the larger of this bound and their codes' error applies.
# Quantized weights cost nothing here, since the oracle sees the dequantized ones.

# Weight-only kernels may keep scales in the activations' 16 bits (Marlin's operator takes no
# others). That rounds all weights of a group at once, 1.7e-3 in each GEMM, and does not average
# out.
_WEIGHT_ONLY = 1.3

# What benchmarks allow beyond the bounds above. Their inputs are larger, and rival libraries may
# use TF32 (4e-4) or keep partial sums in 16 bits.
_BENCHMARKS, _BENCHMARKS_AT_LEAST = (2.5, 1.5), 5e-3


def rms_bound(problem: MoEProblem, *, rounds_activations: bool = True) -> float:
    """Return the relative RMS error that a correct backend stays below on ``problem``.

    Args:
        rounds_activations: whether the error includes the rounding of activations to the scheme.
    """
    bound = _DTYPES[problem.dtype]
    if rounds_activations:
        bound = max(bound, _of_activations(problem))
    if problem.quant.weight is not None and problem.dtype != torch.float32:
        return max(bound, _DTYPES[problem.dtype] * _WEIGHT_ONLY)
    return bound


def _of_activations(problem: MoEProblem) -> float:
    """Return the error that quantized activations cause, 0 if they are not quantized."""
    activation = problem.quant.activation
    return 0.0 if activation is None else activation.codes.error or 0.0


def benchmark_bound(problem: MoEProblem) -> float:
    """Return the relative RMS error above which a benchmark calls an output wrong."""
    of_dtype, of_activations = _BENCHMARKS
    bound = max(_BENCHMARKS_AT_LEAST, of_dtype * _DTYPES[problem.dtype])
    return max(bound, of_activations * _of_activations(problem))
