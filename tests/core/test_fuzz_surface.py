"""Random calls of the public surface, in a process with a memory limit: see fuzz_surface.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moekit.errors import InvalidInput

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from fuzz_surface import KERNEL, PACKED, Late, OtherBits, fault_of

CASES = 400


def _seed() -> str:
    """Return MOEKIT_TEST_SEED, else the number of the commit, as `.ci/run` sets it, or 0."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()[:7]
    return os.environ.get("MOEKIT_TEST_SEED", str(int(commit or "0", 16)))


def test_random_calls_leave_nothing_behind() -> None:
    script, seed = Path(__file__).parents[1] / "support" / "fuzz_surface.py", _seed()
    print(f"repeat with MOEKIT_TEST_SEED={seed}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "--cases", str(CASES), "--seed", seed],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    assert f"{CASES} cases, 0 faults" in done.stdout


def _hang() -> None:
    while True:
        pass


def _raise(error: BaseException) -> None:
    raise error


def _spoil() -> None:
    PACKED["w2"].mul_(2)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (int, None),
        (lambda: _raise(InvalidInput("x")), None),
        (lambda: _raise(TypeError("x")), None),
        (lambda: _raise(AssertionError()), AssertionError),
        (lambda: _raise(SystemExit(2)), SystemExit),
        (lambda: _raise(KeyboardInterrupt()), KeyboardInterrupt),
        (_hang, Late),
        (_spoil, OtherBits),
    ],
)
def test_faults_are_told(call, fault) -> None:
    kept = {name: tensor.clone() for name, tensor in PACKED.experts.items()}
    assert type(fault_of(call, seconds=0.5 if call is _hang else 60)) is (fault or type(None))
    for name, tensor in kept.items():
        PACKED[name].copy_(tensor)
    assert KERNEL.problem.num_experts == 4
