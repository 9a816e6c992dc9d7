"""Rank combinations by the times in tuned tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from moekit.problem import ActivationFormat, MoEProblem
from moekit.selection.candidates import Candidate, Ranking
from moekit.selection.composite import composite
from moekit.selection.tuned.choice import Choice, Found, lookup
from moekit.selection.tuned.plan import (
    TOLERANCE,
    Curve,
    join,
    plan,
    serving,
    split,
    time_at,
)


def by_measurement(problem: MoEProblem, candidates: Sequence[Candidate]) -> Ranking:
    """Rank by the times in the tuned tables, or by priority if they do not compare candidates.

    candidates: at least one; best priority first.

    Measured combinations come first, and before them a composite of dispatchers that is faster with
    the best one's experts. Others follow by priority: they may be faster, but no time shows it.
    Times of experts that were measured on one rank order the experts behind STANDARD dispatchers,
    as they were measured; they do not order dispatchers. A single measured combination is no
    comparison. Experts of negative priority are chosen by name only, however fast they are.
    """
    if (found := lookup(problem)) is None:
        return Ranking(tuple(candidates))
    expected = partial(_expected, problem, found)
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
        return Ranking(tuple(candidates), expected=expected)
    ranked: list[Candidate] = []
    for name in order:
        left = {candidate.experts.name: candidate for candidate in groups[name]}
        if name in choices:
            ranked += _composite(problem, choices[name], groups[name])
            ranked += [left.pop(experts) for experts in choices[name].order]
        ranked += left.values()
    if not found.borrowed:
        ranked = [*_shared_calls(problem, found, ranked[0], groups), *ranked]
    by = f"by measurement ({found})"
    dispatcher_by = "by priority" if found.borrowed else by
    return Ranking(tuple(ranked), dispatcher_by, by, choices[order[0]].note, expected)


def _expected(problem: MoEProblem, found: Found, ranked: Sequence[Candidate]) -> str:
    """Return what the tuned tables know of the first candidate: see `Explanation.expected`."""
    if not ranked:
        return ""
    chosen = ranked[0]
    behind = "local" if found.borrowed else chosen.dispatcher.name
    same = [c for c in ranked if c.dispatcher == chosen.dispatcher]
    singles = [c for c in same if len(split(c.experts.name)) == 1]
    default = min(singles or same, key=lambda each: each.preference(problem))
    return found.expected(behind, chosen.experts.name, default.experts.name)


def _choose(problem: MoEProblem, found: Found, group: Sequence[Candidate]) -> Choice | None:
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


def _composite(problem: MoEProblem, choice: Choice, group: Sequence[Candidate]) -> list[Candidate]:
    """Return the composite that the choice asks for, if it does and its members fit together."""
    if len(choice.plan.buckets) == 1:
        return []
    experts = {candidate.experts.name: candidate.experts for candidate in group}
    made = composite(join(choice.plan.buckets), experts.__getitem__)
    dispatcher = group[0].dispatcher
    if made.native_to(dispatcher.format).unsupported(problem):
        return []
    return [Candidate(dispatcher, made)]


def _shared_calls(
    problem: MoEProblem,
    found: Found,
    best: Candidate,
    groups: Mapping[str, Sequence[Candidate]],
) -> list[Candidate]:
    """Return the composite of dispatchers that is fastest with the experts of ``best``, if any."""
    buckets, curves = split(best.experts.name), dict[str, Curve]()
    for name, group in groups.items():
        if group[0].dispatcher.format is best.dispatcher.format:
            with_each = found.curves(name, {experts for _, experts in buckets})
            served = [with_each.get(experts, ()) for _, experts in buckets]
            if all(served):
                sizes = sorted({tokens for curve in served for tokens, _ in curve})
                curves[name] = [(t, time_at(with_each[serving(buckets, t)], t)) for t in sizes]
    made, alone = (plan(curves, found.high, n) for n in (None, {best.dispatcher.name}))
    if made is None or alone is None or len(made.buckets) == 1:
        return []
    if alone.cost - made.cost < math.log(TOLERANCE):  # not worth a second dispatcher's buffers
        return []
    dispatcher = composite(join(made.buckets), lambda name: groups[name][0].dispatcher)
    return [] if dispatcher.unsupported(problem) else [Candidate(dispatcher, best.experts)]
