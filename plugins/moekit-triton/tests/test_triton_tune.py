"""The tuner: what it times, how it settles on a plan, and how it adds to a table."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from moekit_triton import candidates, heuristics, search, tables, tune
from moekit_triton.calls import Layer
from moekit_triton.capabilities import BLOCKS_M
from moekit_triton.kernels.tiles import GemmConfig
from moekit_triton.plans import Copied, CopiedAhead, Gathered, Sorted, TilePlan
from test_triton_plans import problem, shared_bytes
from triton_checks import compiled as choose_as_compiled

from moekit import DeviceSpec, MoEProblem


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    choose_as_compiled(monkeypatch)


@pytest.mark.parametrize("scheme", ["none", "fp8_block", "fp8_channel_token", "mxfp4_w4a16"])
def test_candidates(scheme) -> None:
    p = problem(quant=scheme)
    for per_expert in tune.ROWS_PER_EXPERT:
        for wide in (1, 2):
            found = candidates.candidates(p, per_expert, wide)
            assert found and len(set(found)) == len(found)
            for c in found:
                plan = Gathered(c, c, wide == 2)
                assert min(shared_bytes(plan, p)) <= 227 << 10 and c.block_m in BLOCKS_M
                if scheme == "fp8_block":
                    assert 128 % c.block_k == 0


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_a_case_that_compiles_has_room_for_every_plan(scheme, monkeypatch) -> None:
    choose_as_compiled(monkeypatch, triton_version="3.6.0")
    p = MoEProblem(
        num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, quant=scheme,
        device="sm90",
    )  # fmt: skip
    small = tune._tiny(p)
    layer, rows, seen = Layer.of(small), tune._TINY_ROWS, set()
    room = heuristics.workspace(layer, rows)
    for tokens in (1024, 4096, 16384):
        for _, plan in candidates.attempts(p, tokens):
            seen.add(type(plan))
            need = plan.workspace(layer, rows, small.top_k)
            assert all(a.shape[0] >= b.shape[0] for a, b in zip(room, need, strict=True)), plan
    assert Copied in seen


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel_token", "int8_channel_token"])
@pytest.mark.parametrize("capability", [(9, 0), (8, 9)])
@pytest.mark.parametrize("rows", [4.0, 16.0, 64.0])
def test_candidates_for_few_rows_of_fp8_use_swap_ab(scheme, capability, rows) -> None:
    p = problem(quant=scheme, device=DeviceSpec("cuda", capability, "any"))
    swapped = capability == (9, 0) and scheme != "int8_channel_token"
    kinds = {c.swapped for c in candidates.candidates(p, rows, 1) if c.block_m < 64}
    assert kinds == ({swapped} if rows < 64 else set())


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_where_specialized_tiles_win_nothing_else_is_tried(scheme, monkeypatch) -> None:
    p = problem(quant=scheme)
    rows = tune.token_count(p, 1024.0)
    for version, specialized in (("3.6.0", True), ("3.5.0", False)):
        choose_as_compiled(monkeypatch, triton_version=version)
        found = list(candidates.attempts(p, rows))
        kinds = {(step, type(plan)) for step, plan in found if isinstance(plan, Sorted)}
        wanted = {("gemm_1", Copied), ("gemm_2", Copied)}
        if specialized and scheme == "none":
            wanted.add(("gemm_1", CopiedAhead))
        assert kinds == wanted or not kinds
        assert any(isinstance(plan, Gathered) for _, plan in found) != specialized
        assert any(plan.first.specialized for _, plan in found) == specialized
        assert len(set(found)) == len(found)
    few = candidates.attempts(p, tune.token_count(p, 16.0))
    assert {type(plan) for _, plan in few} == {Gathered}


@pytest.mark.parametrize(
    "scheme", ["none", "fp8_block", "fp8_tensor_static", "int8_channel_token", "int4_w4a16_g32"]
)
def test_steps_compute_the_call(device, monkeypatch, scheme) -> None:
    """The tuner times the same launches that a call makes, for every routing."""
    sizes = dict(num_experts=4, top_k=2, hidden_size=128, intermediate_size=128)
    p = MoEProblem(**sizes, quant=scheme, device=device.type)
    monkeypatch.setattr(heuristics, "sorting_pays", lambda *_: scheme == "none")
    case = tune.make_case(p, 20, 2)
    tile = GemmConfig(16, 128, 128)
    plans: list[TilePlan] = [Gathered(tile, tile, True), Gathered(tile, tile, False)]
    if scheme == "int8_channel_token":
        plans.pop(0)  # a tile does not hold a row
    plans += [Sorted(tile, tile), Copied(tile, tile)] if scheme == "none" else []
    outs: list[list[torch.Tensor]] = []
    for plan in plans:
        outs.append([])
        for launch, call in zip(case.launches(plan, "gemm_1", "gemm_2"), case.calls, strict=True):
            launch()
            rows = call.ids_RK.numel()
            y_AH = call.buffers.gemm_out[: rows * 128].view(20, 2, 128).float()
            plan.launch(call)
            torch.testing.assert_close(y_AH.sum(1), call.y.float(), rtol=0.02, atol=0.02)
            outs[-1].append(call.y.clone())
        for got, want in zip(outs[-1], outs[0], strict=True):
            assert (got - want).norm() <= 0.05 * want.norm()


def timed(us: float, kind: type[TilePlan] = Gathered, block_m: int = 128) -> search.Timed:
    tile = GemmConfig(block_m, 128, 64, specialized=kind is not Gathered)
    plan = Gathered(tile, tile, True) if kind is Gathered else kind(tile, tile)
    return search.Timed(us, plan)


def test_the_tuner_combines_steps(monkeypatch) -> None:
    """Both GEMMs have one block_m and agree on the order of rows; whole plans decide."""
    found = search.Search(SimpleNamespace(problem=problem()))
    found.found = {
        ("gemm_1", 128, Gathered): [timed(10)],
        ("gemm_2", 128, Gathered): [timed(5)],
        ("gemm_1", 128, Copied): [timed(9, Copied)],
        ("gemm_2", 128, Sorted): [timed(5.5, Copied)],
        ("gemm_1", 64, Copied): [timed(1, Copied, 64)],  # with no GEMM 2 of its kind
        ("gemm_2", 64, Gathered): [timed(1, Gathered, 64)],
        ("gemm_1", 32, Gathered): [],
    }
    us = {Gathered: 15.0, Copied: 14.5}

    def together(plans):
        assert all(plan.first.block_m == plan.second.block_m for plan in plans)
        return [us[type(plan)] for plan in plans]

    def settled() -> type[TilePlan]:
        plan, *_ = found.settle()
        return type(plan)

    monkeypatch.setattr(found, "_together", together)
    assert settled() is Copied
    us[Copied] = 16.5
    assert settled() is Gathered
    found.found = {("gemm_1", 128, Gathered): [timed(1)]}
    assert found.settle() is None


def test_whole_plans_decide_among_the_best_few(monkeypatch) -> None:
    """The fastest tile alone may be slow after another kernel; both GEMMs run for each routing."""
    alone = {("gemm_1", 64): 10.0, ("gemm_1", 32): 11.0, ("gemm_2", 64): 5.0, ("gemm_2", 32): 6.0}

    class Case:
        problem = problem(quant="int4_w4a16_g128")

        def launches(self, plan, *steps):
            assert steps == ("gemm_1", "gemm_2")
            return [(plan.first.block_n, plan.second.block_n)] * 3

    class Timer:
        def __init__(self) -> None:
            self.found: list[float] = []

        def add(self, launches) -> None:
            ((first, second),) = set(launches)
            slow = 100.0 if second == 64 else 0.0
            self.found.append(slow + alone["gemm_1", first] + alone["gemm_2", second])

        def microseconds(self, least: float, rounds: int) -> list[float]:
            return self.found

    monkeypatch.setattr(search, "Timer", Timer)
    found = search.Search(Case())
    for (step, columns), us in alone.items():
        tile = GemmConfig(8, columns, 128)
        one = search.Timed(us, Gathered(tile, tile, True))
        found.found.setdefault((step, 8, Gathered), []).append(one)
    plan, *_ = found.settle()
    assert (plan.first.block_n, plan.second.block_n) == (64, 32)


def test_the_tuner_adds_rows_to_an_entry() -> None:
    large, small = problem(), problem(hidden_size=64, intermediate_size=64)
    table: tune.Table = {}
    assert tune.missing(table, small, [4, 32, 10**6]) == [4, 32]  # too many tokens for the last
    assert tune.missing(table, small, [0.25, 0.26, 1, 1]) == [0.25, 1], "of equal rows one"
    entries = [
        json.loads(tune._key(p)) | {"plans": [{"rows_per_expert": float(r)} for r in rows]}
        for p, rows in ((small, (64, 4)), (large, (16,)), (small, (128, 32)))
    ]
    table = tune.loads(json.dumps({"entries": entries[:2]}))
    assert tune.missing(table, small, [4, 32, 64, 128]) == [32, 128]
    assert tune.missing(table, large, [4, 16]) == [4]
    table = tune.loads(json.dumps({"entries": entries}))
    assert tune.missing(table, small, [4, 32, 64, 128]) == []
    first, second = json.loads(tune.dumps(table))["entries"]
    assert [p["rows_per_expert"] for p in first["plans"]] == [4, 32, 64, 128]
    assert [p["rows_per_expert"] for p in second["plans"]] == [16]


def test_an_entry_of_another_version_is_kept_apart() -> None:
    """The first tables did not name the version of triton."""
    old = tables.table_key(problem()) | {"plans": [{"rows_per_expert": 4.0}]}
    table = tune.loads(json.dumps({"entries": [old]}))
    assert tune.missing(table, problem(), [4]) == [4]
    assert json.loads(tune.dumps(table))["entries"] == [old]


def test_a_run_whose_time_is_over_is_continued(monkeypatch, tmp_path, capsys) -> None:
    """Every plan is in the file when it is found, and only the missing ones are searched again."""
    out, searched, compiled = tmp_path / "table.json", [], []
    argv = ["--shapes", "64:2:128:64", "--quant", "none,fp8_block", "--rows", "1,4", "--gpus", "1"]
    argv += ["--out", str(out), "--seconds", "60"]

    def search_plan(job: tune.Job, end: float):
        if len(searched) % 3 == 2:  # the time is over after two
            searched.append(None)
            return None
        searched.append(job)
        tile = GemmConfig(16, 64, 64)
        size = {"rows_per_expert": job.rows, "us": [1.0, 2.0]}
        size |= Gathered(tile, tile, True).to_json()
        found = tune.shape(job.shape).problem(quant=job.scheme, device="sm90")
        return tune._key(found), {job.rows: size}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpu = DeviceSpec("cuda", (9, 0), "a GPU")
    monkeypatch.setattr(DeviceSpec, "of", classmethod(lambda cls, device: gpu))
    monkeypatch.setattr(tune, "_pool", lambda workers, devices: ThreadPoolExecutor(1))
    monkeypatch.setattr(tune, "_tune", search_plan)
    monkeypatch.setattr(tune, "compile_all", lambda sizes, end: compiled.append(list(sizes)))
    assert tune.main(argv) == 1
    assert "1 of 4 plans are left: run it again to continue" in capsys.readouterr().err
    assert [str(job) for job in searched if job] == [
        "64:2:128:64 none, 1 rows an expert",
        "64:2:128:64 none, 4 rows an expert",
        "64:2:128:64 fp8_block, 4 rows an expert",
    ]
    searched.clear()
    assert tune.main(argv) == 0
    assert searched == [("64:2:128:64", "fp8_block", 1.0)]
    assert [len(each) for each in compiled] == [4, 1]
    assert [len(e["plans"]) for e in json.loads(out.read_text())["entries"]] == [2, 2]
    assert tune.main(argv) == 0 and len(searched) == 1
    assert "already has all" in capsys.readouterr().err


def test_nothing_begins_when_the_time_is_over() -> None:
    assert tune._tune(tune.Job("mixtral", "none", 1.0), time.monotonic() - 1) is None
    assert tune._compile((problem(), []), time.monotonic() - 1) == 0


def test_tables_are_written_a_plan_on_a_line() -> None:
    for file in tables.FILES.shipped.glob("*.json"):
        text = file.read_text()
        assert tune.dumps(tune.loads(text)) == text
