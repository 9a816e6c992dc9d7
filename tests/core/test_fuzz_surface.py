"""Random calls of the public surface, in a process with a memory limit: see fuzz_surface.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moekit.errors import InvalidInput, PeerFailed

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from fuzz_surface import SURFACE, Late, case, fault_of

CASES = 400


def _seed() -> str:
    """Return MOEKIT_TEST_SEED, else the number of the commit, as `.ci/run` sets it, or 0."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()[:7]
    return os.environ.get("MOEKIT_TEST_SEED", str(int(commit or "0", 16)))


def test_random_calls_return_or_raise_an_allowed_error() -> None:
    script, seed = Path(__file__).parents[1] / "support" / "fuzz_surface.py", _seed()
    print(f"repeat with MOEKIT_TEST_SEED={seed}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "--cases", str(CASES), "--seed", seed],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    assert done.stdout.split("\n")[-2].startswith(f"{CASES} cases, 0 faults"), done.stdout


def test_all_kinds_of_calls_are_drawn() -> None:
    assert {case(seed)[0] for seed in range(2000)} == set(SURFACE)


def test_a_case_is_the_same_for_the_same_seed() -> None:
    again = [[fault_of(case(seed)[1]) for seed in range(20)] for _ in range(2)]
    assert again[0] == again[1] == [None] * 20


def _hang() -> None:
    while True:
        pass


def _raise(error: BaseException) -> None:
    raise error


class Unprintable(InvalidInput):
    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda: _raise(RuntimeError("x")), RuntimeError),
        (lambda: _raise(AssertionError()), AssertionError),
        (lambda: _raise(SystemExit(2)), SystemExit),
        (lambda: _raise(KeyboardInterrupt()), KeyboardInterrupt),
        (lambda: _raise(Unprintable()), KeyError),
        (_hang, Late),
    ],
)
def test_faults_are_told(call, fault) -> None:
    assert type(fault_of(call, seconds=0.5)) is fault


@pytest.mark.parametrize("call", [int, lambda: _raise(TypeError("x")),
                                  lambda: _raise(PeerFailed("x"))])  # fmt: skip
def test_what_is_allowed_is_no_fault(call) -> None:
    assert fault_of(call) is None
