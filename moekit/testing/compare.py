"""Compare an output with the fp32 oracle.

Errors are relative, because the magnitude of outputs depends on the model: the RMS of the
difference over the RMS of the reference. Three bounds are checked, because each finds errors that
the others miss: all elements (systematic errors), the worst row (one token dropped among
thousands), the worst element (one stray write). Two more bounds are on means, in which independent
rounding errors cancel: the fitted scale of the output (everything 0.5 % too large) and the mean
difference.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moekit.problem import MoEProblem
from moekit.problem.tolerance import rms_bound

# The worst row and element, in units of the bound on the whole (seen: 1.6 and 6.6). Among more than
# a million elements the worst is worse: outputs have heavy tails, so it grows with the logarithm of
# their number (seen: 10.2 of 7 million). Above four times its row's RMS, an element is judged by
# itself, with the bound of a row (seen: 8.1 times, where 1 % of the element is 10.7 of the units).
_WORST_ROW = 2.5
_WORST_ELEMENT, _MANY_ELEMENTS = 10.0, 10**6
# A row's error is measured against its own RMS, but at least against this part of the whole RMS,
# so that cancellation in one small row does not count as an error.
_ROW_FLOOR = 0.25

# The two means may be this part of the bound on the RMS, or as many standard errors. The standard
# error comes from the tokens, whose errors are independent; it needs at least 16. Within a
# call, all values that share a scale have the same error where a kernel rounds it to 16 bits: the
# weights of a channel, group or tensor, and activations that arrive quantized. One scale of w13
# counts twice, in gate and up, and the slope of the activation adds to it (0.72 seen).
_MEAN, _MEAN_OF_SCALES, _MEAN_OF_ONE_SCALE, _MEAN_OF_DEQUANTIZED = 1 / 6, 1 / 4, 0.8, 1.0
_STANDARD_ERRORS, _LEAST_TOKENS = 8.0, 16


# Relative errors of an output by name, in the order of `Tolerance`, each with its standard error:
# 0 for errors that are not means.
Errors = dict[str, tuple[float, float]]


class Rounding(NamedTuple):
    """The errors of an output that draws of rounding errors explain.

    Attributes:
        element_TH, row_T: absolute errors of elements, and RMS errors of tokens, fp32.
        rms, scale, offset: as in `errors`, without signs.
    """

    element_TH: Tensor
    row_T: Tensor
    rms: float
    scale: float
    offset: float


class Tolerance(NamedTuple):
    """Bounds on the relative errors of an output.

    Attributes:
        rms, row, element: bounds on the error of all elements, of the worst row and element.
        scale, offset: bounds on the two means, which may exceed them by chance for few tokens.
    """

    rms: float
    row: float
    element: float
    scale: float
    offset: float


def tolerance(
    problem: MoEProblem,
    num_tokens: int = 64,
    *,
    effective_tokens: float | None = None,
    rounds_activations: bool = True,
) -> Tolerance:
    """Return the errors that a correct backend may have on ``problem``.

    Args:
        problem: its dtype and scheme decide (see `moekit.problem.tolerance`).
        num_tokens: the number of tokens with an output.
        effective_tokens: the effective sample size, from 1 to ``num_tokens``, its default; less
            where some outputs are far larger than others, as a squared activation makes them. The
            bound on the RMS widens for few.
        rounds_activations: whether the errors include the rounding of activations to the scheme.
    """
    rms = rms_bound(problem, rounds_activations=rounds_activations)
    spread = 1 + max(1, num_tokens if effective_tokens is None else effective_tokens) ** -0.5
    weight, activation = problem.quant.weight, problem.quant.activation
    mean = _MEAN
    if activation is not None and not rounds_activations:
        mean = _MEAN_OF_DEQUANTIZED
    elif activation is None and weight is not None:
        mean = _MEAN_OF_ONE_SCALE if weight.per_tensor else _MEAN_OF_SCALES
    if problem.adapters is not None:  # a token's outputs share a low-rank product (seen: 1.3)
        mean *= 2
    mean *= rms
    if problem.activation.limit is not None:  # gives many activations one value and its rounding
        mean += torch.finfo(problem.dtype).eps / 2
    elements = max(_MANY_ELEMENTS, num_tokens * problem.hidden_size)
    element = _WORST_ELEMENT * rms * math.log(elements) / math.log(_MANY_ELEMENTS)
    return Tolerance(rms * spread, _WORST_ROW * rms, element, mean, mean)


def rms(x: Tensor) -> float:
    """Return the root of the mean square of all elements, 0 for none."""
    return float(x.float().square().mean().sqrt()) if x.numel() else 0.0


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Return ``RMS(out - ref) / RMS(ref)``: 0 for equal tensors, infinite if only ref is zero."""
    error, scale = rms(out.float() - ref.float()), rms(ref)
    if scale == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / scale


def errors(out: Tensor, ref: Tensor) -> Errors:
    """Compare ``out`` with ``ref``, both (T, H) of any float dtypes.

    The scale is ``<out - ref, ref> / <ref, ref>``: how much too large the whole output is. The mean
    is the average of ``out - ref`` divided by RMS(ref).
    """
    used = (ref != 0).any(dim=1)
    if not bool(used.any()):
        wrong = float("inf") if bool((out != 0).any()) else 0.0
        return dict.fromkeys(("RMS", "worst row", "worst element", "scale", "mean"), (wrong, 0.0))
    normalized, total = _normalized(out, ref), relative_error(out, ref)
    rows = normalized.square().mean(dim=1).sqrt()
    elements = _of_elements(normalized, ref)
    ref = ref[used].double()
    difference, squares = out[used].double() - ref, ref.square()
    size_T = squares.sum(dim=1)
    typical_T = torch.full_like(size_T, float(squares.mean().sqrt()) * ref.shape[1])
    return {
        "RMS": (total, 0.0),
        "worst row": (float(rows.max()), 0.0),
        "worst element": (float(elements.max()), 0.0),
        "scale": _mean((difference * ref).sum(dim=1), size_T),
        "mean": _mean(difference.sum(dim=1), typical_T),
    }


def _mean(part_T: Tensor, size_T: Tensor) -> tuple[float, float]:
    """Return ``sum(part) / sum(size)``, and its standard error over the tokens; 0 for too few."""
    if len(part_T) < _LEAST_TOKENS:
        return 0.0, 0.0
    value, total = part_T.sum() / size_T.sum(), size_T.sum()
    # How far the mean moves without each token. If one token has most of the size, the mean fits
    # it, and plain residuals would be too small.
    without_T = (part_T - value * size_T) / (total - size_T)
    return float(value), float(without_T.square().sum().sqrt())


def beyond(found: Errors, bound: Tolerance) -> str:
    """Describe the errors beyond ``bound``, or return ""; NaN exceeds every bound."""
    wrong = []
    for (name, (value, chance)), most in zip(found.items(), bound, strict=True):
        allowed = max(most, _STANDARD_ERRORS * chance)
        if not abs(value) <= allowed:
            wrong.append(f"{name} {value:.3g} (bound {allowed:.3g})")
    return f"relative error too large: {', '.join(wrong)}" if wrong else ""


def beyond_bound(out: Tensor, ref: Tensor, bound: Tolerance, rounding: Rounding | None) -> str:
    """Describe the errors of ``out`` beyond the bound, and beyond those that rounding explains."""
    if rounding is not None:
        row_T1 = rounding.row_T[:, None].to(ref) / (_row_scale(ref) * bound.row)
        element_TH = rounding.element_TH.to(ref) / (_row_scale(ref) * bound.element)
        out = ref + (out - ref) / torch.maximum(row_T1, element_TH).clamp(min=1.0)
        names = "rms", "scale", "offset"
        bound = bound._replace(**{n: max(getattr(bound, n), getattr(rounding, n)) for n in names})
    return beyond(errors(out, ref), bound)


def complain(
    out: Tensor,
    ref: Tensor,
    problem: MoEProblem,
    *,
    rounds_activations: bool = True,
    rounding: Rounding | None = None,
) -> str:
    """Describe what is wrong with ``out`` (T, H), or return an empty string.

    Args:
        ref: the oracle's (T, H) fp32; a row of zeros is a token without an expert.
        rounds_activations: as in `tolerance`.
        rounding: from `rounding_errors`, where roundings explain more than the bounds do. The
            errors of such tokens count less.
    """
    if out.shape != ref.shape:
        return f"has shape {tuple(out.shape)}, expected {tuple(ref.shape)}"
    if out.dtype != problem.dtype:
        return f"is {out.dtype}, expected the problem's {problem.dtype}"
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
    used = int((~idle).sum())
    size_T = torch.linalg.vector_norm(ref, dim=1, dtype=torch.float64).square()
    # Errors average over the tokens, and over fewer if some outputs are far larger than others.
    effective = float(size_T.sum() ** 2 / size_T.square().sum()) if used else 0.0
    bound = tolerance(
        problem, used, effective_tokens=effective, rounds_activations=rounds_activations
    )
    wrong = beyond_bound(out, ref, bound, rounding)
    if not wrong:
        return ""
    if not bool(out.any()):
        wrong += "; the output is all zeros"
    return wrong + _where(_of_elements(_normalized(out, ref), ref), out, ref)


def _normalized(out: Tensor, ref: Tensor) -> Tensor:
    """Return the differences (T, H) in units of their row's RMS."""
    ref = ref.float()
    return (out.float() - ref) / _row_scale(ref)


def _of_elements(normalized: Tensor, ref: Tensor) -> Tensor:
    """Return the absolute errors of elements (T, H) in fp32, as their bound takes them.

    They are in units of their row's RMS, or of a quarter of the element if that is more.
    """
    ref = ref.float()
    quarters = ref.abs() / _row_scale(ref) * (_WORST_ROW / _WORST_ELEMENT)
    return normalized.abs() / quarters.clamp(min=1.0)


def _row_scale(ref: Tensor) -> Tensor:
    """Return what a row's error is measured against, (T, 1)."""
    floor = max(_ROW_FLOOR * rms(ref), torch.finfo(torch.float32).tiny)
    return ref.square().mean(dim=1, keepdim=True).sqrt().clamp(min=floor)


def _where(badness: Tensor, out: Tensor, ref: Tensor, count: int = 5) -> str:
    """Describe the worst coordinates, one in a line."""
    worst = badness.flatten().topk(min(count, badness.numel())).indices.tolist()
    width = badness.shape[1]
    lines = [
        f"\n    [{i // width}, {i % width}] got {float(out.flatten()[i]):.6g}, "
        f"expected {float(ref.flatten()[i]):.6g}"
        for i in worst
    ]
    return "".join(lines)
