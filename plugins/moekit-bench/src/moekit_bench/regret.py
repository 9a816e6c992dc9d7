"""Compute what the choice loses: in every cell, its time against the fastest backend's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import moekit

from . import report
from .implementations import AUTO
from .internals import DTYPES, Found, Key, Table, serving, split
from .records import BACKEND, ExpertsRun, LayerCell, LayersRun, combination
from .shapes import shape


@dataclass(frozen=True)
class Choice:
    """The choice in a cell, beside the times of all candidates.

    times: the microseconds of every candidate, None where it failed or is wrong. pick: what is
    chosen. us: the time of that.
    """

    title: str
    tokens: int
    times: Mapping[str, float | None]
    pick: str
    us: float | None

    @property
    def fastest(self) -> str:
        """Return the name of the fastest candidate; empty if all fail."""
        known = {name: us for name, us in self.times.items() if us is not None}
        return min(known, key=lambda name: known[name], default="")

    @property
    def regret(self) -> float:
        """Return how many percent slower than the fastest the choice is; infinite if it fails."""
        best = self.times.get(self.fastest)
        return math.inf if self.us is None or best is None else 100 * (self.us / best - 1)

    @property
    def shown(self) -> str:
        return report.NONE if self.us is None else f"{self.regret:.1f} %"


def of_combinations(
    title: str, key: Key, table: Table, able: Mapping[str, Collection[str]]
) -> list[Choice]:
    """Return what is chosen from a table, by the table's own times.

    Over several ranks that is for kernels whose ``max_num_tokens`` is each of the table's T.

    Args:
        able: The experts that may be chosen behind each dispatcher.
    """
    times = table.get(key, {})
    records = {names: r for names, r in times.items() if names[1] in able.get(names[0], ())}
    several = key.ranks > 1

    def name(dispatcher: str, experts: str) -> str:
        return combination(dispatcher, experts) if several else experts

    choices = []
    for tokens in sorted({t for r in records.values() for t in r}):
        found = Found(key, 0.0, times, tokens if several else None, False)
        us = {name(*names): r[tokens].us for names, r in records.items() if tokens in r}
        made = {d: found.choose(d, experts) for d, experts in able.items()}
        plans = {d: choice.plan for d, choice in made.items() if choice is not None}
        pick = ""
        if plans:
            best = min(plans, key=lambda d: plans[d].cost)
            pick = name(best, serving(plans[best].buckets, tokens))
        choices.append(Choice(title, tokens, us, pick, us.get(pick)))
    return choices


def of_layers(run: LayersRun) -> list[Choice]:
    run.check_timed()
    return [of_layer(run, cell) for cell in run.cells]


def of_layer(run: LayersRun, cell: LayerCell) -> Choice:
    """Return the combination that is chosen now for calls of max_num_tokens."""
    problem, times = run.problem(cell.scheme, cell.tokens), cell.times()
    chosen, pick = moekit.explain(problem).chosen, ""
    if chosen is not None:
        pick = combination(chosen.dispatcher, serving(split(chosen.experts), cell.tokens))
    return Choice(run.title(cell.scheme), cell.tokens, times, pick, times.get(pick))


def of_experts(run: ExpertsRun) -> list[Choice]:
    """Return what is chosen now for the cells of a run of experts backends.

    The time of the choice is that of the backend ``auto``, or else of the backend that is chosen.
    """
    device, choices = run.device.spec(), []
    for cell in run.cells:
        problem = shape(cell.shape).problem(
            quant=cell.scheme, dtype=DTYPES.get(cell.dtype, cell.dtype), device=device, ep=cell.ep
        )
        chosen = moekit.explain(problem, run.settings.dispatcher).chosen
        pick = serving(split(chosen.experts), cell.tokens) if chosen else ""
        times = {r.name: r.us if r.right else None for r in cell.results if r.kind == BACKEND}
        us = times.pop(AUTO) if AUTO in times else times.get(pick)
        title = f"{cell.shape} {cell.scheme} {cell.routing}"
        choices.append(Choice(title, cell.tokens, times, pick, us))
    return choices


def worst(choices: Sequence[Choice]) -> float:
    return max((choice.regret for choice in choices), default=math.inf)


def markdown(title: str, choices: Sequence[Choice], limit: float) -> str:
    """Return a table for each shape and scheme, in microseconds, and a summary."""
    lines = [f"# {title}"]
    for group, members in itertools.groupby(choices, key=lambda choice: choice.title):
        lines += ["", f"## {group}", "", *_table(list(members))]
    above = sum(not choice.regret <= limit for choice in choices)
    summary = (
        f"{len(choices)} cells; worst regret {worst(choices):.1f} %; {above} above {limit:g} %."
    )
    return "\n".join([*lines, "", summary, ""])


def _table(choices: Sequence[Choice]) -> report.Table:
    names = report.distinct(name for choice in choices for name in choice.times)
    table = report.Table("T", *names, "choice", "µs", "regret")
    for choice in choices:
        times = (_us(choice.times.get(name)) for name in names)
        pick = choice.pick or report.NONE
        table.add(choice.tokens, *times, pick, _us(choice.us), choice.shown)
    return table


def _us(us: float | None) -> str:
    return report.number(us, ".4g" if us is None or us < 1000 else ".0f")
