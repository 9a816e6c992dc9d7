"""Ranks on several hosts."""

from __future__ import annotations

import pytest
import torch

import moekit
from moekit import MoEProblem, ParallelConfig
from moekit.discovery.registry import registry
from moekit.errors import InvalidProblem


def small(**changes) -> MoEProblem:
    values = {
        "num_experts": 8,
        "top_k": 2,
        "hidden_size": 64,
        "intermediate_size": 32,
        "max_num_tokens": 16,
        "device": "cpu",
    }
    return MoEProblem(**{**values, **changes})


def test_only_dispatchers_that_span_hosts_serve_several() -> None:
    problem = small(parallel=ParallelConfig(ep_size=4, nodes=2))
    for name, spec in registry().dispatchers.items():
        if not spec.moves_tokens:
            continue
        said = [r for r in spec.unsupported(problem) if "are on 2 hosts, and it serves one" in r]
        assert bool(said) is not spec.spans_hosts, name
        one_host = problem.replace(parallel=ParallelConfig(ep_size=4))
        assert not any("hosts" in r for r in spec.unsupported(one_host))
    spanning = {n for n, s in registry().dispatchers.items() if s.spans_hosts}
    assert spanning <= {"naive", "flashinfer_allgather", "nccl_ht", "nccl_ll"}


def test_where_nothing_moves_hosts_do_not_matter() -> None:
    problem = small(parallel=ParallelConfig(ep_size=4, dp_size=1, nodes=2))
    assert moekit.explain(problem).chosen.dispatcher == "local"


def test_nodes_are_part_of_the_problem() -> None:
    parallel = ParallelConfig(ep_size=4, tp_size=2, nodes=8)
    problem = small(parallel=parallel)
    assert eval(repr(problem), {**vars(moekit), "torch": torch}) == problem
    assert parallel.num_ranks == 8
    said = r"nodes must divide the number of ranks, ep_size x tp_size \(got 4 ranks, 3 nodes\)"
    with pytest.raises(InvalidProblem, match=said):
        ParallelConfig(ep_size=4, nodes=3)
