"""Files of tuned tables: where they are, how they are read, and which measured sizes are near.

moekit's own tables choose among backends; a plugin's may choose its tiles. Both are JSON files,
one for each device (`device_file`), in a folder that the package ships and in the user's folder,
whose tables count first. The user's folder is the one that MOEKIT_TUNED names, or else
``moekit/tuned`` in the user's cache; a plugin's tables lie in a subfolder of it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from moekit.errors import MoekitError
from moekit.selection.tuned import VARIABLE, slug, user_path
from moekit.untrusted.files import read_json

logger = logging.getLogger("moekit")

T = TypeVar("T")
M = TypeVar("M")

# The nearest sizes count up to this `size_distance`. 1: one size is twice as large.
REACH = 1.0


def device_file(device: str) -> str:
    """Return the name of a device's table: ``nvidia-h200.json`` for ``NVIDIA H200``."""
    return f"{slug(device)}.json"


def size_distance(sizes: Iterable[float], others: Iterable[float]) -> float:
    """Return how far sizes are apart.

    It is the root of the sum of the squares of the log2 of their ratios.
    """
    return math.hypot(*(math.log2(a / b) for a, b in zip(sizes, others, strict=True)))


def nearest(keys: Iterable[T], distance_to: Callable[[T], float]) -> tuple[T, float] | None:
    """Return (key, distance) of the nearest key within `REACH`, or None; of equals the first."""
    found = [(key, far) for key in keys if (far := distance_to(key)) <= REACH]
    return min(found, key=lambda item: item[1], default=None)


@dataclass(frozen=True)
class TableFiles(Generic[T, M]):
    """The tables of one kind.

    shipped: the package's folder of tables.
    parse: makes a table of a file's JSON; raises ValueError, TypeError, LookupError or
        AttributeError for JSON that is not a table.
    merge: makes one table of several. Later ones count more: the user's come after the shipped
        ones, and a folder's tables in the order of their names.
    remedy: how to make a table, as in ``measure again with `...` ``; for error messages.
    owner: the subfolder of the user's tables; empty: the folder itself, which may be a file.
    """

    shipped: Path
    parse: Callable[[Any], T]
    merge: Callable[[Sequence[T]], M]
    remedy: str
    owner: str = ""

    def user_folder(self) -> Path:
        """Return where the user's tables are, and a tuner writes."""
        return user_path() / self.owner if self.owner else user_path()

    def known(self, device: str = "") -> M:
        """Return all tables merged. Files that cannot be used are skipped with a warning.

        Files are read again only when they change. The user's do not count if MOEKIT_TUNED is
        empty. device: its file alone; default: all files.
        """
        named = os.environ.get(VARIABLE)
        if named and not os.path.exists(named):
            _warn_missing(named)
        pattern = device_file(device) if device else "[!.]*.json"
        users = () if named == "" else _files(self.user_folder(), pattern)
        merged: M = _merged(self, (*_files(self.shipped, pattern), *users))
        return merged

    def read(self, file: Path) -> T:
        """Return the table in ``file``. Raises MoekitError, which names the first fault in it."""
        try:
            return self.parse(read_json(file))
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise MoekitError(
                f"the tuned table {file} cannot be used: {type(error).__name__}: {error}; correct "
                f"or delete it, and {self.remedy}"
            ) from error


@lru_cache(maxsize=64)
def _warn_missing(named: str) -> None:
    """Warn, once for each value, that MOEKIT_TUNED names nothing that can be read."""
    logger.warning(
        "%s=%s: there is no such file or folder, so only shipped tables count; expected a folder "
        "of tuned tables, or one table's file: correct the path, unset the variable, or let "
        "`python -m moekit tune` make the tables",
        VARIABLE, named,
    )  # fmt: skip


# A file and its identity: device, inode, size and time of change.
_Signature = tuple[Path, int, int, int, int]


def _files(path: Path, pattern: str) -> tuple[_Signature, ...]:
    try:
        files = sorted(path.glob(pattern)) if path.is_dir() else [path]
        stats = [(file, file.stat()) for file in files if file.exists()]
    except OSError as error:
        logger.warning("tuned tables in %s cannot be read: %s", path, error)
        return ()
    return tuple((f, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for f, s in stats)


@lru_cache(maxsize=64)
def _merged(kind: TableFiles[Any, Any], files: tuple[_Signature, ...]) -> Any:
    tables = [_read_or_warn(kind, *file) for file in files]
    return kind.merge([table for table in tables if table is not None])


@lru_cache(maxsize=256)
def _read_or_warn(kind: TableFiles[Any, Any], file: Path, *signature: int) -> Any:
    try:
        return kind.read(file)
    except MoekitError as error:
        logger.warning("%s", error)
        return None
