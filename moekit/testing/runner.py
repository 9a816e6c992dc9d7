"""Run the kit on an installed backend, without a test file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from moekit.contract.specs import BackendSpec
from moekit.discovery.registry import registry
from moekit.errors import UnknownBackend, Unsupported
from moekit.testing.base import WITHOUT_DEVICE

# A spec's kind -> the kit, and the kit for gradients.
_KITS = {
    "dispatcher": ("DispatcherConformance", "DispatcherGradientConformance"),
    "experts backend": ("ExpertsConformance", "GradientConformance"),
}


_FUSED = ("FusedConformance", "FusedRanksConformance")


class _Count:
    """A pytest plugin that counts the passed tests that called the backend."""

    def __init__(self) -> None:
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        ran = report.when == "call" and name not in WITHOUT_DEVICE
        self.passed += ran and report.passed


def run(name: str, extra_args: Sequence[str] = (), *, gradients: bool = False) -> int:
    """Run the conformance kit on every backend of that name.

    Args:
        extra_args: arguments for pytest (``["-k", "scheme", "-x"]``).
        gradients: run the gradient kit instead.

    Returns:
        pytest's exit code; 5 (no tests) also if only tests ran that do not call the backend.

    Raises:
        UnknownBackend: no backend has the name.
        NameClash: two packages offer it.
        Unsupported: a package that it needs is not installed, or it has no backward.
    """
    specs = _named(name)
    if missing := specs[0].missing():
        raise Unsupported(f"{name!r} cannot be checked: {missing}", [missing])
    if gradients and not (specs := [spec for spec in specs if spec.training is not None]):
        why = f"the spec of {name!r} names no class for training"
        raise Unsupported(f"{name!r} has no backward: {why}", [why])
    kits = [_KITS[spec.kind][gradients] for spec in specs if not spec.fused]
    kits += _FUSED if specs[0].fused else ()
    tests = [f"class Test{k}(moekit.testing.{k}):\n    backend = {name!r}\n" for k in kits]
    count = _Count()
    with TemporaryDirectory(prefix="moekit_check_") as folder:
        # Python imports a module once, so another run has another name.
        file = Path(folder, f"test_{Path(folder).name}.py")
        file.write_text("\n\n".join(["import moekit.testing", *tests]))
        # Without the configuration of the current folder: its addopts are for other tests.
        args = [str(file), "-c", os.devnull, "--rootdir", os.curdir, "-p", "no:cacheprovider"]
        code = int(pytest.main([*args, "-rsfE", *extra_args], [count]))
    if code == pytest.ExitCode.OK and not count.passed:
        print(f"no test called {name!r}: all were skipped (-rs shows why)")
        return int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return code


def _named(name: str) -> list[BackendSpec]:
    """Return the dispatcher and the experts of that name."""
    known, found, unknown = registry(), list[BackendSpec](), list[str]()
    for find in (known.dispatcher, known.expert):
        try:
            found.append(find(name))
        except UnknownBackend as error:
            unknown.append(str(error).splitlines()[0])
    if not found:
        raise UnknownBackend("\n  ".join([*unknown, *known.faults()]))
    return found
