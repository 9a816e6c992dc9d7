"""Results as data (the JSON that docs/bench.md documents), as markdown, and as plots.

Everything is made from the dictionary that goes to ``--json``, so that a recorded run can be
rendered again anywhere (`--from`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moekit.errors import MoekitError
from moekit_bench.bench.cells import Case, Result
from moekit_bench.bench.contestants import PEER
from moekit_bench.bench.shapes import Shape

Json = dict[str, Any]

BEST_PEER = "best peer of each cell"
BEST_MOEKIT = "best of moekit in each cell"


def cell_dict(
    shape: Shape, case: Case, results: Mapping[str, Result], kinds: Mapping[str, str]
) -> Json:
    """One cell with everyone's result."""
    p = case.problem
    limit = next((r.limit_us for r in results.values() if r.limit_us is not None), None)
    return {
        "shape": shape.name,
        "num_experts": p.num_experts,
        "top_k": p.top_k,
        "hidden_size": p.hidden_size,
        "intermediate_size": p.intermediate_size,
        "ep": p.parallel.ep_size,
        "dtype": p.dtype_name,
        "scheme": p.quant.name,
        "routing": case.routing,
        "tokens": case.tokens,
        "inputs": len(case.pairs),
        **asdict(case.work),
        "limit_us": limit,
        "contestants": [_row(name, kinds[name], result) for name, result in results.items()],
    }


def _row(name: str, kind: str, result: Result) -> Json:
    timing = result.timing
    return {
        "name": name,
        "kind": kind,
        "us": None if timing is None else timing.us,
        "graph_us": None if timing is None else timing.graph_us,
        "eager_us": None if timing is None else timing.eager_us,
        "host_us": None if timing is None else timing.host_us,
        "spread_us": None if timing is None else list(timing.spread),
        "fraction": result.fraction,
        # JSON has no NaN: an output with NaN has error null and right false.
        "error": result.error if result.error is not None and math.isfinite(result.error) else None,
        "right": result.right,
        "reason": result.reason,
        "note": "" if timing is None else timing.note,
    }


def summarize(cells: Sequence[Json]) -> list[Json]:
    """Per scheme and contestant, over the cells where it gave right results: the geometric mean of
    the roofline fraction, the worst cell, and the same for the speed against the cell's best peer.

    `BEST_PEER` and `BEST_MOEKIT` are the fastest of their kind in each cell.
    """
    rows = []
    for scheme in _distinct(c["scheme"] for c in cells):
        mine = [c for c in cells if c["scheme"] == scheme]
        names = _distinct(r["name"] for c in mine for r in c["contestants"])
        pickers: dict[str, Callable[[Json], Json | None]] = {
            name: lambda c, n=name: next(  # type: ignore[misc]
                (r for r in _right(c) if r["name"] == n), None
            )
            for name in names
        }
        pickers[BEST_MOEKIT] = lambda c: _fastest(r for r in _right(c) if r["kind"] != PEER)
        pickers[BEST_PEER] = _best_peer
        for name, pick in pickers.items():
            picked = [(c, row) for c in mine if (row := pick(c)) is not None]
            fractions = [(c, r["fraction"]) for c, r in picked if r["fraction"] is not None]
            against = [
                (c, peer["us"] / r["us"]) for c, r in picked if (peer := _best_peer(c)) is not None
            ]
            rows.append(
                {
                    "scheme": scheme,
                    "name": name,
                    "cells": len(picked),
                    "of_cells": len(mine),
                    **_mean_and_worst("fraction", fractions),
                    **_mean_and_worst("speed_vs_best_peer", against),
                }
            )
    return [r for r in rows if r["cells"]]


def _mean_and_worst(name: str, values: Sequence[tuple[Json, float]]) -> Json:
    if not values:
        return {f"{name}_geomean": None, f"{name}_worst": None, f"{name}_worst_cell": None}
    cell, worst = min(values, key=lambda item: item[1])
    mean = math.exp(sum(math.log(value) for _, value in values) / len(values))
    return {
        f"{name}_geomean": mean,
        f"{name}_worst": worst,
        f"{name}_worst_cell": {key: cell[key] for key in ("shape", "routing", "tokens")},
    }


def _right(cell: Json) -> list[Json]:
    return [r for r in cell["contestants"] if r["us"] is not None and r["right"]]


def _fastest(rows: Iterable[Json]) -> Json | None:
    return min(rows, key=lambda r: float(r["us"]), default=None)


def _best_peer(cell: Json) -> Json | None:
    return _fastest(r for r in _right(cell) if r["kind"] == PEER)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


# -- markdown ---------------------------------------------------------------------------------


def markdown(data: Json) -> str:
    """The whole report."""
    device, versions = data["device"], data["versions"]
    settings = data["settings"]
    lines = [
        f"# moekit bench, {data['date']}",
        "",
        f"    {data['command']}",
        "",
        f"{device['name']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        f"Medians of {settings['replays']} turns, microseconds a call; roofline fraction in "
        "brackets. Times marked `e` are eager (no graph), in **bold** the fastest, and struck-out "
        f"ones gave wrong results. {_ceilings_text(data['ceilings'])}",
    ]
    cells = data["cells"]
    for key in _distinct((c["shape"], c["scheme"], c["routing"]) for c in cells):
        group = [c for c in cells if (c["shape"], c["scheme"], c["routing"]) == key]
        lines += ["", _heading(group[0]), "", *_side_by_side(group), "", *_details(group)]
    if data["refused"]:
        lines += ["", "## Not measured", ""]
        for name, reason in _distinct((r["name"], r["reason"]) for r in data["refused"]):
            where = _distinct(
                f"{r['shape']} {r['scheme']}"
                for r in data["refused"]
                if (r["name"], r["reason"]) == (name, reason)
            )
            lines.append(f"- {name}: {reason} ({', '.join(where)})")
    lines += ["", "## All cells", "", *_summary(data["summary"])]
    return "\n".join(lines) + "\n"


def _ceilings_text(ceilings: Json | None) -> str:
    if ceilings is None:
        return "No ceilings are known for this device (--ceilings gives them), so no fractions."
    rates = ", ".join(f"{k} {v / 1e12:.4g} TFLOP/s" for k, v in ceilings["flops"].items())
    return f"Ceilings: {rates}, read {ceilings['read'] / 1e12:.3g} TB/s."


def _heading(cell: Json) -> str:
    c, experts = cell, f"E {cell['num_experts']}"
    if c.get("ep", 1) > 1:  # absent in older records
        experts += f" (those of one of {c['ep']} ranks)"
    return (
        f"## {c['shape']}, {c['scheme']}, {c['routing']}: {experts}, K {c['top_k']}, "
        f"H {c['hidden_size']}, I {c['intermediate_size']}, {c['dtype']}"
    )


def _side_by_side(group: Sequence[Json]) -> list[str]:
    names = _distinct(r["name"] for c in group for r in c["contestants"])
    lines = _table_head(["T", "limit", *names])
    for c in group:
        rows = {r["name"]: r for r in c["contestants"]}
        best = _fastest(_right(c))
        lines.append(_table_row([c["tokens"], _us(c["limit_us"]), *(
            _time_text(rows.get(name), best) for name in names
        )]))  # fmt: skip
    return lines


def _time_text(row: Json | None, best: Json | None) -> str:
    if row is None or row["us"] is None:
        return "–"
    text = _us(row["us"]) + ("e" if row["graph_us"] is None and row["host_us"] is not None else "")
    if not row["right"]:
        return f"~~{text}~~"
    text = f"**{text}**" if row is best else text
    return text if row["fraction"] is None else f"{text} ({row['fraction']:.2f})"


def _details(group: Sequence[Json]) -> list[str]:
    lines = _table_head(
        ["T", "contestant", "µs", "fastest–slowest", "fraction", "error", "eager µs", "host µs", ""]
    )
    for c in group:
        for r in c["contestants"]:
            spread = "–" if r["spread_us"] is None else "–".join(map(_us, r["spread_us"]))
            error = "–" if r["error"] is None else f"{r['error']:.1e}"
            fraction = "–" if r["fraction"] is None else f"{r['fraction']:.3f}"
            remark = "; ".join(filter(None, (r["reason"], r["note"]))).replace("|", "\\|")
            lines.append(_table_row([
                c["tokens"], r["name"], _us(r["us"]), spread, fraction, error,
                _us(r["eager_us"]), _us(r["host_us"]), remark,
            ]))  # fmt: skip
    return lines


def _summary(rows: Sequence[Json]) -> list[str]:
    lines = _table_head(
        ["scheme", "contestant", "cells", "fraction: geometric mean", "worst", "speed against the "
         "best peer: geometric mean", "worst"]
    )  # fmt: skip
    for r in rows:
        texts = []
        for name in ("fraction", "speed_vs_best_peer"):
            mean, worst, cell = (r[f"{name}_{k}"] for k in ("geomean", "worst", "worst_cell"))
            texts.append("–" if mean is None else f"{mean:.3f}")
            where = (
                "" if cell is None else f" ({cell['shape']} {cell['routing']} T={cell['tokens']})"
            )
            texts.append("–" if worst is None else f"{worst:.3f}{where}")
        lines.append(_table_row([r["scheme"], r["name"], f"{r['cells']}/{r['of_cells']}", *texts]))
    return lines


def _us(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def shown_error(row: Json) -> str:
    return "not finite" if row["error"] is None else f"{row['error']:.1e}"


def _table_head(names: Sequence[str]) -> list[str]:
    return [_table_row(names), "|" + "---|" * len(names)]


def _table_row(texts: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, texts)) + " |"


# -- plots ------------------------------------------------------------------------------------


def plot(data: Json, folder: Path) -> list[Path]:
    """One PNG per shape and scheme, a panel per routing: roofline fraction (without ceilings: the
    time) against T, a line per contestant. Raises MoekitError without matplotlib."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MoekitError(
            "plots need matplotlib: pip install matplotlib, and render the recorded JSON with "
            "`python -m moekit bench --from FILE.json --plot DIR`"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for shape, scheme in _distinct((c["shape"], c["scheme"]) for c in data["cells"]):
        group = [c for c in data["cells"] if (c["shape"], c["scheme"]) == (shape, scheme)]
        routings = _distinct(c["routing"] for c in group)
        figure, panels = pyplot.subplots(
            1, len(routings), figsize=(6.5 * len(routings), 4.5), squeeze=False, sharey=True
        )
        for panel, routing in zip(panels[0], routings, strict=True):
            _panel(panel, [c for c in group if c["routing"] == routing])
            panel.set_title(f"{shape}, {scheme}, {routing}")
        figure.suptitle(data["device"]["name"], fontsize=9)
        figure.tight_layout()
        file = folder / f"{shape}_{scheme}.png".replace(":", "x")
        figure.savefig(file, dpi=120)
        pyplot.close(figure)
        files.append(file)
    return files


def _panel(panel: Any, cells: Sequence[Json]) -> None:
    value = "us" if all(c["limit_us"] is None for c in cells) else "fraction"
    names = _distinct(r["name"] for c in cells for r in c["contestants"])
    kinds = {r["name"]: r["kind"] for c in cells for r in c["contestants"]}
    for name in names:
        points = [
            (c["tokens"], r[value])
            for c in cells
            for r in _right(c)
            if r["name"] == name and r[value] is not None
        ]
        if points:
            style = "o--" if kinds[name] == PEER else "o-"
            panel.plot(*zip(*sorted(points), strict=True), style, label=name, markersize=4)
    panel.set_xscale("log", base=2)
    tokens = sorted({c["tokens"] for c in cells})
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
