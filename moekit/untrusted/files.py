"""Reading of foreign files in bounded time and memory, and writing of files whole.

Reading raises OSError or ValueError; callers turn these into moekit's errors, which name the file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moekit.errors import MoekitError
from moekit.untrusted.arguments import shown
from moekit.untrusted.folders import cache_folder as cache_folder
from moekit.untrusted.folders import home_folder as home_folder

if TYPE_CHECKING:
    from importlib.abc import Traversable

MAX_JSON = 1 << 24  # bytes; the largest config.json in use has fewer than a tenth
_MAX_VALUES = 4_000_000  # in one file; a header has about eight for each tensor


def open_regular(path: Path) -> int:
    """Return a file descriptor for reading. Raises OSError unless it is a regular file.

    Opening a FIFO would wait for its writer, and a device has no end.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("it is no regular file")
    return fd


def read_json(path: Path | Traversable, most: int = MAX_JSON) -> Any:
    """Return `parse_json` of a file of at most ``most`` bytes, which may be in a zip file."""
    with open(open_regular(path), "rb") if isinstance(path, Path) else path.open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most} bytes")
    return parse_json(data)


def parse_json(data: bytes) -> Any:
    """Parse UTF-8 JSON (RFC 8259) without repeated names or infinite numbers."""
    if sum(map(data.count, (b"[", b"{", b","))) > _MAX_VALUES:
        raise ValueError(f"it has more than {_MAX_VALUES} values")
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=_object,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{shown(twice)} is there twice")
    return made


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{shown(text)} is too large for a number")
    return value


# -- writing ---------------------------------------------------------------------------------

_PLACE = "name a file in a folder of yours"


def replace_file(file: Path, text: str, remedy: str = _PLACE) -> None:
    """Write ``file`` atomically: a reader sees either the old text or the new one.

    A device or a pipe, such as /dev/null, is written to instead. Folders are made.

    Raises:
        MoekitError: The file cannot be written; ``remedy`` says what to do.
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
