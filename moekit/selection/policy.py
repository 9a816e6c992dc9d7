"""The policy: in which order the combinations that can do a problem are preferred.

Measurements decide if the tuned tables have any, else priorities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moekit.contract.explanation import Combination
from moekit.contract.specs import DispatcherSpec, ExpertsSpec
from moekit.contract.sums import Sums
from moekit.problem import ActivationFormat, MoEProblem
from moekit.runtime.rows import quantized_by
from moekit.selection import tuned as tune
from moekit.selection.composite import composite, members

_BY_PRIORITY = "by priority"
# In priority: a bridge costs copies and padded rows, but less than a reference backend (-100).
_BRIDGE_COST = 50
# Padding costs copies and computes with zeros.
_PADDING_COST = 50


@dataclass(frozen=True)
class Candidate:
    """A dispatcher and experts that can do the problem together."""

    dispatcher: DispatcherSpec
    experts: ExpertsSpec

    @property
    def bridged(self) -> bool:
        return self.experts.needs_bridge(self.dispatcher.format)

    def combination(self, problem: MoEProblem) -> Combination:
        sums = Sums.of(problem, self.experts.bridged_to(self.dispatcher.format))
        return Combination(self.dispatcher.name, self.experts.name, self.bridged, sums)

    def priority(self, problem: MoEProblem) -> int:
        both = self.dispatcher.priority_for(problem) + self.experts.priority_for(problem)
        cost = _BRIDGE_COST if self.bridged else 0
        return both - cost - (_PADDING_COST if self.experts.padding(problem) else 0)

    def notes(self, problem: MoEProblem) -> list[str]:
        """Return what users should know of this combination's numbers."""
        notes = [*self._arithmetic(problem), *self.experts.notes(problem)]
        dispatcher, seen = self.dispatcher, self.experts.bridged_to(self.dispatcher.format)
        taken = dispatcher.weights_in_fp32 or Sums.of(problem, seen) is not Sums.BY_DISPATCHER
        if problem.dtype_name == "float16" and not (taken and seen.weights_in_fp32):
            notes.append(
                "an expert's output above 65504 becomes infinite in float16, whatever its router "
                "weight"
            )
        return notes

    def _arithmetic(self, problem: MoEProblem) -> Iterator[str]:
        """Yield who quantizes the activations, if the scheme quantizes them."""
        scheme = problem.quant.name
        by = quantized_by(problem, self.dispatcher, self.experts)
        if by == "sender":
            yield f"activations are quantized to {scheme} for the transfer"
        elif by == "receiver":
            yield f"activations are quantized to {scheme} when they arrive"
        elif by == "experts":
            exact = [each.name for each in members(self.experts) if each.emulates]
            others = [each.name for each in members(self.experts) if not each.emulates]
            if exact:
                yield (
                    f"activations stay exact ({problem.dtype_name}) in {', '.join(exact)}, which "
                    f"emulates {scheme}"
                )
            if others:
                yield f"{', '.join(others)} quantizes activations to {scheme}"


@dataclass(frozen=True)
class Ranking:
    """Candidates in the order of preference, and what decided for dispatchers and for experts."""

    candidates: tuple[Candidate, ...]
    dispatcher_by: str
    experts_by: str
    note: str = ""


def rank(problem: MoEProblem, candidates: Sequence[Candidate]) -> Ranking:
    """Rank the candidates by measurement, or by declared priorities."""
    ordered = sorted(candidates, key=lambda each: _preference(problem, each))
    by_priority = Ranking(tuple(ordered), _BY_PRIORITY, _BY_PRIORITY)
    return by_measurement(problem, ordered) or by_priority


def _preference(problem: MoEProblem, candidate: Candidate) -> tuple[int, str, str]:
    return -candidate.priority(problem), candidate.dispatcher.name, candidate.experts.name


def expected(problem: MoEProblem, candidates: Sequence[Candidate]) -> str:
    """Return what the tuned tables know of the first candidate: see `Explanation.expected`."""
    found = None if problem.batch_invariant else tune.lookup(problem)
    if found is None or not candidates:
        return ""
    chosen = candidates[0]
    behind = "local" if found.borrowed else chosen.dispatcher.name
    same = [c for c in candidates if c.dispatcher == chosen.dispatcher]
    singles = [c for c in same if len(tune.split(c.experts.name)) == 1]
    default = min(singles or same, key=lambda each: _preference(problem, each))
    return found.expected(behind, chosen.experts.name, default.experts.name)


def by_measurement(problem: MoEProblem, candidates: Sequence[Candidate]) -> Ranking | None:
    """Rank by the times in the tuned tables; None if they do not compare the best dispatcher's.

    candidates: best priority first.

    Measured combinations come first. Others follow by priority: they may be faster, but no time
    shows it. Times of experts that were measured on one rank order the experts behind STANDARD
    dispatchers, as they were measured; they do not order dispatchers. A single measured
    combination is no comparison. Experts of negative priority are chosen by name only, however
    fast they are. Tables say nothing of batch-invariant problems: no backend was measured in that
    mode, and the choice must not depend on sizes.
    """
    found = None if problem.batch_invariant else tune.lookup(problem)
    if found is None:
        return None
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.dispatcher.name, []).append(candidate)
    choices = {
        name: choice
        for name, group in groups.items()
        if (choice := _choose(problem, found, group)) is not None
    }
    order = list(groups)
    if not found.borrowed:
        order.sort(key=lambda name: choices[name].plan.cost if name in choices else math.inf)
    if sum(len(choice.order) for choice in choices.values()) < 2 or order[0] not in choices:
        return None
    ranked: list[Candidate] = []
    for name in order:
        left = {candidate.experts.name: candidate for candidate in groups[name]}
        if name in choices:
            ranked += _composite(problem, choices[name], groups[name])
            ranked += [left.pop(experts) for experts in choices[name].order]
        ranked += left.values()
    by = f"by measurement ({found})"
    dispatcher_by = _BY_PRIORITY if found.borrowed else by
    return Ranking(tuple(ranked), dispatcher_by, by, choices[order[0]].note)


def _choose(
    problem: MoEProblem, found: tune.Found, group: Sequence[Candidate]
) -> tune.Choice | None:
    """Return what the tables choose among candidates of one dispatcher; None if they know none."""
    dispatcher = group[0].dispatcher
    names = [
        c.experts.name
        for c in group
        if c.experts.priority_for(problem) >= 0 and not c.experts.padding(problem)
    ]
    if not found.borrowed:
        return found.choose(dispatcher.name, names)
    standard = dispatcher.format is ActivationFormat.STANDARD
    return found.choose("local", names) if standard else None


def _composite(
    problem: MoEProblem, choice: tune.Choice, group: Sequence[Candidate]
) -> list[Candidate]:
    """Return the composite that the choice asks for, if it does and its members fit together."""
    if len(choice.plan.buckets) == 1:
        return []
    experts = {candidate.experts.name: candidate.experts for candidate in group}
    made = composite(tune.join(choice.plan.buckets), experts.__getitem__)
    dispatcher = group[0].dispatcher
    if made.native_to(dispatcher.format).unsupported(problem):
        return []
    return [Candidate(dispatcher, made)]
