"""The tuner on machines that are not an H200: other GPUs, full disks, stopped runs, old tables."""

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
from moekit_triton import candidates, search, tables, tune
from moekit_triton.capabilities import shared_memory
from moekit_triton.kernels.tiles import GemmConfig
from moekit_triton.plans import Gathered
from test_triton_plans import problem, shared_bytes
from triton_checks import compiled as choose_as_compiled

from moekit import DeviceSpec
from moekit.errors import MoekitError

SHAPE = "64:2:128:64"
TILE = GemmConfig(16, 64, 64)


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    choose_as_compiled(monkeypatch)


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

        def found(job: tune.Job, *_: object) -> tuple[str, tune.Plans]:
            p = tune.shape(job.shape).problem(quant=job.scheme, device="sm90")
            return tune._key(p), {plan["rows_per_expert"]: plan for plan in search_plan(job)}

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: names[device])
        monkeypatch.setattr(DeviceSpec, "of", classmethod(lambda cls, device: spec))
        monkeypatch.setattr(tune, "_pool", lambda workers, devices: ThreadPoolExecutor(1))
        monkeypatch.setattr(tune, "compile_all", lambda *_, **__: None)
        monkeypatch.setattr(tune, "_tune", found)

    return use


def plans(job: tune.Job) -> list[dict[str, Any]]:
    return [{"rows_per_expert": job.rows, "us": [1, 2], **Gathered(TILE, TILE, True).to_json()}]


def arguments(out: Path, **options: str) -> list[str]:
    given = {"shapes": SHAPE, "quant": "none", "rows": "1,4,16", "out": str(out), **options}
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def rows_in(file: Path) -> list[float]:
    """Return the numbers of rows that moekit reads from a table."""
    return [rows for entry in tables.FILES.read(file) for rows, _ in entry.plans]


@pytest.mark.parametrize("scheme", ["none", "fp8_block", "fp8_channel_token", "int4_w4a16_g128"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_candidates_fit_the_devices_shared_memory(scheme, capability) -> None:
    p = problem(quant=scheme, device=DeviceSpec("cuda", capability, "any"))
    for per_expert in tune.ROWS_PER_EXPERT:
        for wide in (1, 2):
            found = [c for c in candidates.candidates(p, per_expert, wide) if not c.wide]
            assert found, per_expert
            for tile in found:
                assert shared_bytes(Gathered(tile, tile, True), p)[2 - wide] <= shared_memory(p)


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


def test_only_gpus_of_one_kind_are_timed(machine, monkeypatch, tmp_path, capsys) -> None:
    machine(plans, "NVIDIA A", "NVIDIA B", "NVIDIA A")
    used = []
    monkeypatch.setattr(
        tune, "_pool", lambda workers, devices: used.append(devices) or ThreadPoolExecutor(1)
    )
    assert tune.main([*arguments(tmp_path), "--gpus", "3"]) == 0
    assert used == [[0, 2]] and "2 of 3 GPUs are of the kind NVIDIA A" in capsys.readouterr().err
    assert rows_in(tmp_path / "nvidia-a.json") == [1, 4, 16]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=1: f"NVIDIA {'ABA'[device]}")
    assert tune._devices(3) == [1] and tune._devices(1) == [1]


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
        end = time.monotonic() + 20
        while not out.exists() and time.monotonic() < end:
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


def test_plans_of_the_installed_triton_count_first(tmp_path, monkeypatch) -> None:
    def entry(version: str, group_m: int) -> dict[str, Any]:
        plan = Gathered(GemmConfig(16, 64, 64, group_m), TILE, True).to_json()
        key = tables.table_key(problem())
        return {**key, "triton": version, "plans": [{"rows_per_expert": 4.0, **plan}]}

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
    [("rows", "0"), ("rows", "1,nan"), ("rows", "few"), ("gpus", "0"), ("seconds", "few")],
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
    plan = Gathered(TILE, TILE, True)
    if impossible:
        one.attempt("gemm_1", plan)
        search.compile_attempts(one._case, [candidates.Attempt("gemm_1", plan)])
        assert one.settle() is None
    else:
        with pytest.raises(RuntimeError):
            one.attempt("gemm_1", plan)
