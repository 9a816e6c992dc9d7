"""Cells: the inputs of an experts block, its calls checked and timed in turns, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moekit.plugin import Adapters, ExpertWeights, MoEProblem, Routing

from .internals import benchmark_bound, oracle
from .limits import Work, bytes_per_expert, work
from .records import Result
from .shapes import inputs
from .timer import Call, Prepared, attempt, release, take_turns

_CHECKED_TOKENS = 32
_MAX_INPUTS = 8


@dataclass(frozen=True)
class Case:
    """The input of all implementations of a cell. work: of one call, averaged over the inputs."""

    problem: MoEProblem
    weights: ExpertWeights
    tokens: int
    routing: str
    inputs: Sequence[tuple[Any, ...]]
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
        """Draw ``count`` inputs, or more where the weights they read would stay in the L2 cache."""
        device = weights.w13.device
        drawn = inputs(routing, tokens, count, problem, device, seed)
        done = work(problem, weights, drawn)
        cache = _cache_bytes(device)
        read = done.active_experts * bytes_per_expert(weights)
        if tokens and read and count * read < 2 * cache:
            count = max(count, min(_MAX_INPUTS, -int(-2 * cache // read)))
            drawn = inputs(routing, tokens, count, problem, device, seed)
            done = work(problem, weights, drawn)
        return cls(problem, weights, tokens, routing, drawn, done)

    def inputs_of(self, call: Any) -> Sequence[tuple[Any, ...]]:
        """Return a call's inputs: if it has S adapters, token t has adapter t modulo S."""
        if (adapters := getattr(call, "adapters", None)) is None:
            return self.inputs
        slots = torch.arange(self.tokens, device=adapters.scaling.device) % len(adapters.scaling)
        ids = slots.int()
        return [(x, replace(routing, adapter_ids=ids), *more) for x, routing, *more in self.inputs]

    def judge(self, call: Any) -> Callable[[Any], float]:
        """Return what takes a call's output for the first input and returns its error."""
        x, routing = self.inputs_of(call)[0]
        rows = sampled_rows(self.tokens, _CHECKED_TOKENS, x.device)
        adapters = getattr(call, "adapters", None)
        want = oracle_rows(self.problem, self.weights, x, routing, rows, adapters)
        return lambda got: relative_error(got, rows, want)


def run_cell(case: Case, calls: Mapping[str, Call], *, replays: int = 10) -> dict[str, Result]:
    """Check and time every call on ``case``, in turns; a call that fails gets its reason.

    Raises:
        DeviceLost: A failure left the device unusable.
    """
    device = case.weights.w13.device
    results: dict[str, Result] = {}
    ready: dict[str, Prepared] = {}
    errors: dict[str, float] = {}
    base_error_of = case.judge(None)

    def prepare(name: str, call: Callable[..., Any]) -> None:
        error_of = case.judge(call) if getattr(call, "adapters", None) else base_error_of
        prepared = Prepared(call, case.inputs_of(call), device)
        errors[name] = error_of(prepared.first_output())
        ready[name] = prepared

    with torch.inference_mode(not case.problem.training):
        for name, call in calls.items():
            _, reason = attempt(device, prepare, name, call)
            results[name] = Result(name=name, reason=reason)
        results |= take_turns(ready, replays)
    ready.clear()
    release(device)
    bound = benchmark_bound(case.problem)
    return {
        name: result if result.us is None else result.judged(errors[name], bound)
        for name, result in results.items()
    }


def _cache_bytes(device: torch.device) -> int:
    """Return the size of the device's L2 cache; 0 where it is unknown, and on the CPU."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))


# -- the error of an output --------------------------------------------------------------------


def sampled_rows(tokens: int, most: int, device: torch.device) -> Tensor:
    """Return the indices of up to ``most`` tokens, evenly spread."""
    return torch.linspace(0, max(0, tokens - 1), min(most, tokens), device=device).long()


def oracle_rows(
    problem: MoEProblem, weights: ExpertWeights, x_TH: Tensor, routing: Routing, rows: Tensor,
    adapters: Adapters | None = None,
) -> Tensor:  # fmt: skip
    """Return the fp32 oracle's output (n, H) for the n tokens that ``rows`` (n,) names."""
    return oracle(x_TH[rows], weights, routing.part(rows, len(rows)), problem, adapters)


def relative_error(got: Tensor, rows: Tensor, want: Tensor) -> float:
    """Return ||got - want|| / ||want|| over ``rows``, infinite if an element of ``got`` is not
    finite. Where ``want`` is zero, the error is 0 for zeros and infinite for any other output."""
    if got.shape[1:] != want.shape[1:] or not bool(torch.isfinite(got).all()):
        return math.inf
    difference = (got[rows].float() - want).norm()
    if not bool(want.any()):
        return math.inf if bool(difference) else 0.0
    return float(difference / want.norm())
