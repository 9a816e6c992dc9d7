"""Time candidate plans of one problem and number of rows on a GPU, and find the fastest.

The tuner launches the plans themselves (`plans`): each GEMM is timed apart, as a step of a plan,
and the best few are then timed as whole plans, since a GEMM that is fastest alone need not be
fastest after another kernel or in one launch with it.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import triton
from moekit_bench import Timer
from moekit_kernels.numerics import SCALE_GROUP
from moekit_kernels.rows import quantize_activations
from torch import Tensor

from moekit.plugin import MoEProblem, PackedWeights

from .calls import Buffers, Call, Layer
from .capabilities import (
    PACKED_BLOCK_M,
    fusable,
    operand_bits,
    shared_memory,
    specializable,
    swap_ab_pays,
    tma_possible,
)
from .heuristics import sorted_wins, sorting_pays, workspace
from .kernels.tiles import CHUNK, GemmTile, OrderedTile, SortedTile, SpecializedTile, TokenTile
from .plans import Copied, CopiedAhead, Gathered, Sorted, TilePlan

# Rows per expert up to which token tiles are timed.
_TOKEN_TILES_MOST = 1024
# Microseconds above which the launch is a small part of the time.
_LONG = 200.0
# Microseconds of work after which the clock is stable.
_STABLE = 10e3
# How many of each kind are timed again, and of kinds how close to the fastest.
_FINALISTS, _CLOSE = 3, 1.08

# -- candidates ---------------------------------------------------------------------------------

Step = Literal["gemm_1", "gemm_2"]
"""The methods of a plan that are timed apart."""


class Attempt(NamedTuple):
    """A GEMM to time, as a step of a plan; the plan's other tile does not matter."""

    step: Step
    plan: TilePlan


def attempts(problem: MoEProblem, rows: int) -> Iterator[Attempt]:
    """Yield the steps to time for ``rows`` tokens. Gathered rows are left out where expert-sorted
    rows have won in every shape."""
    p, wide = problem, 2 if problem.activation.gated else 1
    per_expert = rows * p.top_k / p.num_experts
    sort = sorting_pays(p, rows, p.top_k)
    if not (sort and sorted_wins(p, per_expert)):
        for tile in candidates(p, per_expert, wide):
            if fusable(p, tile.block_n):
                yield Attempt("gemm_1", Gathered(tile, tile, True))
        for tile in candidates(p, per_expert, 1):
            if p.quant.activation is not None:
                yield Attempt("gemm_1", Gathered(tile, tile, False))
            yield Attempt("gemm_2", Gathered(tile, tile, True))
    if sort:
        for ordered in sorted_candidates(p, per_expert, wide):
            yield Attempt("gemm_1", Copied(ordered, ordered))
            if isinstance(ordered, SpecializedTile) and p.quant.weight is None:
                yield Attempt("gemm_1", CopiedAhead(ordered, ordered))
        for ordered in sorted_candidates(p, per_expert, 1):
            yield Attempt("gemm_2", Copied(ordered, ordered))


def candidates(problem: MoEProblem, per_expert: float, wide: int) -> list[GemmTile]:
    """Return tiles for gathered rows; wide: weight rows behind an output column."""
    a_bits, w_bits = operand_bits(problem)
    blocks_m = [b for b in (16, 32, 64, 128) if b == 16 or per_expert * 3 >= b]
    blocks_m = blocks_m[-2:] if per_expert < 200 else [64, 128]
    if w_bits == 4:
        return _packed_candidates(problem, [8, 16] if per_expert <= 4 else blocks_m, wide)
    found: list[GemmTile] = []
    descriptors = (True, False) if tma_possible(problem) else (False,)
    if swap_ab_pays(problem):
        few = [b for b in blocks_m if b < 64]
        found += _swapped_candidates(problem, few, wide, descriptors)
        blocks_m = [b for b in blocks_m if b >= 64]
    steps = (128,) if problem.quant.name.endswith("_block") or a_bits == 8 else (64, 128)
    for block_m, columns, warps, tma, block_k in itertools.product(
        blocks_m, (64, 128, 256), (4, 8), descriptors, steps
    ):
        if columns // wide < 32 or not _fits_registers(block_m, columns, warps, a_bits):
            continue
        stage = (block_m * a_bits + columns * w_bits) * block_k // 8
        for stages in _stage_counts(block_m, columns, warps, stage, shared_memory(problem)):
            size = block_m, columns // wide, block_k
            found.append(GemmTile(*size, 8, warps, stages, tma, halves=block_m == 128))
    if a_bits == 8 and wide == 1:
        # Two weight tiles side by side share the registers for the sums of a step.
        found += [
            GemmTile(m, 128, 128, 8, warps, stages, tma, halves=m == 128, wide=True)
            for (m, warps), tma, stages in itertools.product(
                ((64, 4), (64, 8), (128, 8)), descriptors, (2, 3, 4)
            )
            if m in blocks_m
        ]
    return found


def _fits_registers(block_m: int, columns: int, warps: int, a_bits: int) -> bool:
    """Return whether each thread has enough sums, and registers for them."""
    per_thread = block_m * columns / (32 * warps) * (2 if a_bits == 8 else 1)
    too_many_warps = block_m < 64 and warps == 8 and columns < 128
    return 8 <= per_thread <= 256 and not too_many_warps


def _stage_counts(block_m: int, columns: int, warps: int, stage: int, shared: int) -> list[int]:
    """Return how many stages of ``stage`` bytes are worth timing."""
    stages = min(5 if block_m <= 32 else 4, (shared - block_m * columns) // stage)
    choices = {stages}
    if block_m >= 64 and warps == 4:  # a second program on the multiprocessor
        choices.add(min(stages, shared // 2 // stage))
    return [stages for stages in choices if stages >= 2]


def _swapped_candidates(
    problem: MoEProblem, blocks_m: Sequence[int], wide: int, descriptors: Sequence[bool]
) -> list[GemmTile]:
    """Return swap-AB tiles for few rows of fp8: weights are wgmma's 64 rows, and up to three
    programs share a multiprocessor."""
    found, shared = [], shared_memory(problem)
    tiles = ((64, 4), (128, 4), (128, 8)) if wide == 2 else ((64, 4), (128, 4), (256, 4), (256, 8))
    for block_m, (block_n, warps), tma in itertools.product(blocks_m, tiles, descriptors):
        stage = (block_m + block_n * wide) * SCALE_GROUP
        most = {min(6, shared // programs // stage) for programs in (1, 2, 3)}
        found += [
            GemmTile(block_m, block_n, SCALE_GROUP, 8, warps, stages, tma, swapped=True)
            for stages in sorted(most)
            if stages >= 3
        ]
    return found


def _packed_candidates(problem: MoEProblem, blocks_m: Sequence[int], wide: int) -> list[GemmTile]:
    """Return tiles for 4 bits: a warp makes 16 weight rows, or 32 for few columns."""
    found = []
    tiles = ((16, 1), (32, 2), (64, 4), (64, 2), (128, 8), (128, 4))
    for block_m, (block_n, warps), stages in itertools.product(
        [b for b in blocks_m if b <= PACKED_BLOCK_M], tiles, (3, 5)
    ):
        per_thread = block_m * block_n * wide / (32 * warps)  # sums; partial sums need as many
        if per_thread <= (32 if block_n > 16 * warps else 64):
            stage = (16 * block_m + 4 * block_n * wide) * CHUNK // 8
            if stages * stage <= shared_memory(problem) and (block_m < 64 or block_n >= 64):
                found.append(GemmTile(block_m, block_n, CHUNK, 8, warps, stages))
    return found


def sorted_candidates(problem: MoEProblem, per_expert: float, wide: int) -> list[OrderedTile]:
    """Return tiles for expert-sorted rows; wide: weight rows behind an output column."""
    found: list[OrderedTile] = []
    if specializable(problem):
        found += [SpecializedTile(g, h) for g in (4, 8, 16) for h in (True, False)]
    if problem.quant.weight is not None:
        return found
    found += [
        SortedTile(128, 256 // wide, 64, group_m, 8, stages, persistent, halves=not persistent)
        for stages, group_m, persistent in itertools.product((3, 4), (4, 8, 16), (False, True))
        if not (persistent and wide == 2)
    ]
    if specializable(problem) and per_expert <= _TOKEN_TILES_MOST:
        found += [TokenTile(n, group_m) for n in (128, 256) for group_m in (1, 4)]
    return found


def variations(best: GemmTile) -> list[GemmTile]:
    """Return neighbours of a good tile."""
    found = [replace(best, group_m=g) for g in (1, 4, 16, 32) if g != best.group_m]
    if best.num_stages > 2:
        found.append(replace(best, num_stages=best.num_stages - 1))
    if best.halves:
        found.append(replace(best, halves=False))
    return found


# -- timing -------------------------------------------------------------------------------------

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
        return cls(p, [Call(layer, packed, buffers, x, x_scale, i, ones, y) for i in ids])

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


def interleaved_us(
    timer: Timer, alternatives: Sequence[Launches], least: float = 0.0, rounds: int = 5
) -> list[float]:
    """Return the microseconds of one replay of each alternative, a graph of all its launches.

    Each is the median of ``rounds`` iterations of ``least`` microseconds. Long kernels lower the
    clock; interleaving spreads that over all of them.
    """
    graphs = [_graph(launches) for launches in alternatives]
    once = [timer.queued_us(graph.replay) for graph in graphs]
    took: list[list[float]] = [[] for _ in once]
    for _, (i, graph) in itertools.product(range(rounds), enumerate(graphs)):
        took[i].append(timer.queued_us(graph.replay, max(1, int(least / once[i]))))
    return [statistics.median(us) for us in took]


def _graph(launches: Launches) -> torch.cuda.CUDAGraph:
    launches[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


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
        self._case, self._timer = case, Timer(torch.device(case.problem.device.type))
        self.found: dict[Key, list[Timed]] = {}

    def attempt(self, step: Step, plan: TilePlan) -> None:
        """Time a step; a tile that does not compile is left out."""
        found = self.found.setdefault(_key(step, plan), [])
        enough = found[0].us if found else float("inf")
        try:
            launches = self._case.launches(plan, step)
            launches[0]()
            us = self._timer.queued_us(launches[0])
            if us < max(_LONG, 1.5 * enough):
                (us,) = interleaved_us(self._timer, [launches], rounds=4)
                us /= len(launches)
        except Exception as error:
            if not _tile_is_impossible(error):
                raise
            return
        bisect.insort(found, Timed(us, plan))

    def refine(self) -> None:
        """Time the neighbours of the best gathered tiles."""
        for (step, _, kind), found in list(self.found.items()):
            if kind is Gathered and found:
                best: Any = found[0].plan
                for tile in variations(best.first if step == "gemm_1" else best.second):
                    self.attempt(step, replace(best, first=tile, second=tile))

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
            (replace(first.plan, second=second.plan.second), first, second)  # type: ignore[arg-type]
            for firsts, seconds in groups
            if firsts[0].us + seconds[0].us < _CLOSE * fastest
            for first, second in itertools.product(firsts[:_FINALISTS], seconds[:_FINALISTS])
            if type(first.plan) is Copied or not isinstance(second.plan.second, TokenTile)
        ]

    def _together(self, plans: Sequence[TilePlan]) -> list[float]:
        """Return the microseconds of a replay of both GEMMs of each plan, interleaved."""
        launches = [self._case.launches(plan, "gemm_1", "gemm_2") for plan in plans]
        return interleaved_us(self._timer, launches, _STABLE)


def _tile_is_impossible(error: Exception) -> bool:
    """Return whether an error says that the device or Triton cannot run a tile: too much shared
    memory or too many registers, or one of the compiler's passes or ptxas fails."""
    if isinstance(error, triton.TritonError):
        return True
    return type(error) is RuntimeError and "PassManager" in str(error)


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
