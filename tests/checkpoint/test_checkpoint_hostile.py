"""Hostile files: every one raises an error that names it, in bounded time and memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import hostile_checkpoints as hostile
import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    hostile.write_bases(folder / "bases")
    return folder


def reports(folder: Path) -> dict[str, str]:
    """Return the faults of each case by name, from processes that a case may kill."""
    cases, found, at = hostile.cases(), {}, 0
    while at < len(cases):
        command = [sys.executable, hostile.__file__, str(folder), str(at)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        found |= {line["case"]: line["wrong"] for line in lines if "case" in line}
        started = [line["started"] for line in lines if "started" in line]
        assert started, done.stderr
        at = started[-1] + 1
        if done.returncode:
            found[cases[at - 1].name] = f"the process ended with {done.returncode}"
            shutil.rmtree(folder / "case", ignore_errors=True)
    return found


def test_every_hostile_file_is_refused(folder: Path) -> None:
    cases = hostile.cases()
    assert len({case.name for case in cases}) == len(cases) >= 250
    found = reports(folder)
    assert found.keys() == {case.name for case in cases}
    wrong = {name: what for name, what in found.items() if what}
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


@pytest.mark.parametrize("base", hostile.BASES)
def test_the_unchanged_checkpoints_are_valid(base: str, folder: Path) -> None:
    hostile.load(folder / "bases" / base)


def test_links_as_in_a_hub_cache(folder: Path, tmp_path: Path) -> None:
    """snapshots/REVISION/FILE -> ../../blobs/DIGEST"""
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted((folder / "bases" / "ct").iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    hostile.load(snapshot)
