"""`python -m moekit doctor`: what it finds, what it calls a fault, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from fake_plugins import Fakes, offers, only_named

from moekit.backends import cpu_costs
from moekit.cli.doctor import system
from moekit.cli.main import main
from moekit.selection.tuned import user_path

NEEDY = ", requires=('json', 'no_such_lib'), install_hint='pip install no-such-lib'"
GROUPS = ["versions", "backends", "devices"]


@pytest.fixture(autouse=True)
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fakes]]:
    """Load only the plugins that a test names, and keep caches in a temporary folder."""
    for variable in ("TRITON_CACHE_DIR", "MOEKIT_TUNED"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield from only_named(tmp_path, monkeypatch)


def examined(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, tuple[str, str]]]:
    """Return the exit code, and state and text of each finding."""
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert all(f["state"] in ("ok", "no", "bad") and f["text"] for f in found)
    assert code == any(f["state"] == "bad" for f in found)
    return code, {f["name"]: (f["state"], f["text"]) for f in found}


def test_a_machine_without_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert [line[:-1] for line in out.splitlines() if line.endswith(":")] == GROUPS
    assert out.endswith("\n0 faults\n") and max(map(len, out.splitlines())) <= 100
    code, found = examined(capsys)
    assert code == 0
    assert found["torch"] == ("ok", found["torch"][1]) and "every scheme" in found["torch"][1]
    assert not (tmp_path / "cache").exists()  # nothing is left behind


def test_backends(only: Callable[..., Fakes], capsys: pytest.CaptureFixture[str]) -> None:
    fakes = only("good", "needy", "elsewhere")
    more = ", schemes=frozenset({'none', 'fp8_block'}), describe=lambda p: 'acme 3 in /opt/acme'"
    fakes.install("good", offers("good", more=more))
    fakes.install("needy", offers("needy", more=NEEDY))
    fakes.install("elsewhere", offers("elsewhere", more=", devices=('cuda==1.0',)"))
    code, found = examined(capsys)
    assert code == 0
    detail = "serves schemes: fp8_block, none; acme 3 in /opt/acme (good-dist 1.0)"
    assert found["good"] == ("ok", detail)
    state, text = found["needy"]
    assert state == "no" and "no_such_lib" in text and "pip install no-such-lib" in text
    assert found["elsewhere"][0] == "no" and "cuda==1.0" in found["elsewhere"][1]


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("broken", "raise RuntimeError('boom')", "boom"),
        ("empty", offers("empty", target="json:NoSuchClass"), "NoSuchClass"),
        ("vendor", offers("vendor", target="no_such_module_here:Experts"), "no_such_module_here"),
    ],
)
def test_backends_at_fault(
    only: Callable[..., Fakes], name: str, source: str, words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    only(name, "good").install(name, source)
    only(name, "good").install("good", offers("good"))
    code, found = examined(capsys)
    assert code == 1 and found[name][0] == "bad" and words in found[name][1]
    assert found["good"][0] == "ok"


def test_a_blocked_plugin_is_no_fault(
    only: Callable[..., Fakes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only("good").install("good", offers("good"))
    monkeypatch.setenv("MOEKIT_BLOCK", "good")
    code, found = examined(capsys)
    assert code == 0 and found["good"][0] == "no" and "MOEKIT_BLOCK" in found["good"][1]


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command fails for a user without a name, as some containers run processes."""

    def nowhere() -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for variable in ("XDG_CACHE_HOME", "MOEKIT_TUNED", "TRITON_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert user_path() == Path("/nonexistent/.cache/moekit/tuned")
    assert cpu_costs._file("").parent == Path("/nonexistent/.cache/moekit")


def test_a_group_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost() -> NoReturn:
        raise RuntimeError("driver lost")

    monkeypatch.setattr(system, "devices", lost)
    code, found = examined(capsys)
    assert code == 1 and found["looking"] == ("bad", "RuntimeError: driver lost")
    assert found["torch"][0] == "ok"


@pytest.mark.parametrize("limit", ["0", "-1", "soon", "nan"])
def test_a_time_limit_is_a_number(capsys: pytest.CaptureFixture[str], limit: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", f"--time-limit={limit}"])
    assert caught.value.code == 2
    assert f"must be a number of seconds above 0 (got '{limit}')" in capsys.readouterr().err


def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies between every two devices are compared, here on the CPU."""
    three = [torch.device("cpu", i) for i in range(3)]
    assert list(system._links(three)) == [("links", "ok", "copies between all devices arrive")]
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    found = list(system._links(three))
    assert [name for name, *_ in found] == [f"link {a}-{b}" for a, b in permutations(range(3), 2)]
    assert {state for _, state, _ in found} == {"bad"}
