"""Where measurements go: the table's file, and what they were made with."""

from __future__ import annotations

import fcntl
import functools
import importlib.metadata
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from moekit_bench.bench.cli import replace_file
from moekit_bench.bench.contestants import Contestant
from moekit_bench.bench.environment import versions

from moekit.discovery.specs import BackendSpec, DispatcherSpec, ExpertsSpec
from moekit.errors import MoekitError
from moekit.problem import DeviceSpec
from moekit.selection.tuned import table as tables
from moekit.selection.tuned.table import Table


def table_file(output: Path | None, device: DeviceSpec) -> Path:
    """``output`` if it is a file; else the device's, in that folder or the user's."""
    place, name = output or tables.user_path(), device.name or device.type
    return place if place.suffix == ".json" else place / f"{'-'.join(name.lower().split())}.json"


def add_to(file: Path, table: Table) -> None:
    """Merges ``table`` into ``file``, at once, and after whoever else is doing so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_name(f".{file.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old = tables.read(file) if file.exists() else {}
        replace_file(file, tables.encode(tables.merge([old, table])))


def made_with(
    people: Iterable[Contestant], *specs: BackendSpec | None, more: Mapping[str, str] | None = None
) -> str:
    """What a time depends on: torch, triton, CUDA, plugins, and the libraries these require; also
    those that a backend's class names in ``libraries()`` (name -> version), if it has that."""
    found = versions(people) | dict(more or {})
    del found["python"]
    for spec in specs:
        if not isinstance(spec, DispatcherSpec | ExpertsSpec):
            continue
        for name in {required.partition(".")[0] for required in spec.requires}:
            for distribution in _owners().get(name, ()):
                found[distribution] = importlib.metadata.version(distribution)
        try:
            found |= getattr(spec.load(), "libraries", dict)()
        except MoekitError:  # said when it is made
            pass
    return ", ".join(f"{name} {version}" for name, version in sorted(found.items()))


def write(text: str, file: Path | None) -> None:
    """To standard output, or to ``file``."""
    if file is None:
        print(text, end="")
    elif file != Path(os.devnull):
        replace_file(file, text)


@functools.lru_cache
def _owners() -> Mapping[str, Sequence[str]]:
    return importlib.metadata.packages_distributions()
