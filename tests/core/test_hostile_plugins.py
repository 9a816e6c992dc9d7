"""Hostile plugins (`hostile_plugins.py`) harm nobody: neither plugins beside them nor the tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_plugins import PROBLEM, Fakes, installed, offers
from hostile_plugins import CASES, DEADLY

import moekit
from moekit.discovery import registry as plugins
from moekit.discovery.entry_points import SWITCHES
from moekit.selection import select
from moekit.untrusted import process as isolate

HERE = Path(__file__).parents[1] / "support"


def run(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in (*SWITCHES, *select.SWITCHES)}
    done = [sys.executable, *args]
    return subprocess.run(done, env=env | environ, capture_output=True, text=True, timeout=600)


@pytest.mark.timeout(600)
def test_hostile_plugins_harm_nobody() -> None:
    """One process forks for every case; as one test, it runs in one worker of pytest-xdist."""
    done = run(str(HERE / "hostile_driver.py"))
    assert done.returncode == 0, done.stderr
    faults: dict[str, list[str]] = json.loads(done.stdout)
    assert set(faults) >= set(CASES)
    doctors = [names for names in faults if names.startswith("doctor: ")]
    assert sum(len(names.split(", ")) for names in doctors) == len(DEADLY)
    wrong = [f"{case}: {said}" for case, all_said in faults.items() for said in all_said]
    assert not wrong, "\n".join(wrong)


def test_stdout_is_the_answers_alone(tmp_path: Path) -> None:
    """All that print, in one process with a real end."""
    fakes = Fakes(tmp_path)
    noisy = [name for name in CASES if name.startswith(("prints", "logs", "warns"))]
    for name in noisy:
        fakes.install(name, CASES[name].source.replace("'bad'", repr(name)))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("-m", "moekit", "plugins", "--json", PYTHONPATH=path, MOEKIT_PLUGINS=",".join(noisy))
    assert done.returncode == 0, done.stderr
    states = {p["name"]: p["state"] for p in json.loads(done.stdout)["plugins"]}
    assert {states[name] for name in noisy} == {"ok"}
    assert "{hello" in done.stderr


def test_plugins_prints_what_no_ascii_terminal_shows(tmp_path: Path) -> None:
    Fakes(tmp_path).install("bad", "raise OSError('\\u00e9\\u4e00')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHONPATH": path, "PYTHONIOENCODING": "ascii", "MOEKIT_PLUGINS": "bad"}
    done = run("-m", "moekit", "plugins", **settings)
    assert done.returncode == 1 and "OSError: \\xe9\\u4e00" in done.stdout, done.stderr


# -- the parts ------------------------------------------------------------------------------------


def test_isolated_answers_and_faults() -> None:
    def answer(tell: isolate.Report) -> None:
        tell("a", "b\x1b")
        print("noise")
        raise OSError("gone")

    assert isolate.run(answer, 600) == ([["a", "b\\x1b"]], "OSError: gone")
    assert isolate.run(lambda tell: tell("done"), 600) == ([["done"]], "")


fakes = pytest.fixture(installed)


def test_a_reference_backend_is_never_a_silent_choice(
    fakes: Fakes, caplog: pytest.LogCaptureFixture
) -> None:
    """A clash over the only fast name warns when it is found, and when the slow one is chosen."""
    for name in ("alpha", "beta"):
        fakes.install(name, offers("fast"))
    found = fakes.discover(MOEKIT_PLUGINS="alpha,beta")
    assert "'fast' is also offered by beta-dist 1.0" in caplog.text
    slow = plugins.Registry(tuple(s for s in found.plugins if s.name in ("alpha", "beta")))
    slow.register(found.expert("reference"))
    slow.register(found.dispatcher("local"))
    caplog.clear()
    assert moekit.compose(PROBLEM, backends=slow).experts.spec.name == "reference"
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "nothing faster than the experts backend 'reference'" in warning
    assert "plugin alpha (clash)" in warning
    caplog.clear()
    moekit.compose(PROBLEM, experts="reference", backends=slow)
    assert not caplog.records
