"""What the choice loses: in every cell what is chosen, its time, and the fastest backend's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moekit_bench.bench import dispatch_layers_cli as layers
from moekit_bench.bench import shapes
from moekit_bench.bench.contestants import AUTO, MOEKIT
from moekit_bench.bench.environment import recorded_device

from moekit.problem import DTYPES
from moekit.selection import select
from moekit.selection.tuned.choice import Found
from moekit.selection.tuned.plan import serving, split
from moekit.selection.tuned.table import Key, Table


@dataclass(frozen=True)
class Cell:
    """times: everyone's microseconds (None: none, or wrong); pick: who is chosen; us: its time."""

    title: str
    tokens: int
    times: Mapping[str, float | None]
    pick: str
    us: float | None

    @property
    def regret(self) -> float:
        """How much longer the choice takes than the fastest, in percent; infinite if it fails."""
        best = min((us for us in self.times.values() if us is not None), default=math.inf)
        return math.inf if self.us is None else 100 * (self.us / best - 1)


def of_table(
    title: str, key: Key, table: Table, dispatcher: str, names: Collection[str]
) -> list[Cell]:
    """What a table says itself of the choice among ``names`` that is made from it."""
    found = Found(key, 0.0, table.get(key, {}), None, False)
    records = {e: r for (d, e), r in found.times.items() if d == dispatcher and e in names}
    choice = found.choose(dispatcher, names)
    cells = []
    for tokens in sorted({t for r in records.values() for t in r}):
        times = {e: r[tokens].us if tokens in r else None for e, r in records.items()}
        pick = serving(choice.plan.buckets, tokens) if choice else ""
        cells.append(Cell(title, tokens, times, pick, times.get(pick)))
    return cells


def of_pairs(title: str, key: Key, table: Table, able: Mapping[str, Collection[str]]) -> list[Cell]:
    """What a table says itself of the choice among pairs over several ranks, for kernels whose
    ``max_num_tokens`` is each of its T. able: dispatcher -> experts that may be chosen behind."""
    records = {
        pair: r for pair, r in table.get(key, {}).items() if pair[1] in able.get(pair[0], ())
    }
    cells = []
    for tokens in sorted({t for r in records.values() for t in r}):
        found = Found(key, 0.0, table[key], tokens, False)
        times = {f"{d} + {e}": r[tokens].us for (d, e), r in records.items() if tokens in r}
        made = {d: found.choose(d, names) for d, names in able.items()}
        costs = {d: (c.plan.cost, c.plan.buckets) for d, c in made.items() if c is not None}
        pick = ""
        if costs:
            best = min(costs, key=lambda d: costs[d][0])
            pick = f"{best} + {serving(costs[best][1], tokens)}"
        cells.append(Cell(title, tokens, times, pick, times.get(pick)))
    return cells


def of_layers(data: Mapping[str, Any]) -> list[Cell]:
    """What is chosen now for the cells of the JSON of benchmarks/layer_dispatch.py."""
    layers.check_timed(dict(data))
    made = []
    for cell in data["cells"]:
        times = layers.times(cell)
        pick = layers.choice(layers.problem_of(dict(data), cell["scheme"], cell["tokens"]))
        title = f"{data['settings']['layer']} {cell['scheme']} on {data['ranks']} ranks"
        made.append(Cell(title, cell["tokens"], times, pick, times.get(pick)))
    return made


def of_bench(data: Mapping[str, Any]) -> list[Cell]:
    """What is chosen now for the cells of a bench's JSON. Its time is that of the contestant
    ``auto``, or else of the backend that is chosen."""
    device, dispatcher, cells = recorded_device(data["device"]), data["settings"]["dispatcher"], []
    for cell in data["cells"]:
        problem = shapes.shape(cell["shape"]).problem(
            quant=cell["scheme"],
            dtype=DTYPES[cell["dtype"]],
            device=device,
            ep=cell.get("ep", 1),  # absent in older records
        )
        chosen = select.explain(problem, dispatcher).chosen
        pick = serving(split(chosen.experts), cell["tokens"]) if chosen else ""
        own = [row for row in cell["contestants"] if row["kind"] == MOEKIT]
        times = {row["name"]: row["us"] if row["right"] else None for row in own}
        us = times.pop(AUTO) if AUTO in times else times.get(pick)
        title = f"{cell['shape']} {cell['scheme']} {cell['routing']}"
        cells.append(Cell(title, cell["tokens"], times, pick, us))
    return cells


def worst(cells: Sequence[Cell]) -> float:
    return max((cell.regret for cell in cells), default=math.inf)


def markdown(title: str, cells: Sequence[Cell], limit: float) -> str:
    """A table per shape and scheme, in microseconds, and a summary."""
    lines = [f"# {title}"]
    for group, members in itertools.groupby(cells, key=lambda cell: cell.title):
        mine = list(members)
        names = list(dict.fromkeys(name for cell in mine for name in cell.times))
        lines += ["", f"## {group}", "", _line("T", *names, "choice", "µs", "regret")]
        lines.append("|---" * (len(names) + 4) + "|")
        for cell in mine:
            times = [cell.times.get(name) for name in names]
            *others, own = ["–" if us is None else _number(us) for us in (*times, cell.us)]
            regret = "–" if cell.us is None else f"{cell.regret:.1f} %"
            lines.append(_line(str(cell.tokens), *others, cell.pick or "–", own, regret))
    above = sum(not cell.regret <= limit for cell in cells)
    summary = f"{len(cells)} cells; worst regret {worst(cells):.1f} %; {above} above {limit:g} %."
    return "\n".join([*lines, "", summary, ""])


def _number(us: float) -> str:
    return f"{us:.0f}" if us >= 1000 else f"{us:.4g}"


def _line(*fields: str) -> str:
    return f"| {' | '.join(fields)} |"
