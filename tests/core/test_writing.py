"""Files that moekit and its plugins write whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from moekit.errors import MoekitError
from moekit.plugin import check_writable, replace_file
from moekit.untrusted.folders import cache_folder


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    """So is /dev/null, which a run by root would turn into a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe)
    replace_file(pipe, "µs")
    assert os.read(reader, 10).decode() == "µs" and pipe.is_fifo()
    os.close(reader)


def test_a_pipe_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    pipe, said = tmp_path / "pipe", []
    os.mkfifo(pipe)

    def write() -> None:
        with pytest.raises(MoekitError) as caught:
            replace_file(pipe, "x")
        said.append(str(caught.value))

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(60)
    assert said and said[0].startswith(f"{pipe} cannot be written (No such device or address)")


@pytest.mark.parametrize("stated", ["", "relative", "./here"])
def test_a_relative_cache_folder_is_ignored(monkeypatch, stated: str) -> None:
    """The XDG specification calls it invalid."""
    monkeypatch.setenv("XDG_CACHE_HOME", stated)
    assert cache_folder() == Path.home() / ".cache"
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c")


@pytest.mark.parametrize(
    ("name", "why"), [("folder", "Is a directory"), ("file/below", "File exists")]
)
def test_a_file_that_cannot_be_written(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for write in (check_writable, lambda file: replace_file(file, "x")):
        with pytest.raises(MoekitError) as caught:
            write(tmp_path / name)
        said = str(caught.value)
        assert said.startswith(f"{tmp_path / name} cannot be written ({why}): name a file in")
    with pytest.raises(MoekitError, match=": try --out$"):
        check_writable(tmp_path / name, "try --out")
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "file", tmp_path / "folder"]


def test_threads_that_write_the_same_file(tmp_path: Path) -> None:
    """Each text is whole, and nothing else stays in the folder."""
    texts, file, read = [letter * 100_000 for letter in "abcd"], tmp_path / "new" / "x.json", set()
    replace_file(file, texts[0])
    writers = [
        threading.Thread(target=lambda text=text: [replace_file(file, text) for _ in range(20)])
        for text in texts
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        read.add(file.read_text())
    assert read | {file.read_text()} <= set(texts) and os.listdir(file.parent) == ["x.json"]
