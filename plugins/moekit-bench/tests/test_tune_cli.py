"""`python -m moekit tune` on the CPU, with fake timings where times matter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moekit_bench import Result, experts
from tuned_tables import PROBLEM, fakes, no_tables

import moekit
from moekit.backends.torch_experts import TorchExperts
from moekit.cli.main import main
from moekit.contract import PackedWeights
from moekit.discovery import registry as plugins
from moekit.selection.tuned import table
from moekit.selection.tuned.table import Key

tuned = pytest.fixture(no_tables, name="tuned")

SIZES = "4:2:64:48"
FAST = ["--device", "cpu", "--dtype", "float32", "--shapes", SIZES, "--replays", "1"]
TOKENS = ("1", "16", "64", "256")
# flat and steep cross at T = 100.
CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda t: 10 * t**0.2,
    "steep": lambda t: t**0.7,
    "torch": lambda t: 50.0 * t**0.5,
}


class Copying(TorchExperts):
    def pack(self, weights):
        packed = super().pack(weights)
        return PackedWeights(self.spec.name, {n: t.clone() for n, t in packed.experts.items()})

    @staticmethod
    def libraries() -> dict[str, str]:
        return {"acme": "1.2"}

    @staticmethod
    def tune(argv: list[str]) -> int:
        return len(argv)


class Cells:
    """Replaces `run_cell`: remembers (tokens, names), and returns times from `CURVES`."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[str]]] = []
        self.stop_after = 10**9
        self.wrong: set[str] = set()

    def __call__(self, case, calls, **options) -> dict[str, Result]:
        if len(self.seen) == self.stop_after:
            raise KeyboardInterrupt
        self.seen.append((case.tokens, sorted(calls)))
        return {name: self.result(name, case.tokens) for name in calls}

    def result(self, name: str, tokens: int) -> Result:
        if (us := CURVES.get(name)) is None:
            return Result(name=name, reason="RuntimeError: on purpose")
        return Result(name=name, us=us(tokens)).judged(float(name in self.wrong), 0.5)


@pytest.fixture
def cells(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cells]:
    """Replace timings; the backends are the core's, `flat` and `steep`."""
    found = Cells()
    monkeypatch.setattr(experts, "run_cell", found)
    monkeypatch.setattr(plugins, "_registry", fakes("flat", "steep"))
    yield found


def run(capsys, *argv: str, tokens: str = ",".join(TOKENS)) -> tuple[int, str, str]:
    code = main(["tune", *FAST, "--tokens", tokens, *argv])
    out, err = capsys.readouterr()
    return code, out, err


def times(file: Path, problem: moekit.MoEProblem = PROBLEM):
    return table.read(file)[Key.of(problem)]


# -- tune --select -----------------------------------------------------------------------------


def test_the_choice_follows_the_measurements(cells: Cells, tuned: Path, capsys) -> None:
    assert moekit.explain(PROBLEM).why == "by priority"
    code, out, err = run(capsys, "--select")
    assert code == 0 and "4 cells to measure" in err and "[4/4," in err and "left]" in err
    (file,) = tuned.glob("[!.]*")
    assert file.name == "cpu.json"
    for name in ("flat", "steep", "torch"):
        for tokens, record in times(file)["local", name].items():
            assert record.us == pytest.approx(CURVES[name](tokens), abs=1e-3)
            assert record.copied == 0 and f"torch {torch.__version__}" in record.made_with
    assert ("local", "reference") not in times(file)
    assert out == ""
    explanation = moekit.explain(PROBLEM)
    assert explanation.why == "by measurement (cpu, T=1..256)"
    assert explanation.chosen.experts == "steep:100|flat"
    kernel = moekit.compose(PROBLEM)
    assert [kernel.experts.member(t).spec.name for t in (100, 101)] == ["steep", "flat"]


def test_what_is_known_is_not_measured_again(cells: Cells, tuned: Path, capsys) -> None:
    run(capsys, "--select", tokens="1,16")
    first = table.read(tuned / "cpu.json")
    code, out, err = run(capsys, "--select")
    assert code == 0 and "2 cells to measure" in err
    assert [tokens for tokens, _ in cells.seen] == [1, 16, 64, 256]
    code, _, err = run(capsys, "--select")
    assert code == 0 and "0 cells to measure" in err and len(cells.seen) == 4
    assert first.keys() == table.read(tuned / "cpu.json").keys()


def test_other_versions_and_new_backends_are_measured(
    cells: Cells, tuned: Path, capsys, monkeypatch
) -> None:
    run(capsys, "--select", tokens="1")
    monkeypatch.setattr(plugins, "_registry", fakes("flat", "steep", "new"))
    run(capsys, "--select", tokens="1")
    assert [names for _, names in cells.seen][-1] == ["flat", "new", "steep", "torch"]
    monkeypatch.setattr("torch.__version__", "99.0")
    run(capsys, "--select", tokens="1")
    assert len(cells.seen) == 3
    (record,) = times(tuned / "cpu.json")["local", "flat"].values()
    assert "torch 99.0" in record.made_with
    run(capsys, "--select", "--experts", "steep", tokens="1")
    assert len(cells.seen) == 3


def test_an_interrupted_run_resumes(cells: Cells, tuned: Path, capsys) -> None:
    cells.stop_after = 3
    code, _, err = run(capsys, "--select", "--quant", "none,int8_w8a16")
    assert code == 1 and "interrupted" in err
    assert len(times(tuned / "cpu.json")["local", "flat"]) == 3
    cells.stop_after = 10**9
    code, _, err = run(capsys, "--select", "--quant", "none,int8_w8a16")
    assert code == 0 and "5 cells to measure" in err
    assert [tokens for tokens, _ in cells.seen] == [1, 16, 64, 256, 1, 16, 64, 256]


def test_failures_and_wrong_outputs_are_recorded_and_not_chosen(
    cells: Cells, tuned: Path, capsys, monkeypatch
) -> None:
    broken = fakes("flat", "steep", "tired")
    broken.register(replace(broken.expert("flat"), name="unloadable", target="no_such_module:X"))
    monkeypatch.setattr(plugins, "_registry", broken)
    cells.wrong = {"steep"}
    code, out, _ = run(capsys, "--select")
    found = times(tuned / "cpu.json")
    for name in ("steep", "tired", "unloadable"):
        assert {r.us for r in found["local", name].values()} == {None}, name
    assert code == 0 and moekit.explain(PROBLEM).chosen.experts == "flat"
    assert "0 cells to measure" in run(capsys, "--select")[2]


def test_copies_and_libraries_are_recorded(cells: Cells, tuned: Path, capsys) -> None:
    spec = moekit.registry().expert("flat")
    copying = replace(spec, name="copying", target=f"{__name__}:Copying", requires=("pluggy",))
    moekit.registry().register(copying)
    run(capsys, "--select", tokens="1")
    found = times(tuned / "cpu.json")
    (record,) = found["local", "copying"].values()
    assert record.copied == 1.0
    assert "acme 1.2" in record.made_with and "pluggy 1." in record.made_with
    assert "acme" not in found["local", "flat"][1].made_with


@pytest.mark.parametrize("where", ["new.json", "folder", "MOEKIT_TUNED"])
def test_where_the_table_goes(cells: Cells, tmp_path: Path, capsys, monkeypatch, where) -> None:
    argv = ["--select"]
    if where == "MOEKIT_TUNED":
        monkeypatch.setenv("MOEKIT_TUNED", str(tmp_path / "x" / "mine.json"))
        file = tmp_path / "x" / "mine.json"
    else:
        argv += ["--output", str(tmp_path / where)]
        file = tmp_path / where if where == "new.json" else tmp_path / where / "cpu.json"
    code, out, _ = run(capsys, *argv, tokens="1")
    assert code == 0 and out == "" and times(file)


@pytest.mark.parametrize(
    "argv",
    [
        ["--select", "--experts", "steep:4|flat"],
        ["--select", "--experts", "nobody"],
        ["--select", "--shapes", "nothing"],
        ["--select", "--tokens", "0"],
        ["--select", "--output", "/dev/null/x.json"],
        ["--select", "--quant", "fp9"],
        ["flat", "--fast"],
        ["nobody"],
    ],
    ids=" ".join,
)
def test_wrong_questions(cells: Cells, capsys, argv: list[str]) -> None:
    more = [] if argv[0][0] != "-" else FAST
    code = main(["tune", *argv[:1], *more, *argv[1:]])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and "error: " in err and "Traceback" not in err
    assert not cells.seen


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--ep=2"], "--ep 2 measures combinations of dispatcher and experts: add --select"),
        (["reference"], "to measure them: python -m moekit tune --select --experts reference"),
        pytest.param(
            ["--select", "--ep", "2", "--device", "cuda", "--shapes", "8:2:64:64"],
            "; leave out --device to use 'cpu'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_errors_say_what_to_do(capsys, argv: list[str], said: str) -> None:
    assert main(["tune", *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [["--select", "--frob"], ["--select", "--ep", "two"], ["--select", "--seconds", "soon"]],
)  # fmt: skip
def test_bad_arguments(capsys, argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tune", *argv])
    assert caught.value.code == 2 and "usage: python -m moekit tune" in capsys.readouterr().err


def test_a_broken_table_is_left_alone(cells: Cells, tuned: Path, capsys) -> None:
    tuned.mkdir()
    (tuned / "cpu.json").write_text("precious")
    code, out, err = run(capsys, "--select")
    assert code == 2 and "cannot be used" in err and not cells.seen
    assert (tuned / "cpu.json").read_text() == "precious"


def test_a_backends_own_tuner(cells: Cells) -> None:
    spec = moekit.registry().expert("flat")
    moekit.registry().register(replace(spec, name="copying", target=f"{__name__}:Copying"))
    assert main(["tune", "copying", "--deep", "x", "y"]) == 3


# -- tune, without a mode ------------------------------------------------------------------------


def test_all_tuners_and_then_the_choice(cells: Cells, tuned: Path, capsys, monkeypatch) -> None:
    """Backends that share a tuner run it once; those that cannot do the problem do not run it."""
    asked: list[list[str]] = []

    def tune(argv: list[str]) -> int:
        assert not cells.seen, "the choice is measured with the tiles that were found"
        asked.append(argv)
        return 0

    monkeypatch.setattr(Copying, "tune", staticmethod(tune))
    spec = moekit.registry().expert("flat")
    copying = replace(spec, name="copying", target=f"{__name__}:Copying")
    moekit.registry().register(copying)
    moekit.registry().register(replace(copying, name="twin"))
    moekit.registry().register(replace(copying, name="elsewhere", devices=("cuda",)))
    code, out, err = run(capsys, "--quant", "none,int8_w8a16", tokens="1,16")
    assert asked == [["--shapes", SIZES, "--quant", "none,int8_w8a16"]]
    assert code == 0 and "4 cells to measure" in err and "moekit tune copying --shapes" in err
    assert len(cells.seen) == 4 and out == ""
    monkeypatch.setattr(Copying, "tune", staticmethod(lambda argv: 1))
    assert run(capsys, tokens="1")[0] == 1, "a tuner with something left to do"


def test_the_time_is_shared_and_what_is_left_is_continued(
    cells: Cells, tuned: Path, capsys, monkeypatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    asked: list[list[str]] = []

    def tune(argv: list[str]) -> int:
        asked.append(argv)
        now[0] += 70.0
        return 0

    def cell(case, calls, **options):
        now[0] += 20.0
        return cells(case, calls, **options)

    monkeypatch.setattr(Copying, "tune", staticmethod(tune))
    monkeypatch.setattr(experts, "run_cell", cell)
    spec = moekit.registry().expert("flat")
    moekit.registry().register(replace(spec, name="copying", target=f"{__name__}:Copying"))
    code, _, err = run(capsys, "--seconds", "100")
    assert asked == [["--shapes", SIZES, "--quant", "none", "--seconds", "50.0"]]
    assert code == 1 and "the time is over; 2 of 4 cells are left" in err
    code, _, err = run(capsys, "--seconds", "30")
    assert code == 1 and "the time is over; 2 of 2 cells are left" in err
    code, _, err = run(capsys, "--select", "--seconds", "100")
    assert code == 0 and "2 cells to measure" in err
