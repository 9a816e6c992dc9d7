"""Tuned tables of the choice among backends: measured times by problem and combination.

Reading them imports no backend and touches no device. docs/bench.md documents the format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moekit.problem import MoEProblem
from moekit.selection import tuned
from moekit.selection.tuned.files import TableFiles, size_distance
from moekit.untrusted.arguments import FLAG, accept, instance, matching, optional, real, size

FORMAT = 1
_SIZE = size(1, 1 << 40)  # of experts, tokens ...
_TEXT = instance("a text", str)


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


_KEY = dict.fromkeys(("device", "arch", "scheme", "dtype"), _TEXT) | {
    "gated": FLAG,
    **dict.fromkeys(("experts", "top_k", "hidden", "inner", "ranks"), _SIZE),
}
_RECORD = {
    "us": optional(real(above=0.0)),
    "copied": optional(matching("a number of at least 0", lambda share: 0 <= share < math.inf)),
    **dict.fromkeys(("date", "made_with"), _TEXT),
}

# (dispatcher, experts) -> tokens -> record
Times = Mapping["tuple[str, str]", Mapping[int, Record]]
Table = Mapping[Key, Times]


def read(file: Path) -> Table:
    """Return the table in ``file``. Raises MoekitError, which names the first fault in it."""
    return _files(tuned.SHIPPED, "").read(file)


def known(arch: str) -> Table:
    """Return the user's tables and the ones that are shipped for an architecture as one.

    Files that cannot be used are skipped with a warning.
    """
    return _files(tuned.SHIPPED, arch).known()


def _files(shipped: Path, arch: str) -> TableFiles[Table, Table]:
    remedy = "measure again with `python -m moekit tune --select`"
    return TableFiles(shipped / tuned.slug(arch), parse, merge, remedy)


def parse(data: Any) -> Table:
    """Return the table that a file's JSON holds. Raises ValueError, TypeError or LookupError."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"this is not a tuned table of format {FORMAT}")
    table: dict[Key, dict[tuple[str, str], dict[int, Record]]] = {}
    for cell in data["cells"]:
        key = Key(**accept(_KEY, cell, ValueError))
        tokens = accept({"tokens": _SIZE}, cell, ValueError)["tokens"]
        for combination, values in cell["times"].items():
            dispatcher, experts = combination.split("+")
            record = Record(**values)
            accept(_RECORD, vars(record), ValueError)
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
