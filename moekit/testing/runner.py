"""Run the kit on an installed backend, without a test file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from moekit.discovery.registry import registry
from moekit.errors import Unsupported
from moekit.testing.base import WITHOUT_DEVICE


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
    known = registry()
    spec = known.dispatchers.get(name) or known.expert(name)
    if missing := spec.missing():
        raise Unsupported(f"{name!r} cannot be checked: {missing}", [missing])
    if gradients and spec.training is None:
        why = f"the spec of {name!r} names no class for training"
        raise Unsupported(f"{name!r} has no backward: {why}", [why])
    kits = "ExpertsConformance", "DispatcherConformance"
    if gradients:
        kits = "GradientConformance", "DispatcherGradientConformance"
    tests = [
        f"class Test{kit}(moekit.testing.{kit}):\n    backend = {name!r}\n"
        for kit, offered in zip(kits, (known.experts, known.dispatchers), strict=True)
        if name in offered
    ]
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
