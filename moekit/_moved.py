"""Old names of moekit's modules: importing one warns, and gives the module that took its place."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

_MOVED = {
    "moekit.activation": "moekit.problem.activation",
    "moekit.bench": "moekit_bench",
    "moekit.group": "moekit.plugin",
    "moekit.local": "moekit.backends.local",
    "moekit.parallel": "moekit.layer.parallelism",
    "moekit.plugins": "moekit.discovery.registry",
    "moekit.quant": "moekit.problem.quant",
    "moekit.reference": "moekit.backends.reference",
    "moekit.topology": "moekit.selection.topology",
    "moekit.weights": "moekit.problem.weights",
    "moekit.workspace": "moekit.runtime.workspace",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `_MOVED`, and nothing else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in _MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        new = _MOVED[spec.name]
        warnings.warn(
            f"{spec.name} is now {new}; backends import from moekit.plugin. The old name goes "
            "with moekit 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        module = ModuleType(spec.name)
        vars(module).update(
            {k: v for k, v in vars(importlib.import_module(new)).items() if not k.startswith("__")}
        )
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The names are there already."""


def install() -> None:
    """Make the old names importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
