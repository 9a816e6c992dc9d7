"""Compute what the choice loses: in every cell, its time against the fastest backend's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import moekit

from . import report
from .implementations import AUTO
from .internals import DTYPES, Found, Key, Table, buckets, serving
from .layers_report import chosen_now
from .records import ExpertsRun, LayersRun
from .results import BACKEND, combination
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
    def regret(self) -> float:
        """Return how many percent slower than the fastest the choice is; infinite if it fails."""
        best = min((us for us in self.times.values() if us is not None), default=math.inf)
        return math.inf if self.us is None else 100 * (self.us / best - 1)


def of_table(
    title: str, key: Key, table: Table, dispatcher: str, names: Collection[str]
) -> list[Choice]:
    """Return what is chosen from a table among the experts ``names``, by the table's own times."""
    found = Found(key, 0.0, table.get(key, {}), None, False)
    records = {e: r for (d, e), r in found.times.items() if d == dispatcher and e in names}
    choice = found.choose(dispatcher, names)
    choices = []
    for tokens in sorted({t for r in records.values() for t in r}):
        times = {e: r[tokens].us if tokens in r else None for e, r in records.items()}
        pick = serving(choice.plan.buckets, tokens) if choice else ""
        choices.append(Choice(title, tokens, times, pick, times.get(pick)))
    return choices


def of_combinations(
    title: str, key: Key, table: Table, able: Mapping[str, Collection[str]]
) -> list[Choice]:
    """Return what is chosen from a table for kernels over several ranks whose ``max_num_tokens`` is
    each of its T.

    Args:
        able: The experts that may be chosen behind each dispatcher.
    """
    records = {
        names: r for names, r in table.get(key, {}).items() if names[1] in able.get(names[0], ())
    }
    choices = []
    for tokens in sorted({t for r in records.values() for t in r}):
        found = Found(key, 0.0, table[key], tokens, False)
        times = {combination(d, e): r[tokens].us for (d, e), r in records.items() if tokens in r}
        made = {d: found.choose(d, names) for d, names in able.items()}
        costs = {d: (c.plan.cost, c.plan.buckets) for d, c in made.items() if c is not None}
        pick = ""
        if costs:
            best = min(costs, key=lambda d: costs[d][0])
            pick = combination(best, serving(costs[best][1], tokens))
        choices.append(Choice(title, tokens, times, pick, times.get(pick)))
    return choices


def of(run: ExpertsRun | LayersRun) -> list[Choice]:
    """Return what is chosen now for the cells of a run."""
    return of_layers(run) if isinstance(run, LayersRun) else of_experts(run)


def of_layers(run: LayersRun) -> list[Choice]:
    """Return what is chosen now for the cells of a run of layers."""
    run.check_timed()
    choices = []
    for cell in run.cells:
        times, pick = cell.times(), chosen_now(run.problem(cell.scheme, cell.tokens))
        choices.append(Choice(run.title(cell.scheme), cell.tokens, times, pick, times.get(pick)))
    return choices


def of_experts(run: ExpertsRun) -> list[Choice]:
    """Return what is chosen now for the cells of a run of experts backends.

    The time of the choice is that of the backend ``auto``, or else of the backend that is chosen.
    """
    device, choices = run.device.spec(), []
    for cell in run.cells:
        problem = shape(cell.shape).problem(
            quant=cell.scheme, dtype=DTYPES[cell.dtype], device=device, ep=cell.ep
        )
        chosen = moekit.explain(problem, run.settings.dispatcher).chosen
        pick = serving(buckets(chosen.experts), cell.tokens) if chosen else ""
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


def _table(choices: Sequence[Choice]) -> Iterator[str]:
    names = report.distinct(name for choice in choices for name in choice.times)
    table = report.Table("T", *names, "choice", "µs", "regret")
    for choice in choices:
        regret = report.NONE if choice.us is None else f"{choice.regret:.1f} %"
        times = (_us(choice.times.get(name)) for name in names)
        table.add(choice.tokens, *times, choice.pick or report.NONE, _us(choice.us), regret)
    return iter(table)


def _us(us: float | None) -> str:
    return report.number(us, ".4g" if us is None or us < 1000 else ".0f")
