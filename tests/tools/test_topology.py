"""`python -m moekit explain --nodes`: what each rank needs, without creating anything."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from test_cli import SIZES, VENDORS, actual, documented

import moekit
from moekit import MoEProblem, ParallelConfig
from moekit.cli.main import main
from moekit.contract.sizes import Footprint
from moekit.discovery.registry import Registry, registry
from moekit.errors import InvalidProblem
from moekit.problem.quant import SCHEMES
from moekit.selection import topology
from moekit.testing.cases import random_weights
from moekit.testing.distributed import RankPool

MiB = 1 << 20
BIG = [*SIZES, "--quant", "fp8_block", "--ep", "64", "--max-num-tokens", "128", "--device", "sm90"]


@pytest.fixture(autouse=True)
def no_switches(monkeypatch) -> None:
    for variable in ("MOEKIT_DISPATCHER", "MOEKIT_EXPERTS", "MOEKIT_TUNED"):
        monkeypatch.delenv(variable, raising=False)


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


def on_hosts(problem: MoEProblem, **names) -> dict[str, topology.OnHosts]:
    found = topology.on_hosts(problem, moekit.explain(problem, **names))
    return {each.dispatcher: each for each in found}


# -- what is said --------------------------------------------------------------------------------


def test_text_output(capsys) -> None:
    pytest.importorskip("moekit_naive")
    assert main(["explain", *BIG, "--nodes", "8"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    flat = " ".join(out.split())
    assert "64 ranks on 8 hosts, 8 on each, with 128 tokens each; a rank holds 168 MiB of" in flat
    assert "naive buffers: none (it keeps no buffers) a call: 8192 rows" in flat
    assert "no NVSHMEM" in flat and "local cannot" not in flat
    assert "are on 8 hosts, and it serves one" in flat


def test_json_is_as_documented(capsys) -> None:
    assert main(["explain", *BIG, "--nodes", "8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    t = answer["topology"]
    assert (t["ranks"], t["nodes"], t["tokens"]) == (64, 8, 128)
    each = next(iter(t["dispatchers"].values()))
    shown = {**t, "dispatchers": {"NAME": each}}
    if each["buffers"]:
        each["buffers"] = {"NAME": 1}
    keys = {k.replace("topology.topology", "topology") for k in actual({"topology": shown})}
    want = documented("explain --nodes --json")
    assert {k for k in keys if ".buffers" not in k} == {k for k in want if ".buffers" not in k}


def test_without_nodes_nothing_changes(capsys) -> None:
    assert main(["explain", *BIG, "--json"]) == 0
    assert "topology" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "--nodes 7",
            "nodes must divide the number of ranks, ep_size x tp_size (got 64 ranks, 7 nodes)",
        ),
        ("--nodes 0", "nodes=0"),
    ],
)
def test_nodes_must_divide_the_ranks(capsys, more: str, said: str) -> None:
    assert main(["explain", *BIG, *more.split()]) == 2
    assert said in capsys.readouterr().err


def test_max_num_tokens_is_required(capsys) -> None:
    args = [a for a in BIG if a not in ("--max-num-tokens", "128")]
    assert main(["explain", *args, "--nodes", "8"]) == 2
    assert "set --max-num-tokens" in capsys.readouterr().err


def test_no_library_is_imported() -> None:
    code = (
        "import sys; from moekit.cli.main import main; "
        f"assert main({['explain', *BIG, '--nodes', '8', '--experts', 'torch']!r}) == 0; "
        f"print('loaded', sorted(set({VENDORS!r}) & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded []", done.stdout


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
    with pytest.raises(InvalidProblem, match="3 nodes"):
        ParallelConfig(ep_size=4, nodes=3)


# -- how much ------------------------------------------------------------------------------------


def footprint_of(spec, problem) -> Footprint:
    assert spec.footprint is not None
    return spec.footprint(problem)


def test_experts_are_counted_as_the_kernel_counts_them() -> None:
    """The memory of a combination is `ModularKernel.memory` of the same sizes."""
    pytest.importorskip("moekit_naive")
    problem = small(parallel=ParallelConfig(ep_size=4, nodes=2))
    found = on_hosts(problem, experts="torch")["naive"]
    assert found.serves and found.experts == "torch" and found.memory is not None
    assert found.memory.total == found.memory.workspace + found.memory.intermediate
    more = on_hosts(problem.replace(max_num_tokens=32), experts="torch")["naive"].memory
    assert more.total > 1.5 * found.memory.total


@pytest.mark.parametrize("name", ["a_raises", "b_silent"])
def test_footprints_that_raise_or_are_missing(name: str) -> None:
    naive = pytest.importorskip("moekit_naive").moekit_dispatchers()[0]

    def broken(problem):
        raise RuntimeError("planted")

    made = Registry(plugins=tuple(p for p in registry().plugins if p.name == "core"))
    made.register(replace(naive, name="a_raises", footprint=broken))
    made.register(replace(naive, name="b_silent", footprint=None))
    problem = small(parallel=ParallelConfig(ep_size=4, nodes=2))
    explanation = moekit.explain(problem, backends=made)
    found = {e.dispatcher: e for e in topology.on_hosts(problem, explanation, backends=made)}
    assert found[name].serves and found[name].footprint is None
    text = "\n".join(topology.lines(problem, list(found.values())))
    assert "planted" in text and "memory unknown: it declares no footprint" in text
    assert ("planted" in found[name].why_not) is (name == "a_raises")


@pytest.mark.parametrize("quant", SCHEMES)
def test_weight_bytes_equal_real_weights(quant: str) -> None:
    parallel = ParallelConfig(ep_size=4)
    p = small(hidden_size=256, intermediate_size=128, quant=quant, parallel=parallel, has_bias=True)
    made = [t for n, t in random_weights(p).tensors().items() if not n.endswith("input_scale")]
    assert topology.weight_bytes(p) == sum(t.nbytes for t in made)


def real_figures(rank, world_size, name, changes):
    parallel = ParallelConfig(ep_size=world_size, ep_rank=rank)
    kernel = moekit.compose(small(parallel=parallel, **changes), name, "torch")
    d, most = kernel.dispatcher, kernel.problem.max_num_tokens
    said = d.max_rows(most), d.buffer_bytes(), d.transient_bytes(most), kernel.memory().total
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
        (rows, buffers, transient, total), _ = pool.run(real_figures, name, changes)
    problem = small(parallel=ParallelConfig(ep_size=2), **changes)
    f = footprint_of(registry().dispatcher(name), problem)
    assert (f.rows, f.buffer_bytes, f.transient) == (rows, buffers, transient)
    assert on_hosts(problem, dispatcher=name, experts="torch")[name].memory.total == total


# Recorded on H200 by what the libraries' own helpers said (hidden 7168, top 8 of 256).


def test_deepep_sizes_as_recorded() -> None:
    sizes = pytest.importorskip("moekit_deepep.footprint")
    normal = sizes.normal_buffers(7168, 4)
    assert round(sum(normal.values()) / 1e6) == 235 and len(normal) == 2
    assert round(sizes.normal_buffers(7168, 8)["NVLink queues"] / MiB) == 384
    over = sizes.normal_buffers(7168, 64)
    assert "network queues (NVSHMEM)" in over
    for hidden, want in {7168: (1820, 3640, 7280), 4096: (1040, 2080, 4160)}.items():
        for tokens, mib in zip((128, 256, 512), want, strict=True):
            slots = sizes.low_latency_buffers(tokens, hidden, 256)["rows (NVSHMEM)"]
            assert round(slots / MiB) == mib
    recorded = {1: 2, 16: 2, 128: 8, 1024: 61, 4096: 237}
    assert {t: round(sizes.elastic_buffer(t, 7168, 8, 4) / 1e6) for t in recorded} == recorded
    assert sizes.elastic_buffer(128, 7168, 8, 64, 8) > sizes.elastic_buffer(128, 7168, 8, 8)


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
