"""Whole layers over ranks: every dispatcher with every experts backend, over numbers of tokens.

Every rank has T tokens of its own. Its output is compared with the fp32 oracle of one rank that
holds all experts: each rank computes the oracle's sum over its own experts, and the sums are added.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

import moekit
from moekit.plugin import (
    DeviceSpec,
    DispatcherSpec,
    ExpertWeights,
    MoEProblem,
    PackedWeights,
    ParallelConfig,
    Routing,
    Workspace,
    registry,
)

from .accuracy import oracle_rows, relative_error, sampled_rows
from .codec import merge, merged_by
from .environment import device_facts, versions
from .implementations import backends
from .internals import benchmark_bound, find_experts
from .overlap import OverlapTimer
from .ranks import Ranks, cause, local_device
from .records import (
    LayerCell,
    LayerResult,
    LayerSettings,
    LayerSizes,
    LayersRun,
    Overlap,
    Refusal,
    combination,
    copied_share,
    measured,
)
from .shapes import Inputs, Shape, inputs, random_weights
from .sweep import Log
from .timer import (
    Prepared,
    Timer,
    Timing,
    first_fault,
    first_line,
    from_all_ranks,
    release,
    time_one,
)

# Tokens of each rank that are compared with the oracle.
_CHECKED = 8
# Beyond this many seconds, turns of one kind are cut short to two.
_SECONDS_A_KIND = 0.4


@dataclass(frozen=True)
class LayerTask:
    """A dispatcher, the experts to combine it with, the problem as rank 0 sees it, and how to
    measure. overlap: also time calls in flight and shared experts, see `OverlapTimer`."""

    spec: DispatcherSpec
    experts: tuple[str, ...]
    problem: MoEProblem
    tokens: int
    routing: str = "uniform"
    inputs: int = 2
    replays: int = 5
    graph: bool = True
    overlap: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """What one rank measured. error: infinite if an output is not finite."""

    timing: Timing
    error: float = merged_by(max)
    buffer_bytes: int = merged_by(max)
    stated_bytes: int = merged_by(max)
    copied: float
    overlap: Overlap | None


def measure_layers(rank: int, world_size: int, task: LayerTask) -> list[LayerTimes | str]:
    """Return this rank's measurements of each of the experts, or why it has none. Collective."""
    parallel = replace(task.problem.parallel, ep_rank=rank)
    problem = task.problem.replace(parallel=parallel)
    kernels: list[moekit.ModularKernel] = []  # until the end: they share the dispatcher's buffers
    try:
        with torch.inference_mode():
            mine = _Layers(problem, task)
            return [mine.measure(experts, kernels) for experts in task.experts]
    finally:
        for kernel in kernels:
            kernel.destroy()
        if problem.device.type == "cuda":  # libraries take their buffers outside torch's cache
            torch.cuda.empty_cache()


def layer_results(
    task: LayerTask, ranks: Sequence[Sequence[LayerTimes | str]]
) -> list[LayerResult]:
    """Return one result for each of the experts: medians of times, the worst error, most bytes."""
    results, bound = [], benchmark_bound(task.problem)
    for experts, each in zip(task.experts, zip(*ranks, strict=True), strict=True):
        dispatcher, first = task.spec.name, each[0]
        if isinstance(first, str):
            results.append(LayerResult(dispatcher=dispatcher, experts=experts, reason=first))
            continue
        merged = merge([times for times in each if not isinstance(times, str)])
        results.append(
            LayerResult(
                dispatcher=dispatcher,
                experts=experts,
                **measured(merged.timing, merged.error, bound) | {"reason": ""},
                buffer_bytes=merged.buffer_bytes,
                stated_bytes=merged.stated_bytes,
                copied=merged.copied,
                overlap=merged.overlap,
            )
        )
    return results


@dataclass
class _Held:
    """What the cells of a rank have in common: weights, and what was made of them."""

    key: object = None
    weights: ExpertWeights | None = None
    packed: dict[str, tuple[PackedWeights, float]] = field(default_factory=dict)
    wants: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)


_held = _Held()


class _Layers:
    """One rank's inputs and weights for a task."""

    def __init__(self, problem: MoEProblem, task: LayerTask) -> None:
        self.problem, self.task = problem, task
        self.device = local_device(problem.device.type)
        self.timer = Timer(self.device, ranks=True)
        whole = problem.replace(parallel=ParallelConfig())
        seed = task.seed * 1009 + problem.parallel.ep_rank
        self.inputs: Inputs = inputs(
            task.routing, task.tokens, task.inputs, whole, self.device, seed
        )
        self.weights = self._weights()
        self.rows, self.want = self._oracle()

    def _weights(self) -> ExpertWeights:
        global _held
        key = (repr(self.problem.replace(max_num_tokens=None)), self.task.seed)
        if _held.key != key:
            _held = _Held()
            release(self.device)
            seed = self.task.seed * 1013 + self.problem.parallel.ep_rank
            _held.key, _held.weights = key, random_weights(self.problem, self.device, seed)
        assert _held.weights is not None
        return _held.weights

    def _oracle(self) -> tuple[Tensor, Tensor]:
        """Return rows of the first input and the oracle's output (n, H) for them. Collective."""
        key = (self.task.tokens, self.task.routing)
        if key in _held.wants:
            return _held.wants[key]
        x, routing = self.inputs[0]
        rows = sampled_rows(len(x), _CHECKED, self.device)
        mine = (x[rows].float(), routing.topk_weights[rows], routing.topk_ids[rows])
        want = torch.zeros_like(mine[0])
        for rank, (x, topk_weights, ids) in enumerate(zip(*map(_gathered, mine), strict=True)):
            every = torch.arange(len(x), device=self.device)
            partial = oracle_rows(
                self.problem, self.weights, x, Routing(topk_weights, ids), every
            )  # fmt: skip
            dist.all_reduce(partial)
            if rank == self.problem.parallel.ep_rank:
                want = partial
        _held.wants[key] = rows, want
        return rows, want

    # -- one combination ----------------------------------------------------------------------

    def measure(self, experts: str, kernels: list[moekit.ModularKernel]) -> LayerTimes | str:
        """Measure a combination, whose kernel is added to ``kernels``; or return why not."""
        stated, reason = 0, ""
        try:
            kernel = moekit.compose(
                self.problem,
                self.task.spec.name,
                experts,
                workspace=Workspace(),
                checked=False,
                backends=_backends(self.task.spec),
            )
            kernels.append(kernel)
            packed, copied = self._packed(experts, kernel)
            stated = kernel.memory(self.task.tokens).total
            reason = self._too_large(stated)
        except Exception as failure:
            reason = first_line(failure)
        try:
            if reason := first_fault(reason):
                return reason
            return self._times(kernel, packed, copied, stated)
        finally:
            for kernel in kernels:  # the next combination needs the memory
                kernel.workspace = Workspace()

    def _times(
        self, kernel: moekit.ModularKernel, packed: PackedWeights, copied: float, stated: int
    ) -> LayerTimes:
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
        elif self.task.graph:
            prepared.capture()
        if prepared.graph is not None:
            error = max(error, self._error(prepared.first_output()))
        timing = time_one(prepared, replays, host=False)
        overlap = None
        if self.task.overlap:
            overlap = OverlapTimer(self.timer, kernel, packed, self.inputs).measure(replays)
        return LayerTimes(
            timing=timing,
            error=error,
            buffer_bytes=kernel.dispatcher.buffer_bytes(),
            stated_bytes=stated,
            copied=copied,
            overlap=overlap,
        )

    def _error(self, out: Tensor) -> float:
        error = relative_error(out, self.rows, self.want)
        return math.inf if math.isnan(error) else error

    def _packed(self, experts: str, kernel: moekit.ModularKernel) -> tuple[PackedWeights, float]:
        """Return the packed weights, made once for all dispatchers, and what they copy."""
        if experts not in _held.packed:
            packed = kernel.pack(self.weights)
            _held.packed[experts] = packed, copied_share(self.weights.tensors(), packed)
        return _held.packed[experts]

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
        return max(2, min(self.task.replays, int(_SECONDS_A_KIND * 1e6 / slowest)))


def _backends(spec: DispatcherSpec) -> moekit.Registry:
    """Return this process's backends, with ``spec`` if another process registered it."""
    known = registry()
    if spec.name in known.dispatchers:
        return known
    copy = moekit.Registry(known.plugins, list(known._added))
    copy.register(spec)
    return copy


def _gathered(mine: Tensor) -> list[Tensor]:
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine.contiguous())
    return every


# -- the sweep --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A cell to measure."""

    scheme: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.scheme} T={self.tokens}"


class LayersWorkload:
    """Every scheme and number of tokens, for every combination of dispatcher and experts.

    Args:
        overlap: Also time calls in flight and shared experts.
        seconds: Begin nothing after so many.

    Attributes:
        ranks: Where it runs; set before `measure`.
        wanted: (problem, dispatcher, experts) -> whether to measure; may be replaced.
    """

    ranks: Ranks

    def __init__(
        self,
        shape: Shape,
        dispatchers: Sequence[DispatcherSpec],
        experts: Sequence[str],
        schemes: Sequence[str],
        tokens: Sequence[int],
        device: DeviceSpec,
        num_ranks: int,
        settings: LayerSettings,
        command: str = "",
        overlap: bool = False,
        seconds: float | None = None,
    ) -> None:
        if not experts:
            raise moekit.MoekitError("nothing to measure: name --experts")
        for name in experts:
            find_experts(name, registry())
        self.dispatchers, self.experts = dispatchers, experts
        self.schemes, self.tokens, self.device = schemes, tokens, device
        self.settings, self.overlap, self.seconds = settings, overlap, seconds
        self.wanted: Callable[[MoEProblem, str, str], bool] = lambda *_: True
        self.begin = time.monotonic()
        self.header = LayersRun(
            command=command,
            versions=versions(backends(experts), dispatchers),
            device=device_facts(torch.device(device.type), device),
            ranks=num_ranks,
            layer=LayerSizes(
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                activation=shape.activation,
                has_bias=shape.has_bias,
            ),
            settings=settings,
        )

    def cells(self) -> list[Cell]:
        return [Cell(scheme, tokens) for scheme in self.schemes for tokens in self.tokens]

    def problem(self, scheme: str, tokens: int) -> MoEProblem:
        """Return the problem of capacity ``tokens``, as rank 0 sees it."""
        return self.header.problem(scheme, tokens).replace(device=self.device)

    def measure(self, cell: Cell, log: Log) -> LayerCell:
        problem, results = self.problem(cell.scheme, cell.tokens), list[LayerResult]()
        for spec in self.dispatchers:
            log.doing(f"{cell}: {spec.name}")
            if self._late():
                self._refuse(cell, spec.name, f"--seconds {self.seconds:g} were over", log)
                continue
            names = [
                name
                for name in self._able(cell, spec, problem, log)
                if self.wanted(problem, spec.name, name)
            ]
            if names:
                results += self._results(spec, problem, cell.tokens, names)
        return LayerCell(scheme=cell.scheme, tokens=cell.tokens, results=tuple(results))

    def _able(self, cell: Cell, spec: DispatcherSpec, problem: MoEProblem, log: Log) -> list[str]:
        """Return the experts that go with the dispatcher; the others are refused."""
        if why := spec.unsupported(problem):
            self._refuse(cell, spec.name, "; ".join(why), log)
            return []
        able = []
        for name in self.experts:
            if why := find_experts(name, registry()).unsupported(problem):
                self._refuse(cell, combination(spec.name, name), "; ".join(why), log)
            else:
                able.append(name)
        return able

    def _results(
        self, spec: DispatcherSpec, problem: MoEProblem, tokens: int, names: Sequence[str]
    ) -> list[LayerResult]:
        s = self.settings
        task = LayerTask(
            spec, tuple(names), problem, tokens, s.routing, s.inputs, s.replays, not s.no_graph,
            self.overlap, s.seed,
        )  # fmt: skip
        try:
            return layer_results(task, self.ranks.run(measure_layers, task))
        except Exception as error:
            if len(names) > 1:  # which of them it was, and the others' times
                return [r for n in names for r in self._results(spec, problem, tokens, [n])]
            return [LayerResult(dispatcher=spec.name, experts=names[0], reason=cause(error))]

    def _late(self) -> bool:
        """Whether the time is over, by the first rank's clock."""
        if self.seconds is None:
            return False
        return bool(self.ranks.run(_first, time.monotonic() - self.begin > self.seconds)[0])

    def _refuse(self, cell: Cell, name: str, reason: str, log: Log) -> None:
        log.refuse(Refusal(scheme=cell.scheme, tokens=cell.tokens, name=name, reason=reason))


def _first(rank: int, world_size: int, value: bool) -> bool:
    return value


def succeeded(run: LayersRun) -> bool:
    """Whether something was measured, and all of it ran and is right."""
    results = [r for cell in run.cells for r in cell.results]
    return any(r.us is not None for r in results) and all(r.right and not r.reason for r in results)
