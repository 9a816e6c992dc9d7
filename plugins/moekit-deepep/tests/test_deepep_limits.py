"""The specs' reasons and needs, without the library."""

from __future__ import annotations

from dataclasses import replace

import moekit_deepep
import pytest
import torch

from moekit import MoEProblem, ParallelConfig

SIZES = {
    "num_experts": 64,
    "top_k": 8,
    "hidden_size": 7168,
    "intermediate_size": 2048,
    "max_num_tokens": 128,
    "device": "sm90",
}
SPECS = {spec.name: replace(spec, requires=()) for spec in moekit_deepep.moekit_dispatchers()}


def reasons(name: str, ep: int = 8, tp: int = 1, dp: int = 0, **changes) -> list[str]:
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp)
    return SPECS[name].unsupported(MoEProblem(**{**SIZES, "parallel": parallel, **changes}))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("ep", [2, 4, 8])
def test_ordinary_problems_are_taken(name, ep):
    assert reasons(name, ep) == []
    assert reasons(name, ep, quant="fp8_block", num_experts=63, num_redundant_experts=1) == []


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp": 2}, "tp_size=2"),
        ({"dp": 4}, "dp_size=4"),
        ({"ep": 16}, "ep_size=16 is not supported: choose 2, 4 or 8"),
        ({"ep": 3, "num_experts": 63}, "ep_size=3"),
        ({"num_experts": 60}, "60 experts must be a multiple of ep_size=8"),
        ({"top_k": 33}, "top_k=33 exceeds"),
        ({"hidden_size": 7160}, "hidden_size 7160"),
    ],
)
def test_limits_of_all(name, changes, said):
    (reason,) = reasons(name, **changes)
    assert said in reason


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("deepep_ht", {"hidden_size": 8192}, "hidden_size 8192 exceeds 8176"),
        ("deepep_ht", {"hidden_size": 7184, "quant": "fp8_channel_token"}, "not a multiple of 32"),
        ("deepep_ht", {"num_experts": 2048}, "256 experts per rank exceed 128"),
        ("deepep_ll", {"hidden_size": 1024}, "(available: 2048, 2560"),
        ("deepep_ll", {"top_k": 12}, "top_k=12 exceeds 11"),
        ("deepep_ll", {"max_num_tokens": 512}, "max_num_tokens=512 exceeds 511"),
        ("deepep_elastic", {"hidden_size": 7296}, "not a multiple of 256"),
        ("deepep_elastic", {"num_experts": 4096}, "512 experts per rank exceed 256"),
    ],
)
def test_limits_of_one(name, changes, said):
    (reason,) = reasons(name, **changes)
    assert said in reason


def test_what_trains():
    trained = {n for n in SPECS if not reasons(n, training=True)}
    assert trained == {"deepep_ht", "deepep_elastic"}
    assert "has no backward" in reasons("deepep_ll", training=True)[0]
    problem = MoEProblem(**SIZES, parallel=ParallelConfig(ep_size=8))
    for name, priority in (("deepep_ht", 10), ("deepep_elastic", 8), ("deepep_ll", 6)):
        assert SPECS[name].priority_for(problem) == priority
    # No library has run these backwards: `naive`, of priority 0, is preferred.
    assert all(SPECS[n].priority_for(problem.replace(training=True)) < 0 for n in trained)


@pytest.mark.parametrize("name", ["deepep_ht", "deepep_elastic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_are_bf16(name, dtype):
    """The library combines no other rows."""
    (reason,) = reasons(name, training=True, dtype=dtype)
    assert str(dtype)[6:] in reason


def test_queue_depth_moves_the_token_limit(monkeypatch):
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "2050")
    assert reasons("deepep_ll", max_num_tokens=1024) == []
    assert "exceeds 1024" in reasons("deepep_ll", max_num_tokens=1025)[0]


@pytest.mark.parametrize("depth", ["x", "", "1k", "-5", "3"])
def test_a_queue_depth_that_is_none_is_a_reason(monkeypatch, depth):
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", depth)
    assert reasons("deepep_ll") == [f"NVSHMEM_QP_DEPTH={depth} must be a whole number above 3"]


def test_the_copy_in_use_is_described(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("__version__ = '2.1.0'\n")
    monkeypatch.setattr("moekit.discovery.library._package_folder", lambda name: tmp_path)
    for spec in SPECS.values():
        assert spec.describe(None) == f"deep_ep 2.1.0 in {tmp_path}"


def test_where_nothing_moves_there_are_no_limits():
    for name in SPECS:
        assert reasons(name, 3, dp=1, hidden_size=24, num_experts=64, top_k=40) == []
