"""The report of a run in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from .records import BASELINE, Cell, Refusal, Result, Run, parted, shown_error
from .shapes import shape

C = TypeVar("C")
V = TypeVar("V")
NONE = "–"


class Table:
    """A Markdown table that is written row by row."""

    def __init__(self, *columns: str) -> None:
        self._lines = [self._row(columns), "|" + "---|" * len(columns)]

    def add(self, *cells: object) -> str:
        self._lines.append(self._row(cells))
        return self._lines[-1]

    @staticmethod
    def _row(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)


def markdown(run: Run) -> str:
    """Return the report of a run."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    several = run.ranks > 1
    where = f"{run.ranks} × {run.device['name']}" if several else run.device["name"]
    lines = [f"# moekit bench, {run.mode}, {run.date}", "", f"    {run.command}", ""]
    lines += [
        f"{where}; {versions}",
        "",
        f"Microseconds {_SUBJECTS[run.mode]}, medians of {run.settings.replays} turns"
        f"{' and of the ranks' * several}. Times marked `e` are eager (no graph), in **bold** the "
        f"fastest, and struck-out ones gave wrong results.{_ceilings(run)}",
    ]
    for cells in _grouped(run.cells, lambda c: (c.shape, c.scheme, c.routing)).values():
        lines += ["", f"## {_heading(cells[0], run)}", ""]
        lines += [*_times(cells, run.capacity), *_costs_of_modes(cells)]
        lines += ["", *_details(cells)]
    lines += [*_against_baselines(run.cells), *_not_measured(run.refused)]
    return "\n".join(lines) + "\n"


# -- parts of a report ------------------------------------------------------------------------


_SUBJECTS = {
    "experts": "of a call",
    "train": "of forward and backward",
    "dispatch": "of dispatch and combine, for T tokens on each rank",
    "layers": "of prepare, experts and finalize, for T tokens on each rank",
}


def _ceilings(run: Run) -> str:
    if run.mode not in ("experts", "train"):
        return ""
    if run.ceilings is None:
        return " No ceilings are known for this device, so no fractions."
    rates = ", ".join(f"{k} {v / 1e12:.4g} TFLOP/s" for k, v in run.ceilings.flops.items())
    read = f"{run.ceilings.read / 1e12:.3g} TB/s"
    return f" Roofline fractions in brackets are of {rates}, and {read} of reads."


def _heading(cell: Cell, run: Run) -> str:
    text = f"{cell.shape}, {cell.scheme}, {cell.routing}: {run.settings.dtype}"
    sizes, ep = shape(cell.shape), run.settings.ep
    of_ranks = f" (those of one of {ep} ranks)" if ep > 1 else ""
    return (
        f"{text}, E {sizes.num_experts}{of_ranks}, K {sizes.top_k}, H {sizes.hidden_size}, "
        f"I {sizes.intermediate_size}"
    )


def _times(cells: Sequence[Cell], capacity: int | None) -> Table:
    """Return a row of times for each name, by T."""
    corner = "" if capacity is None else f"capacity {capacity}"
    table = Table(corner, *(f"T={cell.tokens}" for cell in cells))
    if any(cell.limit_us is not None for cell in cells):
        table.add("limit", *(_us(cell.limit_us) for cell in cells))
    by_name = [{r.name: r for r in cell.results} for cell in cells]
    best = [fastest(cell.results) for cell in cells]
    for name in _distinct(name for found in by_name for name in found):
        pairs = zip(by_name, best, strict=True)
        table.add(name, *(_time(found.get(name), fast) for found, fast in pairs))
    return table


def _costs_of_modes(cells: Sequence[Cell]) -> list[str]:
    """Return a table of times in modes over the same backend's times in none."""
    modes = _distinct(r.name for c in cells for r in c.results if parted(r.name)[1])
    if not modes:
        return []
    table = Table("", *(f"T={cell.tokens}" for cell in cells))
    times = [{r.name: r.us for r in cell.results if r.right} for cell in cells]
    for mode in modes:
        pairs = ((us.get(mode), us.get(parted(mode)[0])) for us in times)
        table.add(mode, *(f"{a / b:.2f}" if a and b else NONE for a, b in pairs))
    return ["", "Time over that without what is in brackets:", "", *table]


# Those that no result has are left out.
_COLUMNS: Mapping[str, Callable[[Result], str]] = {
    "µs": lambda r: _us(r.us),
    "fastest–slowest": lambda r: "–".join(map(_us, r.spread_us)) if r.spread_us else NONE,
    "eager": lambda r: _us(r.eager_us),
    "host": lambda r: _us(r.host_us),
    "error": lambda r: NONE if r.us is None else shown_error(r.error),
    "fraction": lambda r: _number(r.fraction, ".3f"),
    "dispatch": lambda r: _us(r.dispatch_us),
    "combine": lambda r: _us(r.combine_us),
    "SMs": lambda r: _number(r.num_sms, "d"),
    "buffers": lambda r: _bytes(r.buffer_bytes),
    "saved": lambda r: _bytes(r.saved_bytes),
    "peak": lambda r: _bytes(r.peak_bytes),
    "why": lambda r: r.reason or r.note,
}


def _details(cells: Sequence[Cell]) -> Table:
    results = [r for cell in cells for r in cell.results]
    columns = {n: s for n, s in _COLUMNS.items() if any(s(r) != NONE for r in results)}
    table = Table("T", "", *columns)
    for cell in cells:
        for r in cell.results:
            table.add(cell.tokens, r.name, *(show(r) for show in columns.values()))
    return table


def _bytes(value: int | None) -> str:
    return NONE if value is None else f"{value / 1e6:.0f} MB"


def _not_measured(refused: Sequence[Refusal]) -> list[str]:
    """Return a section on what was not measured, why, and in which cells."""
    lines = ["", "## Not measured", ""] if refused else []
    for (name, reason), cells in _grouped(refused, lambda r: (r.name, r.reason)).items():
        lines.append(f"- {name}: {reason} ({', '.join(_distinct(r.where for r in cells))})")
    return lines


def _against_baselines(cells: Sequence[Cell]) -> list[str]:
    """Return the speed of moekit's fastest backend against each baseline, over all cells."""
    table, found = Table("scheme", "baseline", "cells", "geometric mean", "least"), False
    for scheme, members in _grouped(cells, lambda c: c.scheme).items():
        rivals = (r.name for c in members for r in c.results if r.kind == BASELINE)
        for name in _distinct(rivals):
            speeds = [s for s in (_speed(cell, name) for cell in members) if s is not None]
            if speeds:
                found, mean = True, statistics.geometric_mean(speeds)
                table.add(scheme, name, len(speeds), f"{mean:.3f}", f"{min(speeds):.3f}")
    title = "Time of a baseline over the time of moekit's fastest backend, where both are right:"
    return ["", "## Against baselines", "", title, "", *table] if found else []


def _speed(cell: Cell, baseline: str) -> float | None:
    mode = parted(baseline)[1]
    own = fastest(r for r in cell.results if r.kind != BASELINE and parted(r.name)[1] == mode)
    other = fastest(r for r in cell.results if r.name == baseline)
    if own is None or other is None or not own.us or not other.us:
        return None
    return other.us / own.us


# -- cells of a table -------------------------------------------------------------------------


def fastest(results: Iterable[Result]) -> Result | None:
    right = [r for r in results if r.right and r.us is not None]
    return min(right, key=lambda r: r.us or 0.0, default=None)


def _time(result: Result | None, best: Result | None) -> str:
    """Show a time: eager ones with `e`, the best one in bold and wrong ones struck out; and the
    roofline fraction, if it is known."""
    if result is None or result.us is None:
        return NONE
    text = _us(result.us) + ("e" if result.eager else "")
    if not result.right:
        return f"~~{text}~~"
    text = f"**{text}**" if result is best else text
    return text if result.fraction is None else f"{text} ({result.fraction:.2f})"


def _us(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _distinct(values: Iterable[C]) -> list[C]:
    return list(dict.fromkeys(values))


def _grouped(values: Iterable[V], key: Callable[[V], C]) -> dict[C, list[V]]:
    """Return the values by key, in the order in which they come."""
    groups: dict[C, list[V]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups
