"""Whole layers over ranks: every dispatcher with every experts backend (docs/bench.md). Each rank
computes the oracle's sum over its own experts, and the sums are added."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
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

from .cases import oracle_rows, relative_error, sampled_rows
from .implementations import KernelCall, asked_of
from .internals import benchmark_bound
from .ranks import Task, local_device, made_once
from .records import Result, copied_share
from .shapes import random_weights
from .timer import Prepared, Timer, first_fault, release

# Tokens of each rank that are compared with the oracle.
_CHECKED = 8


def measure_layers(problem: MoEProblem, task: Task) -> list[Result]:
    """Return this rank's measurements of each of the experts. Collective."""
    mine = _Layers(problem, task)
    return [mine.measure(experts) for experts in task.experts]


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
                return Result(reason=reason)
            assert kernel is not None
            result = self._times(kernel, packed)
            return replace(result, copied=copied)
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
        with kernel.experts.tuning():
            for x, routing in self.inputs:
                kernel(x, packed, routing)
        one = KernelCall(kernel, packed)
        call: Any = partial(KernelCall.__call__, one)  # without its warm-up for smaller calls
        call.graph_safe = one.graph_safe
        prepared = Prepared(call, self.inputs, self.device, timer=self.timer)
        error = relative_error(prepared.first_output(), self.rows, self.want)
        held = kernel.dispatcher.buffer_bytes()
        timed = prepared.time(self.task.settings.replays)
        return timed.judged(error, benchmark_bound(self.problem), buffer_bytes=held)

    def _packed(self, experts: str, kernel: moekit.ModularKernel) -> tuple[PackedWeights, float]:
        """Return the packed weights, made once for all dispatchers, and what they copy."""
        if experts not in self.held.packed:
            packed = kernel.pack(self.weights)
            self.held.packed[experts] = packed, copied_share(self.weights.tensors(), packed)
        return self.held.packed[experts]

    def _too_large(self, nbytes: int) -> str:
        if self.device.type != "cuda":
            return ""
        release(self.device)
        free, _ = torch.cuda.mem_get_info(self.device)
        return "" if nbytes <= free else f"needs {nbytes / 1e9:.0f} GB, {free / 1e9:.0f} are free"


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
