"""Judging: which backends can do a problem, in which order, and why the others cannot."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from moekit.contract.explanation import Explanation
from moekit.contract.specs import CHECK_FAILED, BackendSpec, SpecT
from moekit.discovery.registry import Registry
from moekit.errors import NameClash, UnknownBackend
from moekit.problem import MoEProblem
from moekit.selection.composite import find_experts
from moekit.selection.policy import Candidate, Ranking, expected, rank


class Asked(NamedTuple):
    """A name that is insisted on, and by whom; no name leaves the choice to the policy."""

    name: str | None
    by: str

    @classmethod
    def of(cls, name: str | None, variable: str) -> Asked:
        if name is not None:
            return cls(name, "by name")
        name = os.environ.get(variable) or None
        return cls(name, f"by {variable}" if name else "")

    def specs(self, every: Mapping[str, SpecT], find: Callable[[str], SpecT]) -> Sequence[SpecT]:
        """Return the specs to judge: the named one, or every one."""
        if self.name is None:
            return tuple(every.values())
        try:
            return [find(self.name)]
        except (UnknownBackend, NameClash) as error:
            if self.by == "by name":
                raise
            raise type(error)(f"{error}\n  (chosen {self.by})") from error


@dataclass(frozen=True)
class Selection:
    """The backends that can do a problem, in order, and those that cannot.

    rejected: every reason, by the backend's kind and name.
    """

    problem: MoEProblem
    backends: Registry
    dispatcher: Asked
    experts: Asked
    ranking: Ranking
    rejected: Mapping[tuple[str, str], tuple[str, ...]]

    def explanation(self) -> Explanation:
        ranking = self.ranking
        why = dispatcher_by = self.dispatcher.by or ranking.dispatcher_by
        if (experts_by := self.experts.by or ranking.experts_by) != dispatcher_by:
            why = f"dispatcher {dispatcher_by}, experts {experts_by}"
        notes = [ranking.note] if ranking.note else []
        for best in ranking.candidates[:1]:
            notes += best.notes(self.problem)
        if self.problem.parallel.moves_tokens and not any(
            spec.moves_tokens for spec in self.backends.dispatchers.values()
        ):
            notes.append("no dispatcher that moves tokens is installed: pip install moekit-naive")
        return Explanation(
            self.problem,
            tuple(candidate.combination(self.problem) for candidate in ranking.candidates),
            why,
            {name: why for (kind, name), why in self.rejected.items() if kind == "dispatcher"},
            {name: why for (kind, name), why in self.rejected.items() if kind != "dispatcher"},
            "; ".join(notes),
            frozenset(
                f"{kind} {asked.name}"
                for kind, asked in (("dispatcher", self.dispatcher), ("experts", self.experts))
                if asked.name is not None
            ),
            expected(self.problem, ranking.candidates),
            frozenset(filter(_is_fault, chain(*self.rejected.values()))),
        )

    def without(self, spec: BackendSpec, reason: str) -> Selection:
        """Return the same selection with one more backend rejected."""
        left = tuple(
            each
            for each in self.ranking.candidates
            if spec.name != (each.dispatcher if spec.kind == "dispatcher" else each.experts).name
        )
        rejected = {**self.rejected, (spec.kind, spec.name): (reason,)}
        return replace(self, ranking=replace(self.ranking, candidates=left), rejected=rejected)

    def named(self, spec: BackendSpec) -> bool:
        return (self.dispatcher if spec.kind == "dispatcher" else self.experts).name is not None

    def why_not(self) -> str:
        """Return a line for each rejected backend and each plugin at fault, and what is missing."""
        found = self.explanation()
        notes = [found.note] if found.note and found.chosen is None else []
        return "\n  ".join([*found.refusals(), *self.backends.faults(), *notes])


def judge(
    problem: MoEProblem, dispatcher: str | None, experts: str | None, backends: Registry
) -> Selection:
    """Judge the backends for ``problem``: those named, or else every one.

    Raises UnknownBackend or NameClash for a name of no backend, or of more than one.
    """
    asked = Asked.of(dispatcher, "MOEKIT_DISPATCHER"), Asked.of(experts, "MOEKIT_EXPERTS")
    find = partial(find_experts, backends=backends)
    dispatchers = asked[0].specs(backends.dispatchers, backends.dispatcher)
    every = [spec.made_for(problem) for spec in asked[1].specs(backends.experts, find)]
    specs: list[BackendSpec] = [*dispatchers, *every]
    rejected = {
        (spec.kind, spec.name): tuple(why) for spec in specs if (why := spec.unsupported(problem))
    }
    able = [spec for spec in dispatchers if (spec.kind, spec.name) not in rejected]
    candidates = []
    for spec in every:
        if (spec.kind, spec.name) in rejected:
            continue
        reasons = {each.name: spec.unsupported_behind(each.format) for each in able}
        candidates += [Candidate(each, spec) for each in able if not reasons[each.name]]
        if reasons and all(reasons.values()):
            rejected[spec.kind, spec.name] = tuple(dict.fromkeys(chain(*reasons.values())))
    ranking = rank(problem, candidates)
    return Selection(problem, backends, *asked, ranking, rejected)


def _is_fault(reason: str) -> bool:
    """Return whether a reason is a failed check, or quotes a variable (``NAME=value``) that is set.

    Users may not know of either, unlike of what a backend does not support.
    """
    quoted = re.findall(r"\b([A-Z][A-Z0-9_]+)=", reason)
    return reason.startswith(CHECK_FAILED) or any(name in os.environ for name in quoted)
