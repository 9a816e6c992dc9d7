"""What `moekit bench --dispatch` found, as markdown."""

from __future__ import annotations

from collections.abc import Sequence

from moekit_bench.bench import report
from moekit_bench.bench.report import Json, shown_error


def markdown(data: Json) -> str:
    """The whole report, from what goes to ``--json``."""
    device, settings = data["device"], data["settings"]
    known = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines = [
        f"# moekit bench --dispatch, {data['date']}",
        "",
        f"    {data['command']}",
        "",
        f"{data['ranks']} ranks, {device['name']}; {known}",
        "",
        f"E:K:H {settings['sizes']}, {settings['dtype']}; T tokens on each rank. Microseconds, "
        f"medians of {settings['replays']} turns and of the ranks. Pair: dispatch and combine, in "
        "a CUDA graph where there is one, else eager (`e`); **bold** the fastest, struck out what "
        "is wrong. GB/s over the links: rows to other ranks, one per (token, rank); by DeepEP's "
        "count, rows to this rank too.",
    ]
    groups = dict.fromkeys((c["scheme"], c["routing"]) for c in data["cells"])
    for scheme, routing in groups:
        group = [c for c in data["cells"] if (c["scheme"], c["routing"]) == (scheme, routing)]
        lines += ["", f"## {scheme}, {routing}", "", *_pairs(group), "", *_details(group)]
    lines += not_measured(data["refused"])
    return "\n".join(lines) + "\n"


def not_measured(refused: Sequence[Json]) -> list[str]:
    """A section of who was left out of which cells, and why; empty if nobody was."""
    if not refused:
        return []
    lines = ["", "## Not measured", ""]
    for name, reason in dict.fromkeys((r["name"], r["reason"]) for r in refused):
        same = [r for r in refused if (r["name"], r["reason"]) == (name, reason)]
        where = ", ".join(dict.fromkeys(f"{r['scheme']} T={r['tokens']}" for r in same))
        lines.append(f"- {name}: {reason} ({where})")
    return lines


def _pairs(group: Sequence[Json]) -> list[str]:
    names = list(dict.fromkeys(r["name"] for c in group for r in c["dispatchers"]))
    lines = report._table_head(["T", *names])
    for cell in group:
        by_name = {r["name"]: r for r in cell["dispatchers"]}
        right = [r["us"] for r in cell["dispatchers"] if r["right"]]
        texts = []
        for name in names:
            r = by_name.get(name)
            text = "–" if r is None else _pair(r)
            best = r is not None and r["right"] and r["us"] == min(right)
            texts.append(f"**{text}**" if best else text)
        lines.append(report._table_row([cell["tokens"], *texts]))
    return lines


def _pair(r: Json) -> str:
    if r["us"] is None:
        return "–"
    text = report._us(r["us"]) + ("e" if r["graph_us"] is None and r["host_us"] is not None else "")
    return text if r["right"] else f"~~{text}~~"


def _details(group: Sequence[Json]) -> list[str]:
    lines = report._table_head(
        ["T", "dispatcher", "dispatch", "combine", "pair", "fastest–slowest", "eager", "host",
         "dispatch GB/s: links", "DeepEP's", "combine GB/s: links", "DeepEP's", "SMs",
         "buffers MB", "error", ""]
    )  # fmt: skip
    for cell in group:
        for r in cell["dispatchers"]:
            if r["us"] is None:
                blanks = ["–"] * 13
                lines.append(report._table_row([cell["tokens"], r["name"], *blanks, r["reason"]]))
                continue
            rates = (r[f"{p}_{n}_gbs"] for p in ("dispatch", "combine") for n in ("link", "deepep"))
            lines.append(report._table_row([
                cell["tokens"], r["name"], report._us(r["dispatch_us"]),
                report._us(r["combine_us"]), _pair(r), "–".join(map(report._us, r["spread_us"])),
                report._us(r["eager_us"]), report._us(r["host_us"]),
                *(f"{rate:.3g}" for rate in rates),
                "–" if r["num_sms"] is None else r["num_sms"], f"{r['buffer_bytes'] / 1e6:.0f}",
                shown_error(r), r["note"],
            ]))  # fmt: skip
    return lines
