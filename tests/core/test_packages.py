"""Packages of this repository that are not installed are named where they would serve."""

from __future__ import annotations

import importlib.metadata
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import moekit
from moekit.discovery import packages
from moekit.discovery.packages import REPOSITORY, Package, not_installed
from moekit.discovery.registry import Registry, registry
from moekit.errors import UnknownBackend
from moekit.problem.quant import SCHEMES

ROOT = Path(__file__).parents[2]
SIZES = dict(num_experts=8, top_k=2, hidden_size=256, intermediate_size=256)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package of the repository's plugins is installed."""
    monkeypatch.setattr(packages, "importable", lambda name: False)


@pytest.mark.parametrize("package", REPOSITORY, ids=lambda package: package.name)
def test_the_table_is_what_packages_offer(package: Package) -> None:
    installed = importlib.metadata.distribution(package.name)
    needs = [line for line in installed.requires or () if "extra ==" not in line]
    assert set(package.needs) == set(re.findall(r"\bmoekit-\w+", " ".join(needs)))
    commands = {point.name for point in installed.entry_points.select(group="moekit.commands")}
    assert set(package.commands) == commands
    offered = [s for s in registry().plugins if s.distribution == package.name]
    assert set(package.dispatchers) == {spec.name for s in offered for spec in s.dispatchers}
    assert set(package.experts) == {spec.name for s in offered for spec in s.experts}
    for state in offered:
        for spec in state.experts:
            assert set(package.devices) <= set(spec.devices)
            patterns = package.schemes
            made_for = {s for s in SCHEMES if any(fnmatchcase(s, p) for p in patterns)}
            assert made_for and made_for <= spec.schemes


def test_every_package_that_offers_backends_or_commands_is_in_the_table() -> None:
    offering = set()
    for folder in (ROOT / "plugins").glob("moekit-*"):
        points = importlib.metadata.distribution(folder.name).entry_points
        if any(point.group in ("moekit", "moekit.commands") for point in points):
            offering.add(folder.name)
    assert {package.name for package in REPOSITORY} == offering


def test_explain_names_what_would_serve(bare: None) -> None:
    problem = moekit.MoEProblem(**SIZES, device="sm90", quant="fp8_block")
    explanation = moekit.explain(problem, backends=Registry.discover({"MOEKIT_PLUGINS": ""}))
    assert explanation.chosen.experts == "torch"
    line = (
        "moekit-triton has experts for this problem and is not installed: pip install "
        "./plugins/moekit-kernels ./plugins/moekit-triton (in a clone of moekit's repository); "
        "so have moekit-deepgemm, moekit-flashinfer"
    )
    assert explanation.not_installed == (line,)
    assert str(explanation).endswith(f"\n  {line}")
    assert explanation.as_dict()["not_installed"] == [line]


def test_only_packages_that_serve_are_named(bare: None) -> None:
    on_cpu = moekit.MoEProblem(**SIZES, device="cpu")
    assert list(not_installed(on_cpu)) == []
    (line,) = not_installed(on_cpu.replace(parallel=moekit.ParallelConfig(ep_size=2)))
    assert line.startswith("moekit-naive has a dispatcher") and "; so have" not in line
    (line,) = not_installed(on_cpu.replace(device="sm90", quant="int4_w4a16_g64_act_order"))
    assert line.startswith("moekit-marlin has experts") and "; so have" not in line


def test_installed_packages_are_not_named() -> None:
    parallel = moekit.ParallelConfig(ep_size=2)
    problem = moekit.MoEProblem(**SIZES, device="sm90", parallel=parallel)
    assert list(not_installed(problem)) == []


def test_an_unknown_backend_names_the_package_that_offers_it(bare: None) -> None:
    found = Registry.discover({"MOEKIT_PLUGINS": ""})
    for find, name, package in (
        (found.expert, "triton", "./plugins/moekit-kernels ./plugins/moekit-triton"),
        (found.dispatcher, "naive", "./plugins/moekit-naive"),
    ):
        with pytest.raises(
            UnknownBackend, match=f"named '{name}'.* offers it: pip install"
        ) as told:
            find(name)
        assert package in str(told.value)
    with pytest.raises(UnknownBackend, match="Correct the name, or install the package"):
        found.expert("tritn")
