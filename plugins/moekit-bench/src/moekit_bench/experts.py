"""Experts backends and baselines on the whole experts block, or on its forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from moekit.errors import MoekitError
from moekit.plugin import DeviceSpec, ExpertWeights

from .cases import Case, run_cell
from .environment import about
from .implementations import Implementation, KernelCall
from .internals import DTYPES
from .limits import limit_us
from .records import BASELINE, Ceilings, Cell, Result, Run, copied_share
from .shapes import Shape, random_weights
from .sweep import Sweep, say
from .timer import attempt, release
from .training import Step, TrainingCase


@dataclass(kw_only=True)
class ExpertsSweep(Sweep):
    """Every shape, scheme, routing and number of tokens, for every implementation. Weights and
    calls are made once for each shape and scheme, and freed before the next. Raises MoekitError if
    two implementations have one name, or there is none."""

    shapes: Sequence[Shape]
    implementations: Sequence[Implementation]
    device: torch.device
    ceilings: Ceilings | None = None
    training: bool = False

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
            (shape.name, q): shape.problem(
                quant=q, dtype=DTYPES[s.dtype], device=spec, ep=s.ep, training=self.training
            )
            for shape in self.shapes
            for q in self.schemes
        }
        libraries = [i.version for i in self.implementations if i.version]
        facts = about(self.command, self.device, spec, names, libraries)
        self.run = Run(
            mode="train" if self.training else "experts",
            **facts,
            settings=s,
            ceilings=self.ceilings,
        )
        self.cells = [
            Cell(shape=shape.name, scheme=q, routing=r, tokens=t)
            for shape, q, r, t in product(self.shapes, self.schemes, self.routings, self.tokens)
        ]
        self._group = ("", "")
        self._weights: ExpertWeights | None = None
        self._calls: dict[str, Callable[..., Any]] = {}

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
        say(f"{cell.shape} {cell.scheme}: making random weights")  # may take minutes on a CPU
        weights, reason = attempt(
            self.device, random_weights, problem, self.device, self.settings.seed
        )
        if weights is None:
            self.refuse("all", f"no weights: {reason}", cell)
            return
        if self.training and problem.quant.weight is None:
            weights = weights._map(torch.Tensor.requires_grad_)
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
                self._calls[each.name] = Step(call, weights) if self.training else call
        # The largest call first: a workspace that grows between captures is kept once more.
        for call in self._calls.values():
            if isinstance(call, KernelCall):
                # The cell that needs so much reports a failure.
                attempt(self.device, call.warmup, max(self.tokens))

    def _measured(self, cell: Cell, weights: ExpertWeights) -> Cell:
        p, s = self.problems[self._group], self.settings
        case = Case.make(p, weights, cell.tokens, cell.routing, count=s.inputs, seed=s.seed)
        case = TrainingCase.of(case) if self.training else case
        results = run_cell(case, self._calls, replays=s.replays)
        limit = None
        if any(r.us is not None for r in results.values()):
            limit = limit_us(case.work, p, self.ceilings)
        kinds = {each.name: each.kind for each in self.implementations}

        def complete(result: Result) -> Result:
            call = self._calls[result.name]
            more: dict[str, Any] = {}
            if isinstance(call, KernelCall):
                more["copied"] = copied_share(weights.tensors(), call.packed)
            elif isinstance(call, Step) and result.us is not None:
                more = call.memory(*case.inputs_of(call)[0])
            fraction = None if limit is None or result.us is None else limit / result.us
            if getattr(call, "adapters", None) is not None:  # the limit does not count them
                fraction = None
            kind = kinds[result.name]
            return replace(result, kind=kind, fraction=fraction, **more)

        return replace(
            cell,
            inputs=len(case.inputs),
            limit_us=limit,
            results=tuple(map(complete, results.values())),
        )
