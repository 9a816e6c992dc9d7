"""Assert that an output is right, or say which mistake would explain it.

`diagnose` compares a wrong output with the outputs of backends that have one known mistake. Else it
says which experts the wrong tokens share. It runs only when a comparison has failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moekit.backends.reference import expert_mlp, oracle
from moekit.contract import Routing
from moekit.problem import MoEProblem
from moekit.problem.activation import ACTIVATIONS
from moekit.problem.quantize import dequantize, quantize
from moekit.problem.weights import ExpertWeights
from moekit.testing.cases import SEED_VARIABLE, Case, generator, seed
from moekit.testing.compare import Rounding, complain, errors, relative_error, tolerance

# Fewer columns or neurons than this may decide a token's output so that 16-bit roundings count.
_FEW_NEURONS = 64
# Outputs with more elements are compared with few mistakes, because each takes seconds.
_MOST_ELEMENTS = 1 << 20
# Random draws of rounding errors, and few of them: all find this many times as much in no token.
_DRAWS, _FEW_DRAWS, _MORE_BY_ALL = 32, 4, 8.0


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
        case: the call whose reference is ``ref``. It names the mistake, and tells which tokens are
            sensitive to the rounding of activations.
        rounds_activations: False if ``ref`` has the activations as the backend rounded them to the
            problem's scheme. The dtype's bounds then hold.
    """
    if case is not None and (rounds_activations or problem.quant.activation is None):
        complaint = complain_of(out, ref, case)
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


def complain_of(out: Tensor, ref: Tensor, case: Case) -> str:
    """Do as `complain`, and allow for tokens that the roundings of this call's numbers change most.

    They are tokens with quantized activations, or those that a few neurons decide, as where the
    activation squares them.
    """
    p = case.problem
    few = min(p.hidden_size, p.local_intermediate_size) < _FEW_NEURONS
    sensitive = p.quant.activation is not None or (
        p.dtype.itemsize == 2 and (few or "relu2" in p.activation.name)
    )
    complaint = complain(out, ref, p)
    if complaint and sensitive:
        coarse = rounding_errors(case, _FEW_DRAWS, _MORE_BY_ALL)
        if not complain(out, ref, p, rounding=coarse):  # else all draws take seconds in vain
            return complain(out, ref, p, rounding=rounding_errors(case))
    return complaint


def rounding_errors(case: Case, draws: int = _DRAWS, times: float = 1.0) -> Rounding:
    """Return ``times`` the largest errors in random draws of rounding, 0 for tokens without expert.

    Some tokens are many times as sensitive as the usual one: a neuron or two decide their output,
    and the activation function makes the errors of these larger.

    A draw adds the rounding errors of the problem's scheme, or of its dtype if the scheme has
    unquantized activations, with random signs, to the inputs of both GEMMs. Dequantized weights are
    rounded to the dtype, as kernels of unquantized activations may. Other arithmetic is exact.
    """
    p, ids = case.problem, case.routing.topk_ids
    local = (ids >= p.local_experts.start) & (ids < p.local_experts.stop)
    weights_TK = torch.where(local, case.routing.topk_weights, 0.0)
    x_TH = torch.where(local.any(dim=1, keepdim=True), case.x.float(), 0.0)
    if p.apply_router_weight_on_input:
        x_TH, weights_TK = x_TH * weights_TK, local.float()
    w = case.weights.canonical(p).dequantize(p.quant)
    if p.quant.activation is None:
        w = replace(w, w13=w.w13.to(p.dtype).float(), w2=w.w2.to(p.dtype).float())
    draw = generator("rounding", device=x_TH.device)

    def rounded(expert: int, name: str, made: Tensor, rows: Tensor) -> Tensor:
        if name == "w2":
            return _rounded(rows, case, w.w2_input_scale, draw) @ w.w2[expert].T
        # A kernel may write the product with w13 in the problem's dtype.
        return made if p.quant.activation else _rounded(made, case, None, draw)

    exact, row_T = case.reference(), torch.zeros(len(x_TH), device=x_TH.device)
    scale = offset = 0.0
    for _ in range(draws):
        x, out = _rounded(x_TH, case, w.w13_input_scale, draw), torch.zeros_like(x_TH)
        for expert, physical in enumerate(p.local_experts):
            token, k = (ids == physical).nonzero(as_tuple=True)
            y = expert_mlp(x[token], w, expert, p, partial(rounded, expert))
            out.index_add_(0, token, weights_TK[token, k, None] * y)
        row_T = torch.maximum(row_T, (out - exact).square().mean(dim=1).sqrt())
        found = errors(out, exact)
        scale = max(scale, abs(found["scale"][0]))
        offset = max(offset, abs(found["mean"][0]))
    return Rounding(row_T * times, scale * times, offset * times)


def _rounded(x: Tensor, case: Case, static: Tensor | None, draw: torch.Generator) -> Tensor:
    """Return x (rows, columns) fp32 with the scheme's rounding errors, of random signs."""
    operand = case.problem.quant.activation
    if operand is None:
        near = x.to(case.problem.dtype).float()
    else:
        given = static.max() if operand.static and static is not None else None
        near = dequantize(*quantize(x, operand, given), operand)
    signs = 2 * torch.randint(0, 2, x.shape, generator=draw, device=x.device) - 1
    return x + signs * (near - x)


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
