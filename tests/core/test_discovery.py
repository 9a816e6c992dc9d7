"""No plugin can break discovery, or another plugin. Fake distributions, in this process."""

from __future__ import annotations

import sys
import threading
from multiprocessing import get_context

import pytest
from fake_plugins import PROBLEM, Fakes, assert_usable, installed, offers, state

import moekit
from moekit.discovery import registry as plugins
from moekit.errors import InvalidInput, NameClash, NoBackend

fakes = pytest.fixture(installed)


GUARD = 120.0  # seconds, of which a right process needs few


# -- one broken plugin stays alone ----------------------------------------------------------------


def test_other_packages_metadata_does_not_matter(fakes: Fakes) -> None:
    fakes.install("other", None, entries="[console_scripts]\nnonsense\n")
    fakes.install("garbled", None)
    garbled = fakes.root / "garbled_dist-1.0.dist-info" / "entry_points.txt"
    garbled.write_bytes(b"\xff\xfe\x00[console_scripts]")
    (fakes.root / "half_uninstalled-1.0.dist-info").mkdir()
    fakes.install("good", offers("good"))
    found = fakes.discover()
    assert not [s for s in found.plugins if s.distribution in ("other-dist", "garbled-dist", "?")]
    assert_usable(found, "good")


def test_a_hook_may_return_one_spec(fakes: Fakes) -> None:
    fakes.install("one", offers("one").replace("[spec(name) for name in ('one',)]", "spec('one')"))
    fakes.install("none", offers("none").replace("[spec(name) for name in ('none',)]", "5"))
    found = fakes.discover()
    assert_usable(found, "one")
    assert "moekit_experts returned 5, expected a list of" in state(found, "none").reason


def test_the_user_can_still_interrupt(fakes: Fakes) -> None:
    fakes.install("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        fakes.discover()


def test_strict_lets_the_error_out(fakes: Fakes) -> None:
    fakes.install("bad", "raise RuntimeError('CUDA_HOME is not set')")
    with pytest.raises(RuntimeError, match="CUDA_HOME"):
        fakes.discover(MOEKIT_STRICT="1")
    assert state(fakes.discover(MOEKIT_STRICT="0"), "bad").state == "broken"


@pytest.mark.parametrize(
    ("name", "meant"), [("MOEKIT_EXPERT", "MOEKIT_EXPERTS"), ("MOEKIT_PLUGIN", "MOEKIT_PLUGINS")]
)
def test_a_misspelt_variable_is_named(fakes: Fakes, caplog, name: str, meant: str) -> None:
    fakes.discover(**{name: "torch"})
    assert f"{name} is ignored: {meant} may be meant" in caplog.text
    caplog.clear()
    fakes.discover(**{meant: "torch", "MOEKIT_VLLM": "on", "MOEKIT_TEST_SEED": "1"})
    assert not caplog.text


@pytest.mark.parametrize("value", ["2", "yes", "True", "-1"])
def test_a_switch_is_0_or_1(fakes: Fakes, value: str) -> None:
    says = rf"MOEKIT_STRICT='{value}': expected 0 or 1; set one of them, or unset .* for 0"
    with pytest.raises(InvalidInput, match=says):
        fakes.discover(MOEKIT_STRICT=value)


def test_a_fork_while_another_thread_discovers() -> None:
    held, done = threading.Event(), threading.Event()

    def discover() -> None:
        with plugins._lock:
            held.set()
            done.wait(GUARD)

    thread = threading.Thread(target=discover)
    thread.start()
    assert held.wait(GUARD)
    fork = get_context("fork").Process(target=moekit.registry)
    fork.start()
    fork.join(GUARD)
    fork.kill()
    done.set()
    thread.join()
    assert fork.exitcode == 0


# -- which plugins are looked at ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["acme", "acme-moe", "Acme_MoE"])
def test_blocked_by_its_name_or_its_distributions(fakes: Fakes, name: str) -> None:
    fakes.install("acme", "raise RuntimeError('must not be imported')", distribution="acme-moe")
    fakes.install("good", offers("good"))
    found = fakes.discover(MOEKIT_BLOCK=f" {name} ,")
    acme = state(found, "acme")
    assert (acme.state, acme.reason) == ("blocked", "named in MOEKIT_BLOCK")
    assert "fake_acme_moe" not in sys.modules
    assert_usable(found, "good")


def test_allow_list(fakes: Fakes) -> None:
    fakes.install("acme", "raise RuntimeError('must not be imported')")
    fakes.install("good", offers("good"))
    found = fakes.discover(MOEKIT_PLUGINS="good")
    assert state(found, "acme").reason == "not named in MOEKIT_PLUGINS"
    assert_usable(found, "good")
    none = fakes.discover(MOEKIT_PLUGINS="")
    assert {s.state for s in none.plugins if s.name != "core"} == {"blocked"}
    assert_usable(none, "torch")
    both = fakes.discover(MOEKIT_PLUGINS="good,core", MOEKIT_BLOCK="good")
    assert state(both, "good").reason == "named in MOEKIT_BLOCK"


def test_the_core_can_be_blocked_too(fakes: Fakes) -> None:
    found = fakes.discover(MOEKIT_PLUGINS="", MOEKIT_BLOCK="core")
    assert not found.dispatchers and not found.experts
    with pytest.raises(NoBackend, match="plugin core .blocked.: named in MOEKIT_BLOCK"):
        moekit.compose(PROBLEM, backends=found)


@pytest.mark.parametrize("variable", ["MOEKIT_PLUGINS", "MOEKIT_BLOCK"])
def test_unknown_names_in_a_variable_are_reported(fakes: Fakes, variable: str) -> None:
    fakes.install("good", offers("good"))
    found = fakes.discover(**{variable: "trition"})
    wrong = state(found, "trition")
    assert wrong.state == "broken"
    assert wrong.reason == f"named in {variable}, but no such plugin is installed"


def test_a_distribution_seen_twice_counts_once(
    fakes: Fakes, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Fakes(tmp_path_factory.mktemp("older"))
    older.install("good", offers("old"), version="0.9")
    fakes.install("good", offers("good"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(older.root), str(fakes.root)])
    found = fakes.discover()
    assert state(found, "good").version == "1.0"
    assert_usable(found, "good")


# -- clashes ---------------------------------------------------------------------------------------


def test_a_clash_costs_only_the_name(fakes: Fakes) -> None:
    fakes.install("alpha", offers("shared", "alpha_own"))
    fakes.install("beta", offers("shared", "beta_own"), version="2.0")
    fakes.install("gamma", offers("other"))
    fakes.install("delta", offers("other"))
    found = fakes.discover()
    assert state(found, "alpha").state == "clash"
    reason = "experts backend 'shared' is also offered by beta-dist 2.0"
    assert state(found, "alpha").reason == reason
    assert "shared" not in found.experts
    with pytest.raises(NameClash) as caught:
        moekit.compose(PROBLEM, experts="shared", backends=found)
    said = str(caught.value)
    assert "'shared' is offered by alpha-dist 1.0 and beta-dist 2.0" in said
    assert "MOEKIT_BLOCK=alpha-dist or MOEKIT_BLOCK=beta-dist" in said
    assert "gamma" not in said and "delta" not in said
    for experts in ("alpha_own", "beta_own", "torch"):
        assert_usable(found, experts)
    assert_usable(fakes.discover(MOEKIT_BLOCK="beta-dist"), "shared")


def test_two_forks_of_one_plugin(fakes: Fakes) -> None:
    fakes.install("acme", offers("acme"), distribution="acme-moe")
    fakes.install("acme", offers("acme"), distribution="acme-moe-fork", version="7")
    found = fakes.discover()
    assert [s.state for s in found.plugins if s.name == "acme"] == ["clash", "clash"]
    only = fakes.discover(MOEKIT_BLOCK="acme-moe-fork")
    assert [s.state for s in only.plugins if s.name == "acme"] == ["ok", "blocked"]
    assert_usable(only, "acme")
