"""How far an output may be from the fp32 oracle, and how to say what went wrong.

Errors are relative, because the outputs' magnitude is the model's business: the RMS of the
difference over the RMS of the reference. Three bounds are checked, since each sees what the others
miss: all elements (systematic errors), the worst row (one token dropped among thousands), the
worst element (one stray write). Two more bounds are on means, in which independent rounding errors
cancel: the fitted scale of the output (everything 0.5 % too large) and the mean difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moekit.problem import MoEProblem

if TYPE_CHECKING:
    from moekit.testing.cases import Case

# Bounds on RMS(out - ref) / RMS(ref), about twice what a correct kernel shows.
#
# bfloat16  8 significant bits: rounding one tensor costs 1.7e-3. h, act(h) and out are rounded,
#           and biases round again: 4.3e-3 seen with a rounded h, 2.9e-3 with a fused activation.
# float16   11 bits: the same chain shows 6e-4.
# float32   1e-6 from the order of summation. TF32 (4e-4) is not fp32 and does not pass.
_DTYPES = {torch.bfloat16: 8e-3, torch.float16: 1.2e-3, torch.float32: 1e-5}

# Schemes that quantize activations lose the bits twice, before each GEMM; weights cost nothing
# here, since the oracle sees the dequantized ones. The coarser of this and the dtype's bound holds.
#
# float8_e4m3fn  4 significant bits: 2.6e-2 a rounding, 4e-2 to 6.3e-2 for the two and what the
#                activation makes of the first. How many values share a scale hardly matters, as
#                fp8 is floating.
# int8           a token's largest value sets its step, and grows against the RMS with I: 1.5e-2
#                at I = 100, 3e-2 at I = 2048.
# float4_e2m1    in groups of 16: 9.5e-2 a rounding, 1.5e-1 for the two.
_QUANTIZED_ACTIVATIONS = {"float8_e4m3fn": 9e-2, "int8": 4e-2, "float4_e2m1": 0.22}

# Weight-only kernels may keep scales in the activations' 16 bits (Marlin's operator takes no
# others): a rounding of every weight at once, 1.7e-3 each in two GEMMs, which does not average out.
_WEIGHT_ONLY = 1.3

# The worst row and element, in units of the bound on the whole (seen: 1.6 and 6.6).
_WORST_ROW = 2.5
_WORST_ELEMENT = 10.0
# A row's error is measured against its own RMS, but at least against this part of the whole RMS,
# so that cancellation in one small row does not count as an error.
_ROW_FLOOR = 0.25

# The two means. Independent rounding errors of relative size r leave a mean of r / sqrt(N) over N
# elements, where the participation ratio counts elements that differ in size. Errors within a token
# depend on each other, as they come from the same few large activations, but tokens are
# independent: how far their means lie apart gives the standard error. A correct backend exceeds
# neither six of the former nor eight of the latter (which is estimated from few tokens, at least
# 16). A quantizer with the least squared error shrinks its input by the relative squared error, and
# activations are not linear, so r ** 2 is allowed as well. r is half of the bound on the RMS.
# A clamp gives many activations one value, whose rounding error they share: it may add a whole
# rounding of the dtype (-1.3e-3 seen in bf16, where the most is 2 ** -8).
_SIGMAS, _STANDARD_ERRORS, _LEAST_TOKENS = 6.0, 8.0, 16


@dataclass(frozen=True)
class Mean:
    """A mean over an output's elements, the tokens' standard error of it, and how many elements
    it averages over (at least)."""

    value: float
    standard_error: float
    independent: float


@dataclass(frozen=True)
class Tolerance:
    """Bounds on the three relative errors, and the size of one rounding error for the means.

    shared: the rounding error that activations at a clamp's limit have in common.
    """

    rms: float
    row: float
    element: float
    rounding: float
    shared: float = 0.0

    def of_mean(self, mean: Mean) -> float:
        """Return the bound on ``mean.value``."""
        noise = _SIGMAS * self.rounding / math.sqrt(max(1.0, mean.independent))
        return self.shared + self.rounding**2 + max(noise, _STANDARD_ERRORS * mean.standard_error)


def tolerance(problem: MoEProblem, num_tokens: int = 64) -> Tolerance:
    """What a correct backend may lose on ``problem``, by its dtype and scheme.

    num_tokens: those with an output. Few tokens average over few independent errors, so the bound
    on the whole widens for them.
    """
    rms = _DTYPES[problem.dtype]
    if problem.quant.activation is not None:
        rms = max(rms, _QUANTIZED_ACTIVATIONS[problem.quant.activation.dtype])
    elif problem.quant.weight is not None and problem.dtype != torch.float32:
        rms *= _WEIGHT_ONLY
    spread = 1 + max(1, num_tokens) ** -0.5
    shared = 0.0 if problem.activation.limit is None else torch.finfo(problem.dtype).eps / 2
    return Tolerance(rms * spread, _WORST_ROW * rms, _WORST_ELEMENT * rms, rms / 2, shared)


@dataclass(frozen=True)
class Errors:
    """Relative errors of an output (T, H): over all elements, of the worst row and element.

    scale: ``<out - ref, ref> / <ref, ref>``, by how much the whole output is too large.
    offset: the mean of ``out - ref`` over RMS(ref).
    """

    rms: float
    row: float
    element: float
    scale: Mean
    offset: Mean

    def beyond(self, bound: Tolerance) -> dict[str, tuple[float, float]]:
        """Return what exceeds ``bound`` by name: (found, allowed). NaN exceeds every bound."""
        pairs = {
            "RMS": (self.rms, bound.rms),
            "worst row": (self.row, bound.row),
            "worst element": (self.element, bound.element),
            "scale": (self.scale.value, bound.of_mean(self.scale)),
            "mean": (self.offset.value, bound.of_mean(self.offset)),
        }
        return {name: pair for name, pair in pairs.items() if not abs(pair[0]) <= pair[1]}


def rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt()) if x.numel() else 0.0


def relative_error(out: Tensor, ref: Tensor) -> float:
    """``RMS(out - ref) / RMS(ref)``: 0 for equal tensors, infinite if only ref is zero."""
    error, scale = rms(out.float() - ref.float()), rms(ref)
    if scale == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / scale


def errors(out: Tensor, ref: Tensor, independent: float = float("inf")) -> Errors:
    """Compare ``out`` with ``ref``, both (T, H) of any float dtypes.

    independent: of how many independent roundings the errors consist, if that is known.
    """
    used = (ref != 0).any(dim=1)
    if not bool(used.any()):
        wrong = float("inf") if bool((out != 0).any()) else 0.0
        return Errors(wrong, wrong, wrong, *[Mean(wrong, 0.0, 1.0)] * 2)
    normalized, total = _normalized(out, ref), relative_error(out, ref)
    rows = normalized.square().mean(dim=1).sqrt()
    ref = ref[used].double()
    difference, squares = out[used].double() - ref, ref.square()
    independent = min(independent, float(squares.sum() ** 2 / squares.square().sum()))
    size_T = squares.sum(dim=1)
    typical_T = torch.full_like(size_T, float(squares.mean().sqrt()) * ref.shape[1])
    return Errors(
        total,
        float(rows.max()),
        float(normalized.abs().max()),
        scale=_mean((difference * ref).sum(dim=1), size_T, independent),
        offset=_mean(difference.sum(dim=1), typical_T, independent),
    )


def _mean(part_T: Tensor, size_T: Tensor, independent: float) -> Mean:
    """Return ``sum(part) / sum(size)`` with its standard error, or none of few tokens."""
    if len(part_T) < _LEAST_TOKENS:
        return Mean(0.0, 0.0, independent)
    value, total = part_T.sum() / size_T.sum(), size_T.sum()
    residual = part_T - value * size_T
    return Mean(float(value), float(residual.square().sum().sqrt() / total), independent)


def _independent(problem: MoEProblem) -> float:
    """Return how many roundings of weights an output averages over, at least.

    Weight-only kernels may round scales: what shares one is off by one and the same factor.
    """
    operand = problem.quant.weight
    if operand is None or problem.quant.activation is not None:
        return float("inf")
    rows, columns = operand.scale_shape(problem.hidden_size, problem.local_intermediate_size)
    return float(rows * columns)


def assert_close(
    out: Tensor,
    ref: Tensor,
    problem: MoEProblem,
    what: str = "output",
    *,
    case: Case | None = None,
    earlier: Sequence[Tensor] = (),
) -> None:
    """Fails unless ``out`` (T, H) is ``ref`` (T, H) fp32, the oracle's, up to `tolerance`.

    Rejects other shapes and dtypes, NaN and infinity, and anything but exact zeros where a token
    has no expert. The message says what the mistake looks like, where ``case`` (whose reference is
    ``ref``) and ``earlier`` outputs tell, and names the worst coordinates, the problem and how to
    repeat it.
    """
    complaint = complain(out, ref, problem)
    if complaint:
        from moekit.testing.cases import seed
        from moekit.testing.diagnose import diagnose

        found = ""
        if case is not None:
            try:
                found = diagnose(out, case, earlier)
            except Exception as error:  # must not hide what failed
                found = f"(no diagnosis: {error!r})"
        raise AssertionError(
            f"{what}: {found}{': ' if found else ''}{complaint}"
            f"\n  problem: {problem!r}\n  repeat with MOEKIT_TEST_SEED={seed()}"
        )


def complain(out: Tensor, ref: Tensor, problem: MoEProblem) -> str:
    """What is wrong with ``out``, or an empty string."""
    if out.shape != ref.shape:
        return f"has shape {tuple(out.shape)}, want {tuple(ref.shape)}"
    if out.dtype != problem.dtype:
        return f"is {out.dtype}, want the problem's {problem.dtype}"
    out, ref = out.detach().float(), ref.detach().float().to(out.device)
    bad = ~torch.isfinite(out)
    if bool(bad.any()):
        rows = bad.any(dim=1).nonzero().flatten().tolist()
        return (
            f"{int(bad.sum())} of {out.numel()} elements are NaN or infinite, in {len(rows)} of "
            f"{out.shape[0]} rows: {rows[:8]}" + _where(bad.float(), out, ref)
        )
    idle = (ref == 0).all(dim=1)
    leaked = idle & (out != 0).any(dim=1)
    if bool(leaked.any()):
        rows = leaked.nonzero().flatten().tolist()
        return f"tokens without an expert must get exact zeros; rows {rows[:8]} do not"
    found = errors(out, ref, _independent(problem))
    beyond = found.beyond(tolerance(problem, int((~idle).sum())))
    if not beyond:
        return ""
    text = ", ".join(f"{n} {e:.3g} (bound {limit:.3g})" for n, (e, limit) in beyond.items())
    if not bool(out.any()):
        text += "; the output is all zeros"
    return f"relative error too large: {text}" + _where(_normalized(out, ref).abs(), out, ref)


def _normalized(out: Tensor, ref: Tensor) -> Tensor:
    """Differences (T, H) in units of their row's RMS."""
    ref = ref.float()
    floor = max(_ROW_FLOOR * rms(ref), torch.finfo(torch.float32).tiny)
    scale = ref.square().mean(dim=1, keepdim=True).sqrt().clamp(min=floor)
    return (out.float() - ref) / scale


def _where(badness: Tensor, out: Tensor, ref: Tensor, count: int = 5) -> str:
    """The worst coordinates, one a line."""
    worst = badness.flatten().topk(min(count, badness.numel())).indices.tolist()
    width = badness.shape[1]
    lines = [
        f"\n    [{i // width}, {i % width}] got {float(out.flatten()[i]):.6g}, "
        f"want {float(ref.flatten()[i]):.6g}"
        for i in worst
    ]
    return "".join(lines)
