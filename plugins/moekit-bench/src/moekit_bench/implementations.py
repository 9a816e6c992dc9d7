"""Implementations of the experts block: moekit's backends, and baselines from adapter files.

An adapter is a Python file that defines ``name`` and ``make(problem, weights, device)``, which
returns a `Call` or raises `Unavailable`, and optionally ``version()`` and ``trains = True``: it
also makes calls for ``problem.training``, through which gradients flow to x, the router weights and
the weights. The weights are canonical `ExpertWeights` in the problem's scheme. What a call does
only the first time it sees an input is not timed; what it does every time is. Files whose name
begins with ``_`` are helpers.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moekit
from moekit.errors import MoekitError
from moekit.plugin import ExpertWeights, MoEProblem, PackedWeights, Routing, Workspace, registry

from .internals import named
from .records import BACKEND, BASELINE, IN_MODE, INVARIANT
from .timer import Call


class Unavailable(MoekitError):
    """A baseline's library is missing, or it cannot do a problem; the text says which."""


class KernelCall:
    """A composed kernel with its packed weights, as a call to time."""

    def __init__(self, kernel: moekit.ModularKernel, packed: PackedWeights) -> None:
        self.kernel, self.packed = kernel, packed
        self.graph_safe = kernel.experts.spec.graph_safe and kernel.dispatcher.spec.graph_safe

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        return self.kernel(x, self.packed, routing)

    def warmup(self, num_tokens: int) -> None:
        self.kernel.warmup(self.packed, num_tokens)


@dataclass(frozen=True)
class Implementation:
    """An implementation of the experts block.

    kind: `BACKEND`, `INVARIANT` or `BASELINE`. make: returns the call to time, or raises with the
    reason why it cannot. version: of a baseline's library.
    """

    name: str
    kind: str
    make: Callable[[MoEProblem, ExpertWeights, torch.device], Call]
    version: str = ""


def beside(names: Sequence[str]) -> list[str]:
    """Return each name, followed by its name in batch-invariant mode."""
    return [each for name in names for each in (name, name + IN_MODE)]


def asked_of(name: str, problem: MoEProblem) -> tuple[str, MoEProblem]:
    """Return the backend that a name of `backends` means, and the problem it is asked to do."""
    if not name.endswith(IN_MODE):
        return name, problem
    return name.removesuffix(IN_MODE), problem.replace(batch_invariant=True)


def backends(names: Sequence[str]) -> list[Implementation]:
    """Return the named experts backends, which share one workspace.

    A name may be a composite's, and end with `IN_MODE` for batch-invariant mode. Raises
    UnknownBackend or NameClash.
    """
    known, workspace = registry(), Workspace()

    def backend(name: str) -> Implementation:
        def make(problem: MoEProblem, weights: ExpertWeights, device: torch.device) -> Call:
            experts, problem = asked_of(name, problem)
            behind = None if named(experts, known.expert).fused else "local"
            kernel = moekit.compose(problem, behind, experts, workspace=workspace, backends=known)
            if problem.training:
                train: Any = kernel  # which takes parameters unpacked
                return lambda x, routing: train(x, weights, routing)
            return KernelCall(kernel, kernel.pack(weights))

        return Implementation(name, INVARIANT if name.endswith(IN_MODE) else BACKEND, make)

    for name in names:
        named(name.removesuffix(IN_MODE), known.expert)
    return [backend(name) for name in names]


def unnamed(training: bool = False) -> list[str]:
    """Return the experts backends that are measured without being named."""
    specs = registry().experts.values()
    return [s.name for s in specs if s.priority >= 0 and (s.training or not training)]


def baselines(paths: Sequence[str], only: Sequence[str] | None = None) -> list[Implementation]:
    """Return the baselines of the adapters in these files and folders, or those named in ``only``.

    An adapter that does not load becomes a baseline that says so.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise MoekitError(f"no such file or folder of baselines: {path}")
        found = sorted(path.glob("[!_]*.py")) if path.is_dir() else [path]
        if not found:
            raise MoekitError(f"{path} holds no adapter (*.py)")
        files += found
    made = [_baseline(file) for file in files]
    if only is None:
        return made
    if unknown := sorted(set(only) - {b.name for b in made}):
        there = ", ".join(b.name for b in made) or "none"
        raise MoekitError(f"no baseline is called {', '.join(unknown)}; there are: {there}")
    return [b for b in made if b.name in only]


def _baseline(file: Path) -> Implementation:
    try:
        module = _load(file)
        name, make = str(module.name), _asked_to_train(module)
        version = str(module.version()) if hasattr(module, "version") else ""
    except Exception as error:
        reason = f"{file} does not load: {type(error).__name__}: {error}"

        def broken(problem: MoEProblem, weights: ExpertWeights, device: torch.device) -> Call:
            raise Unavailable(reason)

        return Implementation(file.stem, BASELINE, broken)
    return Implementation(name, BASELINE, make, version)


def _asked_to_train(module: Any) -> Callable[..., Call]:
    """Return the adapter's `make`, which refuses training if the adapter does not mention it."""

    def make(problem: MoEProblem, weights: ExpertWeights, device: torch.device) -> Call:
        if problem.training and not getattr(module, "trains", False):
            raise Unavailable("its adapter has no backward")
        made: Call = module.make(problem, weights, device)
        return made

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
