"""Who is measured: installed experts backends by name, and peers from adapter files.

An adapter is a Python file that defines ``name`` and ``make(problem, weights, device)``, which
returns a `Call` or raises `Unavailable`; optionally ``version()``. ``weights`` are canonical
`ExpertWeights` in the problem's scheme. What it does on its first call with some inputs is not
timed; what it does on every call is. Files whose name begins with ``_`` are helpers.
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

from moekit.contract import PackedWeights, Routing
from moekit.discovery.registry import Registry, registry
from moekit.errors import MoekitError
from moekit.kernel import ModularKernel
from moekit.problem import MoEProblem
from moekit.problem.weights import ExpertWeights
from moekit.runtime.workspace import Workspace
from moekit.selection import select
from moekit_bench.bench.cells import Unavailable
from moekit_bench.bench.measure import Call

MOEKIT, PEER = "moekit", "peer"
AUTO = "auto"


class KernelCall:
    """A composed kernel with its packed weights, as something to time."""

    def __init__(self, kernel: ModularKernel, packed: PackedWeights) -> None:
        self.kernel, self.packed = kernel, packed
        self.graph_safe = kernel.experts.spec.graph_safe and kernel.dispatcher.spec.graph_safe

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        return self.kernel(x, self.packed, routing)

    def warmup(self, num_tokens: int) -> None:
        self.kernel.warmup(self.packed, num_tokens)


@dataclass(frozen=True)
class Contestant:
    """make(problem, weights, device) -> call; raises with the reason when it cannot.

    kind: ``moekit`` or ``peer``. left_out: why it is not measured, if it is not.
    """

    name: str
    kind: str
    make: Callable[[MoEProblem, ExpertWeights, torch.device], Call]
    version: str = ""
    left_out: str = ""


def experts(
    names: Sequence[str] | None = None,
    dispatcher: str = "local",
    *,
    workspace: Workspace | None = None,
    backends: Registry | None = None,
) -> list[Contestant]:
    """The named experts backends, or all; all run with ``dispatcher`` and share one arena.

    A name may be a composite's, and ``auto`` is what `moekit.compose` chooses. Of all, those with a
    negative priority (the oracle, interpreters) only run when named. Raises UnknownBackend or
    NameClash.
    """
    backends = backends or registry()
    arena = workspace or Workspace()
    versions = {
        spec.name: f"{state.distribution} {state.version}"
        for state in backends.plugins
        for spec in state.experts
    }

    def contestant(name: str, left_out: str = "") -> Contestant:
        def make(problem: MoEProblem, weights: ExpertWeights, device: torch.device) -> Call:
            experts = None if name == AUTO else name
            kernel = select.compose(
                problem, dispatcher, experts, workspace=arena, backends=backends
            )
            return KernelCall(kernel, kernel.pack(weights))

        return Contestant(name, MOEKIT, make, versions.get(name, ""), left_out)

    if names is not None:
        for name in names:
            if name != AUTO:
                select.find_experts(name, backends)
        return [contestant(name) for name in names]
    return [
        contestant(
            spec.name,
            f"priority {spec.priority}: only when named in --experts" if spec.priority < 0 else "",
        )
        for spec in backends.experts.values()
    ]


def peers(paths: Sequence[str]) -> list[Contestant]:
    """The adapters in the given files and folders. One that does not load is a contestant that
    says so; raises MoekitError for a path that does not exist."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise MoekitError(f"no such file or folder of peers: {path}")
        found = sorted(path.glob("[!_]*.py")) if path.is_dir() else [path]
        if not found:
            raise MoekitError(f"{path} holds no adapter (*.py)")
        files += found
    return [_peer(file) for file in files]


def _peer(file: Path) -> Contestant:
    try:
        module = _load(file)
        name, make = str(module.name), module.make
        version = str(module.version()) if hasattr(module, "version") else ""
    except Exception as error:
        reason = f"{file} does not load: {type(error).__name__}: {error}"

        def broken(problem: MoEProblem, weights: ExpertWeights, device: torch.device) -> Call:
            raise Unavailable(reason)

        return Contestant(file.stem, PEER, broken)
    return Contestant(name, PEER, make, version)


def _load(file: Path) -> Any:
    """The module in ``file``, which may import its neighbours while it is loaded (not later: an
    adapter may be called like the library it adapts)."""
    spec = importlib.util.spec_from_file_location(f"moekit_bench_peer_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(file.resolve().parent)
    sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module
