"""Reading of foreign files in bounded time and memory.

Reading raises OSError or ValueError; callers turn these into moekit's errors, which name the file.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from moekit.untrusted.arguments import shown

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


def read_json(path: Path, most: int = MAX_JSON) -> Any:
    """Return `parse_json` of a file of at most ``most`` bytes."""
    with open(open_regular(path), "rb") as stream:
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
