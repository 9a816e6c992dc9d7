"""Fused kernels in `python -m moekit bench` and `tune`: they are a combination by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from moekit_bench.tune import _able
from right_fused import acme_moe

import moekit
from moekit.cli.main import main

SPEC = acme_moe.moekit_fused()[0]


@pytest.fixture(autouse=True)
def fused():
    moekit.registry().register(SPEC)
    yield
    moekit.registry().unregister(SPEC)


def results(folder: Path, *options: str) -> dict[str, dict]:
    common = "--device cpu --replays 2 --inputs 2 --tokens 4 --quant none --json".split()
    assert main(["bench", *common, str(folder / "run.json"), *options]) == 0
    (cell,) = json.loads((folder / "run.json").read_text())["cells"]
    return {each["name"]: each for each in cell["results"]}


def test_on_one_rank(tmp_path) -> None:
    found = results(tmp_path, "--shapes", "8:2:128:128", "--experts", "torch,acme_fused")
    assert all(found[name]["us"] > 0 and found[name]["error"] < 0.03 for name in found)
    assert set(found) == {"torch", "acme_fused"}


def test_over_ranks_it_has_no_partner(tmp_path) -> None:
    layers = ("--layers", "--ranks", "2", "--layer", "8:2:128:128", "--experts", "torch")
    found = results(tmp_path, *layers, "--dispatchers", "naive,acme_fused")
    assert set(found) == {"naive + torch", "acme_fused + acme_fused"}
    assert all(each["us"] > 0 for each in found.values())


def test_without_experts_there_is_nothing_to_time(capsys) -> None:
    assert main(["bench", "--dispatch", "--dispatchers", "acme_fused", "--device", "cpu"]) == 2
    assert "acme_fused is a fused kernel: time it with --layers" in capsys.readouterr().err


def test_tables_hold_it_by_its_name_twice() -> None:
    problem = moekit.MoEProblem(
        num_experts=4, top_k=2, hidden_size=64, intermediate_size=48, device="cpu"
    )
    assert _able(problem, ["torch", "acme_fused"]) == [
        ("local", "torch"), ("acme_fused", "acme_fused"),
    ]  # fmt: skip
