"""Names of backends: each means one backend, or an error that says what to do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from fake_plugins import PROBLEM, TORCH, Fakes, assert_usable, installed, offers, state

import moekit
from moekit.contract.specs import ExpertsSpec, importable
from moekit.discovery.registry import Registry
from moekit.errors import BackendBroken, NameClash, NoBackend, UnknownBackend, Unsupported

fakes = pytest.fixture(installed)


# -- backends that fail after discovery ------------------------------------------------------------


def test_no_backend_is_left_after_a_broken_one(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.install("late", offers("late", target="fake_late_dist.nowhere:X"))
    found = fakes.discover(MOEKIT_PLUGINS="late")
    sole = Registry(tuple(s for s in found.plugins if s.name == "late"))
    sole.register(found.dispatcher("local"))
    with pytest.raises(NoBackend, match="late.*does not load: ModuleNotFoundError"):
        moekit.compose(PROBLEM, backends=sole)
    monkeypatch.setenv("MOEKIT_EXPERTS", "late")
    with pytest.raises(BackendBroken):
        moekit.compose(PROBLEM, backends=found)


def test_missing_requirements_are_reasons(fakes: Fakes) -> None:
    more = ", requires=('no_such_lib',), install_hint='pip install no-such-lib'"
    fakes.install("needy", offers("needy", more=more))
    found = fakes.discover()
    assert state(found, "needy").state == "ok"
    wanted = ("no_such_lib is not installed (pip install no-such-lib)",)
    assert moekit.explain(PROBLEM, backends=found).rejected_experts["needy"] == wanted


def test_errors_list_what_every_backend_lacks(fakes: Fakes) -> None:
    more = ", requires=('no_such_lib', 'nor_this'), install_hint='pip install both'"
    fakes.install("needy", offers("needy", "needier", more=more))
    found = fakes.discover(MOEKIT_PLUGINS="needy", MOEKIT_BLOCK="core")
    found.register(fakes.discover(MOEKIT_PLUGINS="").dispatcher("local"))
    with pytest.raises(NoBackend) as caught:
        moekit.compose(PROBLEM, backends=found)
    wanted = ("no_such_lib and nor_this are not installed (pip install both)",)
    assert str(caught.value).count(*wanted) == 2
    assert caught.value.reasons == {"experts needier": wanted, "experts needy": wanted}
    with pytest.raises(Unsupported) as refused:
        moekit.compose(PROBLEM, experts="needy", backends=found)
    assert str(refused.value).count("pip install both") == 1


def test_looking_for_requirements_imports_nothing(fakes: Fakes) -> None:
    parent = fakes.root / "fake_vendor"
    (parent / "inner").mkdir(parents=True)
    (parent / "__init__.py").write_text("raise RuntimeError('imported')")
    (parent / "inner" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    assert importable("fake_vendor")
    assert importable("fake_vendor.inner")
    assert not importable("fake_vendor.outer")
    assert not importable("no_such_lib.inner")
    assert not importable("moekit.errors.deeper")
    assert "fake_vendor" not in sys.modules


# -- names -----------------------------------------------------------------------------------------


def test_register_and_unregister(fakes: Fakes) -> None:
    found = fakes.discover()
    mine = ExpertsSpec(
        name="mine", target=TORCH, format=moekit.ActivationFormat.STANDARD, reduces=True
    )
    found.register(mine)
    assert_usable(found, "mine")
    with pytest.raises(NameClash, match="'mine' is already offered by this process.*choose"):
        found.register(mine)
    with pytest.raises(NameClash, match="'torch' is already offered by moekit"):
        found.register(found.expert("torch"))
    found.unregister(mine)
    with pytest.raises(UnknownBackend, match="'mine' was not registered in this process"):
        found.unregister(mine)
    with pytest.raises(UnknownBackend):
        found.expert("mine")
    with pytest.raises(TypeError):
        found.experts["mine"] = mine


def test_a_copy_has_the_same_backends_and_others_apart() -> None:
    known = moekit.registry()
    mine = replace(known.expert("torch"), name="mine")
    copy = known.copy()
    copy.register(mine)
    again = copy.copy()
    assert again.expert("mine") == mine and again.dispatchers == known.dispatchers
    again.unregister(mine)
    assert "mine" in copy.experts and "mine" not in known.experts


@pytest.mark.parametrize("find", [Registry.expert, Registry.dispatcher])
def test_unknown_names(fakes: Fakes, find: Callable[[Registry, str], object]) -> None:
    fakes.install("bad", "raise RuntimeError('CUDA_HOME is not set')")
    found = fakes.discover(MOEKIT_BLOCK="naive")
    with pytest.raises(UnknownBackend) as caught:
        find(found, "deepep")
    said = str(caught.value)
    assert "named 'deepep'" in said and "install the package" in said
    assert ("torch" if find is Registry.expert else "local") in said
    assert "plugin bad (broken): RuntimeError: CUDA_HOME is not set" in said


def test_names_from_the_environment(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fakes.discover()
    monkeypatch.setenv("MOEKIT_EXPERTS", "tritn")
    with pytest.raises(UnknownBackend, match=r"'tritn'.*\n.*chosen by MOEKIT_EXPERTS"):
        moekit.compose(PROBLEM, backends=found)
    assert moekit.compose(PROBLEM, experts="torch", backends=found).explanation.why == (
        "dispatcher by priority, experts by name"
    )


def test_no_backend_names_the_problem_and_every_reason(fakes: Fakes) -> None:
    found = fakes.discover(MOEKIT_PLUGINS="")
    problem = PROBLEM.replace(parallel=moekit.ParallelConfig(ep_size=2), device="sm90")
    with pytest.raises(NoBackend) as caught:
        moekit.compose(problem, backends=found)
    said = str(caught.value)
    assert "4 experts, top 2, hidden 32" in said and "on cuda sm90" in said
    for name in found.dispatchers:
        assert f"dispatcher {name}: tokens must move between 2 ranks" in said


def test_a_bridge_is_better_than_a_reference_backend(fakes: Fakes) -> None:
    fakes.install("good", offers("rows"))
    slabs = offers("slabs").replace("reduces=True", "reduces=False").replace("STANDARD", "BATCHED")
    fakes.install("batched", slabs)
    found = fakes.discover(MOEKIT_PLUGINS="good,batched", MOEKIT_BLOCK="core")
    core = fakes.discover(MOEKIT_PLUGINS="")
    for spec in (core.dispatcher("local"), core.dispatcher("batched_reference")):
        found.register(spec)
    found.register(core.expert("reference"))
    assert [str(each) for each in moekit.explain(PROBLEM, backends=found).combinations] == [
        "local + rows",
        "local + slabs (bridged)",
        "local + reference",
        "batched_reference + slabs",
        "batched_reference + rows (bridged)",
        "batched_reference + reference (bridged)",
    ]
