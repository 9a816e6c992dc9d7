"""The report of a run of whole layers, with what `moekit.compose` would choose now."""

from __future__ import annotations

from collections.abc import Sequence

from moekit.errors import MoekitError

from . import regret, report
from .records import LayerCell, LayerResult, LayersRun, combination, shown_error
from .report import Table, distinct, fastest, grouped


def markdown(run: LayersRun) -> str:
    settings, layer, shared = run.settings, run.layer, run.settings.share_devices
    shown = (
        f"Microseconds of prepare, experts and finalize, medians of {settings.replays} turns and "
        "of the ranks, in a CUDA graph where both backends declare it safe, else eager (`e`); "
        "**bold** the fastest, struck out what is wrong. Error: the largest, against the fp32 "
        "oracle."
    )
    if shared:
        shown = (
            "Ranks took turns on fewer devices, so there are no times: relative errors against the "
            "fp32 oracle, struck out what is wrong."
        )
    where = f"{run.ranks} {'ranks on fewer' if shared else '×'} {run.device.name}"
    lines = report.head(run, f"Layers over {run.ranks} ranks", where)
    lines += [
        f"E {layer.num_experts}, K {layer.top_k}, H {layer.hidden_size}, I "
        f"{layer.intermediate_size}, {settings.dtype}, {settings.routing}; T tokens on each rank. "
        f"{shown}"
    ]
    for scheme, cells in grouped(run.cells, lambda c: c.scheme).items():
        lines += ["", f"## {scheme}", "", *_combinations(cells, timed=not shared)]
        if not shared:
            lines += ["", *_choices(run, cells), *_overlaps(cells)]
    lines += report.not_measured(run.refused)
    return "\n".join(lines) + "\n"


def _combinations(cells: Sequence[LayerCell], *, timed: bool) -> Table:
    """Return times by T and the largest error, or the errors by T."""
    largest = ["error"] if timed else []
    table = Table(
        "dispatcher", "experts", *(f"T={c.tokens}" for c in cells), *largest, "not measured"
    )
    for dispatcher, experts in distinct(
        (r.dispatcher, r.experts) for c in cells for r in c.results
    ):
        name = combination(dispatcher, experts)
        found = [next((r for r in c.results if r.label == name), None) for c in cells]
        if timed:
            texts = [report.time(r, fastest(c.results)) for r, c in zip(found, cells, strict=True)]
            errors = [r.error for r in found if r and r.us is not None and r.error is not None]
            texts.append(report.number(max(errors, default=None), ".1e"))
        else:
            texts = [_error(r) for r in found]
        reasons = distinct(r.reason for r in found if r and r.reason)
        table.add(dispatcher, experts, *texts, "; ".join(reasons))
    return table


def _error(result: LayerResult | None) -> str:
    if result is None or result.error is None:
        return report.NONE
    return f"{result.error:.1e}" if result.right else f"~~{result.error:.1e}~~"


def _choices(run: LayersRun, cells: Sequence[LayerCell]) -> Table:
    """Return the fastest combination by T, and what would be chosen now."""
    table = Table("T", "fastest", "µs", "chosen now", "µs", "regret")
    for cell in cells:
        try:
            choice = regret.of_layer(run, cell)
        except MoekitError:  # a recording of another machine's backends
            choice = regret.Choice("", cell.tokens, cell.times(), "", None)
        if best := choice.fastest:
            table.add(
                cell.tokens, best, report.us(choice.times[best]), choice.pick or report.NONE,
                report.us(choice.us), choice.shown,
            )  # fmt: skip
    return table


def _overlaps(cells: Sequence[LayerCell]) -> list[str]:
    table = Table(
        "T", "dispatcher", "experts", "sequential", "in flight", "run ahead", "saved",
        "shared after", "within", "concurrent", "saved", "difference",
    )  # fmt: skip
    for cell in cells:
        for r in cell.results:
            if (o := r.overlap) is None:
                continue
            batches = min(o.in_flight_us, o.run_ahead_us or o.in_flight_us)
            shared = min(o.shared_within_us, o.shared_concurrent_us)
            table.add(
                cell.tokens, r.dispatcher, r.experts,
                report.us(o.sequential_us), report.us(o.in_flight_us), report.us(o.run_ahead_us),
                f"{100 * (1 - batches / o.sequential_us):.0f} %",
                report.us(o.shared_after_us), report.us(o.shared_within_us),
                report.us(o.shared_concurrent_us),
                f"{100 * (1 - shared / o.shared_after_us):.0f} %", shown_error(o.error),
            )  # fmt: skip
    if not table:
        return []
    title = "Two micro-batches of T tokens, and shared experts (an MLP of the experts' size):"
    return ["", title, "", *table]
