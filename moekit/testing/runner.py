"""Run the kit on an installed backend, without a test file."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from moekit.discovery.registry import registry
from moekit.errors import Unsupported
from moekit.testing.base import WITHOUT_DEVICE

VARIABLE = "_MOEKIT_CHECK"


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
    count = _Count()
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = f"{name} gradients" if gradients else name
    try:
        # Without the configuration of the current folder: its addopts are for other tests.
        args = ["--pyargs", "moekit.testing.suite", "-c", os.devnull, "--rootdir", os.curdir]
        code = int(pytest.main([*args, "-p", "no:cacheprovider", "-rsfE", *extra_args], [count]))
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
    if code == pytest.ExitCode.OK and not count.passed:
        print(f"no test called {name!r}: all were skipped (-rs shows why)")
        return int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return code
