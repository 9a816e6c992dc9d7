"""Run measurements on ranks, which this process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

import torch

import moekit
from moekit.errors import MoekitError
from moekit.plugin import (
    DeviceSpec,
    DispatcherSpec,
    MoEProblem,
    ParallelConfig,
    PrepareAndFinalize,
    reason_of,
    registry,
)

from .environment import about
from .implementations import asked_of
from .internals import DTYPES, named
from .records import Cell, Result, Run, Settings, merge
from .shapes import Inputs, Shape, inputs
from .sweep import Sweep
from .timer import first_fault

M = TypeVar("M", moekit.ModularKernel, PrepareAndFinalize)

_SECONDS_A_CELL = 180.0


@dataclass(frozen=True)
class Task:
    """One measurement, which every rank takes part in. problem: as rank 0 sees it; its
    max_num_tokens is the capacity, and the cell's tokens are `max_tokens` of the calls."""

    spec: DispatcherSpec
    problem: MoEProblem
    cell: Cell
    settings: Settings
    experts: tuple[str, ...] = ("",)

    def problem_of(self, rank: int) -> MoEProblem:
        return self.problem.replace(parallel=replace(self.problem.parallel, ep_rank=rank))

    def inputs_of(self, rank: int, device: torch.device) -> Inputs:
        """Return the rank's own tokens, which choose among the experts of all ranks."""
        whole = self.problem.replace(parallel=ParallelConfig())
        cell, seed = self.cell, self.settings.seed * 1009 + rank
        made = inputs(cell.routing, cell.tokens, self.settings.inputs, whole, device, seed)
        return [(x, replace(routing, max_tokens=cell.tokens)) for x, routing in made]


# Made once for a dispatcher and a problem, and used for every number of tokens.
_made: dict[tuple[str, str], dict[str, Any]] = {}


def made_once(task: Task, problem: MoEProblem, name: str, make: Callable[[], M]) -> M:
    """Return this rank's kernel or dispatcher of that name, which ``make`` makes at first.

    What was made for another dispatcher or problem is destroyed before. Collective: if a rank
    cannot make it, all raise MoekitError, and none keeps it.
    """
    group = repr(task.spec), repr(problem)
    if group not in _made:
        destroy_made()
    mine = _made.setdefault(group, {})
    if name not in mine:
        made: M | Exception
        try:
            made = make()
        except Exception as error:
            made = error
        fault = first_fault(reason_of(made) if isinstance(made, Exception) else "")
        if isinstance(made, Exception):
            raise made
        if fault:
            made.destroy()
            raise MoekitError(fault)
        mine[name] = made
    found: M = mine[name]
    return found


def destroy_made(rank: int = 0, world_size: int = 1) -> None:
    """Destroy what this rank's `made_once` holds. Collective."""
    every = [each for group in _made.values() for each in group.values()]
    _made.clear()
    for each in every:
        each.destroy()
    if every and torch.cuda.is_available():  # libraries take their buffers outside torch's cache
        torch.cuda.empty_cache()


Runner = Callable[..., list[Any]]
"""Runs ``function(rank, world_size, *args)`` on each rank, and returns their results."""


@contextmanager
def _pool(count: int, device_type: str) -> Iterator[Runner]:
    """Yield ranks of this process; new ones after a failure, which may have left them unusable."""
    from moekit.testing.distributed import RankPool

    pools: list[RankPool] = []

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        if not pools:
            pools.append(RankPool(count, device_type, _SECONDS_A_CELL))
        try:
            return pools[0].run(function, *args)
        except Exception:
            pools.pop().close()
            raise

    try:
        yield run
    finally:
        for pool in pools:
            pool.close()


def cause(error: Exception) -> str:
    """Return what a rank raised, rather than that ranks failed."""
    tracebacks = getattr(error, "tracebacks", {})
    for rank, text in sorted(tracebacks.items()):
        return f"rank {rank}: {text.strip().splitlines()[-1]}"
    return reason_of(error)


def local_device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


# -- what they measure ------------------------------------------------------------------------


Measure = Callable[[MoEProblem, Task], list[Result]]
"""Returns a rank's measurement of each of the task's experts. Collective."""


def on_rank(rank: int, world_size: int, measure: Measure, task: Task) -> list[Result]:
    """Return what ``measure`` measures on this rank. Collective."""
    try:
        with torch.inference_mode():
            return measure(task.problem_of(rank), task)
    except Exception:  # the state of what was made is unknown
        destroy_made()
        raise


@dataclass(frozen=True, kw_only=True)
class _Part(Cell):
    """Name the part of a cell that one dispatcher measures."""

    spec: DispatcherSpec

    def __str__(self) -> str:
        return f"{super().__str__()} {self.spec.name}"


@dataclass(kw_only=True)
class RanksSweep(Sweep):
    """The sweep of `--dispatch` and `--layers`. One dispatcher after another takes all numbers of
    tokens, so that only one holds its buffers.

    experts: to combine each dispatcher with; an empty name: none. asked: `--ranks`. capacity:
    `--capacity`; None: as many tokens as each cell has. wanted: whether to measure (problem,
    dispatcher, experts).
    """

    mode: str
    measure_on_rank: Measure
    shape: Shape
    dispatchers: Sequence[DispatcherSpec]
    experts: Sequence[str] = ("",)
    device: DeviceSpec
    asked: int | None
    capacity: int | None = None
    wanted: Callable[[MoEProblem, str, str], bool] = lambda *_: True
    on_ranks: Runner = field(init=False)

    def __post_init__(self) -> None:
        default = torch.cuda.device_count() if self.device.type == "cuda" else 2
        self.num_ranks = self.asked or default
        if self.num_ranks < 2:
            raise MoekitError(
                f"tokens move between at least 2 ranks (got {self.num_ranks}); set --ranks"
            )
        if self.capacity is not None:
            self.capacity = max(self.capacity, *self.tokens)
        self.cells = [
            _Part(shape=self.shape.name, scheme=q, routing=r, tokens=t, spec=spec)
            for q, r, spec, t in product(self.schemes, self.routings, self.dispatchers, self.tokens)
        ]
        names = [*(spec.name for spec in self.dispatchers), *self.experts]
        self.run = Run(
            mode=self.mode,
            **about(self.command, torch.device(self.device.type), self.device, names),
            ranks=self.num_ranks,
            capacity=self.capacity,
            settings=self.settings,
        )

    def problem(self, scheme: str, tokens: int) -> MoEProblem:
        """Return the problem that a cell's kernels are composed for, as rank 0 sees it."""
        return self.shape.problem(
            quant=scheme,
            dtype=DTYPES[self.settings.dtype],
            max_num_tokens=tokens if self.capacity is None else self.capacity,
            parallel=ParallelConfig(ep_size=self.num_ranks),
            device=self.device,
        )

    def measure(self) -> None:
        if self.device.type == "cuda" and torch.cuda.device_count() < self.num_ranks:
            raise MoekitError(
                f"{self.num_ranks} ranks need as many GPUs, and this machine has "
                f"{torch.cuda.device_count()}: lower --ranks (tune: --ep)"
            )
        with _pool(self.num_ranks, self.device.type) as self.on_ranks:
            super().measure()

    def finish(self) -> None:
        self.on_ranks(destroy_made)

    def measure_cell(self, cell: Cell) -> Cell:
        assert isinstance(cell, _Part)
        spec, problem = cell.spec, self.problem(cell.scheme, cell.tokens)
        whole = Cell(shape=cell.shape, scheme=cell.scheme, routing=cell.routing, tokens=cell.tokens)
        if why := spec.unsupported(problem):
            self.refuse(spec.name, "; ".join(why), whole, cell.tokens)
            return whole
        names = []
        for name in self._partners(spec, problem):
            if why := _unsupported(spec, problem, name):
                self.refuse(f"{spec.name} + {name}", "; ".join(why), whole, cell.tokens)
            elif self.wanted(problem, spec.name, name):
                names.append(name)
        task = Task(spec, problem, whole, self.settings, tuple(names))
        return replace(whole, results=tuple(self._measured(task))) if names else whole

    def _partners(self, spec: DispatcherSpec, problem: MoEProblem) -> Sequence[str]:
        """Return the experts to combine ``spec`` with: itself, if it is a fused kernel."""
        if spec.fused:
            return [spec.name]
        find = registry().expert
        return [n for n in self.experts if not n or not named(asked_of(n, problem)[0], find).fused]

    def _measured(self, task: Task) -> list[Result]:
        try:
            ranks = self.on_ranks(on_rank, self.measure_on_rank, task)
            merged = [merge(results) for results in zip(*ranks, strict=True)]
        except Exception as error:
            if len(task.experts) > 1:  # which of them it was, and the others' times
                alone = (replace(task, experts=(name,)) for name in task.experts)
                return [result for each in alone for result in self._measured(each)]
            merged = [Result(reason=cause(error))]
        return [_named(r, task.spec.name, e) for r, e in zip(merged, task.experts, strict=True)]


def _unsupported(spec: DispatcherSpec, problem: MoEProblem, experts: str) -> list[str]:
    if not experts:
        return []
    base, asked = asked_of(experts, problem)
    return spec.unsupported(asked) or named(base, registry().expert).unsupported(asked)


def _named(result: Result, dispatcher: str, experts: str) -> Result:
    if not experts:
        return replace(result, name=dispatcher)
    name = f"{dispatcher} + {experts}"
    return replace(result, name=name, dispatcher=dispatcher, experts=experts)
