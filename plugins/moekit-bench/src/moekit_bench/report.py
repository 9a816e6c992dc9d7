"""Markdown: the one table writer, and the parts that the reports of all runs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from .records import ExpertsResult, Measurement, Refusal, Run, shown_error

C = TypeVar("C")
V = TypeVar("V")
M = TypeVar("M", bound=Measurement)
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

    def __bool__(self) -> bool:
        return len(self._lines) > 2


def us(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def spread(result: Measurement) -> str:
    return NONE if result.spread_us is None else "–".join(map(us, result.spread_us))


def error(result: Measurement) -> str:
    return NONE if result.us is None else shown_error(result.error)


def fastest(results: Iterable[M]) -> M | None:
    right = [r for r in results if r.right and r.us is not None]
    return min(right, key=lambda r: r.us or 0.0, default=None)


def time(result: Measurement | None, best: Measurement | None) -> str:
    """Show a time: eager ones with `e`, the best one in bold and wrong ones struck out; and the
    roofline fraction, if it is known."""
    if result is None or result.us is None:
        return NONE
    text = us(result.us) + ("e" if result.eager else "")
    if not result.right:
        return f"~~{text}~~"
    text = f"**{text}**" if result is best else text
    fraction = result.fraction if isinstance(result, ExpertsResult) else None
    return text if fraction is None else f"{text} ({fraction:.2f})"


def side_by_side(cells: Sequence[Any], **columns: Callable[[Any], object]) -> Table:
    """Return the times of all names by T, after columns that show something of the cell."""
    names = distinct(r.name for c in cells for r in c.results)
    table = Table("T", *columns, *names)
    for cell in cells:
        best, by_name = fastest(cell.results), {r.name: r for r in cell.results}
        shown = (show(cell) for show in columns.values())
        table.add(cell.tokens, *shown, *(time(by_name.get(name), best) for name in names))
    return table


def distinct(values: Iterable[C]) -> list[C]:
    return list(dict.fromkeys(values))


def grouped(values: Iterable[V], key: Callable[[V], C]) -> dict[C, list[V]]:
    """Return the values by key, in the order in which they come."""
    groups: dict[C, list[V]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def head(run: Run, title: str, subject: str) -> list[str]:
    """Return the lines that say what was run, where, and with what."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return [f"# {title}, {run.date}", "", f"    {run.command}", "", f"{subject}; {versions}", ""]


def not_measured(refused: Sequence[Refusal]) -> list[str]:
    """Return a section on what was not measured, why, and in which cells."""
    if not refused:
        return []
    lines = ["", "## Not measured", ""]
    for (name, reason), cells in grouped(refused, lambda r: (r.name, r.reason)).items():
        lines.append(f"- {name}: {reason} ({', '.join(distinct(r.where for r in cells))})")
    return lines
