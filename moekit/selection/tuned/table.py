"""Tuned tables: measured times by problem and backends, and the files that keep them.

Data alone: reading them imports no backend and touches no device. docs/bench.md has the format.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

from moekit.errors import MoekitError
from moekit.problem import MoEProblem
from moekit.untrusted.files import read_json

logger = logging.getLogger("moekit")

FORMAT = 1
VARIABLE = "MOEKIT_TUNED"
_MOST = 1 << 40  # of experts, tokens ...
SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class Key:
    """What a time depends on, besides backends and tokens: device and architecture, sizes on one
    rank, arithmetic, and how many ranks exchange tokens (1: none)."""

    device: str
    arch: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    gated: bool
    scheme: str
    dtype: str
    ranks: int = 1

    @classmethod
    def of(cls, problem: MoEProblem) -> Key:
        parallel = problem.parallel
        return cls(
            device=problem.device.name,
            arch=str(problem.device),
            # Where ranks hold one expert more or less, all of them must choose alike.
            experts=-(-problem.num_physical_experts // parallel.ep_size),
            top_k=problem.top_k,
            hidden=problem.hidden_size,
            inner=problem.local_intermediate_size,
            gated=problem.activation.gated,
            scheme=problem.quant.name,
            dtype=problem.dtype_name,
            ranks=parallel.ep_size if parallel.moves_tokens else 1,
        )

    def distance(self, other: Key) -> float:
        """In log2 of the sizes; infinite where something else differs. A device without a name
        (``sm90``) is any of its architecture."""
        same = ("arch", "gated", "scheme", "dtype", "ranks")
        if self.device not in ("", other.device) or any(
            getattr(self, name) != getattr(other, name) for name in same
        ):
            return math.inf
        sizes = ("experts", "top_k", "hidden", "inner")
        return math.hypot(*(math.log2(getattr(self, n) / getattr(other, n)) for n in sizes))

    def __str__(self) -> str:
        ranks = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        return f"E {self.experts} K {self.top_k} H {self.hidden} I {self.inner}{ranks}"


@dataclass(frozen=True)
class Record:
    """One measurement. us: microseconds, None if it failed or was wrong. copied: bytes of packed
    weights that are no views of the canonical ones, as a share of those; None if unknown. date:
    ISO 8601; made_with: what the time depends on, with versions."""

    us: float | None
    copied: float | None = None
    date: str = ""
    made_with: str = ""


# (dispatcher, experts) -> tokens -> record
Times = Mapping["tuple[str, str]", Mapping[int, Record]]
Table = Mapping[Key, Times]


def read(file: Path) -> Table:
    """The table in ``file``; MoekitError naming the first thing in it that makes no sense."""
    try:
        data = read_json(file)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"no tuned table of format {FORMAT}")
        table: dict[Key, dict[tuple[str, str], dict[int, Record]]] = {}
        for cell in data["cells"]:
            key, tokens = Key(**{f.name: cell[f.name] for f in fields(Key)}), cell["tokens"]
            _check(key, tokens)
            for pair, values in cell["times"].items():
                dispatcher, experts = pair.split("+")
                record = Record(**values)
                _check_record(record)
                times = table.setdefault(key, {}).setdefault((dispatcher, experts), {})
                times[tokens] = _newer(times.get(tokens), record)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise MoekitError(
            f"the tuned table {file} cannot be used: {what}; correct or delete it, and measure "
            "again with `python -m moekit tune --select`"
        ) from error
    return table


def encode(table: Table) -> str:
    """JSON with one cell, all backends at one number of tokens, a line."""
    cells = []
    for key, times in sorted(table.items(), key=lambda item: repr(item[0])):
        for tokens in sorted({t for records in times.values() for t in records}):
            row = {
                "+".join(pair): asdict(records[tokens])
                for pair, records in sorted(times.items())
                if tokens in records
            }
            cells.append(json.dumps({**asdict(key), "tokens": tokens, "times": row}))
    return f'{{"format": {FORMAT}, "cells": [\n' + ",\n".join(cells) + "\n]}\n"


def merge(tables: Iterable[Table], *, newest: bool = True) -> Table:
    """One table of all. Of two records the newer counts; with newest=False the later table's."""
    merged: dict[Key, dict[tuple[str, str], dict[int, Record]]] = {}
    for table in tables:
        for key, times in table.items():
            for pair, records in times.items():
                mine = merged.setdefault(key, {}).setdefault(pair, {})
                for tokens, record in records.items():
                    mine[tokens] = _newer(mine.get(tokens), record) if newest else record
    return merged


def known(environ: Mapping[str, str] = os.environ) -> Table:
    """All tables together: the shipped ones, and before them the user's. None, if MOEKIT_TUNED is
    empty. What cannot be read is left out, with a warning."""
    if environ.get(VARIABLE) == "":
        return {}
    return _merged(_files(SHIPPED), _files(user_path(environ)))


def user_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file or folder of the user's tables: MOEKIT_TUNED, else a folder in the user's cache."""
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "moekit" / "tuned"


def _newer(old: Record | None, new: Record) -> Record:
    return old if old is not None and old.date > new.date else new


def _check(key: Key, tokens: object) -> None:
    sizes = (key.experts, key.top_k, key.hidden, key.inner, key.ranks, tokens)
    if any(type(n) is not int or not 1 <= n <= _MOST for n in sizes) or type(key.gated) is not bool:
        raise ValueError(f"{key!r} with {tokens!r} tokens: want whole numbers from 1 to {_MOST}")
    words = (key.device, key.arch, key.scheme, key.dtype)
    if any(not isinstance(word, str) for word in words):
        raise ValueError(f"{key!r}: want names")


def _check_record(record: Record) -> None:
    for what, least in (("us", 1e-3), ("copied", 0.0)):
        value = getattr(record, what)
        if value is None:
            continue
        if type(value) not in (int, float) or not least <= value < math.inf:
            raise ValueError(f"{what} is {value!r}: want a finite number of at least {least:g}")
    if not (isinstance(record.date, str) and isinstance(record.made_with, str)):
        raise ValueError(f"{record!r}: want texts for date and made_with")


# A file, and what tells whether it changed.
Signature = tuple[Path, int, int]


def _files(path: Path) -> tuple[Signature, ...]:
    try:
        files = sorted(path.glob("[!.]*.json")) if path.is_dir() else [path]
        stats = [(file, file.stat()) for file in files if file.exists()]
    except OSError as error:
        logger.warning("tuned tables in %s cannot be read: %s", path, error)
        return ()
    return tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in stats)


@lru_cache(maxsize=8)
def _merged(*tiers: tuple[Signature, ...]) -> Table:
    """Of each tier the newest records; a later tier's count before an earlier one's."""
    return merge((merge(_read_or_warn(*s) for s in tier) for tier in tiers), newest=False)


@lru_cache(maxsize=64)
def _read_or_warn(file: Path, *signature: int) -> Table:
    """What cannot be read is as if it were not there: choice goes on, by priority if need be."""
    try:
        return read(file)
    except MoekitError as error:
        logger.warning("%s", error)
        return {}
