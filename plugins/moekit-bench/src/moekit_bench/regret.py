"""Compute what the choice loses: in every cell, its time against the fastest backend's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import moekit
from moekit.plugin import MoEProblem

from .implementations import AUTO
from .internals import serving, split
from .records import Cell, combination


@dataclass(frozen=True)
class Choice:
    """The choice in a cell, and the times of all candidates.

    times: the microseconds of every candidate, None where it failed or is wrong. pick: what is
    chosen. us: its time.
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


def of_layer(problem: MoEProblem, cell: Cell) -> Choice:
    """Return the combination that is chosen now for ``problem``, among a cell's results."""
    chosen, times, pick = moekit.explain(problem).chosen, cell.times(), ""
    if chosen is not None:
        pick = combination(chosen.dispatcher, serving(split(chosen.experts), cell.tokens))
    ranks = problem.parallel.num_ranks
    title = f"{cell.shape} {cell.scheme} on {ranks} ranks"
    return Choice(title, cell.tokens, times, pick, times.get(pick))


def of_experts(problem: MoEProblem, dispatcher: str, cell: Cell) -> Choice:
    """Return the backend that is chosen now for ``problem``, among a cell's results.

    The time of the choice is the time of the backend ``auto``, or else of the chosen backend.
    """
    chosen, times = moekit.explain(problem, dispatcher).chosen, cell.times()
    pick = serving(split(chosen.experts), cell.tokens) if chosen else ""
    us = times.pop(AUTO) if AUTO in times else times.get(pick)
    return Choice(f"{cell.shape} {cell.scheme} {cell.routing}", cell.tokens, times, pick, us)


def worst(choices: Sequence[Choice]) -> float:
    return max((choice.regret for choice in choices), default=math.inf)
