"""Which pair of backends, and why: every candidate, every reason, one order."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moekit.bridge import bridge
from moekit.errors import BackendBroken, NameClash, NoBackend, UnknownBackend, Unsupported
from moekit.kernel import ModularKernel, Workspace
from moekit.plugins import BackendSpec, DispatcherSpec, ExpertsSpec, Registry, SpecT, registry
from moekit.problem import MoEProblem

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger("moekit")

SWITCHES = ("MOEKIT_DISPATCHER", "MOEKIT_EXPERTS")
_BY_NAME = "by name"
# In priority: a bridge costs copies, and padded rows, but less than a reference backend (-100).
_BRIDGE_COST = 50


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
        lines += [f"  not {name}: {'; '.join(why)}" for name, why in self.reasons().items()]
        return "\n".join(lines)

    def _without(self, spec: BackendSpec, reason: str) -> Explanation:
        """The same with one more backend rejected."""
        more = {spec.name: (reason,)}
        if isinstance(spec, DispatcherSpec):
            pairs = tuple(p for p in self.pairs if p.dispatcher != spec.name)
            rejected = {**self.rejected_dispatchers, **more}
            return replace(self, pairs=pairs, rejected_dispatchers=rejected)
        pairs = tuple(p for p in self.pairs if p.experts != spec.name)
        return replace(self, pairs=pairs, rejected_experts={**self.rejected_experts, **more})


def summary(problem: MoEProblem) -> str:
    """``problem`` in one line, for people (``repr`` is for Python)."""
    p, parallel = problem, problem.parallel
    limit = f" (limit {p.activation.limit:g})" if p.activation.clamped else ""
    words = [
        f"{p.num_experts} experts",
        f"top {p.top_k}",
        f"hidden {p.hidden_size}",
        f"intermediate {p.intermediate_size}",
        p.dtype_name,
        f"quant {p.quant.name}",
        p.activation.name + limit,
    ]
    words += ["bias"] if p.has_bias else []
    words += ["weight on input"] if p.apply_router_weight_on_input else []
    words += [f"{p.num_redundant_experts} redundant"] if p.num_redundant_experts else []
    words += [] if p.max_num_tokens is None else [f"at most {p.max_num_tokens} tokens"]
    for kind in ("ep", "tp", "dp"):
        if (size := getattr(parallel, f"{kind}_size")) > 1:
            words.append(f"{kind} {size}")
    return f"{', '.join(words)} on {p.device}"


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
    dispatcher, dispatcher_by = _asked(dispatcher, "MOEKIT_DISPATCHER")
    experts, experts_by = _asked(experts, "MOEKIT_EXPERTS")
    dispatchers: Mapping[str, DispatcherSpec] = backends.dispatchers
    if dispatcher is not None:
        dispatchers = {dispatcher: _find(backends.dispatcher, dispatcher, dispatcher_by)}
    candidates: Mapping[str, ExpertsSpec] = backends.experts
    if experts is not None:
        candidates = {experts: _find(backends.expert, experts, experts_by)}

    bad_dispatchers = _rejected(dispatchers, problem)
    bad_experts = _rejected(candidates, problem)
    scored = []
    for d in dispatchers.values():
        for e in candidates.values():
            if d.name in bad_dispatchers or e.name in bad_experts:
                continue
            bridged = d.format is not e.format
            score = (
                d.priority_for(problem) + e.priority_for(problem) - (_BRIDGE_COST if bridged else 0)
            )
            scored.append(((-score, d.name, e.name), Pair(d.name, e.name, bridged)))
    pairs = tuple(pair for _, pair in sorted(scored, key=lambda item: item[0]))
    why = dispatcher_by
    if dispatcher_by != experts_by:
        why = f"dispatcher {dispatcher_by}, experts {experts_by}"
    return Explanation(problem, pairs, why, bad_dispatchers, bad_experts)


def compose(
    problem: MoEProblem,
    dispatcher: str | None = None,
    experts: str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    workspace: Workspace | None = None,
    checked: bool | None = None,
    peer_timeout: float = 60.0,
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
    dispatcher, _ = _asked(dispatcher, "MOEKIT_DISPATCHER")
    experts, _ = _asked(experts, "MOEKIT_EXPERTS")
    _require_named(explanation, dispatcher, experts)
    while (pair := explanation.chosen) is not None:
        dispatcher_spec = backends.dispatcher(pair.dispatcher)
        experts_spec = backends.expert(pair.experts)
        spec: BackendSpec = dispatcher_spec
        try:
            dispatcher_class = dispatcher_spec.load()
            spec = experts_spec
            experts_class = experts_spec.load()
        except BackendBroken as error:
            if spec.name == (dispatcher if spec is dispatcher_spec else experts):
                raise
            logger.warning("passing over %s: %s", spec.name, error)
            explanation = explanation._without(spec, str(error))
            continue
        logger.info("moekit: %s", explanation)
        # Experts first: they hold nothing that would have to be freed if the dispatcher fails.
        gemms = bridge(experts_class, experts_spec, problem, dispatcher_spec.format)
        return ModularKernel(
            dispatcher_class(dispatcher_spec, problem, group),
            gemms,
            workspace=workspace,
            explanation=explanation,
            checked=checked,
            peer_timeout=peer_timeout,
        )
    reasons = explanation.reasons()
    lines = [f"{name}: {'; '.join(why)}" for name, why in reasons.items()]
    text = "\n  ".join([*lines, *backends.faults()])
    raise NoBackend(f"no installed backends can do this: {summary(problem)}\n  {text}", reasons)


def _asked(name: str | None, variable: str) -> tuple[str | None, str]:
    """The name insisted on, and what the choice is made by."""
    if name is not None:
        return name, _BY_NAME
    name = os.environ.get(variable) or None
    return name, f"by {variable}" if name else "by priority"


def _find(find: Callable[[str], SpecT], name: str, chosen_by: str) -> SpecT:
    try:
        return find(name)
    except (UnknownBackend, NameClash) as error:
        if chosen_by == _BY_NAME:
            raise
        raise type(error)(f"{error}\n  (chosen {chosen_by})") from error


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
            f"{text} (chosen {explanation.why}). See `python -m moekit explain` for what can",
            [reason for _, why in faults for reason in why],
        )
