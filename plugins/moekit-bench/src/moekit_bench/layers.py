"""Whole layers over ranks: every dispatcher with every experts backend, over numbers of tokens.

Every rank has its own T tokens. Its output is compared with the fp32 oracle of one rank that
holds all experts: each rank computes the oracle's sum over its own experts, and the sums are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moekit
from moekit.plugin import (
    DispatcherSpec,
    ExpertWeights,
    MoEProblem,
    PackedWeights,
    Routing,
    Workspace,
    reason_of,
    registry,
)

from . import report
from .experts import oracle_rows, relative_error, sampled_rows
from .implementations import asked_of, backends
from .internals import benchmark_bound, find_experts
from .ranks import RanksSweep, Task, cause, destroy_made, local_device, made_once
from .records import Cell, Result, combination, copied_share, merge
from .shapes import random_weights
from .timer import Prepared, Timer, first_fault, from_all_ranks, release, time_one

# Tokens of each rank that are compared with the oracle.
_CHECKED = 8
# Beyond this many seconds, turns of one kind are cut short to two.
_SECONDS_A_KIND = 0.4


def measure_layers(rank: int, world_size: int, task: Task) -> list[Result]:
    """Return this rank's measurements of each of the experts. Collective."""
    try:
        with torch.inference_mode():
            mine = _Layers(task.problem_of(rank), task)
            return [mine.measure(experts) for experts in task.experts]
    except Exception:  # the state of the kernels is unknown
        destroy_made()
        raise


@dataclass
class _Held:
    """The weights that the cells of a rank share, and what was made of them."""

    weights: ExpertWeights
    packed: dict[str, tuple[PackedWeights, float]] = field(default_factory=dict)
    wants: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)


_held: dict[object, _Held] = {}  # of the latest cells alone


class _Layers:
    """One rank's inputs and weights for a task."""

    def __init__(self, problem: MoEProblem, task: Task) -> None:
        self.problem, self.task = problem, task
        self.device = local_device(problem.device.type)
        self.timer = Timer(self.device, ranks=True)
        self.inputs = task.inputs_of(problem.parallel.ep_rank, self.device)
        self.held = self._hold()
        self.weights = self.held.weights
        self.rows, self.want = self._oracle()

    def _hold(self) -> _Held:
        key = (repr(self.problem.replace(max_num_tokens=None)), self.task.settings.seed)
        if key not in _held:
            _held.clear()
            release(self.device)
            seed = self.task.settings.seed * 1013 + self.problem.parallel.ep_rank
            _held[key] = _Held(random_weights(self.problem, self.device, seed))
        return _held[key]

    def _oracle(self) -> tuple[Tensor, Tensor]:
        """Return rows of the first input and the oracle's output (n, H) for them. Collective."""
        key = (self.task.cell.tokens, self.task.cell.routing)
        if key in self.held.wants:
            return self.held.wants[key]
        x, routing = self.inputs[0]
        rows = sampled_rows(len(x), _CHECKED, self.device)
        mine = (x[rows].float(), routing.topk_weights[rows], routing.topk_ids[rows])
        want = torch.zeros_like(mine[0])
        for rank, (x, topk_weights, ids) in enumerate(zip(*map(_gathered, mine), strict=True)):
            every = torch.arange(len(x), device=self.device)
            partial = oracle_rows(self.problem, self.weights, x, Routing(topk_weights, ids), every)
            dist.all_reduce(partial)
            if rank == self.problem.parallel.ep_rank:
                want = partial
        self.held.wants[key] = rows, want
        return rows, want

    # -- one combination ----------------------------------------------------------------------

    def measure(self, experts: str) -> Result:
        failed = _named(self.task.spec.name, experts)
        kernel: moekit.ModularKernel | None = None
        try:
            kernel = made_once(self.task, self.problem, experts, lambda: self._composed(experts))
            packed, copied = self._packed(experts, kernel)
            memory = kernel.memory(self.task.cell.tokens)
            reason = self._too_large(memory.total - memory.buffers)  # these are held already
        except Exception as failure:
            reason = reason_of(failure)
        try:
            if reason := first_fault(reason):
                return Result(**failed, reason=reason)
            assert kernel is not None
            result = self._times(kernel, packed)
            return replace(result, **failed, copied=copied, stated_bytes=memory.total)
        finally:
            if kernel is not None:  # the next combination needs the memory
                kernel.workspace = Workspace()

    def _composed(self, experts: str) -> moekit.ModularKernel:
        """Return a new kernel for all numbers of tokens up to ``problem.max_num_tokens``."""
        name, problem = asked_of(experts, self.problem)
        return moekit.compose(
            problem,
            self.task.spec.name,
            name,
            workspace=Workspace(),
            checked=False,
            backends=_backends(self.task.spec),
        )

    def _times(self, kernel: moekit.ModularKernel, packed: PackedWeights) -> Result:
        def call(x: Tensor, routing: Routing) -> Tensor:
            return kernel(x, packed, routing)

        with kernel.experts.tuning():
            for each in self.inputs:
                call(*each)
        prepared = Prepared(call, self.inputs, self.device, graph=False, timer=self.timer)
        replays = self._replays(self.timer.eager_us(prepared.all_calls))
        error = self._error(prepared.output)
        unsafe = [s.name for s in (kernel.dispatcher.spec, kernel.experts.spec) if not s.graph_safe]
        if unsafe and self.device.type == "cuda":
            prepared.note = f"{unsafe[0]}: declared not graph-safe"
        else:
            prepared.capture()
        if prepared.graph is not None:
            error = max(error, self._error(prepared.first_output()))
        timing = time_one(prepared, replays)
        bound, held = benchmark_bound(self.problem), kernel.dispatcher.buffer_bytes()
        return Result.of(timing, error, bound, buffer_bytes=held)

    def _error(self, out: Tensor) -> float:
        error = relative_error(out, self.rows, self.want)
        return math.inf if math.isnan(error) else error

    def _packed(self, experts: str, kernel: moekit.ModularKernel) -> tuple[PackedWeights, float]:
        """Return the packed weights, made once for all dispatchers, and what they copy."""
        if experts not in self.held.packed:
            packed = kernel.pack(self.weights)
            self.held.packed[experts] = packed, copied_share(self.weights.tensors(), packed)
        return self.held.packed[experts]

    def _too_large(self, nbytes: int) -> str:
        if self.device.type != "cuda":
            return ""
        free, _ = torch.cuda.mem_get_info(self.device)
        if nbytes > free:
            release(self.device)
            free, _ = torch.cuda.mem_get_info(self.device)
        if nbytes <= free:
            return ""
        return f"needs {nbytes / 1e9:.0f} GB, {free / 1e9:.0f} are free"

    def _replays(self, us: float) -> int:
        """Return the turns that fit the time, by the slowest rank. Collective."""
        slowest = max(*from_all_ranks(us), 1.0)
        return max(2, min(self.task.settings.replays, int(_SECONDS_A_KIND * 1e6 / slowest)))


def _named(dispatcher: str, experts: str) -> dict[str, Any]:
    """Return the fields of a result that name its combination."""
    name = combination(dispatcher, experts)
    return {"name": name, "dispatcher": dispatcher, "experts": experts}


def _backends(spec: DispatcherSpec) -> moekit.Registry:
    """Return this process's backends, with ``spec`` if another process registered it."""
    known = registry()
    if spec.name in known.dispatchers:
        return known
    copy = known.copy()
    copy.register(spec)
    return copy


def _gathered(mine: Tensor) -> list[Tensor]:
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine.contiguous())
    return every


# -- the sweep --------------------------------------------------------------------------------


@dataclass(kw_only=True)
class LayersSweep(RanksSweep):
    """Every dispatcher with every experts backend.

    wanted: (problem, dispatcher, experts) -> whether to measure.
    """

    experts: Sequence[str]
    wanted: Callable[[MoEProblem, str, str], bool] = lambda *_: True
    mode = "layers"

    def __post_init__(self) -> None:
        if not self.experts:
            raise moekit.MoekitError("nothing to measure: name --experts")
        self.implementations = backends(self.experts)
        super().__post_init__()

    def choices(self) -> list[report.Choice]:
        """Return what `moekit.compose` would choose now in each measured cell."""
        return [report.of_layer(self.problem(c.scheme, c.tokens), c) for c in self.run.cells]

    def report(self) -> str:
        return report.markdown(self.run, self.choices())

    def results(self, spec: DispatcherSpec, problem: MoEProblem, cell: Cell) -> list[Result]:
        names = []
        for name in self.experts:
            base, asked = asked_of(name, problem)
            if why := spec.unsupported(asked) or find_experts(base, registry()).unsupported(asked):
                self.refuse(combination(spec.name, name), "; ".join(why), cell, cell.tokens)
            elif self.wanted(problem, spec.name, name):
                names.append(name)
        return self._measured(spec, problem, cell, names) if names else []

    def _measured(
        self, spec: DispatcherSpec, problem: MoEProblem, cell: Cell, names: Sequence[str]
    ) -> list[Result]:
        task = Task(spec, problem, cell, self.settings, tuple(names))
        try:
            ranks = self.on_ranks(measure_layers, task)
            return [merge(results) for results in zip(*ranks, strict=True)]
        except Exception as error:
            if len(names) > 1:  # which of them it was, and the others' times
                return [r for n in names for r in self._measured(spec, problem, cell, [n])]
            return [Result(**_named(spec.name, names[0]), reason=cause(error))]
