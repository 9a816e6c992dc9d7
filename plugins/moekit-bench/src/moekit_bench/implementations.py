"""Implementations of the experts block: moekit's backends, and baselines from adapter files, which
docs/bench.md describes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moekit
from moekit.errors import MoekitError
from moekit.plugin import AdapterSlots, ExpertWeights, MoEProblem, Routing, Workspace, registry

from .internals import named
from .records import ADAPTERS, BACKEND, BASELINE, INVARIANT, parted
from .shapes import random_adapters
from .timer import Call


class Unavailable(MoekitError):
    """A baseline's library is missing, or it cannot do a problem; the text says which."""


class KernelCall:
    """A composed kernel with its weights, packed or to train, as a call to time."""

    def __init__(self, kernel: moekit.ModularKernel, packed: Any) -> None:
        self.kernel, self.packed = kernel, packed
        self.adapters = getattr(packed, "adapters", None)
        self.graph_safe = kernel.experts.spec.graph_safe and kernel.dispatcher.spec.graph_safe

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        return self.kernel(x, self.packed, routing)

    def warmup(self, num_tokens: int) -> None:
        self.kernel.warmup(self.packed, num_tokens)


@dataclass(frozen=True)
class Implementation:
    """An implementation of the experts block. kind: `BACKEND`, `BASELINE`, or a backend's mode.
    make: returns the call to time, or raises with the reason why it cannot. version: of a
    baseline's library."""

    name: str
    kind: str
    make: Callable[[MoEProblem, ExpertWeights, torch.device], Call]
    version: str = ""


def beside(names: Sequence[str], modes: Sequence[str] = (INVARIANT,)) -> list[str]:
    """Return each name, followed by its name in each mode."""
    return [each for name in names for each in (name, *(f"{name} ({mode})" for mode in modes))]


def asked_of(name: str, problem: MoEProblem) -> tuple[str, MoEProblem]:
    """Return the backend that a name of `backends` means, and the problem it is asked to do."""
    base, mode = parted(name)
    if mode.startswith(ADAPTERS):
        count, rank = map(int, mode.removeprefix(ADAPTERS).split(":"))
        problem = problem.replace(adapters=AdapterSlots(count, rank))
    return base, problem.replace(batch_invariant=True) if mode == INVARIANT else problem


def backends(names: Sequence[str]) -> list[Implementation]:
    """Return the named experts backends, which share one workspace.

    A name may be a composite's, and end with a mode (`beside`). Raises UnknownBackend or NameClash.
    """
    known, workspace = registry(), Workspace()

    def backend(name: str) -> Implementation:
        def make(problem: MoEProblem, weights: ExpertWeights, device: torch.device) -> Call:
            experts, problem = asked_of(name, problem)
            behind = None if named(experts, known.expert).fused else "local"
            kernel = moekit.compose(problem, behind, experts, workspace=workspace, backends=known)
            if problem.adapters is not None:
                adapters = random_adapters(problem, device)
                packed = kernel.pack(weights.detach())
                return KernelCall(kernel, replace(packed, adapters=adapters))
            trains = any(t.requires_grad for t in weights.tensors().values())
            return KernelCall(kernel, weights if trains else kernel.pack(weights))

        return Implementation(name, parted(name)[1].partition(" ")[0] or BACKEND, make)

    for name in names:
        named(parted(name)[0], known.expert)
    return [backend(name) for name in names]


def unnamed(training: bool = False) -> list[str]:
    """Return the experts backends that are measured without being named."""
    specs = registry().experts.values()
    return [s.name for s in specs if s.priority >= 0 and (s.training or not training)]


def baselines(
    paths: Sequence[str], only: Sequence[str] | None = None, modes: Sequence[str] = ()
) -> list[Implementation]:
    """Return the baselines of the files and folders at ``paths``, or only the named ones, each
    also in the modes that it supports.

    A file that does not load becomes a baseline that says so.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise MoekitError(f"no such file or folder of baselines: {path}")
        found = sorted(path.glob("[!_]*.py")) if path.is_dir() else [path]
        if not found:
            raise MoekitError(f"{path} holds no adapter (*.py)")
        files += found
    made = [each for file in files for each in _baseline(file, modes)]
    there = {parted(b.name)[0] for b in made}
    if unknown := sorted(set(only or ()) - there):
        raise MoekitError(
            f"no baseline is called {', '.join(unknown)}; there are: {', '.join(sorted(there))}"
        )
    return [b for b in made if only is None or parted(b.name)[0] in only]


def _baseline(file: Path, modes: Sequence[str]) -> list[Implementation]:
    try:
        module = _load(file)
        name, adapts = str(module.name), getattr(module, "adapts", False)
        version = str(module.version()) if hasattr(module, "version") else ""
    except Exception as error:
        reason = f"{file} does not load: {type(error).__name__}: {error}"

        def broken(problem: MoEProblem, weights: ExpertWeights, device: torch.device) -> Call:
            raise Unavailable(reason)

        return [Implementation(file.stem, BASELINE, broken)]
    names = beside([name], [mode for mode in modes if adapts and mode.startswith(ADAPTERS)])
    return [Implementation(each, BASELINE, _asked(module, each), version) for each in names]


def _asked(module: Any, name: str) -> Callable[..., Call]:
    """Return the adapter's `make` for the mode in ``name``, which refuses training if the adapter
    does not mention it."""

    def make(problem: MoEProblem, weights: ExpertWeights, device: torch.device) -> Call:
        if problem.training and not getattr(module, "trains", False):
            raise Unavailable("its adapter has no backward")
        _, problem = asked_of(name, problem)
        if problem.adapters is None:
            made: Any = module.make(problem, weights, device)
        else:
            adapters = random_adapters(problem, device)
            made = module.make(problem, weights.detach(), device, adapters)
            made.adapters = adapters
        return made  # type: ignore[no-any-return]

    return make


def _load(file: Path) -> Any:
    """Return the module in ``file``.

    It may import its neighbours while it is loaded, but not later: an adapter may be called like
    the library that it adapts.
    """
    spec = importlib.util.spec_from_file_location(f"moekit_bench_baseline_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(file.resolve().parent)
    sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module
