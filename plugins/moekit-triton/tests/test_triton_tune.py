"""The tuner: what it times, how it settles on a plan, and how it adds to a table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from moekit_triton import heuristics, search, tables, tune
from moekit_triton.calls import Layer
from moekit_triton.capabilities import BLOCKS_M, shared_memory
from moekit_triton.kernels.tiles import GemmTile, SortedTile, SpecializedTile, TokenTile
from moekit_triton.plans import Copied, CopiedAhead, Gathered, Sorted, TilePlan
from test_triton_plans import problem, shared_bytes
from triton_checks import compiled as choose_as_compiled

from moekit import DeviceSpec, MoEProblem
from moekit.errors import MoekitError

SHAPE = "64:2:128:64"
TILE = GemmTile(16, 64, 64)
PLAN = Gathered(TILE, TILE, True)


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    choose_as_compiled(monkeypatch)


@pytest.mark.parametrize(
    "scheme", ["none", "fp8_block", "fp8_channel_token", "int4_w4a16_g128", "mxfp4_w4a16"]
)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_candidates_fit_the_device(scheme, capability) -> None:
    p = problem(quant=scheme, device=DeviceSpec("cuda", capability, "any"))
    for per_expert in tune.ROWS_PER_EXPERT:
        for wide in (1, 2):
            found = search.candidates(p, per_expert, wide)
            assert found and len(set(found)) == len(found)
            for tile in found:
                need = shared_bytes(Gathered(tile, tile, True), p)[0 if wide == 2 else 1]
                assert tile.block_m in BLOCKS_M and (tile.wide or need <= shared_memory(p))
                assert scheme != "fp8_block" or 128 % tile.block_k == 0


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
        for _, plan in search.attempts(p, tokens):
            seen.add(type(plan))
            need = plan.workspace(layer, rows, small.top_k)
            assert all(a.shape[0] >= b.shape[0] for a, b in zip(room, need, strict=True)), plan
    assert Copied in seen
    assert small.top_k == p.top_k, "a constant of GEMM 1: what was compiled would serve no tile"


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_where_specialized_tiles_win_nothing_else_is_tried(scheme, monkeypatch) -> None:
    p = problem(quant=scheme)
    rows = tune.token_count(p, 1024.0)
    for version, specialized in (("3.6.0", True), ("3.5.0", False)):
        choose_as_compiled(monkeypatch, triton_version=version)
        found = list(search.attempts(p, rows))
        kinds = {(step, type(plan)) for step, plan in found if isinstance(plan, Sorted)}
        wanted = {("gemm_1", Copied), ("gemm_2", Copied)}
        if specialized and scheme == "none":
            wanted.add(("gemm_1", CopiedAhead))
        assert kinds == wanted or not kinds
        assert any(isinstance(plan, Gathered) for _, plan in found) != specialized
        assert any(type(plan.first) is SpecializedTile for _, plan in found) == specialized
        assert len(set(found)) == len(found)
    few = search.attempts(p, tune.token_count(p, 16.0))
    assert {type(plan) for _, plan in few} == {Gathered}


@pytest.mark.parametrize(
    "scheme",
    [
        "none", "fp8_block", "int8_channel_token",
        *(pytest.param(s, marks=pytest.mark.full) for s in ("fp8_tensor_static", "int4_w4a16_g32")),
    ],
)  # fmt: skip
def test_steps_compute_the_call(device, monkeypatch, scheme) -> None:
    """The tuner times the same launches that a call makes, for every routing."""
    sizes = dict(num_experts=4, top_k=2, hidden_size=128, intermediate_size=128)
    p = MoEProblem(**sizes, quant=scheme, device=device.type)
    monkeypatch.setattr(heuristics, "sorting_pays", lambda *_: scheme == "none")
    case = search.Case.make(p, tune.random_packed(p), 20, 2)
    tile = GemmTile(16, 128, 128)
    plans: list[TilePlan] = [Gathered(tile, tile, True), Gathered(tile, tile, False)]
    if scheme == "int8_channel_token":
        plans.pop(0)  # a tile does not hold a row
    ordered = SortedTile(16, 128, 128, num_warps=4, num_stages=3)
    if scheme == "none":
        plans += [Sorted(tile, ordered), Copied(ordered, ordered)]
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
    tile = GemmTile(block_m, 128, 64)
    ordered = SortedTile(block_m, 128, 64)
    plan = Gathered(tile, tile, True) if kind is Gathered else kind(ordered, ordered)
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
    tokens = search.Timed(5.0, Copied(TokenTile(128), TokenTile(128)))
    ahead = search.Timed(1.0, CopiedAhead(SpecializedTile(), SpecializedTile()))
    found.found = {("gemm_1", 128, CopiedAhead): [ahead], ("gemm_2", 128, Sorted): [tokens]}
    assert found.settle() is None, "no table holds such a plan"


def test_whole_plans_decide_among_the_best_few(monkeypatch) -> None:
    """The fastest tile alone may be slow after another kernel; both GEMMs run for each routing."""
    alone = {("gemm_1", 64): 10.0, ("gemm_1", 32): 11.0, ("gemm_2", 64): 5.0, ("gemm_2", 32): 6.0}

    class Case:
        problem = problem(quant="int4_w4a16_g128")

        def launches(self, plan, *steps):
            assert steps == ("gemm_1", "gemm_2")
            return [(plan.first.block_n, plan.second.block_n)] * 3

    def interleaved_us(timer, alternatives, least: float) -> list[float]:
        blocks = [set(launches).pop() for launches in alternatives]
        slow = {64: 100.0, 32: 0.0}
        return [slow[b] + alone["gemm_1", a] + alone["gemm_2", b] for a, b in blocks]

    monkeypatch.setattr(search, "interleaved_us", interleaved_us)
    found = search.Search(Case())
    for (step, columns), us in alone.items():
        tile = GemmTile(8, columns, 128)
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


def test_tables_are_written_a_plan_on_a_line() -> None:
    for file in tables.FILES.shipped.glob("*.json"):
        text = file.read_text()
        assert tune.dumps(tune.loads(text)) == text


# -- the command on machines of all kinds -------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """Stand in for a machine with GPUs; jobs run in a thread, and nothing is compiled."""

    def use(
        search_plan: Callable[[tune.Job], list[dict[str, Any]]],
        *names: str,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        names = names or ("a GPU",)
        spec = DeviceSpec("cuda", capability, names[0])

        def found(job: tune.Job) -> tuple[str, tune.Plans]:
            p = tune.shape(job.shape).problem(quant=job.scheme, device="sm90")
            return tune._key(p), {plan["rows_per_expert"]: plan for plan in search_plan(job)}

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: names[device])
        monkeypatch.setattr(DeviceSpec, "of", classmethod(lambda cls, device: spec))
        monkeypatch.setattr(tune, "_pool", lambda workers, devices: ThreadPoolExecutor(1))
        monkeypatch.setattr(tune, "compile_all", lambda wanted, end: None)
        monkeypatch.setattr(tune, "_tune", found)

    return use


def plans(job: tune.Job) -> list[dict[str, Any]]:
    return [{"rows_per_expert": job.rows, "us": [1, 2], "plan": PLAN.describe()}]


def arguments(out: Path, **options: str) -> list[str]:
    given = {"shapes": SHAPE, "quant": "none", "rows": "1,4,16", "out": str(out), **options}
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def rows_in(file: Path) -> list[float]:
    """Return the numbers of rows that moekit reads from a table."""
    return [rows for entry in tables.FILES.read(file) for rows, _ in entry.plans]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "it needs more memory than the GPU has"),
        (None, "no tile compiles and runs on this GPU"),
    ],
)
def test_a_job_without_a_plan_stops_no_other(machine, tmp_path, capsys, fault, words) -> None:
    def search_plan(job: tune.Job) -> list[dict[str, Any]]:
        if job.rows == 4:
            if fault is not None:
                raise fault
            return []
        return plans(job)

    machine(search_plan)
    out = tmp_path / "t.json"
    assert tune.main(arguments(out)) == 1
    assert rows_in(out) == [1, 16]
    said = capsys.readouterr().err
    assert f"{SHAPE} none, 4 rows an expert: no plan, {words}" in said and "1 of 3 plans" in said


def test_only_gpus_of_one_kind_are_timed(machine, monkeypatch, tmp_path) -> None:
    machine(plans, "NVIDIA A", "NVIDIA B", "NVIDIA A")
    used = []
    monkeypatch.setattr(
        tune, "_pool", lambda workers, devices: used.append(devices) or ThreadPoolExecutor(1)
    )
    assert tune.main(arguments(tmp_path)) == 0
    assert used == [[0, 2]] and rows_in(tmp_path / "nvidia-a.json") == [1, 4, 16]


def test_a_slice_of_a_gpu_has_a_table_of_its_own(machine, tmp_path, monkeypatch) -> None:
    name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    monkeypatch.setenv("MOEKIT_TUNED", str(tmp_path))
    machine(plans, name)
    argv = arguments(tmp_path)
    del argv[argv.index("--out") : argv.index("--out") + 2]
    assert tune.main(argv) == 0
    assert (tmp_path / "triton" / "nvidia-h100-80gb-hbm3-mig-1g.10gb.json").is_file()
    small = tune.shape(SHAPE).problem(device=DeviceSpec("cuda", (9, 0), name))
    assert [rows for rows, _ in tables.measured_plans(small)] == [1, 4, 16]


def test_schemes_that_the_device_lacks_are_left_out(machine, tmp_path, capsys) -> None:
    machine(plans, "NVIDIA A100", capability=(8, 0))
    out = tmp_path / "t.json"
    assert tune.main(arguments(out, quant="none,fp8_block")) == 0
    said = capsys.readouterr().err
    assert f"{SHAPE} fp8_block is left out: fp8 needs compute capability 8.9" in said
    assert {e.key["scheme"] for e in tables.FILES.read(out)} == {"none"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be used"),
        ('{"plans": []}', "KeyError: 'entries'"),
        (None, "cannot be written"),
    ],
)
def test_a_table_that_cannot_be_used_is_said_first(machine, tmp_path, text, words) -> None:
    begun = []
    machine(lambda job: begun.append(job) or plans(job))
    (tmp_path / "file").write_text(text or "")
    out = tmp_path / "file" / "t.json" if text is None else tmp_path / "file"
    with pytest.raises(MoekitError, match=words) as raised:
        tune.main(arguments(out))
    assert str(out) in str(raised.value) and not begun
    assert text is not None or "name another file with --out" in str(raised.value)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), BrokenProcessPool("died")])
def test_a_run_that_is_stopped_keeps_what_it_found(machine, tmp_path, capsys, stop) -> None:
    out = tmp_path / "t.json"

    def search_plan(job: tune.Job) -> list[dict[str, Any]]:
        if job.rows == 1:
            return plans(job)
        while not out.exists():
            time.sleep(0.01)
        raise stop

    machine(search_plan)
    if isinstance(stop, KeyboardInterrupt):
        assert tune.main(arguments(out)) == 130
        assert f"stopped; {out} has what was found" in capsys.readouterr().err
    else:
        with pytest.raises(MoekitError, match="a worker process died.* run it again to continue"):
            tune.main(arguments(out))
    assert rows_in(out) == [1]
    machine(plans)
    assert tune.main(arguments(out)) == 0 and rows_in(out) == [1, 4, 16]
    assert tune.main(arguments(out)) == 0 and "already has all" in capsys.readouterr().err


def test_no_plan_begins_after_the_time(machine, tmp_path, capsys) -> None:
    """`tune --seconds` without a backend's name passes the time on."""
    out = tmp_path / "t.json"

    def search_plan(job: tune.Job) -> list[dict[str, Any]]:
        if job.rows > 1:
            while not out.exists():  # the first plan is written when the others are cancelled
                time.sleep(0.01)
        return plans(job)

    machine(search_plan)
    assert tune.main(arguments(out, seconds="1e-9")) == 1
    assert 16 not in rows_in(out) and "are left: run it again" in capsys.readouterr().err


def test_plans_of_the_installed_triton_count_first(tmp_path, monkeypatch) -> None:
    def entry(version: str, group_m: int) -> dict[str, Any]:
        text = Gathered(GemmTile(16, 64, 64, group_m), TILE, True).describe()
        plans = [{"rows_per_expert": 4.0, "plan": text}]
        return {**tables.table_key(problem()), "triton": version, "plans": plans}

    (tmp_path / "triton").mkdir()
    monkeypatch.setenv("MOEKIT_TUNED", str(tmp_path))
    file = tmp_path / "triton" / "nvidia-h200.json"
    entries = [entry("3.5.0", 5), entry(triton.__version__, 7), entry("9.9.9", 9)]
    for order in (entries, entries[::-1]):
        file.write_text(json.dumps({"entries": order}))
        found = dict(tables.measured_plans(problem()))
        assert found[4.0].first.group_m == 7
        file.unlink()


@pytest.mark.parametrize(
    ("option", "value"),
    [("rows", "0"), ("rows", "1,nan"), ("rows", "few")],
)
def test_wrong_arguments(machine, tmp_path, capsys, option, value) -> None:
    machine(plans)
    with pytest.raises(SystemExit) as left:
        tune.main(arguments(tmp_path / "t.json", **{option: value}))
    assert left.value.code == 2 and f"argument --{option}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "impossible"),
    [
        (triton.runtime.errors.OutOfResources(300000, 101376, "shared memory"), True),
        (triton.runtime.errors.PTXASError("register allocation failed"), True),
        (RuntimeError("PassManager::run failed"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_only_tiles_that_are_impossible_are_left_out(error, impossible) -> None:
    def launches(plan, *steps):
        raise error

    one = search.Search(SimpleNamespace(problem=problem(), launches=launches))
    if impossible:
        one.attempt("gemm_1", PLAN)
        search.compile_attempts(one._case, [search.Attempt("gemm_1", PLAN)])
        assert one.settle() is None
    else:
        with pytest.raises(RuntimeError):
            one.attempt("gemm_1", PLAN)
