"""The specs' reasons and preferences, without the library."""

from __future__ import annotations

from dataclasses import replace

import moekit_nccl
import pytest
import torch
from moekit_nccl import library

import moekit
from moekit import MoEProblem, ParallelConfig
from moekit.discovery.registry import Registry

SIZES = {
    "num_experts": 64,
    "top_k": 8,
    "hidden_size": 7168,
    "intermediate_size": 2048,
    "max_num_tokens": 128,
    "device": "sm90",
}
SPECS = {spec.name: replace(spec, requires=()) for spec in moekit_nccl.moekit_dispatchers()}


def problem_of(ep: int = 8, tp: int = 1, dp: int = 0, nodes: int = 1, **changes) -> MoEProblem:
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp, nodes=nodes)
    return MoEProblem(**{**SIZES, "parallel": parallel, **changes})


def reasons(name: str, **given) -> list[str]:
    return SPECS[name].unsupported(problem_of(**given))


@pytest.fixture(autouse=True)
def without_library(monkeypatch) -> None:
    """Judge the problem alone, also where the library is installed."""
    monkeypatch.setattr(library, "unsupported", lambda: [])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "given",
    [
        {"ep": 2},
        {"ep": 4, "tp": 2, "top_k": 4},
        {"ep": 4, "dp": 2},
        {"ep": 64, "nodes": 8},
        {"quant": "fp8_block", "dtype": torch.float16},
        {"quant": "mxfp8"},
    ],
)
def test_ordinary_problems_are_taken(name, given):
    assert reasons(name, **given) == []


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("nccl_ht", {"ep": 16}, "1 hosts of 16 ranks exceed 8 hosts of 8"),
        ("nccl_ll", {"max_num_tokens": 8193}, "max_num_tokens=8193 exceeds 8192"),
        ("nccl_ht", {"tp": 8, "ep": 1, "dp": 8}, "top_k * tp_size = 64 exceeds 32"),
        ("nccl_ll", {"ep": 2, "tp": 4}, "top_k * tp_size = 32 exceeds 21"),
        ("nccl_ht", {"hidden_size": 7164}, "rows of hidden_size=7164"),
        ("nccl_ht", {"hidden_size": 7176, "quant": "fp8_channel_token"}, "not a multiple of 16"),
        ("nccl_ll", {"hidden_size": 7232}, "hidden_size 7232 is not a multiple of 128"),
        ("nccl_ht", {"ep": 2, "num_experts": 66}, "66 experts of a host"),
        ("nccl_ll", {"num_experts": 2048}, "2048 experts, slices included, exceed 1400"),
        ("nccl_ll", {"num_experts": 60}, "60 experts must be a multiple of ep_size=8"),
        ("nccl_ht", {"max_num_tokens": None}, "set max_num_tokens"),
        ("nccl_ll", {"training": True}, "has no backward"),
    ],
)
def test_limits(name, given, said):
    (reason,) = reasons(name, **given)
    assert said in reason


def test_where_nothing_moves_there_are_no_limits():
    for name in SPECS:
        assert reasons(name, ep=3, dp=1, hidden_size=24, num_experts=63, top_k=40) == []


def test_the_choice_over_hosts():
    """The first choice is high throughput, then low latency, then `naive`."""
    backends = Registry(plugins=moekit.registry().plugins)
    for spec in SPECS.values():
        backends.register(replace(spec, name=f"{spec.name}_here"))
    made = moekit.explain(problem_of(ep=16, nodes=2), backends=backends)
    said = made.text(every=True)
    assert made.chosen.dispatcher == "nccl_ht_here"
    places = [said.index(f"{name} + ") for name in ("nccl_ht_here", "nccl_ll_here", "naive")]
    assert places == sorted(places)
    assert "the 16 ranks are on 2 hosts, and it serves one" in said


def test_over_hosts_it_precedes_naive():
    """On one host nobody has compared it; `naive` has priority 0."""
    naive = moekit.registry().dispatcher("naive")
    for name in SPECS:
        assert SPECS[name].priority_for(problem_of(ep=16, nodes=2)) > naive.priority
        assert SPECS[name].priority_for(problem_of()) < naive.priority
    training = problem_of(ep=16, nodes=2, training=True)
    assert SPECS["nccl_ht"].priority_for(training) > naive.priority
