"""On what and with what a run was made, and how it was asked for."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shlex
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

import moekit
from moekit.errors import MoekitError
from moekit.plugin import DeviceSpec, registry

from .records import parted

_owners = functools.cache(importlib.metadata.packages_distributions)


def command(*words: str) -> str:
    """Return ``python -m moekit words...`` with the variables that moekit reads, as a shell takes
    it."""
    variables = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("MOEKIT_"))
    return shlex.join([*variables, "python", "-m", "moekit", *words])


def versions(backends: Iterable[str], libraries: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of everything installed that can change a time.

    libraries: further names with versions, such as "quack 0.2.1".
    """
    found = {
        "moekit": moekit.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    with suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    found["cuda"] = torch.version.cuda or ""
    for text in libraries:
        name, _, version = text.rpartition(" ")
        found.setdefault(name, version)
    names = {parted(name)[0] for name in backends}
    for plugin in registry().plugins:
        if names & {spec.name for spec in (*plugin.dispatchers, *plugin.experts)}:
            found[plugin.distribution] = plugin.version
    return {name: version for name, version in found.items() if version}


def made_with(dispatcher: str, experts: str) -> str:
    """Return what a time depends on, with versions: torch, triton, CUDA, plugins and the libraries
    that they require or that a backend's class names in ``libraries()`` (name -> version)."""
    found = versions([dispatcher, experts])
    del found["python"]
    for spec in (registry().dispatcher(dispatcher), registry().expert(experts)):
        for name in {required.partition(".")[0] for required in spec.requires}:
            for distribution in _owners().get(name, ()):
                found[distribution] = importlib.metadata.version(distribution)
        with suppress(MoekitError):  # reported when the backend is created
            found |= getattr(spec.load(), "libraries", dict)()
    return ", ".join(f"{name} {version}" for name, version in sorted(found.items()))


def about(
    command: str,
    device: torch.device,
    spec: DeviceSpec,
    backends: Iterable[str],
    libraries: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the fields of a `Run` that say how and with what it was made."""
    facts: dict[str, Any] = {
        "name": spec.name or f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "type": device.type,
        "capability": spec.capability,
        "arch": spec.arch,
    }
    return {
        "command": command,
        "versions": versions(backends, libraries),
        "device": facts,
    }
