"""One cell of a sweep: a problem, a number of tokens and a routing, and everyone's result."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moekit.backends.reference import expert_mlp
from moekit.errors import MoekitError
from moekit.problem import MoEProblem
from moekit.problem.weights import ExpertWeights
from moekit_bench.bench.limits import Ceilings, Work, bytes_per_expert, limit_us, work
from moekit_bench.bench.measure import Call, Prepared, Timing, check_alive, first_line, take_turns
from moekit_bench.bench.shapes import Inputs, inputs

# Beyond these relative errors an output is wrong, not inexact (zeros have error 1).
_WRONG_DTYPE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 5e-3}  # 5e-3: tf32
_WRONG_ACTIVATION = {"float8_e4m3fn": 0.12, "int8": 0.06}

_CHECKED_TOKENS = 32
_MAX_INPUTS = 8


@dataclass(frozen=True)
class Case:
    """What all contestants of a cell are given. ``work``: of one call, averaged over ``pairs``."""

    problem: MoEProblem
    weights: ExpertWeights
    tokens: int
    routing: str
    pairs: Inputs
    work: Work

    @classmethod
    def make(
        cls,
        problem: MoEProblem,
        weights: ExpertWeights,
        tokens: int,
        routing: str = "uniform",
        *,
        count: int = 3,
        seed: int = 0,
    ) -> Case:
        """Draws ``count`` inputs, more where the weights they read would stay in the L2 cache."""
        device = weights.w13.device
        pairs = inputs(routing, tokens, count, problem, device, seed)
        done = work(problem, weights, pairs)
        cache = cache_bytes(device)
        read = done.active_experts * bytes_per_expert(weights)
        if tokens and read and count * read < 2 * cache:
            count = min(_MAX_INPUTS, -int(-2 * cache // read))
            pairs = inputs(routing, tokens, count, problem, device, seed)
            done = work(problem, weights, pairs)
        return cls(problem, weights, tokens, routing, pairs, done)


@dataclass(frozen=True)
class Result:
    """One contestant's row. timing is None, and reason says why, when there is nothing to time.

    error: ||out - oracle|| / ||oracle|| over the checked tokens; right: it is as small as the
    scheme allows. fraction: limit / time.
    """

    timing: Timing | None
    error: float | None = None
    right: bool = False
    limit_us: float | None = None
    reason: str = ""

    @property
    def fraction(self) -> float | None:
        if self.timing is None or self.limit_us is None:
            return None
        return self.limit_us / self.timing.us


def run_cell(
    case: Case,
    calls: Mapping[str, Call],
    *,
    ceilings: Ceilings | None = None,
    replays: int = 10,
    host: bool = True,
    graph: bool = True,
    log: Callable[[str], None] | None = None,
) -> dict[str, Result]:
    """Checks and times every call on ``case``, in turns; one that fails gets its reason.

    Raises DeviceLost when a failure took the device with it.
    """
    device = case.weights.w13.device
    limit = limit_us(case.work, case.problem, ceilings)
    results: dict[str, Result] = {}
    ready: dict[str, Prepared] = {}
    errors: dict[str, float] = {}

    def prepare(name: str, call: Call) -> str:
        """Why not, or empty. A function, so that nothing keeps a failed call's tensors alive."""
        try:
            prepared = Prepared(call, case.pairs, device, graph)
            errors[name] = relative_error(prepared.first_output(), rows, want)
            ready[name] = prepared
        except Exception as error:
            check_alive(device)
            return first_line(error)
        return ""

    with torch.inference_mode():
        rows, want = sampled_oracle(case)
        for name, call in calls.items():
            if log is not None:
                log(name)
            if reason := prepare(name, call):
                results[name] = Result(None, reason=reason)
                release(device)
        for name, timing in take_turns(ready, replays, host=host).items():
            off = errors[name]
            if isinstance(timing, Exception):
                results[name] = Result(None, off, reason=first_line(timing))
            else:
                right = off <= wrong_above(case.problem)
                reason = "" if right else f"wrong: error {off:.1e}"
                results[name] = Result(timing, off, right, limit, reason)
    ready.clear()
    release(device)
    return {name: results[name] for name in calls}


def sampled_oracle(case: Case) -> tuple[Tensor, Tensor]:
    """(token indices, the fp32 oracle's rows (n, H) for them) of the case's first input.

    Dequantizes one expert at a time, and only those that the tokens go to.
    """
    (x_TH, routing), p = case.pairs[0], case.problem
    count = min(_CHECKED_TOKENS, case.tokens)
    rows = torch.linspace(0, max(0, case.tokens - 1), count, device=x_TH.device).long()
    x, ids, weights = x_TH[rows].float(), routing.topk_ids[rows], routing.topk_weights[rows]
    out = torch.zeros_like(x)
    local = p.local_experts
    for physical in sorted(set(ids.flatten().tolist())):
        if physical not in local:
            continue
        token, slot = (ids == physical).nonzero(as_tuple=True)
        one = _expert(case.weights, physical - local.start).dequantize(p.quant)
        weight = weights[token, slot, None]
        if p.apply_router_weight_on_input:
            y = expert_mlp(x[token] * weight, one, 0, p)
        else:
            y = weight * expert_mlp(x[token], one, 0, p)
        out.index_add_(0, token, y)
    return rows, out


def _expert(weights: ExpertWeights, expert: int) -> ExpertWeights:
    """One expert alone, as views."""
    views: dict[str, Any] = {
        name: tensor[expert : expert + 1]
        for name, tensor in weights.tensors().items()
        if not name.endswith("input_scale")  # shared by all, and not needed to dequantize
    }
    return ExpertWeights(**views)


def relative_error(got: Tensor, rows: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| over ``rows``; NaN if any element of ``got`` is not finite.

    Where ``want`` is zero (no choice of these rows is on this rank): 0 if ``got`` is, else inf."""
    if got.shape[1:] != want.shape[1:] or not bool(torch.isfinite(got).all()):
        return float("nan")
    difference = (got[rows].float() - want).norm()
    if not bool(want.any()):
        return math.inf if bool(difference) else 0.0
    return float(difference / want.norm())


def wrong_above(problem: MoEProblem) -> float:
    """The relative error beyond which an output is wrong."""
    activation = problem.quant.activation
    coarse = 0.0 if activation is None else _WRONG_ACTIVATION.get(activation.dtype, 0.3)
    return max(_WRONG_DTYPE[problem.dtype], coarse)


def cache_bytes(device: torch.device) -> int:
    """Size of the device's L2 cache, 0 where unknown (and on the CPU)."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))


def release(device: torch.device) -> None:
    """Gives memory back that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Unavailable(MoekitError):
    """A peer's library is missing, or it cannot do a problem; the text says which."""
