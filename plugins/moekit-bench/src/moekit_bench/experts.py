"""Experts backends and baselines on the whole experts block: cells, measurement and sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from moekit.errors import MoekitError
from moekit.plugin import DeviceSpec, ExpertWeights, MoEProblem, Routing

from .environment import about
from .implementations import Implementation, KernelCall
from .internals import DTYPES, benchmark_bound, oracle
from .limits import Work, bytes_per_expert, limit_us, work
from .records import BASELINE, Ceilings, Cell, Result, Run, copied_share
from .shapes import Inputs, Shape, inputs, random_weights
from .sweep import Sweep
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
    inputs: Inputs
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


def run_cell(case: Case, calls: Mapping[str, Call], *, replays: int = 10) -> dict[str, Result]:
    """Check and time every call on ``case``, in turns; a call that fails gets its reason.

    Raises:
        DeviceLost: A failure left the device unusable.
    """
    device = case.weights.w13.device
    results: dict[str, Result] = {}
    ready: dict[str, Prepared] = {}
    errors: dict[str, float] = {}

    def prepare(name: str, call: Call) -> None:
        prepared = Prepared(call, case.inputs, device)
        errors[name] = relative_error(prepared.first_output(), rows, want)
        ready[name] = prepared

    with torch.inference_mode():
        x, routing = case.inputs[0]
        rows = sampled_rows(case.tokens, _CHECKED_TOKENS, device)
        want = oracle_rows(case.problem, case.weights, x, routing, rows)
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


@dataclass(kw_only=True)
class ExpertsSweep(Sweep):
    """Every shape, scheme, routing and number of tokens, for every implementation.

    Weights and calls are made once for each shape and scheme, and freed before the next.
    ``problems`` are keyed by a shape's name and a scheme.

    Raises:
        MoekitError: Two implementations have one name, or there is none.
    """

    shapes: Sequence[Shape]
    implementations: Sequence[Implementation]
    device: torch.device
    ceilings: Ceilings | None = None

    def __post_init__(self) -> None:
        names = [i.name for i in self.implementations]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise MoekitError(
                f"{', '.join(twice)} is named twice: name it once in --experts, or rename the "
                "baseline"
            )
        if not names:
            raise MoekitError("nothing to measure: name --experts or --baselines")
        spec, s = DeviceSpec.of(self.device), self.settings
        self.problems = {  # all of them now, so that a typing error costs no time
            (shape.name, q): shape.problem(quant=q, dtype=DTYPES[s.dtype], device=spec, ep=s.ep)
            for shape in self.shapes
            for q in self.schemes
        }
        libraries = [i.version for i in self.implementations if i.version]
        facts = about(self.command, self.device, spec, names, libraries)
        self.run = Run(mode="experts", **facts, settings=s, ceilings=self.ceilings)
        self.cells = [
            Cell(shape=shape.name, scheme=q, routing=r, tokens=t)
            for shape, q, r, t in product(self.shapes, self.schemes, self.routings, self.tokens)
        ]
        self._group = ("", "")
        self._weights: ExpertWeights | None = None
        self._calls: dict[str, Call] = {}

    @property
    def succeeded(self) -> bool:
        """Return whether every measured cell has a right result."""
        return all(any(r.right for r in cell.results) for cell in self.run.cells)

    def measure_cell(self, cell: Cell) -> Cell | None:
        if (cell.shape, cell.scheme) != self._group:
            self._begin(cell)
        if self._weights is None:
            return None
        # It fails if memory runs out for the inputs or the oracle.
        made: Cell | None
        made, reason = attempt(self.device, self._measured, cell, self._weights)
        if made is None:
            self.refuse("all", f"T={cell.tokens}: {reason}", cell)
        return made

    def _begin(self, cell: Cell) -> None:
        self._group, self._weights = (cell.shape, cell.scheme), None
        self._calls.clear()
        release(self.device)
        problem = self.problems[self._group]
        weights, reason = attempt(
            self.device, random_weights, problem, self.device, self.settings.seed
        )
        if weights is None:
            self.refuse("all", f"no weights: {reason}", cell)
            return
        self._weights = weights
        for each in self.implementations:
            if problem.parallel.ep_size > 1 and each.kind == BASELINE:
                self.refuse(
                    each.name, "--ep: adapters are not told which experts are other ranks'", cell
                )
                continue
            call, reason = attempt(self.device, each.make, problem, weights, self.device)
            if reason:
                self.refuse(each.name, reason, cell)
            else:
                self._calls[each.name] = call
        # The largest call first: a workspace that grows between captures is kept once more.
        for call in self._calls.values():
            if isinstance(call, KernelCall):
                # The cell that needs so much reports a failure.
                attempt(self.device, call.warmup, max(self.tokens))

    def _measured(self, cell: Cell, weights: ExpertWeights) -> Cell:
        p, s = self.problems[self._group], self.settings
        case = Case.make(p, weights, cell.tokens, cell.routing, count=s.inputs, seed=s.seed)
        results = run_cell(case, self._calls, replays=s.replays)
        limit = None
        if any(r.us is not None for r in results.values()):
            limit = limit_us(case.work, p, self.ceilings)
        kinds = {each.name: each.kind for each in self.implementations}

        def complete(result: Result) -> Result:
            call = self._calls[result.name]
            copied = None
            if isinstance(call, KernelCall):
                copied = copied_share(weights.tensors(), call.packed)
            fraction = None if limit is None or result.us is None else limit / result.us
            kind = kinds[result.name]
            return replace(result, kind=kind, copied=copied, fraction=fraction)

        return replace(
            cell,
            inputs=len(case.inputs),
            limit_us=limit,
            results=tuple(map(complete, results.values())),
        )


# -- the error of an output --------------------------------------------------------------------


def sampled_rows(tokens: int, most: int, device: torch.device) -> Tensor:
    """Return the indices of up to ``most`` tokens, evenly spread."""
    return torch.linspace(0, max(0, tokens - 1), min(most, tokens), device=device).long()


def oracle_rows(
    problem: MoEProblem, weights: ExpertWeights, x_TH: Tensor, routing: Routing, rows: Tensor
) -> Tensor:
    """Return the fp32 oracle's output (n, H) for the n tokens that ``rows`` (n,) names."""
    chosen = Routing(routing.topk_weights[rows], routing.topk_ids[rows])
    return oracle(x_TH[rows], weights, chosen, problem)


def relative_error(got: Tensor, rows: Tensor, want: Tensor) -> float:
    """Return ||got - want|| / ||want|| over ``rows``, infinite if an element of ``got`` is not
    finite.

    Where ``want`` is zero, because no choice of these tokens is on this rank, the error is 0 for an
    output of zeros and infinite for any other.
    """
    if got.shape[1:] != want.shape[1:] or not bool(torch.isfinite(got).all()):
        return math.inf
    difference = (got[rows].float() - want).norm()
    if not bool(want.any()):
        return math.inf if bool(difference) else 0.0
    return float(difference / want.norm())
