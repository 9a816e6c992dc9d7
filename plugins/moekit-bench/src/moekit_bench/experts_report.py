"""The report of a run of experts backends and baselines, its summary and its plots."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moekit.errors import MoekitError

from . import report
from .limits import Ceilings
from .records import BACKEND, BASELINE, IN_MODE, ExpertsCell, ExpertsResult, ExpertsRun, SummaryRow
from .report import Table, distinct, fastest, grouped

BEST_BASELINE = "best baseline of each cell"
BEST_MOEKIT = "best of moekit in each cell"


# -- the summary ------------------------------------------------------------------------------


def summarized(run: ExpertsRun) -> ExpertsRun:
    """Return the run with its summary.

    For every scheme and implementation, over the cells where it is right, that has the geometric
    means and the worst cells of the roofline fraction and of the speed against the cell's best
    baseline. `BEST_MOEKIT` and `BEST_BASELINE` are the fastest of their kind in each cell.
    """
    rows = []
    for scheme, cells in grouped(run.cells, lambda c: c.scheme).items():
        for name in distinct(r.name for c in cells for r in c.results):
            rows.append(_summary_row(scheme, name, cells, name=name))
        rows.append(_summary_row(scheme, BEST_MOEKIT, cells, kind=BACKEND))
        rows.append(_summary_row(scheme, BEST_BASELINE, cells, kind=BASELINE))
    return replace(run, summary=tuple(row for row in rows if row.cells))


def _summary_row(scheme: str, title: str, cells: Sequence[ExpertsCell], **facts: str) -> SummaryRow:
    """Return the row of the fastest right result with these fields in each cell."""
    ran, fractions, speeds = 0, [], []
    for cell in cells:
        own, best = _fastest(cell, **facts), _fastest(cell, kind=BASELINE)
        if own is None or own.us is None:
            continue
        ran += 1
        if own.fraction is not None:
            fractions.append((own.fraction, cell))
        if best is not None and best.us is not None:
            speeds.append((best.us / own.us, cell))
    return SummaryRow(
        scheme=scheme,
        name=title,
        cells=ran,
        of_cells=len(cells),
        **_mean_and_worst("fraction", fractions),
        **_mean_and_worst("speed", speeds),
    )


def _fastest(cell: ExpertsCell, **facts: str) -> ExpertsResult | None:
    return fastest(r for r in cell.results if facts.items() <= vars(r).items())


def _mean_and_worst(what: str, values: Sequence[tuple[float, ExpertsCell]]) -> dict[str, Any]:
    if not values:
        return {}
    worst, cell = min(values, key=lambda item: item[0])
    where = {"shape": cell.shape, "routing": cell.routing, "tokens": cell.tokens}
    mean = statistics.geometric_mean(value for value, _ in values)
    return {f"{what}_geomean": mean, f"{what}_worst": worst, f"{what}_worst_cell": where}


# -- Markdown ---------------------------------------------------------------------------------


def markdown(run: ExpertsRun) -> str:
    lines = report.head(run, "moekit bench", run.device.name)
    lines += [
        f"Medians of {run.settings.replays} turns, microseconds a call; roofline fraction in "
        "brackets. Times marked `e` are eager (no graph), in **bold** the fastest, and struck-out "
        f"ones gave wrong results. {_ceilings(run.ceilings)}"
    ]
    for group in grouped(run.cells, lambda c: (c.shape, c.scheme, c.routing)).values():
        times = report.side_by_side(group, limit=lambda cell: report.us(cell.limit_us))
        lines += ["", _heading(group[0]), "", *times, *_cost_of_mode(group)]
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
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MoekitError(
            "plots need matplotlib: pip install 'moekit-bench[plot]', and render the recorded JSON "
            "with `python -m moekit bench --from FILE.json --plot DIR`"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for (shape, scheme), group in grouped(run.cells, lambda c: (c.shape, c.scheme)).items():
        routings = grouped(group, lambda c: c.routing)
        figure = figures.Figure(figsize=(6.5 * len(routings), 4.5))
        panels = figure.subplots(1, len(routings), squeeze=False, sharey=True)
        for panel, (routing, cells) in zip(panels[0], routings.items(), strict=True):
            _panel(panel, cells)
            panel.set_title(f"{shape}, {scheme}, {routing}")
        figure.suptitle(run.device.name, fontsize=9)
        figure.tight_layout()
        file = folder / f"{shape}_{scheme}.png".replace(":", "x")
        figure.savefig(file, dpi=120)
        files.append(file)
    return files


def _panel(panel: Any, cells: Sequence[ExpertsCell]) -> None:
    value = "us" if all(c.limit_us is None for c in cells) else "fraction"
    kinds = {r.name: r.kind for c in cells for r in c.results}
    for name, kind in kinds.items():
        points = [
            (c.tokens, getattr(r, value))
            for c in cells
            if (r := _fastest(c, name=name)) is not None and getattr(r, value) is not None
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
