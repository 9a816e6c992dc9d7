"""Where and with what a run was made, and how it was asked for."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

import moekit
from moekit.errors import MoekitError
from moekit.problem import DeviceSpec
from moekit_bench.bench.contestants import Contestant

T = TypeVar("T")


def command(*words: str) -> str:
    """``python -m moekit words...``, with the variables that moekit reads, as a shell takes it."""
    variables = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("MOEKIT_"))
    return shlex.join([*variables, "python", "-m", "moekit", *words])


def whole(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number, ``least`` or more."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"want a whole number, {least} or more, not {text!r}")
        return int(text)

    return number


def answered(question: Callable[[], int]) -> int:
    """A command's exit code; 2, and the reason on standard error, for a wrong question."""
    try:
        return question()
    except (MoekitError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def recorded(file: Path, use: Callable[[dict[str, Any]], T]) -> T:
    """``use`` of what a run wrote with --json. MoekitError if it is something else."""
    wanted = "is not what this command's --json writes"
    try:
        data = json.loads(file.read_text())
    except ValueError as error:
        raise MoekitError(f"{file} {wanted}: no JSON, {error}") from error
    if not isinstance(data, dict):
        raise MoekitError(f"{file} {wanted}: no JSON object")
    try:
        return use(data)
    except (KeyError, TypeError) as error:
        raise MoekitError(f"{file} {wanted}: {type(error).__name__}: {error}") from error


def versions(people: Iterable[Contestant]) -> dict[str, str]:
    """Of everything that can change a time; what is not installed is left out."""
    found = {
        "moekit": moekit.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": installed("triton"),
        "cuda": torch.version.cuda or "",
    }
    # What offers a contestant, under the offering distribution's name: "moekit-triton 0.1.0".
    for text in sorted({c.version for c in people if c.version and not c.left_out}):
        name, _, version = text.rpartition(" ")
        found.setdefault(name, version)
    return {name: version for name, version in found.items() if version}


def recorded_device(facts: Mapping[str, Any]) -> DeviceSpec:
    """Of what `device_facts` made; the CPU without its name, which tells threads."""
    capability = None if facts["capability"] is None else tuple(facts["capability"])
    name = "" if facts["type"] == "cpu" else facts["name"]
    return DeviceSpec(facts["type"], capability, name, facts.get("arch", ""))


def device_facts(device: torch.device, spec: DeviceSpec) -> dict[str, Any]:
    """name, type, capability, arch, multiprocessors, l2_bytes, memory_bytes; null where unknown."""
    result: dict[str, Any] = {
        "name": spec.name or f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "type": device.type,
        "capability": None if spec.capability is None else list(spec.capability),
        "arch": spec.arch,
        "multiprocessors": None,
        "l2_bytes": None,
        "memory_bytes": None,
    }
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        result["multiprocessors"] = facts.multi_processor_count
        result["l2_bytes"] = getattr(facts, "L2_cache_size", None)
        result["memory_bytes"] = facts.total_memory
    return result


def installed(distribution: str) -> str:
    """Its version; empty if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
