"""The script that holds out shapes of the tuned tiles: what it chooses, and what it reports."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from moekit_triton import tables
from test_triton_plans import H200, TILE, entry
from triton_checks import compiled

DEVICE_SCRIPTS = Path(__file__).resolve().parents[3] / "benchmarks" / "device"


@pytest.fixture
def script(monkeypatch):
    compiled(monkeypatch, triton_version="3.6.0")
    if not DEVICE_SCRIPTS.is_dir():
        pytest.skip("benchmarks/ is not beside the plugins")
    monkeypatch.syspath_prepend(str(DEVICE_SCRIPTS))
    return importlib.import_module("tile_regret")


def test_a_held_out_shape_sees_other_shapes_only(script) -> None:
    mine, near, far = entry(8, 4096, 40), entry(8, 2048, 50), entry(8, 256, 60)
    same_sizes = entry(8, 4096, 70, scheme="fp8_channel_token")
    (cell, *_) = script.cells([mine, near, far, same_sizes], H200)
    assert cell.tuned.first.group_m == 40
    assert cell.chosen["other shapes"].first.group_m == 50
    assert cell.chosen["rules"].first.group_m not in (40, 50, 60, 70)
    (alone, *_) = script.cells([mine, far], H200)
    assert alone.chosen["other shapes"] == alone.chosen["rules"] == cell.chosen["rules"]
    (borrowing,) = script.cells([mine], H200, borrowed=[mine, near])
    assert borrowing.chosen["other shapes"].first.group_m == 50
    assert "| other shapes | all | 1 | 0 | 0 | 0 |" in script.agreement([borrowing])


def test_shipped_tables_are_covered(script) -> None:
    entries = tables.FILES.known(H200.name)
    found = list(script.cells(entries, H200))
    assert len({cell.name for cell in found}) == len(found) > 150
    tuned = sum(len(e.plans) for e in entries)
    assert len(found) < tuned, "a few tokens have dot products"


def test_a_recording_is_continued_and_its_regret_reported(script, tmp_path, monkeypatch) -> None:
    found = list(script.cells([entry(8, 4096, 40, 80), entry(8, 2048, 50)], H200))
    us = {40: 105.0, 80: 121.0, 50: 100.0}
    timed = []

    def times(cell, packed):
        timed.append(cell.name)
        each = us[cell.tuned.first.group_m]
        return {"tuned": 100.0, "other shapes": each, "rules": 100.0}, TILE

    monkeypatch.setattr(script, "times", times)
    file = tmp_path / "regret.json"
    script.record(found[:1], file)
    script.record(found, file)
    assert timed == [cell.name for cell in found]
    rows = script.regret(json.loads(file.read_text())).splitlines()
    mean = f"{(1.05 * 1.21) ** (1 / 3) - 1:.2%}"
    assert rows[2] == f"| other shapes | 3 | {mean} | 21.0% | 1 | {found[1].name} |"
    assert rows[3].startswith("| rules | 3 | 0.00% | 0.0% | 0 |") and len(rows) == 4
    beaten = script.regret({"a": dict.fromkeys(script.CHOICES, 100.0) | {"tuned": 150.0}})
    assert beaten.splitlines()[-1] == "The rules beat the table by 50%: a"
