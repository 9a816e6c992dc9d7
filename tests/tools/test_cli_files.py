"""`python -m moekit` with files that the system refuses to read or write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from moekit.cli import commands
from moekit.cli.main import main

PROBLEM = "explain --num-experts 8 --top-k 2 --hidden-size 64 --intermediate-size 64".split()
dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")


def refused(argv: Sequence[str], stdout: str, **environ: str) -> str:
    """Return standard error of a command that exits with 2 and without a traceback."""
    with open(stdout, "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "moekit", *argv],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "", **environ},
            timeout=120,
        )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    return done.stderr


@dev_full
@pytest.mark.parametrize(
    ("argv", "unbuffered"),
    [
        pytest.param(argv, unbuffered, marks=[pytest.mark.full] * (unbuffered != usual))
        for argv, usual in (
            (["plugins", "--json"], ""),
            (PROBLEM, "1"),
            (["bench", "--list-shapes"], ""),
        )
        for unbuffered in ("", "1")
    ],
)
def test_standard_output_on_a_full_disk(argv: list[str], unbuffered: str) -> None:
    """For each command buffered or unbuffered; the other combinations are full."""
    said = refused(argv, "/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert "standard output" in said and "(No space left on device)" in said
    assert "on a disk that is not full" in said


@pytest.mark.parametrize(
    ("folder", "why"), [("x" * 300, "File name too long"), ("file/below", "Not a directory")]
)
def test_explain_a_model_that_cannot_be_read(folder: str, why: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    assert main(["explain", "--model", str(tmp_path / folder)]) == 2
    said = capsys.readouterr().err
    assert f"error: {tmp_path / folder}" in said and "cannot be read" in said
    assert f"({why})" in said and "download it again" not in said


class Full:
    to = eval = lambda self, *_: self

    def save_pretrained(self, folder: Path) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("folder", "why"), [("new/folder", "No space left on device"), ("file", "File exists")]
)
def test_demo_in_a_place_for_no_model(
    folder: str, why: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(Qwen3MoeConfig=SimpleNamespace, Qwen3MoeForCausalLM=lambda _: Full())
    monkeypatch.setitem(sys.modules, "transformers", fake)
    (tmp_path / "file").touch()
    assert main(["demo", "--model-dir", str(tmp_path / folder)]) == 2
    said = capsys.readouterr().err
    assert f"--model-dir {tmp_path / folder} cannot be written (" in said and why in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "/a/b"), "/a/b cannot be read or written (Perm"),
        (FileNotFoundError(2, "No usable temporary directory"), "temporary file cannot be read or"),
        (BlockingIOError(11, "Resource temporarily unavailable"), None),
        (OSError("it is no regular file"), None),
    ],
)
def test_errors_of_files_and_others(
    error: OSError, said: str | None, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is no user's keeps its traceback."""

    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(commands, "run", fail)
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        if said is None:
            with pytest.raises(type(error)):
                main(["other"])
        else:
            assert main(["other"]) == 2 and said in capsys.readouterr().err
