"""The report of a run of dispatchers."""

from __future__ import annotations

from collections.abc import Sequence

from . import report
from .records import DispatcherCell, DispatchRun
from .report import Table, grouped


def markdown(run: DispatchRun) -> str:
    settings = run.settings
    lines = report.head(run, "moekit bench --dispatch", f"{run.ranks} ranks, {run.device.name}")
    lines += [
        f"E:K:H {settings.sizes}, {settings.dtype}; T tokens on each rank. Microseconds, medians "
        f"of {settings.replays} turns and of the ranks. Both: dispatch and combine, in a CUDA "
        "graph where there is one, else eager (`e`); **bold** the fastest, struck out what is "
        "wrong. GB/s over the links: rows to other ranks, one per (token, rank); by DeepEP's "
        "count, rows to this rank too."
    ]
    for (scheme, routing), group in grouped(run.cells, lambda c: (c.scheme, c.routing)).items():
        lines += ["", f"## {scheme}, {routing}", "", *report.side_by_side(group)]
        lines += ["", *details(group)]
    lines += report.not_measured(run.refused)
    return "\n".join(lines) + "\n"


def details(cells: Sequence[DispatcherCell]) -> Table:
    table = Table(
        "T", "dispatcher", "dispatch", "combine", "both", "fastest–slowest", "eager", "host",
        "dispatch GB/s: links", "DeepEP's", "combine GB/s: links", "DeepEP's", "SMs",
        "buffers MB", "error", "",
    )  # fmt: skip
    for cell in cells:
        for r in cell.results:
            megabytes = None if r.buffer_bytes is None else r.buffer_bytes / 1e6
            table.add(
                cell.tokens, r.name, report.us(r.dispatch_us), report.us(r.combine_us),
                report.time(r, None), report.spread(r), report.us(r.eager_us), report.us(r.host_us),
                report.number(r.dispatch_link_gbs, ".3g"),
                report.number(r.dispatch_deepep_gbs, ".3g"),
                report.number(r.combine_link_gbs, ".3g"),
                report.number(r.combine_deepep_gbs, ".3g"),
                report.number(r.num_sms, "d"), report.number(megabytes, ".0f"), report.error(r),
                r.reason or r.note,
            )  # fmt: skip
    return table
