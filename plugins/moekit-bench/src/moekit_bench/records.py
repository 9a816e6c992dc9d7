"""Records of a run, which docs/bench.md documents as JSON.

A `Run` has cells, and a cell has a result for each implementation, dispatcher or combination.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moekit.plugin import replace_file

FORMAT = 1
BACKEND, BASELINE = "moekit", "baseline"
INVARIANT, ADAPTERS = "batch-invariant", "adapters"  # modes


def now() -> str:
    """Return the time in UTC, as ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def parted(name: str) -> tuple[str, str]:
    """Return an implementation's name without its mode, and the mode, as "adapters 8:32"."""
    base, _, mode = name.removesuffix(")").partition(" (")
    return base, mode


@dataclass(frozen=True, kw_only=True)
class Result:
    """The time of an implementation, dispatcher or combination, and whether its output is right.
    docs/bench.md describes the fields; None is unknown, or does not apply."""

    name: str = ""
    kind: str = BACKEND
    us: float | None = None
    graph_us: float | None = None
    eager_us: float | None = None
    host_us: float | None = None
    spread_us: tuple[float, float] | None = None
    error: float | None = None
    right: bool = False
    reason: str = ""
    note: str = ""
    fraction: float | None = None
    copied: float | None = None
    dispatcher: str | None = None
    experts: str | None = None
    dispatch_us: float | None = None
    combine_us: float | None = None
    num_sms: int | None = None
    buffer_bytes: int | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None

    def judged(self, error: float, bound: float, **more: Any) -> Result:
        """Return the record with the output's relative error, and further fields."""
        finite, right = error if math.isfinite(error) else None, error <= bound
        reason = "" if right else f"wrong: error {shown_error(finite)}"
        return replace(self, error=finite, right=right, reason=reason, **more)

    @property
    def eager(self) -> bool:
        """Return whether the time that counts is an eager one on a device that has graphs."""
        return self.graph_us is None and (self.host_us is not None or bool(self.note))

    def __str__(self) -> str:
        if self.us is None:
            return f"{self.name} failed ({self.reason})"
        reason = f", {self.reason}" if self.reason else ""
        fraction = "" if self.fraction is None else f" {self.fraction:.2f}"
        return f"{self.name} {self.us:.0f} us{reason}{fraction}"


def shown_error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def _widest(ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


_MERGED: dict[str, Any] = {
    **dict.fromkeys(("us", "graph_us", "eager_us", "host_us"), statistics.median),
    **dict.fromkeys(("dispatch_us", "combine_us"), statistics.median),
    **dict.fromkeys(("error", "buffer_bytes"), max),
    "spread_us": _widest,
}


def merge(results: Sequence[Result]) -> Result:
    """Make one record of all ranks' records; a field that a rank lacks becomes None."""
    reason = next((r.reason for r in results if r.reason), "")
    changes: dict[str, Any] = {"reason": reason, "right": all(r.right for r in results)}
    for name, reduce in _MERGED.items():
        values = [getattr(result, name) for result in results]
        changes[name] = None if None in values else reduce(values)
    return replace(results[0], **changes)


def copied_share(given: Mapping[str, Any], packed: Any) -> float:
    """Return the bytes of packed tensors that are not views of the canonical ones in ``given``, as
    a share of these."""
    known = {t.untyped_storage().data_ptr() for t in given.values()}
    parts = (*packed.experts.values(), *packed.shared.values())
    own = sum(t.nbytes for t in parts if t.untyped_storage().data_ptr() not in known)
    return round(float(own / sum(t.nbytes for t in given.values())), 4)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A shape, scheme, routing and number of tokens, and the results for them."""

    shape: str
    scheme: str
    routing: str
    tokens: int
    inputs: int | None = None
    limit_us: float | None = None
    results: tuple[Result, ...] = ()

    def __str__(self) -> str:
        return f"{self.shape} {self.scheme} {self.routing} T={self.tokens}"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Something that was not measured, and why."""

    name: str
    reason: str
    shape: str
    scheme: str
    tokens: int | None = None

    @property
    def where(self) -> str:
        return f"{self.shape} {self.scheme}" + ("" if self.tokens is None else f" T={self.tokens}")


@dataclass(frozen=True)
class Ceilings:
    """The rates that a device was measured to reach.

    flops: FLOP/s by arithmetic (bf16, fp8, ...). read: memory read bandwidth in bytes/s.
    """

    flops: dict[str, float]
    read: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options with which a run measures. ep: ranks whose first one has the experts."""

    dtype: str = "bfloat16"
    inputs: int
    replays: int
    seed: int = 0
    ep: int = 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of `bench`."""

    mode: str
    format: int = FORMAT
    command: str = ""
    date: str = field(default_factory=now)
    versions: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, Any]
    ranks: int = 1
    capacity: int | None = None
    settings: Settings
    ceilings: Ceilings | None = None
    refused: tuple[Refusal, ...] = ()
    cells: tuple[Cell, ...] = ()

    def adding(self, cell: Cell) -> Run:
        """Return the run with a cell more, or with more results of a cell that it has."""
        for index, has in enumerate(self.cells):
            if str(has) == str(cell):
                both = replace(has, results=has.results + cell.results)
                return replace(self, cells=(*self.cells[:index], both, *self.cells[index + 1 :]))
        return replace(self, cells=(*self.cells, cell))

    def write(self, file: Path) -> None:
        """Write the run as JSON, without the fields that are None."""
        data = asdict(self, dict_factory=lambda items: {k: v for k, v in items if v is not None})
        replace_file(file, json.dumps(data, indent=1, allow_nan=False) + "\n")
