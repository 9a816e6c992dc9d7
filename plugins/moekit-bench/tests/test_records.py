"""Records as JSON and back, the records of ranks as one, and the table writer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from moekit_bench import Table, Timing
from moekit_bench.codec import from_json, merge, read_recording, to_json
from moekit_bench.overlap import difference
from moekit_bench.records import (
    DispatcherResult,
    DispatchRun,
    ExpertsResult,
    ExpertsRun,
    LayersRun,
    Overlap,
)

import moekit
from moekit.cli.main import main

RECORDINGS = Path(__file__).parent / "recordings"  # made by moekit 0.1, or as older versions did


@pytest.mark.parametrize(
    ("name", "cls", "mode"),
    [
        ("experts", ExpertsRun, []),
        ("dispatch", DispatchRun, ["--dispatch"]),
        ("layers", LayersRun, ["--layers"]),
    ],
)
def test_recordings_of_older_versions_load(capsys, name, cls, mode) -> None:
    file = RECORDINGS / f"{name}.json"
    run = from_json(cls, read_recording(file))
    again = json.loads(json.dumps(to_json(run), allow_nan=False))
    assert from_json(cls, again) == run
    for old, new in zip(json.loads(file.read_text())["cells"], again["cells"], strict=True):
        (results,) = (key for key in ("contestants", "dispatchers", "pairs") if key in old)
        for was, now in zip(old.pop(results), new.pop(results), strict=True):
            overlap = now.get("overlap") or {}
            assert was.pop("overlap", {}).items() <= overlap.items()
            assert was.items() <= now.items()
        assert old.items() <= new.items()
    assert main(["bench", *mode, "--from", str(file)]) == 0
    assert f"{run.versions['moekit']}, python" in capsys.readouterr().out


def test_a_wrong_recording_is_named_by_its_place() -> None:
    data = json.loads((RECORDINGS / "layers.json").read_text())
    data["cells"][1]["pairs"][0]["us"] = "fast"
    with pytest.raises(moekit.MoekitError, match=r"f.cells\[1\].pairs\[0\].us must be float, not"):
        from_json(LayersRun, data, "f")
    del data["cells"][1]["tokens"]
    with pytest.raises(moekit.MoekitError, match=r"f.cells\[1\] has no 'tokens'"):
        from_json(LayersRun, {**data, "cells": [data["cells"][0], {"scheme": "none"}]}, "f")


@pytest.mark.parametrize(
    ("name", "cells", "mode"),
    [
        ("experts", "contestants", []),
        ("dispatch", "dispatchers", ["--dispatch"]),
        ("layers", "pairs", ["--layers"]),
    ],
)
@pytest.mark.parametrize("us", [0, 0.0, -1.5, 1e-320])
def test_a_time_that_cannot_be_is_named(capsys, tmp_path, name, cells, mode, us) -> None:
    file, data = tmp_path / "run.json", json.loads((RECORDINGS / f"{name}.json").read_text())
    data["cells"][0][cells][0]["us"] = us
    file.write_text(json.dumps(data))
    for command in (["bench", *mode], ["tune", "--regret"])[: 1 if name == "dispatch" else 2]:
        assert main([*command, "--from", str(file)]) == 2
        said = f"{file}.cells[0].{cells}[0].us must be at least 0.001 (got {us})"
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("what", "value"), [("us", 1e-4), ("copied", -1)])
def test_a_wrong_recording_leaves_the_table_alone(capsys, tmp_path, what, value) -> None:
    """A table that does not hold what tables may hold is refused as a whole when it is read."""
    file, table = tmp_path / "run.json", tmp_path / "table.json"
    data = json.loads((RECORDINGS / "layers.json").read_text())
    argv = ["tune", "--select", "--from", str(file), "--output", str(table)]
    file.write_text(json.dumps(data))
    assert main(argv) == 0
    good = table.read_text()
    data["cells"][0]["pairs"][0][what] = value
    file.write_text(json.dumps(data))
    assert main(argv) == 2 and table.read_text() == good
    assert f"{file}.cells[0].pairs[0].{what} must be at least 0" in capsys.readouterr().err


def test_ranks_become_one_record() -> None:
    """Medians of times, the mean of counts, the worst error, the most bytes, all right."""

    def rank(us: float, error: float, nbytes: int) -> DispatcherResult:
        timing = Timing(None, us, None, (us - 1, us + 1))
        return DispatcherResult.of(
            timing, error, 0.5, name="a", dispatch_us=2.0, rows=us, buffer_bytes=nbytes,
            dispatch_row_bytes=1000,
        )  # fmt: skip

    merged = merge([rank(10, 0.1, 7), rank(20, 0.2, 9), rank(60, 0.9, 8)]).with_rates()
    assert (merged.us, merged.spread_us, merged.rows) == (20, (9, 61), 30)
    assert (merged.error, merged.right, merged.buffer_bytes) == (0.9, False, 9)
    assert merged.graph_us is None and merged.dispatch_deepep_gbs == 30 * 1000 / 2 / 1e3
    lost = merge([rank(10, 0.1, 7), rank(10, math.nan, 7)])
    assert lost.error is None and not lost.right


def test_an_output_that_is_not_finite_is_no_small_difference() -> None:
    one, nan = torch.ones(2), torch.tensor([1.0, math.nan])
    assert difference([one, one], [one, one]) == 0.0
    for wrong in ([nan, one], [one, nan]):
        assert difference(wrong, [one, one]) is None
    times = dict.fromkeys(("sequential_us", "in_flight_us", "shared_after_us"), 1.0)
    times |= {"shared_within_us": 1.0, "shared_concurrent_us": 1.0}

    def rank(error: float | None) -> Overlap:
        return Overlap(**times, error_in_flight=0.1, error_within=error, error_concurrent=0.0)

    assert rank(0.2).error == 0.2 and merge([rank(0.2), rank(0.3)]).error == 0.3
    lost = merge([rank(0.2), rank(None)])
    assert lost.error is None and from_json(Overlap, to_json(lost)) == lost


def test_json_has_no_nan() -> None:
    data = to_json(ExpertsResult(name="a", us=math.inf, fraction=math.nan))
    assert (data["us"], data["fraction"]) == (None, None)


def test_names_of_composites_do_not_break_a_table() -> None:
    table = Table("T", "a:64|b")
    table.add(1, "a:64|b")
    assert list(table) == ["| T | a:64\\|b |", "|---|---|", "| 1 | a:64\\|b |"]
