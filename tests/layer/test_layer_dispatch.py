"""Whole layers over ranks: `bench --layers`, `tune --ep`, and the choice from them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moekit_bench import layers
from moekit_bench.layers import measure_layers
from moekit_bench.ranks import Task, on_rank
from moekit_bench.records import Cell, Settings, merge
from rank_pools import rank_pool
from tuned_tables import PROBLEM, make_table, movers, no_tables, write_table

import moekit
from moekit.cli.main import main as moekit_main
from moekit.discovery.registry import Registry
from moekit.errors import GroupMismatch, MoekitError
from moekit.problem import ParallelConfig
from moekit.selection.tuned import table

naive = pytest.importorskip("moekit_naive.dispatcher")

tuned = pytest.fixture(no_tables, name="tuned")

FAST = "--device cpu --layer 8:2:128:128 --replays 2 --inputs 2 --experts torch".split()
MOVING = PROBLEM.replace(num_experts=16, parallel=ParallelConfig(ep_size=4))


class Logging(naive.NaiveDispatcher):
    """Writes what it is made for, and which calls it gets, to the file that LOGGED names."""

    def __init__(self, spec, problem, *more):
        super().__init__(spec, problem, *more)
        self._log(f"made for {problem.max_num_tokens}")

    def prepare(self, x_TH, routing, quantize):
        self._log(f"{len(x_TH)} of {routing.max_tokens}")
        return super().prepare(x_TH, routing, quantize)

    def _log(self, text):
        with open(f"{os.environ['LOGGED']}{self.problem.parallel.ep_rank}", "a") as file:
            print(text, file=file)


@pytest.fixture
def logged():
    """`logging` beside the installed ones."""
    spec = moekit.registry().dispatcher("naive")
    target = f"{__name__}:Logging"
    moekit.registry().register(replace(spec, name="logging", target=target, priority=-50))
    yield
    moekit.registry().unregister(moekit.registry().dispatcher("logging"))


pool = rank_pool(2)


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = moekit_main(["bench", "--layers", *FAST, *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# -- the sweep -------------------------------------------------------------------------------------


def test_a_sweep(tuned, capsys, tmp_path) -> None:
    file, report = tmp_path / "l.json", tmp_path / "l.md"
    options = "--dispatchers naive --tokens 1,9 --quant none,fp8_block".split()
    code, out, err = run(capsys, *options, "--json", str(file), "--markdown", str(report))
    data = json.loads(file.read_text())
    assert code == 0 and out == "" and "[4/4" in err
    assert (data["mode"], data["ranks"]) == ("layers", 2)
    assert {(c["scheme"], c["tokens"]) for c in data["cells"]} == {
        (s, t) for s in ("none", "fp8_block") for t in (1, 9)
    }
    for cell in data["cells"]:
        (r,) = cell["results"]
        assert (r["dispatcher"], r["experts"], r["reason"]) == ("naive", "torch", "")
        assert r["right"] and r["us"] == r["eager_us"] > 0 and "graph_us" not in r
        assert 0 < r["error"] < (2e-2 if cell["scheme"] == "none" else 0.12)
        assert r["spread_us"][0] <= r["spread_us"][1]
    text = report.read_text()
    assert "| naive + torch | **" in text


def test_batch_invariant_mode_beside_the_default(tuned, capsys, tmp_path) -> None:
    file = tmp_path / "l.json"
    options = "--dispatchers naive --experts torch --tokens 3 --quant none --batch-invariant"
    code, out, _ = run(capsys, *options.split(), "--json", str(file))
    pairs = {r["experts"]: r for r in json.loads(file.read_text())["cells"][0]["results"]}
    assert code == 0 and set(pairs) == {"torch", "torch (batch-invariant)"}
    assert all(r["right"] and r["us"] > 0 for r in pairs.values())
    assert "| naive + torch (batch-invariant) | " in out


@pytest.mark.parametrize(("mode", "capacity"), [("--layers", 50), ("--dispatch", 2)])
def test_kernels_are_made_once_for_a_capacity(
    tuned, capsys, tmp_path, monkeypatch, logged, mode: str, capacity: int
) -> None:
    monkeypatch.setenv("LOGGED", str(tmp_path / "log"))
    argv = "--device cpu --replays 2 --inputs 2 --dispatchers logging,naive --tokens 1,4".split()
    argv += FAST[2:4] + (FAST[8:] if mode == "--layers" else [])
    argv += ["--quant", "none", "--capacity", str(capacity), "--json", str(tmp_path / "r.json")]
    assert moekit_main(["bench", mode, *argv]) == 0
    largest = max(capacity, 4)
    for rank in (0, 1):
        made, *calls = (tmp_path / f"log{rank}").read_text().splitlines()
        assert made == f"made for {largest}" and set(calls) == {"1 of 1", "4 of 4"}
    data, out = json.loads((tmp_path / "r.json").read_text()), capsys.readouterr().out
    assert data["capacity"] == largest and f"| capacity {largest} | T=1 | T=4 |" in out
    assert [[r["name"][:5] for r in cell["results"]] for cell in data["cells"]] == [
        ["loggi", "naive"]
    ] * 2


def compose_without_naive_on_one_rank(rank, world_size):
    known = Registry.discover({"MOEKIT_BLOCK": "naive"} if rank == 1 else {})
    problem = PROBLEM.replace(
        num_experts=8, parallel=ParallelConfig(ep_size=world_size, ep_rank=rank)
    )
    try:
        return str(moekit.compose(problem, "naive", "torch", backends=known))
    except MoekitError as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_cannot_choose_keeps_no_other_waiting(pool) -> None:
    others, own = pool.run(compose_without_naive_on_one_rank)
    assert others.startswith("GroupMismatch: ") and own.partition(":")[0] in others, others
    assert "rank 1: " in others and "naive" in others
    assert not own.startswith("GroupMismatch") and "naive" in own


# -- a rank's measurement --------------------------------------------------------------------------


def layer_problem(ranks: int, **changes):
    values = {
        "num_experts": 9,
        "top_k": 2,
        "hidden_size": 128,
        "intermediate_size": 128,
        "max_num_tokens": 7,
        "parallel": ParallelConfig(ep_size=ranks),
        "device": "cpu",
    }
    return moekit.MoEProblem(**{**values, **changes})


def layer_task(*names: str) -> Task:
    dispatcher = moekit.registry().dispatcher("naive")
    cell = Cell(shape="", scheme="none", routing="uniform", tokens=7)
    return Task(dispatcher, layer_problem(2), cell, Settings(inputs=2, replays=2), names)


def oracle_of(rank, world_size, task):
    """This rank's oracle rows, and a layer of one rank with everyone's experts."""
    with torch.inference_mode():
        mine = layers._Layers(task.problem_of(rank), task)
        everyone = [None] * world_size
        torch.distributed.all_gather_object(everyone, mine.weights.tensors())
    whole = moekit.ExpertWeights(**{n: torch.cat([w[n] for w in everyone]) for n in everyone[0]})
    alone = task.problem.replace(parallel=ParallelConfig())
    kernel = moekit.compose(alone, "local", "reference")
    out = kernel(mine.inputs[0][0], kernel.pack(whole), mine.inputs[0][1])
    return mine.want, out[mine.rows]


def test_the_oracle_is_that_of_one_rank_with_all_experts(pool) -> None:
    """Also where experts do not divide by the ranks."""
    for want, out in pool.run(oracle_of, layer_task()):
        assert len(want) == 7 and bool(want.any())
        torch.testing.assert_close(want, out.float(), rtol=2e-2, atol=2e-2 * float(want.std()))


def test_one_that_cannot_be_composed_leaves_the_others(pool) -> None:
    task = layer_task("nobody", "torch")
    nobody, right = map(merge, zip(*pool.run(on_rank, measure_layers, task), strict=True))
    assert "nobody" in nobody.reason and nobody.us is None
    assert right.right and right.reason == "" and right.copied == 0.0


# -- tune --ep, and the choice -------------------------------------------------------------------

TUNE = "tune --ep 2 --device cpu --shapes 8:2:128:128 --quant none --experts torch".split()
TUNE += ["--replays", "2"]


def test_tune_select_fills_the_table(tuned: Path, capsys) -> None:
    options = ["--dispatcher", "naive", "--tokens", "1,4"]
    assert moekit_main([*TUNE, "--select", *options]) == 0
    (file,) = tuned.glob("*.json")
    (key,) = table.read(file)
    assert (key.ranks, key.experts) == (2, 4)
    times = table.read(file)[key]["naive", "torch"]
    assert sorted(times) == [1, 4] and times[1].us > 0 and times[1].copied == 0.0
    assert "moekit-naive" in times[1].made_with
    before = file.read_text()
    assert moekit_main([*TUNE, "--select", *options]) == 0  # known: not measured again
    assert file.read_text() == before


def test_the_pair_that_is_fastest_up_to_the_capacity_is_chosen(tuned: Path) -> None:
    """Calls say their `max_tokens`, and cost as much as in a kernel for so many."""
    times = {
        "slabs+a": {1: 10.0, 16: 20.0, 256: 4000.0},
        "rows+a": {1: 30.0, 16: 40.0, 256: 100.0},
        "rows+b": {1: 50.0, 16: 30.0, 256: 500.0},
    }
    write_table(tuned / "x.json", make_table(times, MOVING))

    def chosen(most: int) -> str:
        problem = MOVING.replace(max_num_tokens=most)
        return str(moekit.explain(problem, backends=movers("a", "b")).chosen)

    assert [chosen(t) for t in (1, 16)] == ["slabs + a (bridged)"] * 2
    assert chosen(256) == "rows + a:5|b:24|a"  # calls that do not say it cost as much as 256
    explanation = moekit.explain(MOVING.replace(max_num_tokens=16), backends=movers("a", "b"))
    assert "T=1..256, on 4 ranks" in explanation.why
    # Also behind one dispatcher.
    rows = moekit.explain(MOVING.replace(max_num_tokens=16), "rows", backends=movers("a", "b"))
    assert rows.chosen.experts == "a:5|b"


def compose_by_own_table(rank, world_size, folder):
    os.environ["MOEKIT_TUNED"] = f"{folder}/{rank}"
    try:
        parallel = ParallelConfig(ep_size=world_size, ep_rank=rank)
        problem = PROBLEM.replace(num_experts=8, max_num_tokens=4, parallel=parallel)
        return str(moekit.compose(problem).explanation.chosen)
    except GroupMismatch as error:
        return f"GroupMismatch: {error}"
    finally:
        del os.environ["MOEKIT_TUNED"]


def test_all_ranks_choose_alike_or_all_raise(pool, tmp_path) -> None:
    pytest.importorskip("moekit_flashinfer")
    problem = PROBLEM.replace(num_experts=8, max_num_tokens=4, parallel=ParallelConfig(ep_size=2))

    def write(rank: int, naive: float, allgather: float) -> None:
        times = {"naive+torch": {4: naive}, "flashinfer_allgather+torch": {4: allgather}}
        write_table(tmp_path / str(rank) / "x.json", make_table(times, problem))

    write(0, 1.0, 9.0)
    write(1, 9.0, 1.0)
    for said in pool.run(compose_by_own_table, str(tmp_path)):
        assert said.startswith("GroupMismatch: ranks disagree on dispatcher and experts: naive")
        assert "naive + torch on ranks [0], flashinfer_allgather + torch on ranks [1]" in said
        assert "MOEKIT_TUNED" in said
    write(0, 9.0, 1.0)
    said = pool.run(compose_by_own_table, str(tmp_path))
    assert said == ["flashinfer_allgather + torch"] * 2
