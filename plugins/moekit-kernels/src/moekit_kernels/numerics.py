"""Device arithmetic: conversions that round to nearest even, quantization and activations.

Triton's interpreter (triton 3.6 to 3.9) gets four things wrong: a dot of two bf16 tiles is garbage,
fp32 -> bf16 truncates, fp32 -> fp8 drops the carry out of the mantissa, and fp8 subnormals flush to
zero. These helpers make the interpreter's numbers agree with the GPU's; on the GPU they compile to
the plain conversion.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from moekit.plugin import Activation as ProblemActivation

__all__ = [
    "INTERPRETED", "NO_ACTIVATION", "QMAX", "SCALE_GROUP", "TINY", "Activation", "activate",
    "activate_gated", "convert", "dot", "quantize", "round_to_integer", "scale_of", "tanh",
    "times_sigmoid", "weight_after", "weight_before",
]  # fmt: skip

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter (TRITON_INTERPRET=1 when triton was imported)."""

QMAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Largest magnitude of each quantized dtype."""

SCALE_GROUP = 128
"""Rows and columns that share a scale in block quantization."""

TINY = 1e-12
"""Smallest amax that a scale is derived from: an all-zero row gets a positive scale."""


@dataclass(frozen=True)
class Activation:
    """An activation as the kernels take it.

    name: "silu", "gelu", "gelu_tanh" or "relu2"; only with a gate also "swigluoai", "situ" or
    "swiglustep". gated: the input is the two halves [gate; up]. alpha: of swigluoai and situ.
    limit: clamp of gate and up before the activation; in swiglustep the clamp of gate follows silu,
    and in situ the limit bounds up smoothly.
    """

    name: str
    gated: bool = True
    alpha: float = 1.702
    limit: float | None = None

    @classmethod
    def of(cls, activation: ProblemActivation) -> "Activation":
        """Convert a problem's activation."""
        name = activation.name.removesuffix("_no_mul").removesuffix("_and_mul")
        return cls(name, activation.gated, activation.alpha or 0.0, activation.limit)


NO_ACTIVATION = Activation("none", gated=False, alpha=0.0)
"""Leaves values as they are."""

_INTERPRETED = tl.constexpr(INTERPRETED)
_TINY = tl.constexpr(TINY)


@triton.jit
def round_to_integer(x):
    """Round fp32 to the nearest integer as fp32, ties to even, for |x| < 2**22."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2**23: the sum's unit in the last place is 1


@triton.jit
def _round_e4m3(x):
    """Round fp32 (|x| <= 448) to the nearest e4m3 value as fp32, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (x + 24576.0) - 24576.0  # 1.5 * 2**14: unit in the last place 2**-9
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal)


@triton.jit
def _round_bf16(x):
    """Round fp32 to the nearest bf16 value as fp32, ties to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def convert(x, DTYPE: tl.constexpr):
    """Convert fp32 to DTYPE (fp32, fp16, bf16, e4m3 within +-448, int8 within +-127), rounding to
    nearest even."""
    if DTYPE == tl.int8:
        x = round_to_integer(x)
    if _INTERPRETED:
        if DTYPE == tl.bfloat16:
            x = _round_bf16(x)
        if DTYPE == tl.float8e4nv:
            x = _round_e4m3(x)
    return x.to(DTYPE)


@triton.jit
def weight_before(weight):
    """Return the factor of a router weight to apply in fp32 before a result is rounded to fp16.

    It never enlarges a value, so rounding overflows only where the result itself would.
    `weight_after` is the remaining factor.
    """
    return tl.where(tl.abs(weight) > 1.0, 1.0, weight)


@triton.jit
def weight_after(weight):
    """Return the factor of a router weight that `weight_before` leaves: one of the two is 1."""
    return tl.where(tl.abs(weight) > 1.0, weight, 1.0)


@triton.jit
def scale_of(amax, QMAX: tl.constexpr):
    """Return the scale that maps ``amax`` to the largest quantized magnitude."""
    amax = tl.maximum(amax, _TINY)
    return tl.div_rn(amax, tl.full(amax.shape, QMAX, tl.float32))


@triton.jit
def quantize(x, scale, QMAX: tl.constexpr, DTYPE: tl.constexpr):
    """Return x / scale as DTYPE, clamped, rounded to nearest even. x: fp32 (M, N); scale: (M or 1,
    1)."""
    if _INTERPRETED:  # the interpreter's fma rounds twice
        x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        # One division a row. The product with the reciprocal, corrected by its remainder, is the
        # quotient rounded to nearest (Markstein), in a third of the instructions.
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        product = tl.clamp(x * inverse, -QMAX, QMAX)
        x = tl.fma(tl.fma(product, -scale, x), inverse, product)
    return convert(tl.clamp(x, -QMAX, QMAX), DTYPE)


@triton.jit
def dot(a, w, acc, PRECISION: tl.constexpr):
    """Return acc + a @ w. The operand with fewer bits is converted to the dtype of the other."""
    if _INTERPRETED:
        if a.dtype == tl.bfloat16:
            a = a.to(tl.float32)
        if w.dtype == tl.bfloat16:
            w = w.to(tl.float32)
    if w.dtype.primitive_bitwidth < a.dtype.primitive_bitwidth:
        w = w.to(a.dtype)
    elif a.dtype.primitive_bitwidth < w.dtype.primitive_bitwidth:
        a = a.to(w.dtype)
    return tl.dot(a, w, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def times_sigmoid(x, z):
    """Return x * sigmoid(z) in half the instructions of tl.sigmoid, with the same error (two units
    in the last place)."""
    if _INTERPRETED:
        return x * tl.sigmoid(z)
    else:
        return libdevice.fast_dividef(x, 1.0 + libdevice.fast_expf(-z))


@triton.jit
def activate_gated(gate, up, alpha, limit, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr):
    """Return activation(gate) * up in fp32.

    CLAMP: apply the limit: gate <= limit, |up| <= limit before the activation; see `Activation` for
    the kinds in which it means something else.
    """
    if ACTIVATION == "situ":
        if CLAMP:
            up = limit * tanh(up / limit)
        return up * times_sigmoid(alpha * tanh(gate / alpha), gate)
    elif ACTIVATION == "swiglustep":
        return tl.minimum(times_sigmoid(gate, gate), limit) * tl.clamp(up, -limit, limit)
    else:
        if CLAMP:
            gate = tl.minimum(gate, limit)
            up = tl.clamp(up, -limit, limit)
        if ACTIVATION == "swigluoai":
            return (up + 1.0) * times_sigmoid(gate, alpha * gate)
        else:
            return activate(gate, ACTIVATION) * up


@triton.jit
def tanh(x):
    """Return tanh(x). The series serves small |x|, where 2 * sigmoid(2 * x) - 1 cancels."""
    square = x * x
    series = x * (1.0 - square * (0.333333333 - square * (0.133333333 - square * 0.0539682540)))
    two = tl.full(x.shape, 2.0, tl.float32)
    return tl.where(square < 0.01, series, times_sigmoid(two, 2.0 * x) - 1.0)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply a plain activation elementwise, fp32 to fp32."""
    if ACTIVATION == "silu":
        return times_sigmoid(x, x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(z)) == sigmoid(2 * z)
        return times_sigmoid(x, 1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.maximum(x, 0.0)
        return positive * positive
