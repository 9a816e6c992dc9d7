"""Ranks on several hosts, and the memory that dispatchers state without being created."""

from __future__ import annotations

import pytest
import torch

import moekit
from moekit import MoEProblem, ParallelConfig
from moekit.contract.sizes import Footprint
from moekit.discovery.registry import registry
from moekit.errors import InvalidProblem
from moekit.testing.distributed import RankPool

MiB = 1 << 20


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


# -- who serves ----------------------------------------------------------------------------------


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
    assert spanning <= {"naive", "flashinfer_allgather"}


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


# -- how much ------------------------------------------------------------------------------------


def footprint_of(spec, problem) -> Footprint:
    assert spec.footprint is not None
    return spec.footprint(problem)


def real_figures(rank, world_size, name, changes):
    parallel = ParallelConfig(ep_size=world_size, ep_rank=rank)
    kernel = moekit.compose(small(parallel=parallel, **changes), name, "torch")
    d, most = kernel.dispatcher, kernel.problem.max_num_tokens
    said = d.max_rows(most), d.buffer_bytes(), d.transient_bytes(most)
    kernel.destroy()
    return said


@pytest.mark.parametrize(
    ("name", "quant"), [("naive", "none"), ("flashinfer_allgather", "fp8_block")]
)
def test_footprints_equal_real_dispatchers(name: str, quant: str) -> None:
    """The footprint of a problem has the sizes that a real group of ranks reports."""
    if name not in registry().dispatchers:
        pytest.skip(f"{name} is not installed")
    changes = {"quant": quant, "hidden_size": 256, "intermediate_size": 128}
    with RankPool(2) as pool:
        (rows, buffers, transient), _ = pool.run(real_figures, name, changes)
    problem = small(parallel=ParallelConfig(ep_size=2), **changes)
    f = footprint_of(registry().dispatcher(name), problem)
    assert (f.rows, f.buffer_bytes, f.transient) == (rows, buffers, transient)


# Recorded on H200 by what the libraries' own helpers said (hidden 7168, top 8 of 256).


def test_deepep_sizes_as_recorded() -> None:
    sizes = pytest.importorskip("moekit_deepep.footprint")
    normal = sizes.normal_buffers(7168, 4)
    assert round(sum(normal.values()) / 1e6) == 235 and len(normal) == 2
    assert round(sizes.normal_buffers(7168, 8)["NVLink queues"] / MiB) == 384
    for hidden, want in {7168: (1820, 3640, 7280), 4096: (1040, 2080, 4160)}.items():
        for tokens, mib in zip((128, 256, 512), want, strict=True):
            slots = sizes.low_latency_buffers(tokens, hidden, 256)["rows (NVSHMEM)"]
            assert round(slots / MiB) == mib
    recorded = {1: 2, 16: 2, 128: 8, 1024: 61, 4096: 237}
    assert {t: round(sizes.elastic_buffer(t, 7168, 8, 4) / 1e6) for t in recorded} == recorded


def test_flashinfer_sizes_as_recorded() -> None:
    sizes = pytest.importorskip("moekit_flashinfer.footprint")
    row = (2 * 7168 + 64, 2 * 7168)
    recorded = {128: 28, 1024: 225, 4096: 899, 8192: 1797}
    said = {t: round(sizes.one_sided_workspace(8, t, row) / MiB) for t in recorded}
    assert said == recorded
    recorded = {1: 2, 16: 2, 128: 17, 1024: 120, 4096: 472}
    pages = {t: sizes.pages(sizes.one_sided_workspace(4, t, row)) for t in recorded}
    assert {t: round(n / 1e6) for t, n in pages.items()} == recorded
    assert round(sum(sizes.two_sided_buffers(4).values()) / 1e6) == 285


@pytest.mark.parametrize("tokens", [1, 16, 128, 1024])
def test_pplx_sizes_as_recorded(tokens: int) -> None:
    footprint = pytest.importorskip("moekit_pplx.footprint")
    problem = MoEProblem(
        num_experts=256,
        top_k=8,
        hidden_size=7168,
        intermediate_size=2048,
        max_num_tokens=tokens,
        parallel=ParallelConfig(ep_size=4),
        device="sm90",
    )
    recorded = {1: 11, 16: 182, 128: 1454, 1024: 11633}
    assert round(footprint.footprint(problem).buffer_bytes / 1e6) == recorded[tokens]
