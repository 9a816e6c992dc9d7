"""Old names of moekit's modules, and modules that load at first use.

Importing an old name gives the module that took its place, and warns.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

# A subpackage of an old package moved with it.
_MOVED = {
    "moekit.activation": "moekit.problem.activation",
    "moekit.bench": "moekit_bench",
    "moekit.bridge": "moekit.backends.bridge",
    "moekit.graphs": "moekit.runtime.graphs",
    "moekit.group": "moekit.plugin",
    "moekit.local": "moekit.backends.local",
    "moekit.overlap": "moekit.runtime.overlap",
    "moekit.parallel": "moekit.layer.parallelism",
    "moekit.plugins": "moekit.discovery.registry",
    "moekit.quant": "moekit.problem.quant",
    "moekit.reference": "moekit.backends.reference",
    "moekit.router": "moekit.layer.router",
    "moekit.select": "moekit.selection.select",
    "moekit.topology": "moekit.selection.topology",
    "moekit.torch_experts": "moekit.backends.torch_experts",
    "moekit.tune": "moekit.selection.tuned",
    "moekit.weights": "moekit.problem.weights",
    "moekit.workspace": "moekit.runtime.workspace",
}
_LAZY = ("checkpoint", "eplb", "integrations")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `_MOVED`, and nothing else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _MOVED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        warnings.warn(
            f"{spec.name} is now {_MOVED[spec.name]}; backends import from moekit.plugin. The old "
            "name goes with moekit 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_MOVED[module.__name__])


def install() -> None:
    """Make the old names importable.

    The finder comes first: a folder of an old name, left behind in a checkout, would hide it.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def attribute(name: str) -> ModuleType:
    """Return the submodule of moekit that ``moekit.<name>`` means, or raise AttributeError."""
    if name not in _LAZY and f"moekit.{name}" not in _MOVED:
        raise AttributeError(f"module 'moekit' has no attribute {name!r}")
    return importlib.import_module(f"moekit.{name}")
