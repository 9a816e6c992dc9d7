"""Fake distributions: packages and their metadata, written into a folder on sys.path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import moekit
from moekit.discovery import registry as plugins
from moekit.discovery.entry_points import SWITCHES, PluginState
from moekit.discovery.registry import Registry
from moekit.selection import select
from moekit.testing.calls import check_call
from moekit.testing.cases import make_case
from moekit.testing.experts_base import sizes_of

PROBLEM = moekit.MoEProblem(**sizes_of(4, 2, 32, 16), dtype=torch.float32, device="cpu")
TORCH = "moekit.backends.torch_experts:TorchExperts"


def offers(*names: str, target: str = TORCH, more: str = "") -> str:
    """Source of a plugin that offers working experts under these names."""
    return f"""
import moekit

def spec(name, **changes):
    facts = dict(target={target!r}, format=moekit.ActivationFormat.STANDARD, reduces=True)
    return moekit.ExpertsSpec(name=name, **{{**facts, **changes}})

@moekit.hookimpl
def moekit_experts():
    return [spec(name{more}) for name in {names!r}]
"""


class Fakes:
    """Distributions written into a folder on sys.path."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def install(
        self,
        name: str,
        source: str | None,
        *,
        distribution: str | None = None,
        version: str = "1.0",
        entries: str | None = None,
        metadata: str | None = None,
        late: str = "",
    ) -> None:
        """An entry point ``name`` for package ``fake_<distribution>`` with this source, and a
        module ``late`` in it."""
        distribution = distribution or f"{name}-dist"
        package = f"fake_{distribution.replace('-', '_')}"
        if source is not None:
            (self.root / package).mkdir()
            (self.root / package / "__init__.py").write_text(source)
            (self.root / package / "late.py").write_text(late)
        info = self.root / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        if metadata is None:
            metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
        entries = f"[moekit]\n{name} = {package}\n" if entries is None else entries
        (info / "entry_points.txt").write_text(entries, errors="surrogateescape")

    def discover(self, **environ: str) -> Registry:
        importlib.invalidate_caches()
        return Registry.discover(environ)


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """Body of the tests' fixture ``fakes``."""
    for variable in ("MOEKIT_EXPERTS", "MOEKIT_DISPATCHER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: more threads cost more than they give
    yield Fakes(tmp_path)
    torch.set_num_threads(threads)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def only_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fakes]]:
    """Body of the tests' fixture ``only``: ``only("a", "b")`` loads, of all plugins, just these."""
    for variable in (*SWITCHES, *select.SWITCHES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(plugins, "_registry", None)
    for fakes in installed(tmp_path, monkeypatch):

        def choose(*names: str, fakes: Fakes = fakes) -> Fakes:
            monkeypatch.setenv("MOEKIT_PLUGINS", ",".join(names))
            importlib.invalidate_caches()
            return fakes

        choose()
        yield choose


def state(found: Registry, name: str) -> PluginState:
    (only,) = (s for s in found.plugins if s.name == name)
    return only


def assert_usable(found: Registry, experts: str) -> None:
    check_call(moekit.compose(PROBLEM, experts=experts, backends=found), make_case(PROBLEM, 5))
