"""Which pair of backends, and why: every candidate, every reason, one order."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from moekit.backends.bridge import bridge
from moekit.backends.composite_experts import CompositeKernel
from moekit.contract import PermuteExpertsUnpermute, PrepareAndFinalize
from moekit.discovery.answers import check_dispatcher, check_experts, create
from moekit.discovery.registry import Registry, registry
from moekit.discovery.specs import BackendSpec, DispatcherSpec, ExpertsSpec, SpecT
from moekit.errors import (
    GroupMismatch,
    MoekitError,
    NameClash,
    NoBackend,
    PeerFailed,
    UnknownBackend,
    Unsupported,
)
from moekit.kernel import ModularKernel
from moekit.problem import ActivationFormat, MoEProblem
from moekit.runtime.group import same_choice
from moekit.runtime.workspace import Workspace
from moekit.selection import tuned as tune
from moekit.selection.composite import CompositeSpec, composite, weights_in_fp32
from moekit.selection.explanation import Explanation, Pair, summary
from moekit.untrusted.arguments import FLAG, GROUP, NAME, TIMEOUT, accept, instance, optional
from moekit.untrusted.code import message

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger("moekit")

SWITCHES = ("MOEKIT_DISPATCHER", "MOEKIT_EXPERTS", tune.VARIABLE)
_BY_NAME, _BY_PRIORITY = "by name", "by priority"
# In priority: a bridge costs copies, and padded rows, but less than a reference backend (-100).
_BRIDGE_COST = 50


_PROBLEM = {"problem": instance("a MoEProblem", MoEProblem)}
_ASKED = dict.fromkeys(("dispatcher", "experts"), optional(NAME)) | {
    "backends": optional(instance("a Registry", Registry))
}
_COMPOSED = _ASKED | {
    "workspace": optional(instance("a Workspace", Workspace)),
    "checked": optional(FLAG),
    "peer_timeout": TIMEOUT,
}


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
    accept(_PROBLEM | _ASKED, locals())
    backends = backends or registry()
    dispatcher, dispatcher_by = _asked(dispatcher, "MOEKIT_DISPATCHER")
    experts, experts_by = _asked(experts, "MOEKIT_EXPERTS")
    dispatchers: Mapping[str, DispatcherSpec] = backends.dispatchers
    if dispatcher is not None:
        dispatchers = {dispatcher: _find(backends.dispatcher, dispatcher, dispatcher_by)}
    candidates: Mapping[str, ExpertsSpec] = backends.experts
    if experts is not None:
        candidates = {experts: _find(lambda n: find_experts(n, backends), experts, experts_by)}

    bad_dispatchers = _rejected(dispatchers, problem)
    bad_experts = _rejected(candidates, problem)
    scored = []
    for d in dispatchers.values():
        for e in candidates.values():
            if d.name in bad_dispatchers or e.name in bad_experts:
                continue
            bridged = _bridged(d, e)
            score = (
                d.priority_for(problem) + e.priority_for(problem) - (_BRIDGE_COST if bridged else 0)
            )
            scored.append(((-score, d.name, e.name), Pair(d.name, e.name, bridged)))
    pairs = tuple(pair for _, pair in sorted(scored, key=lambda item: item[0]))
    pairs, found, note = _by_measurement(problem, pairs, dispatchers, candidates)
    if isinstance(named := candidates.get(experts or ""), CompositeSpec):
        note = named.memory_note(problem)
    if pairs:
        notes = [note] if note else []
        chosen = find_experts(pairs[0].experts, backends)
        notes += _notes(problem, dispatchers[pairs[0].dispatcher], chosen)
        note = "; ".join(notes)
    if found is not None and experts_by == _BY_PRIORITY:
        experts_by = f"by measurement ({found})"
    if found is not None and dispatcher_by == _BY_PRIORITY and not found.borrowed:
        dispatcher_by = f"by measurement ({found})"
    why = dispatcher_by
    if dispatcher_by != experts_by:
        why = f"dispatcher {dispatcher_by}, experts {experts_by}"
    return Explanation(problem, pairs, why, bad_dispatchers, bad_experts, note)


def _notes(problem: MoEProblem, dispatcher: DispatcherSpec, experts: ExpertsSpec) -> Iterator[str]:
    """What users should know of the numbers of the chosen combination."""
    members = experts.members if isinstance(experts, CompositeSpec) else (experts,)
    for member in members:
        if problem.quant.activation is not None and member.emulates:
            yield f"{member.name} emulates {problem.quant.name}: it quantizes no activations itself"
        if how := member.description(problem):
            yield f"{member.name}: {how}"
    taken = dispatcher.weights_in_fp32 or not dispatcher.applies_weights
    kept = taken and all(weights_in_fp32(member, dispatcher.format) for member in members)
    if problem.dtype_name == "float16" and not kept:
        yield (
            "an expert's output above 65504 becomes infinite in float16, whatever its router weight"
        )


def find_experts(name: str, backends: Registry) -> ExpertsSpec:
    """The named backend, or the composite of that name; raises UnknownBackend or NameClash."""
    return composite(name, backends.expert) if "|" in name else backends.expert(name)


def _bridged(dispatcher: DispatcherSpec, experts: ExpertsSpec) -> bool:
    members = experts.members if isinstance(experts, CompositeSpec) else (experts,)
    return any(m.format is not dispatcher.format for m in members)


def _by_measurement(
    problem: MoEProblem,
    pairs: tuple[Pair, ...],
    dispatchers: Mapping[str, DispatcherSpec],
    candidates: Mapping[str, ExpertsSpec],
) -> tuple[tuple[Pair, ...], tune.Found | None, str]:
    """``pairs`` in the order of the tuned tables, what they know (None: nothing), and a note.

    Measured pairs come before others, which follow by priority: they may be better, but nobody has
    seen it. Experts that were measured on one rank alone are ordered where tokens come as rows, as
    they did then; the dispatcher is not. One measured pair is no comparison, and changes nothing.
    Experts of negative priority are for those who name them, however fast.
    """
    found = tune.lookup(problem)
    if found is None:
        return pairs, None, ""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.dispatcher, []).append(pair)
    choices: dict[str, tune.Choice] = {}
    for name, group in groups.items():
        rows = dispatchers[name].format is ActivationFormat.STANDARD
        source = name if not found.borrowed else "local" if rows else ""
        names = [p.experts for p in group if candidates[p.experts].priority_for(problem) >= 0]
        if choice := found.choose(source, names):
            choices[name] = choice
    order = list(groups)
    if not found.borrowed:
        order.sort(key=lambda name: choices[name].plan.cost if name in choices else math.inf)
    if sum(len(c.order) for c in choices.values()) < 2 or order[0] not in choices:
        return pairs, None, ""
    result: list[Pair] = []
    for name in order:
        left = {pair.experts: pair for pair in groups[name]}
        if name in choices:
            choice = choices[name]
            result += _composites(problem, dispatchers[name], candidates, choice)
            result += [left.pop(experts) for experts in choice.order]
        result += left.values()
    return tuple(result), found, choices[order[0]].note


def _composites(
    problem: MoEProblem,
    dispatcher: DispatcherSpec,
    candidates: Mapping[str, ExpertsSpec],
    choice: tune.Choice,
) -> list[Pair]:
    """The composite that the choice asks for, if it does and its members go together."""
    if len(choice.plan.buckets) == 1:
        return []
    spec = composite(tune.join(choice.plan.buckets), candidates.__getitem__)
    if spec.seen_from(dispatcher.format).unsupported(problem):
        return []
    return [Pair(dispatcher.name, spec.name, _bridged(dispatcher, spec))]


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

    Collective where tokens move. Raises Unsupported (a named backend cannot), NoBackend (none
    can), UnknownBackend, NameClash, BackendBroken, GroupMismatch (also where ranks choose
    differently, or another one raises). A backend that cannot be loaded or made is passed over
    with a warning when nobody named it. A dispatcher that moves tokens is made by all ranks
    together, after they agreed on it, so nothing takes its place.
    """
    accept(_PROBLEM | {"group": optional(GROUP)}, locals())
    moves = problem.parallel.moves_tokens
    try:
        accept(_COMPOSED, locals())
        chosen = _choose(problem, dispatcher, experts, group, backends or registry())
    except MoekitError as error:
        if moves:  # the others must hear of it
            with suppress(GroupMismatch):
                same_choice("", group, f"{type(error).__name__}: {message(error)}", peer_timeout)
        raise
    if moves:
        same_choice(str(chosen.explanation.chosen), group, timeout=peer_timeout)
    logger.info("moekit: %s", chosen.explanation)
    tokens = chosen.dispatcher
    if tokens is None:
        tokens = create(chosen.dispatcher_class, chosen.dispatcher_spec, problem, group)
        check_experts(chosen.experts, check_dispatcher(tokens))
    return chosen.kernel_class(
        tokens,
        chosen.experts,
        workspace=workspace,
        explanation=chosen.explanation,
        checked=checked,
        peer_timeout=peer_timeout,
    )


class _Chosen(NamedTuple):
    """The best pair whose classes load and whose experts could be made; and the dispatcher, unless
    all ranks must make it together."""

    explanation: Explanation
    dispatcher_spec: DispatcherSpec
    dispatcher_class: type[PrepareAndFinalize]
    dispatcher: PrepareAndFinalize | None
    experts: PermuteExpertsUnpermute
    kernel_class: type[ModularKernel]


def _choose(
    problem: MoEProblem,
    dispatcher: str | None,
    experts: str | None,
    group: dist.ProcessGroup | None,
    backends: Registry,
) -> _Chosen:
    """What `compose` composes, by this rank alone; raises as it does."""
    explanation = explain(problem, dispatcher, experts, backends=backends)
    dispatcher, _ = _asked(dispatcher, "MOEKIT_DISPATCHER")
    experts, _ = _asked(experts, "MOEKIT_EXPERTS")
    _require_named(explanation, dispatcher, experts)
    while (pair := explanation.chosen) is not None:
        dispatcher_spec = backends.dispatcher(pair.dispatcher)
        experts_spec = find_experts(pair.experts, backends)
        kernel_class: type[ModularKernel] = ModularKernel
        if isinstance(experts_spec, CompositeSpec):
            experts_spec = experts_spec.seen_from(dispatcher_spec.format)
            kernel_class = CompositeKernel
        spec: BackendSpec = dispatcher_spec
        tokens: PrepareAndFinalize | None = None
        try:
            dispatcher_class = dispatcher_spec.load()
            # Experts first: they hold nothing that would have to be freed if the dispatcher fails.
            spec = experts_spec
            gemms = bridge(experts_spec.load(), experts_spec, problem, dispatcher_spec.format)
            if not problem.parallel.moves_tokens:
                spec = dispatcher_spec
                tokens = create(dispatcher_class, dispatcher_spec, problem, group)
                rows = check_dispatcher(tokens)
                spec = experts_spec
                check_experts(gemms, rows)
        except (GroupMismatch, PeerFailed):
            raise  # about the ranks, not about the backend
        except MoekitError as error:
            if spec.name == (dispatcher if spec is dispatcher_spec else experts):
                raise
            logger.warning("moekit: passing over %s: %s", spec.name, message(error))
            explanation = explanation._without(spec, message(error))
            continue
        for spec, name in ((dispatcher_spec, dispatcher), (experts_spec, experts)):
            if name is None and spec.priority_for(problem) < 0:
                logger.warning(
                    "moekit: nothing faster than the %s %r can do this problem:\n  %s",
                    spec.kind, spec.name, _why_not(explanation, backends),
                )  # fmt: skip
        return _Chosen(
            explanation, dispatcher_spec, dispatcher_class, tokens, gemms, kernel_class
        )  # fmt: skip
    raise NoBackend(
        f"no installed backends can do this: {summary(problem)}\n  "
        f"{_why_not(explanation, backends)}",
        explanation.reasons(),
    )


def _why_not(explanation: Explanation, backends: Registry) -> str:
    lines = [f"{name}: {'; '.join(why)}" for name, why in explanation.reasons().items()]
    return "\n  ".join([*lines, *backends.faults()])


def _asked(name: str | None, variable: str) -> tuple[str | None, str]:
    """The name insisted on, and what the choice is made by."""
    if name is not None:
        return name, _BY_NAME
    name = os.environ.get(variable) or None
    return name, f"by {variable}" if name else _BY_PRIORITY


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
    judged = {name: tuple(spec.unsupported(problem)) for name, spec in specs.items()}
    return {name: why for name, why in judged.items() if why}


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
