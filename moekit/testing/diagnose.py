"""Assert that an output is right, or say which mistake would explain it.

`diagnose` compares a wrong output with the outputs of backends that have one known mistake, in all
experts or in those whose tokens are wrong. It also looks for dropped assignments and for tokens
that hold each other's results. It runs only when a comparison has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moekit.backends.reference import oracle
from moekit.contract import Routing
from moekit.problem import MoEProblem
from moekit.problem.activation import ACTIVATIONS
from moekit.problem.weights import ExpertWeights
from moekit.testing.cases import SEED_VARIABLE, Case, seed
from moekit.testing.compare import complain, relative_error, tolerance
from moekit.testing.rounding import rounding_errors

# `_dropped` looks at every assignment if (T, K, H) has no more elements than this.
_MOST_ELEMENTS = 1 << 26
# `_some_experts` tries without each of the first wrong experts, up to this many.
_MOST_SUBSETS = 8
# Fewer neurons than this may decide a token's output so that roundings to 16 bits count.
_FEW_NEURONS = 64


def assert_close(
    out: Tensor,
    ref: Tensor,
    problem: MoEProblem,
    what: str = "output",
    *,
    case: Case | None = None,
    earlier: Sequence[Tensor] = (),
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
        earlier: outputs of earlier calls, of any shape; a repeated one is recognized.
        rounds_activations: False if ``ref`` has the activations as the backend rounded them to the
            problem's scheme. The bounds are then those of the dtype.
    """
    complaint = complain(out, ref, problem, rounds_activations=rounds_activations)
    if complaint and case is not None and rounds_activations:
        complaint = _judge(case)(out, ref)
    if complaint:
        found = ""
        if case is not None:
            try:
                found = diagnose(out, case, earlier)
            except Exception as error:  # must not hide what failed
                found = f"(no diagnosis: {error!r})"
        raise AssertionError(
            f"{what}: {found}{': ' if found else ''}{complaint}"
            f"\n  problem: {problem!r}\n  repeat with {SEED_VARIABLE}={seed()}"
        )


def _judge(case: Case) -> Callable[[Tensor, Tensor], str]:
    """Return `complain` of outputs and their references, with the roundings of this call's numbers.

    Weight-only kernels may take scales in the problem's dtype, if they are normal numbers there.
    The errors do not cancel where a scale is the largest of a row of bf16 over 127, which is
    rounded down more often than up.
    """
    p = case.problem
    if p.quant.activation is not None:
        return partial(complain, problem=p, rounding=rounding_errors(case))
    rounded = _with_rounded_scales(case)

    def judged(out: Tensor, ref: Tensor) -> str:
        complaint = complain(out, ref, p)
        if complaint and p.dtype.itemsize == 2 and p.local_intermediate_size < _FEW_NEURONS:
            complaint = complain(out, ref, p, rounding=rounding_errors(case))
        if complaint and rounded is not None and torch.equal(ref, case.reference().to(ref.device)):
            near = rounded.to(out.device)
            if relative_error(out, near) < relative_error(out, ref.to(out.device)):
                return complain(out, near, p) and complaint
        return complaint

    return judged


def _with_rounded_scales(case: Case) -> Tensor | None:
    """Return the oracle's (T, H) fp32 with scales in the problem's dtype, or None if not normal."""
    p, w = case.problem, case.weights
    if p.quant.weight is None or p.dtype.itemsize != 2:
        return None
    limits, short = torch.finfo(p.dtype), {}
    for name in ("w13_scale", "w2_scale"):
        scale = getattr(w, name)
        if scale is None or scale.dtype != torch.float32:
            return None
        size = scale[scale != 0].abs()
        if bool(((size < limits.tiny) | (size > limits.max)).any()):
            return None
        short[name] = scale.to(p.dtype).float()
    return replace(case, weights=replace(w, **short)).reference()


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
    return wrong


def diagnose(out: Tensor, case: Case, earlier: Sequence[Tensor] = ()) -> str:
    """Name the mistake that explains ``out`` (T, H), a wrong result of ``case``, or return "".

    Args:
        earlier: outputs of earlier calls, of any shape.
    """
    p, right = case.problem, case.reference()
    out = out.detach().to(right.device)
    if out.shape != right.shape:
        return ""
    if not bool(torch.isfinite(out).all()):
        return _non_finite(out, case)
    for index, old in enumerate(reversed(earlier)):
        if old.shape == out.shape and torch.equal(old, out):
            return f"the output is that of {index + 1} calls before"
    wrong_T = _wrong_rows(out, right, p)
    for explain in (_whole, _dropped, _swapped_rows, _some_experts, _scale):
        if text := explain(out, right, case, wrong_T):
            return text
    return ""


def _wrong_rows(out: Tensor, right: Tensor, problem: MoEProblem) -> Tensor:
    """Return a mask (T,) of the tokens whose error exceeds the bound on a row."""
    size = right.square().mean(dim=1).sqrt()
    apart = (out.float() - right).square().mean(dim=1).sqrt()
    return apart > tolerance(problem).row * size.clamp(min=float(size.mean()) / 4)


def _same(out: Tensor, want: Tensor, case: Case) -> bool:
    out = out.to(case.problem.dtype)
    # Most mistakes are far beyond the widest bound, for which `complain` would look at more.
    if relative_error(out, want) > tolerance(case.problem, 1).rms:
        return False
    return not complain(out, want, case.problem)


def _non_finite(out: Tensor, case: Case) -> str:
    bad = ~torch.isfinite(out).all(dim=1)
    idle = (case.routing.topk_ids < 0).all(dim=1)
    not_finite = ~torch.isfinite(case.x).all(dim=1) & ~idle
    if bool((bad & idle).any()) and not bool((bad & ~idle).any()):
        return "rows of tokens without an expert are not written, or multiplied by zero"
    if bool(not_finite.any()) and bool((bad & ~not_finite).any()):
        return "a token that is not finite changes the output of other tokens"
    if bool((bad == (case.routing.topk_ids < 0).any(dim=1)).all()):
        return "exactly the tokens with an id of -1 are not finite: these assignments are computed"
    if bool(bad.any()) and not bool(out.isnan().any()):
        return "values are infinite, and none is NaN: something overflows, in float16 above 65504"
    if bool(bad.all()):
        return "every row holds NaN: it was not written, or computed from memory that was not"
    return ""


def _mistakes(case: Case) -> Iterator[tuple[str, Tensor]]:
    yield from wrong_results(case).items()
    p, r = case.problem, case.routing
    for name in sorted(ACTIVATIONS):
        other = replace(p.activation, name=name, alpha=None, limit=None)
        if other.gated == p.activation.gated and name != p.activation.name:
            result = oracle(case.x, case.weights, r, p.replace(activation=other))
            yield f"the activation is {name}", result
    plain = case.weights.canonical(p).dequantize(p.quant)
    for name in ("w13", "w2"):
        w = getattr(plain, name)
        changes: dict[str, Any] = {name: w.reshape(w.shape[0], w.shape[2], w.shape[1]).mT}
        turned = oracle(case.x, replace(plain, **changes), r, p.replace(quant="none"))
        yield f"{name} read as if it were transposed", turned
    if p.activation.gated:
        mixed = replace(plain, w13=torch.cat((plain.w13[:, 0::2], plain.w13[:, 1::2]), dim=1))
        result = oracle(case.x, mixed, r, p.replace(quant="none"))
        yield "gate and up taken for alternating rows", result


def _whole(out: Tensor, right: Tensor, case: Case, wrong_T: Tensor) -> str:
    for what, result in _mistakes(case):
        if _same(out, result, case):
            return f"looks like: {what}"
    return ""


def _some_experts(out: Tensor, right: Tensor, case: Case, wrong_T: Tensor) -> str:
    """Find a mistake that only the experts have whose tokens are all wrong."""
    p, ids = case.problem, case.routing.topk_ids
    local = set(p.local_experts)
    # A token of zeros is right with any weights, and clears no expert.
    right_ones = set(ids[~wrong_T & case.x.any(dim=1)].flatten().tolist()) & local
    wrong_ones = sorted((set(ids[wrong_T].flatten().tolist()) - right_ones) & local)
    if not wrong_ones or not right_ones:
        return ""
    # A right expert may share all of its few tokens with wrong ones.
    fewer = [[e for e in wrong_ones if e != out_of] for out_of in wrong_ones[:_MOST_SUBSETS]]
    for chosen in (wrong_ones, *(f for f in fewer if f)):
        theirs = torch.isin(ids, torch.tensor(chosen, device=ids.device))
        only = _routed(case, torch.where(theirs, ids, -1))
        rest = right - only.reference()
        for what, result in _mistakes(only):
            if _same(out, rest + result, case):
                return f"{_experts(chosen, len(local))} wrong: {what}"
    return f"{_experts(wrong_ones, len(local))} wrong; all tokens of the other experts are right"


def _experts(wrong: Sequence[int], count: int) -> str:
    if len(wrong) == 1:
        return f"expert {wrong[0]} of {count}"
    if wrong == list(range(wrong[0], wrong[-1] + 1)) and len(wrong) > 2:
        return f"experts {wrong[0]} to {wrong[-1]} of {count}"
    shown = ", ".join(map(str, wrong[:8])) + (" ..." if len(wrong) > 8 else "")
    return f"experts {shown} of {count}"


def _dropped(out: Tensor, right: Tensor, case: Case, wrong_T: Tensor) -> str:
    """Find dropped assignments that explain every wrong token."""
    p, ids = case.problem, case.routing.topk_ids
    if not bool(wrong_T.any()) or ids.numel() * p.hidden_size > _MOST_ELEMENTS:
        return ""
    results = [
        _routed(case, torch.where(torch.arange(ids.shape[1], device=ids.device) == k, ids, -1))
        for k in range(ids.shape[1])
    ]
    parts_TKH = torch.stack([case.reference() for case in results], dim=1)
    # The difference is the sum of the missing parts.
    missing = (right - out.float())[wrong_T, :, None]
    found = torch.linalg.lstsq(parts_TKH[wrong_T].mT.double().cpu(), missing.double().cpu())
    lost_TK = torch.zeros_like(ids, dtype=torch.bool)
    lost_TK[wrong_T] = (found.solution[..., 0] > 0.5).to(ids.device) & (ids[wrong_T] >= 0)
    left = _routed(case, torch.where(lost_TK, -1, ids))
    if not bool(lost_TK.any()) or not _same(out, left.reference(), case):
        return ""
    return (
        f"{int(lost_TK.sum())} of {int((ids >= 0).sum())} assignments dropped{_which(lost_TK, ids)}"
    )


def _which(lost: Tensor, ids: Tensor) -> str:
    """Describe what only the assignments in ``lost`` (T, K) have in common."""
    K, flat = ids.shape[1], ids.flatten()
    order = flat.argsort(stable=True)
    sorted_ids = flat[order]
    rank = torch.arange(len(flat), device=ids.device) - torch.searchsorted(sorted_ids, sorted_ids)
    rows = torch.empty_like(rank).scatter_(0, order, rank).view_as(ids)  # ids may be int32
    index = torch.arange(ids.numel(), device=ids.device).view_as(ids)
    kinds = {
        "top-k positions": index % K,
        "experts": ids,
        "rows of an expert": rows,
        "tokens": index // K,
        "assignments": index,
    }
    kept = ~lost & (ids >= 0)
    for what, value in kinds.items():
        first = int(value[lost].min())
        if not bool((kept & (value >= first)).any()):
            return f": those of {what} from {first} on"
        gone = set(value[lost].tolist())
        if what in ("top-k positions", "experts") and not gone & set(value[kept].tolist()):
            return f": those of {what} {', '.join(map(str, sorted(gone)[:8]))}"
    return ""


def _swapped_rows(out: Tensor, right: Tensor, case: Case, wrong_T: Tensor) -> str:
    """Find tokens that hold other tokens' results."""
    if not bool(wrong_T.any()) or len(out) > 4096:
        return ""
    nearest = torch.cdist(out.float(), right).argmin(dim=1)
    if not _same(out, right[nearest], case):
        return ""
    pairs = [f"{t} has {int(nearest[t])}'s" for t in wrong_T.nonzero().flatten()[:4].tolist()]
    return f"{int(wrong_T.sum())} tokens have other tokens' results: token {', '.join(pairs)}"


def _scale(out: Tensor, right: Tensor, case: Case, wrong_T: Tensor) -> str:
    right = right.double()
    factor = float((out.double() * right).sum() / right.square().sum().clamp(min=1e-30))
    if not factor or not _same((out.double() / factor).float(), right.float(), case):
        return ""
    return f"the whole output is {factor:.4g} times too large"


def _routed(case: Case, ids: Tensor) -> Case:
    """Return the same tokens with other ids; the weights of ids -1 are NaN."""
    weights = case.routing.topk_weights.masked_fill(ids < 0, float("nan"))
    return replace(case, routing=Routing(weights, ids))
