"""Files of tuned tables: reading, precedence, refused files, nearness and concurrent writers."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from moekit_bench.tune import add_to
from tuned_tables import MADE, PROBLEM, fakes, make_table, no_tables, write_table

import moekit
from moekit.plugin import TableFiles, device_file, nearest, size_distance
from moekit.selection import tuned as tables
from moekit.selection.tuned import files as tuned_files
from moekit.selection.tuned import table
from moekit.selection.tuned.choice import lookup
from moekit.selection.tuned.table import Key, Record

tuned = pytest.fixture(no_tables, name="tuned")


def time(problem=PROBLEM, experts: str = "a", tokens: int = 1) -> float | None:
    found = lookup(problem)
    return None if found is None else found.times["local", experts][tokens].us


# -- what is read ------------------------------------------------------------------------------


def test_a_table_is_read_as_it_was_written(tuned: Path) -> None:
    times = make_table({"a": {1: 3.25, 16: None}, "batched+b": {7: 1e6}}, copied={"a": None})
    more = make_table({"a": (2, 0.5)}, PROBLEM.replace(quant="fp8_block", device="sm90"))
    file = write_table(tuned / "x.json", times, more)
    assert table.read(file) == {**times, **more}
    assert file.read_text().count("\n") == 2 + 3 + 5, "a cell a line"


@pytest.mark.parametrize("where", ["file", "folder"])
def test_moekit_tuned_names_a_file_or_a_folder(tuned: Path, monkeypatch, where: str) -> None:
    file = write_table(tuned / "x.json", make_table({"a": {1: 5.0}}))
    monkeypatch.setenv("MOEKIT_TUNED", str(file if where == "file" else tuned))
    assert time() == 5.0


def test_an_empty_moekit_tuned_reads_no_table(tuned: Path, monkeypatch) -> None:
    write_table(tuned.parent / "shipped" / "cpu" / "x.json", make_table({"a": {1: 5.0}}))
    assert time() == 5.0
    monkeypatch.setenv("MOEKIT_TUNED", "")
    assert time() is None
    monkeypatch.setenv("MOEKIT_TUNED", "/no/such/place")
    assert time() == 5.0


def test_a_moekit_tuned_that_does_not_exist_is_said_once(tuned: Path, monkeypatch, caplog) -> None:
    of_plugin = TableFiles(tuned, dict, list, "tune again", owner="acme").known
    for known, name in ((time, "no-tables"), (of_plugin, "no-tables-of-a-plugin")):
        caplog.clear()
        missing = tuned / name
        monkeypatch.setenv("MOEKIT_TUNED", str(missing))
        known()
        known()
        (warning,) = caplog.messages
        assert f"MOEKIT_TUNED={missing}: there is no such file or folder" in warning
        assert "expected a folder of tuned tables" in warning and "unset the variable" in warning
    caplog.clear()
    for value in ("", str(tuned), str(write_table(tuned / "x.json", make_table({"a": {1: 5.0}})))):
        monkeypatch.setenv("MOEKIT_TUNED", value)
        time()
    monkeypatch.delenv("MOEKIT_TUNED")
    time()
    assert not caplog.messages


def test_the_users_folder(monkeypatch) -> None:
    monkeypatch.setenv("MOEKIT_TUNED", "/t.json")
    assert tables.user_path() == Path("/t.json")
    monkeypatch.delenv("MOEKIT_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert tables.user_path() == Path("/c/moekit/tuned")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert tables.user_path() == Path("/home/me/.cache/moekit/tuned")


def test_shipped_tables_are_readable() -> None:
    files = list(tables.SHIPPED.glob("*/*.json"))
    assert files
    for file in files:
        (arch,) = {tables.slug(key.arch) for key in table.read(file)}
        assert arch == file.parent.name


def test_later_files_and_user_tables_win(tuned: Path) -> None:
    shipped = tuned.parent / "shipped" / "cpu"
    write_table(shipped / "z.json", make_table({"a": {1: 1.0}}))
    write_table(shipped / "b.json", make_table({"a": {1: 2.0, 4: 2.0}, "b": {1: 2.0}}))
    assert (time(), time(tokens=4), time(experts="b")) == (1.0, 2.0, 2.0)
    write_table(tuned / "a.json", make_table({"a": {1: 3.0}}))
    assert (time(), time(tokens=4), time(experts="b")) == (3.0, 2.0, 2.0)


def test_a_changed_file_is_read_again(tuned: Path) -> None:
    for us in (5.0, 6.0):
        write_table(tuned / "x.json", make_table({"a": {1: us}}))
        os.utime(tuned / "x.json", ns=(0, int(us)))
        assert time() == us
    (tuned / "x.json").unlink()
    assert time() is None


def test_a_file_of_the_same_size_and_date_is_read_if_it_is_another(tuned: Path) -> None:
    for us in (5.0, 6.0):
        write_table(tuned / "new", make_table({"a": {1: us}}))
        os.utime(tuned / "new", ns=(0, 7))
        (tuned / "new").replace(tuned / "x.json")
        assert time() == us


def test_an_unchanged_file_is_read_once(tuned: Path, monkeypatch) -> None:
    read, read_json = [], tuned_files.read_json
    monkeypatch.setattr(tuned_files, "read_json", lambda f: read.append(f) or read_json(f))
    write_table(tuned / "x.json", make_table({"a": {1: 5.0}}))
    assert [time() for _ in range(5)] == [5.0] * 5
    assert read.count(tuned / "x.json") == 1


# -- what is refused ---------------------------------------------------------------------------


def broken(**changes: object) -> str:
    """Return a table with one cell and changes to it or to its record."""
    cell = json.loads(table.encode(make_table({"a": {1: 5.0}})))["cells"][0]
    for name, value in changes.items():
        place = cell["times"]["local+a"] if name in ("us", "copied", "date", "more") else cell
        if value is ...:
            del place[name]
        else:
            place[name] = value
    return json.dumps({"format": 1, "cells": [cell]})


NONSENSE = {
    "empty": "",
    "cut off": broken()[:-7],
    "no table": "[]",
    "null": "null",
    "another format": '{"format": 2, "cells": []}',
    "no cells": '{"format": 1}',
    "cells of nothing": '{"format": 1, "cells": [null]}',
    "deep": "[" * 100_000,
    "not text": "\udcff",
    "no tokens": broken(tokens=...),
    "zero tokens": broken(tokens=0),
    "tokens as text": broken(tokens="1"),
    "half a token": broken(tokens=1.5),
    "true tokens": broken(tokens=True),
    "no size": broken(hidden=...),
    "negative size": broken(hidden=-1),
    "a list for a size": broken(hidden=[1]),
    "gated by a word": broken(gated="yes"),
    "no device name": broken(device=None),
    "zero time": broken(us=0),
    "negative time": broken(us=-3.0),
    "no number": broken(us=math.nan),
    "infinite": broken(us=math.inf),
    "time as text": broken(us="fast"),
    "true time": broken(us=True),
    "negative copy": broken(copied=-0.1),
    "date as number": broken(date=2026),
    "unknown field": broken(more=1),
    "no combination": broken(times={"a": {"us": 1.0}}),
    "times of nothing": broken(times=[]),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_unusable_files_are_skipped_with_a_warning(tuned: Path, caplog, what: str) -> None:
    """Selection falls back to priorities, and still uses other files."""
    tuned.mkdir()
    file = tuned / "bad.json"
    file.write_bytes(NONSENSE[what].encode("utf-8", "surrogateescape"))
    with pytest.raises(moekit.MoekitError, match=r"bad\.json cannot be used: .*tune --select"):
        table.read(file)
    with caplog.at_level(logging.WARNING, "moekit"):
        for _ in range(3):
            explanation = moekit.compose(PROBLEM, backends=fakes("a")).explanation
    assert explanation.why == "by priority"
    assert len(caplog.records) == 1 and "bad.json" in caplog.text, "said once"
    write_table(tuned / "good.json", make_table({"a": {1: 1.0}, "torch": {1: 2.0}}))
    assert "by measurement" in moekit.explain(PROBLEM, backends=fakes("a")).why


def test_the_unbroken_table_of_these_tests_is_usable(tuned: Path) -> None:
    tuned.mkdir()
    (tuned / "x.json").write_text(broken())
    assert time() == 5.0


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_places(tuned: Path, caplog) -> None:
    file = write_table(tuned / "x.json", make_table({"a": {1: 5.0}}))
    file.chmod(0)
    assert time() is None and "PermissionError" in caplog.text
    tuned.chmod(0)
    assert time() is None
    tuned.chmod(0o700)


# -- which shape -------------------------------------------------------------------------------


def test_the_nearest_shape_within_reach(tuned: Path) -> None:
    wide = PROBLEM.replace(hidden_size=128)
    write_table(tuned / "x.json", make_table({"a": {1: 1.0}}), make_table({"a": {1: 2.0}}, wide))
    assert (time(), time(wide)) == (1.0, 2.0)
    assert time(PROBLEM.replace(hidden_size=80)) == 1.0
    assert time(PROBLEM.replace(hidden_size=100)) == 2.0
    assert time(PROBLEM.replace(hidden_size=256)) == 2.0, "twice one size is in reach"
    assert time(PROBLEM.replace(hidden_size=260)) is None
    assert time(PROBLEM.replace(hidden_size=32, top_k=1)) is None, "twice two sizes is not"
    found = lookup(PROBLEM.replace(hidden_size=80))
    assert 0 < found.distance < 1 and "nearest shape E 4 K 2 H 64 I 48" in str(found)
    assert "nearest" not in str(lookup(PROBLEM))


@pytest.mark.parametrize(
    "changes",
    [{"quant": "fp8_block"}, {"activation": "silu_no_mul"}, {"device": "sm90"}]
)  # fmt: skip
def test_another_scheme_activation_or_device_is_not_near(tuned: Path, changes) -> None:
    write_table(tuned / "x.json", make_table({"a": {1: 1.0}}))
    assert time() == 1.0 and time(PROBLEM.replace(**changes)) is None


def test_devices_go_by_name_and_nameless_ones_by_architecture(tuned: Path) -> None:
    def on(name: str, capability=(9, 0)):
        return PROBLEM.replace(device=moekit.DeviceSpec("cuda", capability, name))

    write_table(tuned / "x.json", make_table({"a": {1: 1.0}}, on("NVIDIA H200")))
    assert time(on("NVIDIA H200")) == time(on("")) == 1.0
    assert time(on("", (8, 0))) is None and time(on("NVIDIA A100", (8, 0))) is None
    assert str(lookup(on(""))) == "NVIDIA H200, T=1..1"


def test_a_device_that_was_not_measured_borrows_from_its_architecture(tuned: Path) -> None:
    def on(name: str):
        return PROBLEM.replace(device=moekit.DeviceSpec("cuda", (9, 0), name))

    write_table(tuned / "x.json", make_table({"a": {100: 1.0}}, on("NVIDIA H200")))
    found = lookup(on("NVIDIA H20"))
    assert str(found) == "NVIDIA H200, T=100..100, the nearest device to NVIDIA H20"
    assert found.curves("local", ["a"]) == {"a": [(100, 1.0)]}
    # An H100 reads 3.11 TB/s where an H200 reads 4.49: experts stay bound by memory for longer.
    found = lookup(on("NVIDIA H100 80GB HBM3"))
    assert found.curves("local", ["a"]) == {"a": [(144, 1.0)]}
    write_table(tuned / "y.json", make_table({"a": {100: 2.0}}, on("NVIDIA H20")))
    found = lookup(on("NVIDIA H20"))
    assert str(found) == "NVIDIA H20, T=100..100" and found.curves("local", ["a"])["a"][0][1] == 2.0


def test_numbers_of_ranks(tuned: Path) -> None:
    """Sizes are local, and combinations measured on as many ranks count before single ones."""
    alone = PROBLEM.replace(num_experts=4)
    write_table(tuned / "x.json", make_table({"a": {1: 1.0}}, alone))
    moving = moekit.ParallelConfig(ep_size=4, ep_rank=1)
    spread = PROBLEM.replace(num_experts=15, parallel=moving, max_num_tokens=10)
    found = lookup(spread)
    assert Key.of(spread).experts == 4 == spread.replace(num_experts=16).num_local_experts
    assert found.borrowed and found.distance == 0 and found.high == 10
    assert "experts on one rank" in str(found)
    same_tokens = moekit.ParallelConfig(ep_size=4, dp_size=1)
    found = lookup(spread.replace(parallel=same_tokens))
    assert not found.borrowed and found.high == 3, "a quarter of 10 tokens' choices are here"
    write_table(tuned / "x.json", make_table({"a": {1: 1.0}}, alone),
                make_table({"naive+a": {1: 9.0}}, spread))  # fmt: skip
    found = lookup(spread)
    assert not found.borrowed and found.times["naive", "a"][1].us == 9.0
    assert "on each of 4 ranks" in str(found.key)


# -- writers -----------------------------------------------------------------------------------


def test_writing_keeps_what_others_wrote(tuned: Path) -> None:
    file = tuned / "deep" / "x.json"
    add_to(file, make_table({"a": {1: 1.0}}))
    add_to(file, make_table({"b": {1: 2.0}}))
    add_to(file, make_table({"a": {1: 3.0, 4: 4.0}}))
    times = table.read(file)[Key.of(PROBLEM)]
    assert [times["local", "a"][t].us for t in (1, 4)] == [3.0, 4.0]
    assert times["local", "b"] == {1: Record(2.0, 0.0, **MADE)}
    assert [f.name for f in file.parent.iterdir() if f.suffix == ".json"] == ["x.json"]


def test_a_broken_file_is_not_overwritten(tuned: Path) -> None:
    tuned.mkdir()
    (tuned / "x.json").write_text("precious")
    with pytest.raises(moekit.MoekitError, match="correct or delete it"):
        add_to(tuned / "x.json", make_table({"a": {1: 1.0}}))
    assert (tuned / "x.json").read_text() == "precious"


WRITERS = """
import os, sys
from pathlib import Path
from tuned_tables import make_table
from moekit_bench.tune import add_to

def write(name):
    if pid := os.fork():
        return pid
    code = 1
    try:
        for tokens in range(1, 31):
            add_to(Path(sys.argv[1]), make_table({name: {tokens: float(tokens)}}))
        code = 0
    finally:
        os._exit(code)

print("ready", flush=True)
writers = [write(name) for name in sys.argv[2:]]
sys.exit(any([os.waitpid(pid, 0)[1] for pid in writers]))
"""


def test_concurrent_writers_lose_nothing_and_readers_see_whole_files(tuned: Path) -> None:
    file = write_table(tuned / "x.json", make_table({"a": {1: 1.0}}))
    here = str(Path(__file__).parents[1] / "support")
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    writers = subprocess.Popen(
        [sys.executable, "-c", WRITERS, str(file), "b", "c", "d"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writers.stdout.readline() == "ready\n"
    seen, done = [0], threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(len(table.read(file)[Key.of(PROBLEM)]))

    reader = threading.Thread(target=read)
    reader.start()
    writers.communicate(timeout=120)
    done.set()
    reader.join()
    assert writers.returncode == 0
    times = table.read(file)[Key.of(PROBLEM)]
    assert {e: len(records) for (_, e), records in times.items()} == {
        "a": 1, "b": 30, "c": 30, "d": 30,
    }  # fmt: skip
    assert seen == sorted(seen) and seen[-1] >= 1


# -- tables of plugins ---------------------------------------------------------------------------


def tiles(tmp_path: Path, **options: object) -> TableFiles:
    return TableFiles(
        tmp_path / "shipped", lambda data: data["tiles"], list,
        "tune again", **options,
    )  # fmt: skip


def write_json(file: Path, value: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))


def test_plugins_tables_lie_in_a_subfolder_by_device(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("MOEKIT_TUNED", str(tmp_path / "mine"))
    write_json(tmp_path / "shipped" / "acme-x1.json", {"tiles": 1})
    write_json(tmp_path / "shipped" / "acme-x2.json", {"tiles": 2})
    write_json(tmp_path / "mine" / "acme" / "acme-x1.json", {"tiles": 3})
    kind = tiles(tmp_path, owner="acme")
    assert kind.known("Acme X1") == [1, 3] and kind.known("Acme X2") == [2]
    assert kind.known("Acme X3") == [] and kind.known() == [1, 2, 3]
    write_json(tmp_path / "mine" / "acme" / "acme-x1.json", [])
    assert kind.known("Acme X1") == [1]
    assert "acme-x1.json cannot be used: TypeError" in caplog.text and "tune again" in caplog.text
    monkeypatch.setenv("MOEKIT_TUNED", "")
    assert kind.known("Acme X1") == [1]


def test_names_and_distances() -> None:
    assert device_file("NVIDIA H200") == "nvidia-h200.json"
    assert device_file("AMD Instinct MI300X/OAM (0.5)") == "amd-instinct-mi300x-oam-0.5.json"
    assert size_distance((2, 64), (4, 64)) == 1 and size_distance((2, 32), (4, 64)) == 2**0.5
    assert nearest([8, 3, 5], lambda n: size_distance([n], [4])) == (5, math.log2(5 / 4))
    assert nearest([9], lambda n: size_distance([n], [4])) is None
