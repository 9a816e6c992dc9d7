"""Candidates: combinations that can do a problem, and their order by priority."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moekit.contract.explanation import Combination
from moekit.contract.specs import DispatcherSpec, ExpertsSpec
from moekit.contract.sums import Sums
from moekit.problem import MoEProblem

# In priority: a bridge costs copies and padded rows, but less than a reference backend (-100).
_BRIDGE_COST = 50
# Padding costs copies and computes with zeros.
_PADDING_COST = 50


@dataclass(frozen=True)
class Candidate:
    """A dispatcher and experts that can do the problem together."""

    dispatcher: DispatcherSpec
    experts: ExpertsSpec

    def combination(self, problem: MoEProblem) -> Combination:
        sums = Sums.of(problem, self.experts.bridged_to(self.dispatcher.format))
        bridged = self.experts.needs_bridge(self.dispatcher.format)
        names = self.dispatcher.name, self.experts.name
        return Combination(*names, bridged, sums, self.experts.fused)

    def preference(self, problem: MoEProblem) -> tuple[int, str, str]:
        """Return what sorts candidates, best first: priorities, then names."""
        priority = self.experts.priority_for(problem)
        priority += 0 if self.experts.fused else self.dispatcher.priority_for(problem)
        priority -= _BRIDGE_COST if self.experts.needs_bridge(self.dispatcher.format) else 0
        priority -= _PADDING_COST if self.experts.padding(problem) else 0
        return -priority, self.dispatcher.name, self.experts.name


@dataclass(frozen=True)
class Ranking:
    """Candidates in the order of preference, and what decided for dispatchers and for experts.

    note: where measured times come from. expected: returns what tables know of the first of some
    candidates, as in `Explanation`.
    """

    candidates: tuple[Candidate, ...]
    dispatcher_by: str = "by priority"
    experts_by: str = "by priority"
    note: str = ""
    expected: Callable[[Sequence[Candidate]], str] = lambda _: ""
