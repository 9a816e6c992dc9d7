"""The report of a run of experts backends and baselines, its summary and its plots."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moekit.errors import MoekitError

from . import report
from .limits import Ceilings
from .records import BACKEND, BASELINE, IN_MODE, ExpertsCell, ExpertsResult, ExpertsRun, SummaryRow
from .report import Table, distinct, fastest

BEST_BASELINE = "best baseline of each cell"
BEST_MOEKIT = "best of moekit in each cell"

Picker = Callable[[ExpertsCell], "ExpertsResult | None"]


# -- the summary ------------------------------------------------------------------------------


def summarized(run: ExpertsRun) -> ExpertsRun:
    """Return the run with its summary.

    For every scheme and implementation, over the cells where it is right, that has the geometric
    means and the worst cells of the roofline fraction and of the speed against the cell's best
    baseline. `BEST_MOEKIT` and `BEST_BASELINE` are the fastest of their kind in each cell.
    """
    rows = []
    for scheme in distinct(c.scheme for c in run.cells):
        cells = [c for c in run.cells if c.scheme == scheme]
        names = distinct(r.name for c in cells for r in c.results)
        pickers = {name: _fastest(name=name) for name in names}
        pickers |= {BEST_MOEKIT: _fastest(kind=BACKEND), BEST_BASELINE: _best_baseline}
        rows += [_summary_row(scheme, name, pick, cells) for name, pick in pickers.items()]
    return replace(run, summary=tuple(row for row in rows if row.cells))


def _fastest(**facts: str) -> Picker:
    """Return what picks a cell's fastest right result with these fields."""
    return lambda cell: fastest(r for r in cell.results if facts.items() <= vars(r).items())


_best_baseline = _fastest(kind=BASELINE)


def _summary_row(scheme: str, name: str, pick: Picker, cells: Sequence[ExpertsCell]) -> SummaryRow:
    picked = [(c, r) for c in cells if (r := pick(c)) is not None and r.us is not None]
    fractions = [(c, r.fraction) for c, r in picked if r.fraction is not None]
    speeds = [
        (c, best.us / r.us)
        for c, r in picked
        if r.us is not None and (best := _best_baseline(c)) is not None and best.us is not None
    ]
    fraction, speed = _mean_and_worst(fractions), _mean_and_worst(speeds)
    return SummaryRow(
        scheme=scheme,
        name=name,
        cells=len(picked),
        of_cells=len(cells),
        fraction_geomean=fraction[0],
        fraction_worst=fraction[1],
        fraction_worst_cell=fraction[2],
        speed_geomean=speed[0],
        speed_worst=speed[1],
        speed_worst_cell=speed[2],
    )


def _mean_and_worst(
    values: Sequence[tuple[ExpertsCell, float]],
) -> tuple[float | None, float | None, dict[str, Any] | None]:
    if not values:
        return None, None, None
    cell, worst = min(values, key=lambda item: item[1])
    mean = math.exp(sum(math.log(value) for _, value in values) / len(values))
    return mean, worst, {"shape": cell.shape, "routing": cell.routing, "tokens": cell.tokens}


# -- Markdown ---------------------------------------------------------------------------------


def markdown(run: ExpertsRun) -> str:
    """Return the whole report."""
    lines = report.head(run, "moekit bench", run.device.name)
    lines += [
        f"Medians of {run.settings.replays} turns, microseconds a call; roofline fraction in "
        "brackets. Times marked `e` are eager (no graph), in **bold** the fastest, and struck-out "
        f"ones gave wrong results. {_ceilings(run.ceilings)}"
    ]
    for key in distinct((c.shape, c.scheme, c.routing) for c in run.cells):
        group = [c for c in run.cells if (c.shape, c.scheme, c.routing) == key]
        lines += ["", _heading(group[0]), "", *_side_by_side(group), *_cost_of_mode(group)]
        lines += ["", *_details(group)]
    lines += report.not_measured(run.refused)
    lines += ["", "## All cells", "", *_summary(run.summary)]
    return "\n".join(lines) + "\n"


def _ceilings(ceilings: Ceilings | None) -> str:
    if ceilings is None:
        return "No ceilings are known for this device (--ceilings gives them), so no fractions."
    rates = ", ".join(f"{k} {v / 1e12:.4g} TFLOP/s" for k, v in ceilings.flops.items())
    return f"Ceilings: {rates}, read {ceilings.read / 1e12:.3g} TB/s."


def _heading(cell: ExpertsCell) -> str:
    experts = f"E {cell.num_experts}"
    if cell.ep > 1:
        experts += f" (those of one of {cell.ep} ranks)"
    return (
        f"## {cell.shape}, {cell.scheme}, {cell.routing}: {experts}, K {cell.top_k}, "
        f"H {cell.hidden_size}, I {cell.intermediate_size}, {cell.dtype}"
    )


def _side_by_side(cells: Sequence[ExpertsCell]) -> Table:
    names = distinct(r.name for c in cells for r in c.results)
    table = Table("T", "limit", *names)
    for cell in cells:
        best, by_name = fastest(cell.results), {r.name: r for r in cell.results}
        table.add(
            cell.tokens,
            report.us(cell.limit_us),
            *(report.time(by_name.get(n), best, after=_fraction(by_name.get(n))) for n in names),
        )
    return table


def _cost_of_mode(cells: Sequence[ExpertsCell]) -> list[str]:
    """Return a table of times in batch-invariant mode over the same backend's default times."""
    modes = distinct(r.name for c in cells for r in c.results if r.name.endswith(IN_MODE))
    if not modes:
        return []
    names = [name.removesuffix(IN_MODE) for name in modes]
    table = Table("T", *names)
    for cell in cells:
        us = {r.name: r.us for r in cell.results if r.right and r.us is not None}
        pairs = [(us.get(name), us.get(name + IN_MODE)) for name in names]
        table.add(
            cell.tokens,
            *(report.NONE if None in pair else f"{pair[1] / pair[0]:.2f}" for pair in pairs),  # type: ignore[operator]
        )
    return ["", "Time in batch-invariant mode, over the default's:", "", *table]


def _fraction(result: ExpertsResult | None) -> str:
    return "" if result is None or result.fraction is None else f" ({result.fraction:.2f})"


def _details(cells: Iterable[ExpertsCell]) -> Table:
    table = Table(
        "T", "implementation", "µs", "fastest–slowest", "fraction", "error", "eager µs", "host µs",
        "",
    )  # fmt: skip
    for cell in cells:
        for r in cell.results:
            table.add(
                cell.tokens, r.name, report.us(r.us), report.spread(r),
                report.number(r.fraction, ".3f"), report.number(r.error, ".1e"),
                report.us(r.eager_us), report.us(r.host_us),
                "; ".join(filter(None, (r.reason, r.note))),
            )  # fmt: skip
    return table


def _summary(rows: Iterable[SummaryRow]) -> Table:
    table = Table(
        "scheme", "implementation", "cells", "fraction: geometric mean", "worst",
        "speed against the best baseline: geometric mean", "worst",
    )  # fmt: skip

    def worst(value: float | None, cell: dict[str, Any] | None) -> str:
        where = f" ({cell['shape']} {cell['routing']} T={cell['tokens']})" if cell else ""
        return report.number(value, ".3f") + where

    for r in rows:
        table.add(
            r.scheme, r.name, f"{r.cells}/{r.of_cells}",
            report.number(r.fraction_geomean, ".3f"),
            worst(r.fraction_worst, r.fraction_worst_cell),
            report.number(r.speed_geomean, ".3f"), worst(r.speed_worst, r.speed_worst_cell),
        )  # fmt: skip
    return table


# -- plots ------------------------------------------------------------------------------------


def plot(run: ExpertsRun, folder: Path) -> list[Path]:
    """Write a PNG for each shape and scheme, with a panel for each routing.

    A panel shows the roofline fraction, or the time where no ceilings are known, against T.

    Raises:
        MoekitError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MoekitError(
            "plots need matplotlib: pip install 'moekit-bench[plot]', and render the recorded JSON "
            "with `python -m moekit bench --from FILE.json --plot DIR`"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for shape, scheme in distinct((c.shape, c.scheme) for c in run.cells):
        group = [c for c in run.cells if (c.shape, c.scheme) == (shape, scheme)]
        routings = distinct(c.routing for c in group)
        figure, panels = pyplot.subplots(
            1, len(routings), figsize=(6.5 * len(routings), 4.5), squeeze=False, sharey=True
        )
        for panel, routing in zip(panels[0], routings, strict=True):
            _panel(panel, [c for c in group if c.routing == routing])
            panel.set_title(f"{shape}, {scheme}, {routing}")
        figure.suptitle(run.device.name, fontsize=9)
        figure.tight_layout()
        file = folder / f"{shape}_{scheme}.png".replace(":", "x")
        figure.savefig(file, dpi=120)
        pyplot.close(figure)
        files.append(file)
    return files


def _panel(panel: Any, cells: Sequence[ExpertsCell]) -> None:
    value = "us" if all(c.limit_us is None for c in cells) else "fraction"
    kinds = {r.name: r.kind for c in cells for r in c.results}
    for name, kind in kinds.items():
        points = [
            (c.tokens, getattr(r, value))
            for c in cells
            if (r := _fastest(name=name)(c)) is not None and getattr(r, value) is not None
        ]
        if points:
            style = "o--" if kind == BASELINE else "o-"
            panel.plot(*zip(*sorted(points), strict=True), style, label=name, markersize=4)
    panel.set_xscale("log", base=2)
    tokens = sorted({c.tokens for c in cells})
    panel.set_xticks(tokens, [str(t) for t in tokens])
    panel.set_xlabel("tokens")
    if value == "fraction":
        panel.set_ylabel("roofline fraction (limit / time)")
        panel.set_ylim(0, 1.05)
    else:
        panel.set_ylabel("µs a call")
        panel.set_yscale("log")
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8)
