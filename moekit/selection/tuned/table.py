"""Tuned tables of the choice among backends: measured times by problem and combination.

Reading them imports no backend and touches no device. docs/bench.md documents the format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from moekit.problem import MoEProblem
from moekit.selection.tuned.files import TableFiles, size_distance
from moekit.selection.tuned.files import user_path as user_path

FORMAT = 1
_MOST = 1 << 40  # of experts, tokens ...
SHIPPED = resources.files(__package__) / "shipped"


@dataclass(frozen=True)
class Key:
    """Everything a time depends on, apart from backends and tokens.

    device, arch: names; experts, top_k, hidden, inner: sizes on one rank; gated, scheme, dtype: the
    arithmetic; ranks: how many ranks exchange tokens (1: none).
    """

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
        """Return how far the sizes are apart; infinite if anything else differs.

        A device without a name (``sm90``) equals any device of its architecture.
        """
        same = ("arch", "gated", "scheme", "dtype", "ranks")
        if self.device not in ("", other.device) or any(
            getattr(self, name) != getattr(other, name) for name in same
        ):
            return math.inf
        return size_distance(self.sizes, other.sizes)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.experts, self.top_k, self.hidden, self.inner

    def __str__(self) -> str:
        ranks = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        return f"E {self.experts} K {self.top_k} H {self.hidden} I {self.inner}{ranks}"


@dataclass(frozen=True)
class Record:
    """One measurement.

    us: microseconds; None if the call failed or its result was wrong.
    copied: bytes of packed weights that are no views of the canonical ones, as a share of those;
        None if unknown.
    date: ISO 8601. made_with: the versions that the time depends on.
    """

    us: float | None
    copied: float | None = None
    date: str = ""
    made_with: str = ""


# (dispatcher, experts) -> tokens -> record
Times = Mapping["tuple[str, str]", Mapping[int, Record]]
Table = Mapping[Key, Times]


def read(file: Path) -> Table:
    """Return the table in ``file``. Raises MoekitError, which names the first fault in it."""
    return _tables().read(file)


def known() -> Table:
    """Return the user's and the shipped tables as one; empty if MOEKIT_TUNED is empty.

    Files that cannot be used are skipped with a warning.
    """
    return _tables().known()


def _tables() -> TableFiles[Table, Table]:
    remedy = "measure again with `python -m moekit tune --select`"
    return TableFiles(SHIPPED, parse, merge, remedy, optional=True)


def parse(data: Any) -> Table:
    """Return the table that a file's JSON holds. Raises ValueError, TypeError or LookupError."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"this is no tuned table of format {FORMAT}")
    table: dict[Key, dict[tuple[str, str], dict[int, Record]]] = {}
    for cell in data["cells"]:
        key, tokens = Key(**{f.name: cell[f.name] for f in fields(Key)}), cell["tokens"]
        _check(key, tokens)
        for combination, values in cell["times"].items():
            dispatcher, experts = combination.split("+")
            record = Record(**values)
            _check_record(record)
            times = table.setdefault(key, {}).setdefault((dispatcher, experts), {})
            times[tokens] = record
    return table


def encode(table: Table) -> str:
    """Return JSON with one cell a line: all combinations at one number of tokens."""
    cells = []
    for key, times in sorted(table.items(), key=lambda item: repr(item[0])):
        for tokens in sorted({t for records in times.values() for t in records}):
            row = {
                "+".join(combination): asdict(records[tokens])
                for combination, records in sorted(times.items())
                if tokens in records
            }
            cells.append(json.dumps({**asdict(key), "tokens": tokens, "times": row}))
    return f'{{"format": {FORMAT}, "cells": [\n' + ",\n".join(cells) + "\n]}\n"


def merge(tables: Iterable[Table]) -> Table:
    """Merge tables. Of two records of a cell the later table's counts."""
    merged: dict[Key, dict[tuple[str, str], dict[int, Record]]] = {}
    for table in tables:
        for key, times in table.items():
            for combination, records in times.items():
                merged.setdefault(key, {}).setdefault(combination, {}).update(records)
    return merged


def _check(key: Key, tokens: object) -> None:
    sizes = (key.experts, key.top_k, key.hidden, key.inner, key.ranks, tokens)
    if any(type(n) is not int or not 1 <= n <= _MOST for n in sizes) or type(key.gated) is not bool:
        raise ValueError(f"{key!r} with {tokens!r} tokens: sizes must be from 1 to {_MOST}")
    words = (key.device, key.arch, key.scheme, key.dtype)
    if any(not isinstance(word, str) for word in words):
        raise ValueError(f"{key!r}: device, arch, scheme and dtype must be strings")


def _check_record(record: Record) -> None:
    for what, least in (("us", 1e-3), ("copied", 0.0)):
        value = getattr(record, what)
        if value is None:
            continue
        if type(value) not in (int, float) or not least <= value < math.inf:
            raise ValueError(f"{what} must be at least {least:g} and finite (got {value!r})")
    if not (isinstance(record.date, str) and isinstance(record.made_with, str)):
        raise ValueError(f"{record!r}: date and made_with must be strings")
