"""Judge backends: which can do a problem, in which order, and why the others cannot."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from moekit.contract.explanation import Explanation
from moekit.contract.fused import FusedSpec
from moekit.contract.specs import CHECK_FAILED, BackendSpec, DispatcherSpec, ExpertsSpec, SpecT
from moekit.discovery.registry import Registry, not_installed
from moekit.errors import NameClash, UnknownBackend
from moekit.problem import MoEProblem
from moekit.selection import tuned
from moekit.selection.candidates import Candidate, Ranking


class Asked(NamedTuple):
    """A name that someone requires, and who; without a name the order decides."""

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
            return [named(self.name, find)]
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
        ranking, asked = self.ranking, {"dispatcher": self.dispatcher, "experts": self.experts}
        why = dispatcher_by = self.dispatcher.by or ranking.dispatcher_by
        if (experts_by := self.experts.by or ranking.experts_by) != dispatcher_by:
            why = f"dispatcher {dispatcher_by}, experts {experts_by}"
        return Explanation(
            self.problem,
            tuple(candidate.combination(self.problem) for candidate in ranking.candidates),
            why,
            {name: why for (kind, name), why in self.rejected.items() if kind == "dispatcher"},
            {name: why for (kind, name), why in self.rejected.items() if kind != "dispatcher"},
            frozenset(f"{kind} {each.name}" for kind, each in asked.items() if each.name),
            ranking.expected(ranking.candidates),
            frozenset(filter(_is_fault, chain(*self.rejected.values()))),
            partial(not_installed, self.problem),
            partial(_notes, self.problem, ranking),
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
        return bool((self.dispatcher if spec.kind == "dispatcher" else self.experts).name)

    def why_not(self) -> str:
        """Return a line for each rejected backend and each plugin at fault, and what is missing."""
        found = self.explanation()
        missing = found.not_installed if found.chosen is None else ()
        return "\n  ".join([*found.refusals(), *self.backends.faults(), *missing])


def judge(
    problem: MoEProblem, dispatcher: str | None, experts: str | None, backends: Registry
) -> Selection:
    """Judge the backends for ``problem``: those named, or else every one.

    Raises UnknownBackend or NameClash for a name of no backend, or of more than one.
    """
    asked = Asked.of(dispatcher, "MOEKIT_DISPATCHER"), Asked.of(experts, "MOEKIT_EXPERTS")
    alone = asked[1].name is None and backends.dispatchers.get(asked[0].name or "")
    if alone and alone.fused:
        asked = asked[0], asked[0]
    dispatchers = asked[0].specs(backends.dispatchers, backends.dispatcher)
    every = [s.made_for(problem) for s in asked[1].specs(backends.experts, backends.expert)]
    fused = {spec.name: spec for spec in every if isinstance(spec, FusedSpec)}
    dispatchers = [fused.get(spec.name, spec) for spec in dispatchers]
    rejected: dict[tuple[str, str], tuple[str, ...]] = {}
    for spec in (*dispatchers, *every):
        reasons = spec.unsupported(problem)
        if not (asked[0].name or spec.fused) and isinstance(spec, DispatcherSpec):
            reasons = [*_nothing_to_move(spec, problem), *reasons]
        if reasons:
            rejected[spec.kind, spec.name] = tuple(reasons)
    able = [spec for spec in dispatchers if (spec.kind, spec.name) not in rejected]
    candidates = []
    for spec in every:
        if (spec.kind, spec.name) in rejected:
            continue
        behind = {each.name: _apart(each, spec) for each in able}
        candidates += [Candidate(each, spec) for each in able if not behind[each.name]]
        if behind and all(behind.values()):
            rejected[spec.kind, spec.name] = tuple(dict.fromkeys(chain(*behind.values())))
    return Selection(problem, backends, *asked, rank(problem, candidates), rejected)


def _apart(dispatcher: DispatcherSpec, experts: ExpertsSpec) -> list[str]:
    """Return why these two cannot be combined: a fused kernel goes with itself only."""
    if dispatcher.fused or experts.fused:
        one = (experts if experts.fused else dispatcher).name
        together = dispatcher.fused and dispatcher.name == experts.name
        return [] if together else [f"{one} is a fused kernel, which is dispatcher and experts"]
    return experts.unsupported_behind(dispatcher.format)


def named(name: str, find: Callable[[str], SpecT]) -> SpecT:
    """Return the backend that ``find`` finds by that name, or the composite of such backends.

    Raises UnknownBackend or NameClash.
    """
    if "|" not in name and ":" not in name:
        return find(name)
    from moekit.selection.composite import composite

    return composite(name, find)


def rank(problem: MoEProblem, candidates: Sequence[Candidate]) -> Ranking:
    """Rank the candidates by measurement if tables have any, else by declared priorities."""
    ordered = sorted(candidates, key=lambda each: each.preference(problem))
    if not ordered or not tuned.any_for(problem):
        return Ranking(tuple(ordered))
    from moekit.selection.measured import by_measurement

    return by_measurement(problem, ordered)


def _nothing_to_move(spec: DispatcherSpec, problem: MoEProblem) -> list[str]:
    """Return why nobody would choose a dispatcher that moves tokens if they stay on their rank."""
    if not spec.moves_tokens or problem.parallel.moves_tokens:
        return []
    return ["moves tokens between ranks, and in this problem every token stays on its rank"]


def _notes(problem: MoEProblem, ranking: Ranking) -> list[str]:
    from moekit.selection.notes import notes

    about_best = (notes(problem, best) for best in ranking.candidates[:1])
    return [*filter(None, [ranking.note]), *chain(*about_best)]


def _is_fault(reason: str) -> bool:
    """Return whether a reason is a failed check, or quotes a variable (``NAME=value``) that is set.

    Users may not know of either, unlike of what a backend does not support.
    """
    quoted = re.findall(r"\b([A-Z][A-Z0-9_]+)=", reason)
    return reason.startswith(CHECK_FAILED) or any(name in os.environ for name in quoted)
