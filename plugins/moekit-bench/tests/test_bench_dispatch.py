"""`python -m moekit bench --dispatch` on the CPU, over gloo."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from moekit_bench import report
from moekit_bench.dispatch import measure_dispatch
from moekit_bench.ranks import Task, on_rank
from moekit_bench.records import Cell, Run, Settings, merge
from moekit_bench.timer import first_fault
from rank_pools import rank_pool

import moekit
from moekit.cli.main import main
from moekit.contract.pending import Pending
from moekit.problem import MoEProblem, ParallelConfig

naive = pytest.importorskip("moekit_naive.dispatcher")

FAST = ["--device", "cpu", "--layer", "8:2:128:128", "--replays", "2", "--inputs", "2"]
TIMES = ("us", "dispatch_us", "combine_us", "eager_us")


class Doubling(naive.NaiveDispatcher):
    """Returns twice the right output."""

    def finalize(self, y, dispatched, out_TH):
        out = super().finalize(y, dispatched, out_TH).result()
        return Pending.ready(out.mul_(2))


class Forgetting(naive.NaiveDispatcher):
    """Writes no output."""

    def finalize(self, y, dispatched, out_TH):
        return Pending.ready(out_TH)


class Failing(naive.NaiveDispatcher):
    def prepare(self, x_TH, routing, quantize):
        raise moekit.MoekitError("on purpose")


pool = rank_pool(2)


@pytest.fixture
def bad_ones():
    """Register `doubling`, `failing` and `narrow`, which supports nothing."""
    spec = moekit.registry().dispatcher("naive")
    made = [
        replace(spec, name=name.lower(), target=f"{__name__}:{name}", **more)
        for name, more in (
            ("Doubling", {}),
            ("Failing", {}),
            ("Narrow", {"dtypes": frozenset({"float16"})}),
        )
    ]
    for each in made:
        moekit.registry().register(each)
    yield
    for each in made:
        moekit.registry().unregister(each)


def problem_for(ranks, **changes):
    values = {
        "num_experts": 8,
        "top_k": 2,
        "hidden_size": 128,
        "intermediate_size": 128,
        "device": "cpu",
        "parallel": ParallelConfig(ep_size=ranks),
    }
    return MoEProblem(**{**values, **changes})


def measured(pool, spec, problem, tokens):
    cell = Cell(shape="", scheme=problem.quant.name, routing="uniform", tokens=tokens)
    task = Task(spec, problem, cell, Settings(inputs=2, replays=1))
    return merge([result for (result,) in pool.run(on_rank, measure_dispatch, task)])


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["bench", "--dispatch", *FAST, *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_sweep(capsys, tmp_path):
    files = [tmp_path / "run.json", tmp_path / "run.md"]
    options = ["--dispatchers", "naive", "--tokens", "1,16", "--quant", "none,fp8_block"]
    places = ["--json", str(files[0]), "--markdown", str(files[1])]
    code, out, err = run(capsys, *options, *places)
    data, text = json.loads(files[0].read_text()), files[1].read_text()
    assert code == 0 and out == "" and "[4/4" in err
    assert data["ranks"] == 2 and data["versions"]["moekit-naive"]
    cells = {(c["scheme"], c["tokens"]): c["results"][0] for c in data["cells"]}
    assert set(cells) == {(s, t) for s in ("none", "fp8_block") for t in (1, 16)}
    for r in cells.values():
        assert r["name"] == "naive" and r["right"] and r["reason"] == ""
        assert all(r[name] > 0 for name in TIMES) and "graph_us" not in r
        assert r["spread_us"][0] <= r["us"] <= r["spread_us"][1]
        assert 0 < r["error"] < 1e-2 and "num_sms" not in r and r["buffer_bytes"] == 0
    assert "## 8:2:128:128, fp8_block, uniform" in text and "| 16 | naive |" in text


def test_wrong_failing_and_refused(capsys, tmp_path, bad_ones):
    """A wrong time is struck out, a failure has its reason, and the others are measured."""
    file = tmp_path / "run.json"
    names = "doubling,failing,narrow,naive"
    code, out, _ = run(capsys, "--dispatchers", names, "--tokens", "4", "--json", str(file))
    data = json.loads(file.read_text())
    doubling, failing, right = data["cells"][0]["results"]
    assert code == 1
    assert not doubling["right"] and doubling["error"] == pytest.approx(1.0, rel=0.05)
    assert "us" not in failing and "on purpose" in failing["reason"]
    assert right["right"] and f"**{right['us']:.0f}**" in out.replace("e**", "**")
    assert "~~" in out and "on purpose" in out
    (refused,) = data["refused"]
    assert refused["name"] == "narrow" and "dtype bfloat16" in refused["reason"]
    assert "- narrow: dtype bfloat16" in out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--ranks", "1"], "at least 2"),
        (["--layer", "8:2"], "EXPERTS:TOP_K:HIDDEN"),
        (["--tokens", "0"], "positive"),
        (["--quant", "fp3"], "fp3"),
        (["--routing", "odd"], "odd"),
        (["--dispatchers", "nobody"], "nobody"),
        (["--dispatchers", ","], "no dispatcher"),
        (["--device", "cuda"], "CUDA"),
    ],
)
def test_wrong_questions(capsys, argv, text):
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == "" and text in err


@pytest.mark.parametrize("quant", ["fp8_tensor", "fp8_tensor_static", "int8_channel_token"])
def test_outputs_are_compared_with_the_tokens_that_were_sent(pool, quant):
    spec = moekit.registry().dispatcher("naive")
    result = measured(pool, spec, problem_for(2, quant=quant), 7)
    assert result.right and result.error < 1e-2


def test_output_that_is_not_written_is_wrong(pool):
    spec = replace(
        moekit.registry().dispatcher("naive"), name="bad", target=f"{__name__}:Forgetting"
    )
    result = measured(pool, spec, problem_for(2), 7)
    assert not result.right and result.error is None
    assert str(result).endswith("us, wrong: error not finite")
    cell = Cell(shape="8:2:128:128", scheme="none", routing="uniform", tokens=7, results=(result,))
    run = Run(mode="dispatch", device={"name": "d"}, settings=Settings(inputs=1, replays=1),
              cells=(cell,))  # fmt: skip
    assert "| not finite |" in report.markdown(run)


def told_by_ranks(rank, world_size):
    return first_fault("" if rank == 0 else "it broke\nin two lines"), first_fault("")


def test_ranks_tell_each_other(pool):
    assert pool.run(told_by_ranks) == [("it broke\nin two lines", "")] * 2
