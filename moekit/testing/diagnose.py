"""Assert that an output is right, or say which mistake would explain it.

`diagnose` compares a wrong output with the outputs of backends that have one known mistake. Else it
says which experts the wrong tokens share. It runs only when a comparison has failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moekit.backends.reference import Product, oracle
from moekit.contract import Routing
from moekit.problem import MoEProblem
from moekit.problem.activation import ACTIVATIONS
from moekit.problem.quantize import dequantize, quantize
from moekit.problem.weights import ExpertWeights
from moekit.testing.cases import SEED_VARIABLE, Case, generator, seed
from moekit.testing.compare import Rounding, complain, errors, relative_error, tolerance

# Outputs with more elements are compared with few mistakes, because each takes seconds.
_MOST_ELEMENTS = 1 << 20
# Numbers of random draws of rounding errors. An error may be twice their mean, as kernels may round
# a number twice, and so many of their standard deviations: with 7 it is 5.8 times the standard
# deviation of an error that one neuron decides. A few draws come first, with a wider bound.
_DRAWS = (6, 28.0), (32, 7.0)


def assert_close(
    out: Tensor,
    ref: Tensor,
    problem: MoEProblem,
    what: str = "output",
    *,
    case: Case | None = None,
    rounds_activations: bool = True,
) -> None:
    """Assert that ``out`` (T, H) is the oracle's ``ref`` (T, H) fp32, up to `tolerance`.

    Rejects other shapes and dtypes, NaN and infinity, and anything but exact zeros where a token
    has no expert. The message names the mistake if it is a known one, the worst coordinates, the
    problem, and how to repeat the failure.

    Args:
        what: the name of the output in the message.
        case: the call whose reference is ``ref``, or a part of it. It names the mistake, and
            tells which errors rounding explains.
        rounds_activations: False if ``ref`` has the activations as the backend rounded them to the
            problem's scheme. The dtype's bounds then hold.
    """
    if case is not None:
        complaint = complain_of(out, ref, case, rounds_activations=rounds_activations)
    else:
        complaint = complain(out, ref, problem, rounds_activations=rounds_activations)
    if complaint:
        found = ""
        if case is not None:
            try:
                found = diagnose(out, case)
            except Exception as error:  # must not hide what failed
                found = f"(no diagnosis: {error!r})"
        raise AssertionError(
            f"{what}: {found}{': ' if found else ''}{complaint}"
            f"\n  problem: {problem!r}\n  repeat with {SEED_VARIABLE}={seed()}"
        )


def assert_right(out: Tensor, case: Case, what: str = "output") -> None:
    """Assert that ``out`` (T, H) is the result of the call, as `assert_close` does."""
    assert_close(out, case.reference(), case.problem, what, case=case)


def complain_of(out: Tensor, ref: Tensor, case: Case, *, rounds_activations: bool = True) -> str:
    """Do as `complain`, and allow for the roundings that this call's numbers are sensitive to.

    A neuron or two may decide a token's output, and the activation function makes errors of these
    larger. Values that share a scale or a mantissa are rounded alike, so their errors add up.
    """
    compare = partial(complain, out, ref, case.problem, rounds_activations=rounds_activations)
    return compare() and beyond_rounding(compare, Draws(case, rounds_activations))


def beyond_rounding(compare: Callable[..., str], draws: Draws) -> str:
    """Return what ``compare(rounding=...)`` says, "" if rounding explains the errors."""
    said = ""
    for count, deviations in _DRAWS:
        if said := compare(rounding=draws.explained(count, deviations)):
            break  # more draws take seconds in vain
    return said


def rounding_errors(case: Case) -> Rounding:
    """Return the errors of this call's output that rounding explains."""
    return Draws(case).explained(*_DRAWS[-1])


class Draws:
    """Random draws of the rounding errors of a call's output, or of a gradient of it.

    A draw adds rounding errors to all that kernels may round: weights' scales and dequantized
    weights (unless activations are quantized), both operands and the result of each product, and
    the output. Other arithmetic is exact. Activations are rounded to the scheme, or to the dtype.
    """

    def __init__(
        self,
        case: Case,
        rounds_activations: bool = True,
        result: Callable[..., Tensor] = Case.reference,
    ) -> None:
        """result: Returns a fp32 matrix for a case and ``around``, as `Case.reference` does."""
        self._case, self._exact, self._count = case, result(case), 0
        self._result = result
        self._operand = case.problem.quant.activation if rounds_activations else None
        self._weight = case.problem.quant.weight if self._operand is None else None
        self._weights = case.weights.canonical(case.problem)
        self._generator = generator("rounding", device=case.x.device)
        self._sums = [torch.zeros((), device="cpu")] * 6  # adds to tensors of any device

    def explained(self, count: int, deviations: float) -> Rounding:
        """Return twice the mean of the errors of ``count`` draws, and so many ``deviations``."""
        while self._count < count:
            found = self._draw()
            both = [*found, *(t.square() for t in found)]
            self._sums = [a + b for a, b in zip(self._sums, both, strict=True)]
            self._count += 1
        means = [t / count for t in self._sums]
        element_TH, row_T, (rms, scale, offset) = (
            2 * mean + deviations * (square - mean.square()).clamp(min=0).sqrt()
            for mean, square in zip(means[:3], means[3:], strict=True)
        )
        return Rounding(element_TH, row_T, float(rms), float(scale), float(offset))

    def _draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return errors of elements and tokens, and the RMS, scale and mean of `errors`."""
        case, w, weight = self._case, self._weights, self._weight
        if weight is not None and weight.scale_dtype == "float32":
            changes: dict[str, Any] = {}
            for name in ("w13_scale", "w2_scale"):
                scale = getattr(w, name)
                # Its range is the dtype's: a kernel that loses bits of small scales is wrong.
                unit = 2.0 ** math.frexp(float(scale.abs().max()))[1]
                changes[name] = unit * self._rounded(scale / unit)
            case = replace(case, weights=replace(w, **changes))
        out = self._rounded(self._result(case, around=self._around))
        error_TH = (out - self._exact).abs()
        found = [abs(value) for value, _ in errors(out, self._exact).values()]
        return error_TH, error_TH.square().mean(dim=1).sqrt(), torch.tensor([found[0], *found[3:]])

    def _around(self, product: Product) -> Product:
        def made(name: str, rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
            static = self._weights.tensors().get(f"{name}_input_scale")
            coded = self._operand is not None and name in ("w13", "w2")  # not an adapter's
            rows = self._coded(rows, static) if coded else self._rounded(rows)
            if self._weight is not None:
                matrix = self._rounded(matrix)
            return self._rounded(product(name, rows, matrix, bias))

        return made

    def _rounded(self, x: Tensor) -> Tensor:
        """Return x with rounding errors, except for numbers that the dtype holds.

        Numbers of one mantissa have the same relative error, as in a conversion.
        """
        dtype = self._case.problem.dtype
        (mantissa, exponent), info = torch.frexp(x), torch.finfo(dtype)
        least = math.frexp(info.tiny)[1]  # smaller numbers have fewer bits
        half = torch.ldexp(mantissa.sign() * info.eps / 4, exponent.clamp(min=least))
        noise = torch.where(x == x.to(dtype), 0.0, half * self._noise(mantissa))
        return x + noise.detach()

    def _coded(self, x: Tensor, static: Tensor | None) -> Tensor:
        """Return x (rows, columns) with the rounding errors of its codes, of random signs.

        Equal numbers have the same sign.
        """
        operand = self._operand
        assert operand is not None
        near = dequantize(*quantize(x, operand, static if operand.static else None), operand)
        return x + ((near - x) * self._noise(x).sign()).detach()

    def _noise(self, x: Tensor) -> Tensor:
        """Return numbers from -1 to 1 that are random functions of the magnitudes of x (fp32)."""
        factor, offset = torch.randint(2**62, (2,), generator=self._generator, device=x.device)
        bits = x.abs().contiguous().view(torch.int32).long()
        made: Tensor = ((bits * (2 * factor + 1) + offset) >> 32).float() / 2**31
        return made


def wrong_results(case: Case) -> dict[str, Tensor]:
    """Return outputs (T, H) of backends with one mistake each, by the name of the mistake."""
    p, w, r = case.problem, case.weights, case.routing
    used = r.topk_ids >= 0

    def result(
        weights: ExpertWeights = w, topk_weights: Tensor = r.topk_weights, ids: Tensor = r.topk_ids
    ) -> Tensor:
        return oracle(case.x, weights, Routing(topk_weights, ids), p)

    def without(*biases: str) -> ExpertWeights:
        zeros: dict[str, Any] = {b: torch.zeros_like(getattr(w, b)) for b in biases}
        return replace(w, **zeros)

    if p.activation.limit is not None:
        far = replace(p.activation, limit=1e6)
        return {"clamp dropped": oracle(case.x, w, r, p.replace(activation=far))}
    right = case.reference()
    first, last = p.local_experts.start, p.local_experts.stop
    other = first + (r.topk_ids - first + 1) % (last - first)
    wrong = {
        "zeros": torch.zeros_like(right),
        "doubled": right * 2,
        "tokens swapped": right.roll(1, dims=0),
        "experts swapped": result(ids=torch.where(used, other, -1)),
        "router weights not applied": result(topk_weights=torch.ones_like(r.topk_weights)),
        "router weights applied twice": result(topk_weights=r.topk_weights.square()),
    }
    if not p.apply_router_weight_on_input:
        total = r.topk_weights.nan_to_num(0.0).sum(dim=1, keepdim=True).clamp(min=1e-6)
        wrong["router weights normalized"] = result(topk_weights=r.topk_weights / total)
    if len(right):
        wrong["one token dropped"] = right.clone()
        wrong["one token dropped"][right.square().sum(dim=1).argmax()] = 0.0
    if p.quant.weight is not None and p.quant.weight.act_order:
        wrong["w13's act-order dropped"] = result(replace(w, w13_g_idx=None))
        wrong["w2's act-order dropped"] = result(replace(w, w2_g_idx=None))
    if p.has_bias:
        wrong["w13's bias dropped"] = result(without("w13_bias"))
        wrong["w2's bias dropped"] = result(without("w2_bias"))
    if p.activation.gated:
        plain = w.canonical(p).dequantize(p.quant)
        swapped = replace(plain, w13=plain.w13.roll(plain.w13.shape[1] // 2, dims=1))
        wrong["gate and up swapped"] = oracle(case.x, swapped, r, p.replace(quant="none"))
        mixed = replace(plain, w13=torch.cat((plain.w13[:, 0::2], plain.w13[:, 1::2]), dim=1))
        mixed_rows = oracle(case.x, mixed, r, p.replace(quant="none"))
        wrong["gate and up taken for alternating rows"] = mixed_rows
    return wrong


def diagnose(out: Tensor, case: Case) -> str:
    """Name the mistake that explains ``out`` (T, H), a wrong result of ``case``, or return ""."""
    p, right = case.problem, case.reference()
    out = out.detach().to(right.device)
    if out.shape != right.shape or not bool(torch.isfinite(out).all()):
        return ""
    if out.numel() <= _MOST_ELEMENTS:
        most = tolerance(p, 1).rms  # most mistakes are far beyond it, and `complain` takes longer
        for what, result in (*wrong_results(case).items(), *_other_activations(case)):
            if relative_error(out, result) <= most and not complain(out.to(p.dtype), result, p):
                return f"looks like: {what}"
    size = right.square().mean(dim=1).sqrt()
    apart = (out.float() - right).square().mean(dim=1).sqrt()
    return _place(apart > tolerance(p).row * size.clamp(min=float(size.mean()) / 4), case)


def _other_activations(case: Case) -> Iterator[tuple[str, Tensor]]:
    p = case.problem
    for name in sorted(ACTIVATIONS):
        other = replace(p.activation, name=name, alpha=None, limit=None)
        if other.gated == p.activation.gated and name != p.activation.name:
            result = oracle(case.x, case.weights, case.routing, p.replace(activation=other))
            yield f"the activation is {name}", result


def _place(wrong_T: Tensor, case: Case) -> str:
    """Name experts, or rows of experts, that all wrong tokens have and no right token has."""
    ids = case.routing.topk_ids
    flat, index = ids.flatten(), torch.arange(ids.numel(), device=ids.device)
    order = flat.argsort(stable=True)
    place = index - torch.searchsorted(flat[order], flat[order])
    rows = torch.empty_like(index).scatter_(0, order, place).view_as(ids)
    # A token of zeros is right with any weights, and clears no expert.
    right_TK = (~wrong_T & case.x.any(dim=1))[:, None] & (ids >= 0)
    for what, value_TK in (("experts", ids), ("rows of an expert", rows)):
        apart_TK = (ids >= 0) & ~torch.isin(value_TK, value_TK[right_TK])
        theirs = apart_TK.any(dim=1)[wrong_T]
        if bool(right_TK.any()) and len(theirs) and bool(theirs.all()):
            found = torch.unique(value_TK[apart_TK]).tolist()
            shown = ", ".join(map(str, found[:8])) + (" ..." if len(found) > 8 else "")
            return f"only tokens with these {what} are wrong: {shown}"
    return ""
