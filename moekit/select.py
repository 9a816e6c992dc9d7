"""Which pair of backends, and why: every candidate, every reason, one order."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moekit.bridge import bridge
from moekit.errors import BackendBroken, BackendError, NoBackend, Unsupported
from moekit.kernel import ModularKernel, Workspace
from moekit.plugins import BackendSpec, DispatcherSpec, ExpertsSpec, Registry, registry
from moekit.problem import MoEProblem

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger("moekit")


@dataclass(frozen=True)
class Pair:
    """A possible choice. ``bridged``: their formats differ, so the core converts between them."""

    dispatcher: str
    experts: str
    bridged: bool

    def __str__(self) -> str:
        return f"{self.dispatcher} + {self.experts}" + (" (bridged)" if self.bridged else "")


@dataclass(frozen=True)
class Explanation:
    """What could do ``problem``, best first, and why each other backend could not.

    rejected_dispatchers, rejected_experts: name -> every reason. why: what decided the order.
    """

    problem: MoEProblem
    pairs: tuple[Pair, ...]
    why: str
    rejected_dispatchers: Mapping[str, tuple[str, ...]]
    rejected_experts: Mapping[str, tuple[str, ...]]

    @property
    def chosen(self) -> Pair | None:
        return self.pairs[0] if self.pairs else None

    def reasons(self) -> dict[str, tuple[str, ...]]:
        return {
            **{f"dispatcher {name}": why for name, why in self.rejected_dispatchers.items()},
            **{f"experts {name}": why for name, why in self.rejected_experts.items()},
        }

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; the shape `python -m moekit explain --json` documents."""

        def pair(p: Pair) -> dict[str, Any]:
            return {"dispatcher": p.dispatcher, "experts": p.experts, "bridged": p.bridged}

        return {
            "problem": repr(self.problem),
            "chosen": pair(self.pairs[0]) if self.pairs else None,
            "why": self.why,
            "runners_up": [pair(p) for p in self.pairs[1:]],
            "rejected_dispatchers": {n: list(r) for n, r in self.rejected_dispatchers.items()},
            "rejected_experts": {n: list(r) for n, r in self.rejected_experts.items()},
        }

    def __str__(self) -> str:
        lines = [f"chosen: {self.chosen or 'nothing'} ({self.why})"]
        lines += [f"  then: {pair}" for pair in self.pairs[1:]]
        for name, why in self.reasons().items():
            lines += [f"  not {name}: {reason}" for reason in why]
        return "\n".join(lines)


def explain(
    problem: MoEProblem,
    dispatcher: str | None = None,
    experts: str | None = None,
    *,
    backends: Registry | None = None,
) -> Explanation:
    """Judges every known backend for ``problem``, without creating any.

    Names given here, or in ``MOEKIT_DISPATCHER`` and ``MOEKIT_EXPERTS``, leave only these in the
    running. Raises UnknownBackend or NameClash for a name that means nothing or too much.
    """
    backends = backends or registry()
    sources = set()
    if dispatcher is None and (dispatcher := os.environ.get("MOEKIT_DISPATCHER") or None):
        sources.add("MOEKIT_DISPATCHER")
    elif dispatcher is not None:
        sources.add("named")
    if experts is None and (experts := os.environ.get("MOEKIT_EXPERTS") or None):
        sources.add("MOEKIT_EXPERTS")
    elif experts is not None:
        sources.add("named")
    dispatchers: Mapping[str, DispatcherSpec] = backends.dispatchers
    if dispatcher is not None:
        dispatchers = {dispatcher: backends.dispatcher(dispatcher)}
    candidates: Mapping[str, ExpertsSpec] = backends.experts
    if experts is not None:
        candidates = {experts: backends.expert(experts)}

    bad_dispatchers = _rejected(dispatchers, problem)
    bad_experts = _rejected(candidates, problem)
    scored = []
    for d in dispatchers.values():
        for e in candidates.values():
            if d.name in bad_dispatchers or e.name in bad_experts:
                continue
            bridged = d.format is not e.format
            order = (bridged, -(d.priority + e.priority), d.name, e.name)
            scored.append((order, Pair(d.name, e.name, bridged)))
    pairs = tuple(pair for _, pair in sorted(scored, key=lambda item: item[0]))
    why = " and ".join(sorted(sources)) if sources else "by priority"
    if sources and dispatcher is None:
        why += "; dispatcher by priority"
    if sources and experts is None:
        why += "; experts by priority"
    return Explanation(problem, pairs, why, bad_dispatchers, bad_experts)


def compose(
    problem: MoEProblem,
    dispatcher: str | None = None,
    experts: str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    workspace: Workspace | None = None,
    checked: bool | None = None,
    backends: Registry | None = None,
) -> ModularKernel:
    """The best pair for ``problem``, created and composed.

    dispatcher, experts: names to insist on. group: the ranks the layer is spread over, for
    dispatchers that move tokens; default: the default process group.

    Raises Unsupported (a named backend cannot), NoBackend (none can), UnknownBackend, NameClash,
    BackendBroken, GroupMismatch. A backend that fails to load is passed over when nobody named it.
    """
    backends = backends or registry()
    explanation = explain(problem, dispatcher, experts, backends=backends)
    _require_named(explanation, dispatcher, experts)
    failures: dict[str, tuple[str, ...]] = {}
    for pair in explanation.pairs:
        try:
            dispatcher_class = backends.dispatcher(pair.dispatcher).load()
            experts_class = backends.expert(pair.experts).load()
        except BackendBroken as error:
            if dispatcher == pair.dispatcher or experts == pair.experts:
                raise
            failures[str(pair)] = (str(error),)
            logger.warning("passing over %s: %s", pair, error)
            continue
        made = dispatcher_class(backends.dispatcher(pair.dispatcher), problem, group)
        gemms = experts_class(backends.expert(pair.experts), problem)
        rest = tuple(p for p in explanation.pairs if p != pair and str(p) not in failures)
        explanation = Explanation(
            problem,
            (pair, *rest),
            explanation.why,
            explanation.rejected_dispatchers,
            {**explanation.rejected_experts, **failures},
        )
        logger.info("moekit: %s", str(explanation).splitlines()[0])
        return ModularKernel(
            made,
            bridge(gemms, made.spec.format),
            workspace=workspace,
            explanation=explanation,
            checked=checked,
        )
    reasons = {**explanation.reasons(), **failures}
    text = "\n".join(f"  {name}: {reason}" for name, why in reasons.items() for reason in why)
    raise NoBackend(f"no installed backends can do {problem!r}:\n{text}", reasons)


def _rejected(
    specs: Mapping[str, DispatcherSpec] | Mapping[str, ExpertsSpec], problem: MoEProblem
) -> dict[str, tuple[str, ...]]:
    judged = {name: tuple(_reasons(spec, problem)) for name, spec in specs.items()}
    return {name: why for name, why in judged.items() if why}


def _reasons(spec: BackendSpec, problem: MoEProblem) -> list[str]:
    try:
        return spec.unsupported(problem)
    except Exception as error:  # a stranger's check function
        return [f"its check failed: {type(error).__name__}: {error}"]


def _require_named(explanation: Explanation, dispatcher: str | None, experts: str | None) -> None:
    faults = [
        (f"{kind} {name!r}", rejected[name])
        for kind, name, rejected in (
            ("dispatcher", dispatcher, explanation.rejected_dispatchers),
            ("experts", experts, explanation.rejected_experts),
        )
        if name is not None and name in rejected
    ]
    if faults:
        text = "; ".join(f"{who} cannot do this problem: {', '.join(why)}" for who, why in faults)
        raise Unsupported(
            f"{text}. See `python -m moekit explain` for what can",
            [reason for _, why in faults for reason in why],
        )


__all__ = ["BackendError", "Explanation", "Pair", "compose", "explain"]
