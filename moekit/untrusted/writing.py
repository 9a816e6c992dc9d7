"""Writing of files whole, with errors that say what to do."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moekit.errors import MoekitError

_PLACE = "name a file in a folder of yours"


def replace_file(file: Path, text: str, remedy: str = _PLACE) -> None:
    """Write ``file`` atomically: a reader sees either the old text or the new one.

    A device or a pipe, such as /dev/null, is written to instead. Folders are made. Raises
    MoekitError if the file cannot be written; ``remedy`` says what to do.
    """
    with _writing(file, remedy):
        if file.exists() and not file.is_file():
            # Opening a pipe that nobody reads raises an error, and does not wait.
            fd = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(fd, True)
            with open(fd, "w", encoding="utf-8") as stream:
                stream.write(text)
            return
        partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


def check_writable(file: Path, remedy: str = _PLACE) -> None:
    """Raise MoekitError now if `replace_file` would raise it later, after hours of measurement."""
    with _writing(file, remedy):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if file.is_file() or not file.exists():
            tempfile.TemporaryFile(dir=file.parent).close()


@contextmanager
def _writing(file: Path, remedy: str) -> Iterator[None]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise MoekitError(f"{file} cannot be written ({error.strerror}): {remedy}") from error
