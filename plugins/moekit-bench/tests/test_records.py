"""Records: the results of ranks as one, what a file holds, and the table writer."""

from __future__ import annotations

import json
import math

from moekit_bench import Result, Table
from moekit_bench.records import Cell, Run, Settings, merge


def rank(us: float, error: float, nbytes: int) -> Result:
    timed = Result(name="a", us=us, eager_us=us, spread_us=(us - 1, us + 1))
    return timed.judged(error, 0.5, dispatch_us=us, buffer_bytes=nbytes)


def test_ranks_become_one_record() -> None:
    """Medians of times, the worst error, the most bytes, all right."""
    merged = merge([rank(10, 0.1, 7), rank(20, 0.2, 9), rank(60, 0.9, 8)])
    assert (merged.us, merged.spread_us, merged.dispatch_us) == (20, (9, 61), 20)
    assert (merged.error, merged.right, merged.buffer_bytes) == (0.9, False, 9)
    assert merged.graph_us is None and merged.name == "a"
    assert merged.reason == "wrong: error 9.0e-01"
    lost = merge([rank(10, 0.1, 7), rank(10, math.inf, 7)])
    assert lost.error is None and not lost.right


def test_a_file_has_no_nan_and_no_fields_that_do_not_apply(tmp_path) -> None:
    cell = Cell(shape="x", scheme="none", routing="uniform", tokens=1,
                results=(rank(5, math.inf, 1),))  # fmt: skip
    run = Run(mode="layers", device={"name": "d"}, settings=Settings(inputs=1, replays=1),
              cells=(cell,))  # fmt: skip
    run.write(tmp_path / "run.json")
    data = json.loads((tmp_path / "run.json").read_text())
    (result,) = data["cells"][0]["results"]
    assert result["us"] == 5 and not result["right"]
    assert not {"error", "graph_us", "fraction"} & result.keys()
    assert "limit_us" not in data["cells"][0] and "ceilings" not in data


def test_names_of_composites_do_not_break_a_table() -> None:
    table = Table("T", "a:64|b")
    table.add(1, "a:64|b")
    assert list(table) == ["| T | a:64\\|b |", "|---|---|", "| 1 | a:64\\|b |"]
