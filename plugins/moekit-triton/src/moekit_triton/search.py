"""Time candidate plans of one problem and number of rows on a GPU, and find the fastest.

The tuner launches the plans themselves (`plans`): each GEMM is timed apart, as a step of a plan,
and the best few are then timed as whole plans, since a GEMM that is fastest alone need not be
fastest after another kernel or in one launch with it.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from moekit_kernels.rows import quantize_activations
from torch import Tensor

from moekit.plugin import MoEProblem, PackedWeights

from .calls import Buffers, Call, Layer
from .candidates import Attempt, Step, attempts, variations
from .heuristics import workspace
from .kernels.tiles import SpecializedTile
from .plans import Gathered, Sorted, TilePlan

# Microseconds above which the launch is a small part of the time.
_LONG = 200.0
# Microseconds of work after which the clock is stable.
_STABLE = 10e3
# How many of each kind are timed again, and of kinds how close to the fastest.
_FINALISTS, _CLOSE = 3, 1.08

Launches = Sequence[Callable[[], None]]
"""A step's launches, one for each routing."""


class Case(NamedTuple):
    """Tensors of one problem and number of rows, for several routings, whose calls share memory."""

    problem: MoEProblem
    calls: Sequence[Call]

    @classmethod
    def make(cls, problem: MoEProblem, packed: PackedWeights, rows: int, routings: int) -> Case:
        """Make a case on the problem's device. ``packed``: the layer's weights."""
        p, layer, device = problem, Layer.of(problem), torch.device(problem.device.type)
        scores = torch.rand(routings, rows, p.num_experts, device=device)
        x = torch.randn(rows, p.hidden_size, dtype=p.dtype, device=device)
        a = torch.randn(rows * p.top_k, p.local_intermediate_size, dtype=p.dtype, device=device)
        x_scale = a_scale = None
        if p.quant.activation is not None:
            x, x_scale = _quantize(x, layer, packed, "a1_scale")
            a, a_scale = _quantize(a, layer, packed, "a2_scale")
        memory = (
            torch.empty(s.shape, dtype=s.dtype, device=device) for s in workspace(layer, rows)
        )
        buffers = Buffers(*memory)
        for start in range(0, len(buffers.activated), len(a)):  # GEMM 2 is timed on real values
            part = buffers.activated[start : start + len(a)]
            part.copy_(a[: len(part)])
        if a_scale is not None:
            buffers.scale.fill_(float(a_scale.mean()))
        y = torch.empty(rows, p.hidden_size, dtype=p.dtype, device=device)
        ones = torch.ones(rows, p.top_k, device=device)
        ids = (s.topk(p.top_k, dim=1).indices for s in scores)
        return cls(p, [Call(layer, x, x_scale, i, ones, packed, y, buffers) for i in ids])

    def launches(self, plan: TilePlan, *steps: Step) -> Launches:
        """Prepare ``plan`` for every routing, and return the launches of ``steps``."""
        found: list[Callable[[], None]] = []
        for call in self.calls:
            own = call._replace(workspace=_own_lists(plan, call))
            operands = plan.prepare(own)
            found.append(partial(_run, [getattr(plan, step) for step in steps], own, operands))
        return found


def _quantize(x: Tensor, layer: Layer, packed: PackedWeights, static: str) -> tuple[Tensor, Tensor]:
    operand = layer.problem.quant.activation
    assert operand is not None
    return quantize_activations(x, operand, packed.get(static) if layer.static else None, None)


def _own_lists(plan: TilePlan, call: Call) -> Buffers:
    """Return the call's buffers with new int32 lists: plans, which sort differently, are timed
    interleaved."""
    specs = Buffers(*plan.workspace(call.layer, *call.ids_RK.shape))  # type: ignore[arg-type]
    lists: dict[str, Any] = {
        name: torch.empty(spec.shape, dtype=torch.int32, device=call.x.device)
        for name, spec in specs._asdict().items()
        if spec.dtype == torch.int32
    }
    return call.buffers._replace(**lists)


def _run(steps: Sequence[Callable[[Call, Any], None]], call: Call, operands: Any) -> None:
    for step in steps:
        step(call, operands)


class Timer:
    """CUDA graphs of alternatives, timed interleaved."""

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._launches: list[object] = []  # graphs do not keep tensors made before them alive

    def add(self, launches: Launches) -> None:
        """Add an alternative: one graph of all ``launches``."""
        launches[0]()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        self.graphs.append(graph)
        self._launches.append(launches)

    def microseconds(self, least: float, rounds: int) -> list[float]:
        """Return the time of one replay of each: the median of ``rounds`` iterations of ``least``
        microseconds. Long kernels lower the clock; interleaving spreads that over all of them."""
        once = [_elapsed(graph.replay) for graph in self.graphs]
        took: list[list[float]] = [[] for _ in once]
        for _, (i, graph) in itertools.product(range(rounds), enumerate(self.graphs)):
            replays = max(1, int(least / once[i]))
            took[i].append(_elapsed(graph.replay, replays) / replays)
        return [statistics.median(us) for us in took]


def _elapsed(call: Callable[[], None], times: int = 1) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


@dataclass(frozen=True, order=True)
class Timed:
    """A step of a plan, and the microseconds that one launch took."""

    us: float
    plan: TilePlan = field(compare=False)


Key = tuple[Step, int, type[TilePlan]]
"""A step, its block_m and its kind of plan. GEMM 2 does not depend on who sorted: Sorted."""


class Search:
    """The fastest plan of a case: both GEMMs with one block_m, each with its own tile."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.found: dict[Key, list[Timed]] = {}

    def attempt(self, step: Step, plan: TilePlan) -> None:
        """Time a step; a tile that does not compile is left out."""
        found = self.found.setdefault(_key(step, plan), [])
        enough = found[0].us if found else float("inf")
        try:
            launches = self._case.launches(plan, step)
            launches[0]()
            us = _elapsed(launches[0])
            if us < max(_LONG, 1.5 * enough):
                timer = Timer()
                timer.add(launches)
                (us,) = timer.microseconds(0.0, 4)
                us /= len(launches)
        except Exception as error:
            if not _tile_is_impossible(error):
                raise
            return
        bisect.insort(found, Timed(us, plan))

    def refine(self) -> None:
        """Time the neighbours of the best gathered tiles, and GEMM 1 that sorts with them."""
        sorts = self._case.problem.quant.weight is None and ("gemm_2", 128, Sorted) in self.found
        for (step, _, kind), found in list(self.found.items()):
            if kind is Gathered and found:
                best: Any = found[0].plan
                for tile in variations(best.first if step == "gemm_1" else best.second):
                    self.attempt(step, replace(best, first=tile, second=tile))
        for timed in self.found.get(("gemm_1", 128, Gathered), [])[:_FINALISTS]:
            if sorts and isinstance(timed.plan, Gathered) and timed.plan.fused:
                self.attempt("gemm_1", Sorted(timed.plan.first, SpecializedTile()))

    def settle(self) -> tuple[TilePlan, Timed, Timed] | None:
        """Return the fastest plan, and its steps as they were timed apart; None if nothing ran."""
        finalists = self._finalists()
        if not finalists:
            return None
        us = self._together([plan for plan, *_ in finalists])
        return finalists[us.index(min(us))]

    def _finalists(self) -> list[tuple[TilePlan, Timed, Timed]]:
        groups = []
        for (step, block_m, kind), firsts in self.found.items():
            after = Gathered if kind is Gathered else Sorted
            seconds = self.found.get(("gemm_2", block_m, after), [])
            if step == "gemm_1" and firsts and seconds:
                groups.append((firsts, seconds))
        if not groups:
            return []
        fastest = min(first[0].us + second[0].us for first, second in groups)
        return [
            (_with_second(first.plan, second.plan), first, second)
            for firsts, seconds in groups
            if firsts[0].us + seconds[0].us < _CLOSE * fastest
            for first, second in itertools.product(firsts[:_FINALISTS], seconds[:_FINALISTS])
        ]

    def _together(self, plans: Sequence[TilePlan]) -> list[float]:
        """Return the microseconds of a replay of both GEMMs of each plan, interleaved."""
        timer = Timer()
        for plan in plans:
            timer.add(self._case.launches(plan, "gemm_1", "gemm_2"))
        return timer.microseconds(_STABLE, 5)


def _tile_is_impossible(error: Exception) -> bool:
    """Return whether an error says that the device or Triton cannot run a tile: too much shared
    memory or too many registers, or one of the compiler's passes or ptxas fails."""
    if isinstance(error, triton.TritonError):
        return True
    return type(error) is RuntimeError and "PassManager" in str(error)


def _with_second(first: Any, second: TilePlan) -> TilePlan:
    plan: TilePlan = replace(first, second=second.second)
    return plan


def _key(step: Step, plan: TilePlan) -> Key:
    sorts = step == "gemm_2" and isinstance(plan, Sorted)
    return step, plan.block_m, Sorted if sorts else type(plan)


def fastest_plan(case: Case, rows: int) -> tuple[TilePlan, Timed, Timed] | None:
    """Search all candidates for ``rows`` tokens; see `Search.settle`."""
    search = Search(case)
    for attempt in attempts(case.problem, rows):
        search.attempt(*attempt)
    search.refine()
    return search.settle()


def compile_attempts(case: Case, wanted: Sequence[Attempt]) -> None:
    """Launch each step once on a small case, which fills Triton's cache."""
    for step, plan in wanted:
        try:
            case.launches(plan, step)[0]()
        except Exception as error:
            if not _tile_is_impossible(error):
                raise
