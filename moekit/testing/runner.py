"""`run`: the kit over an installed backend, without a test file."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from moekit.discovery.registry import registry
from moekit.testing.collection import WITHOUT_DEVICE

VARIABLE = "_MOEKIT_CHECK"


class _Count:
    """A pytest plugin that counts the tests in which a backend ran and passed."""

    def __init__(self) -> None:
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        ran = report.when == "call" and name not in WITHOUT_DEVICE
        self.passed += ran and report.passed


def run(name: str, extra_args: Sequence[str] = ()) -> int:
    """Runs the conformance kit over every backend of that name; returns pytest's exit code.

    extra_args go to pytest (``["-k", "scheme", "-x"]``). 5 (pytest's "no tests") also when every
    test was skipped but those of the declaration, for then nothing was shown. Raises
    UnknownBackend or NameClash.
    """
    known = registry()
    if name not in known.dispatchers:
        known.expert(name)
    count = _Count()
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        # No configuration of the current folder: its addopts are not meant for this.
        args = ["--pyargs", "moekit.testing.suite", "-c", os.devnull, "--rootdir", os.curdir]
        code = int(pytest.main([*args, "-p", "no:cacheprovider", "-rsfE", *extra_args], [count]))
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
    if code == pytest.ExitCode.OK and not count.passed:
        print(f"every test that calls {name!r} was skipped: nothing is shown about it")
        return int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return code
