"""Selection: judge the backends for a problem, and compose the best to a kernel."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

from moekit.backends.bridge import bridge, local_spec
from moekit.contract import PrepareAndFinalize
from moekit.contract.explanation import Explanation
from moekit.contract.specs import BackendSpec, DispatcherSpec
from moekit.discovery.answers import check_dispatcher, check_experts, create
from moekit.discovery.registry import Registry, registry
from moekit.errors import GroupMismatch, MoekitError, NoBackend, PeerFailed, Unsupported
from moekit.kernel import ModularKernel
from moekit.problem import MoEProblem
from moekit.problem.problem import summary
from moekit.runtime.workspace import Workspace
from moekit.selection.candidates import Candidate
from moekit.selection.judge import Selection, judge
from moekit.selection.tuned import VARIABLE
from moekit.untrusted.arguments import FLAG, GROUP, NAME, TIMEOUT, accept, instance, optional
from moekit.untrusted.code import describe, message

logger = logging.getLogger("moekit")

SWITCHES = ("MOEKIT_DISPATCHER", "MOEKIT_EXPERTS", VARIABLE)

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
    """Judge every known backend for ``problem``, without creating any.

    Args:
        problem: what is to be computed, and where.
        dispatcher, experts: names; default: MOEKIT_DISPATCHER and MOEKIT_EXPERTS.
        backends: the backends to choose from; default: all that are installed.

    Raises UnknownBackend or NameClash for a name of no backend, or of more than one.
    """
    accept(_PROBLEM | _ASKED, locals())
    return judge(problem, dispatcher, experts, backends or registry()).explanation()


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
    """Create the best combination for ``problem``, and compose it to a kernel.

    A backend that nobody named and that cannot be loaded or made is skipped with a warning. Where
    tokens move, the call is collective: all ranks agree on a combination, then make its dispatcher
    together, so that no other one can take its place. The dispatcher's buffers are made on the
    thread's current device.

    Args:
        problem: what is to be computed, and where.
        dispatcher, experts: names; default: MOEKIT_DISPATCHER and MOEKIT_EXPERTS.
        group: the ranks that the layer is spread over; default: the default process group.
        workspace: the arena for scratch memory; default: one that kernels share.
        checked: see `ModularKernel`.
        peer_timeout: seconds to wait for another rank.
        backends: the backends to choose from; default: all that are installed.

    Raises:
        InvalidProblem: an argument has another type, or is out of range.
        Unsupported: a named backend cannot do the problem.
        NoBackend: no combination can.
        UnknownBackend, NameClash: a name means no backend, or more than one.
        BackendBroken: a named backend cannot be loaded or made.
        GroupMismatch: ranks chose differently, another rank raised, or the group does not fit.
        PeerFailed: a rank did not come within ``peer_timeout`` seconds.
    """
    accept(_PROBLEM | {"group": optional(GROUP)}, locals())
    moves = problem.parallel.moves_tokens
    if moves:
        from moekit.runtime.group import same_choice
    try:
        accept(_COMPOSED, locals())
        selection = judge(problem, dispatcher, experts, backends or registry())
        made = _make_best(selection, group)
    except Exception as error:
        if moves:  # the other ranks wait for this one's choice
            with suppress(GroupMismatch):
                same_choice("", group, describe(error), peer_timeout)
        raise
    if moves:
        same_choice(str(made.explanation.chosen), group, timeout=peer_timeout)
    logger.info("moekit: %s", made.explanation)
    tokens = made.dispatcher
    if tokens is None:
        tokens = create(made.dispatcher_class, made.dispatcher_spec, problem.dispatched, group)
    gemms: Any = made.experts or tokens
    try:
        if moves:
            check_experts(gemms, check_dispatcher(tokens))
        return _kernel_class(problem)(
            tokens,
            gemms,
            workspace=workspace,
            explanation=made.explanation,
            checked=checked,
            peer_timeout=peer_timeout,
        )
    except BaseException:
        tokens.destroy()  # nobody else could free its buffers
        raise


def _kernel_class(problem: MoEProblem) -> type[ModularKernel]:
    if not problem.training:
        return ModularKernel
    from moekit.training.kernel import TrainableKernel

    return TrainableKernel


# -- making ----------------------------------------------------------------------------------------


class _Made(NamedTuple):
    """The best combination whose classes load and whose experts could be made.

    dispatcher: None if all ranks must make it together. experts: None if the dispatcher is fused.
    """

    explanation: Explanation
    dispatcher_spec: DispatcherSpec
    dispatcher_class: type[PrepareAndFinalize]
    dispatcher: PrepareAndFinalize | None
    experts: Any


class _Failed(Exception):
    """A backend that cannot be loaded or made."""

    def __init__(self, spec: BackendSpec, error: MoekitError) -> None:
        self.spec, self.error = spec, error


@contextmanager
def _blaming(spec: BackendSpec) -> Iterator[None]:
    try:
        yield
    except (GroupMismatch, PeerFailed):
        raise  # these are about the ranks, not about the backend
    except MoekitError as error:
        raise _Failed(spec, error) from error


def _make_best(selection: Selection, group: dist.ProcessGroup | None) -> _Made:
    """Make the best candidate that can be made; raises as `compose` does."""
    _require_named(selection)
    while selection.ranking.candidates:
        candidate = selection.ranking.candidates[0]
        try:
            made = _make(candidate, selection, group)
        except _Failed as failed:
            if selection.named(failed.spec):
                raise failed.error from failed.error.__cause__
            reason = message(failed.error)
            logger.warning("moekit: passing over %s: %s", failed.spec.name, reason)
            selection = selection.without(failed.spec, reason)
            continue
        for spec in (candidate.dispatcher, candidate.experts):
            if not selection.named(spec) and spec.priority_for(selection.problem) < 0:
                logger.warning(
                    "moekit: nothing faster than the %s %r can do this problem:\n  %s",
                    spec.kind, spec.name, selection.why_not(),
                )  # fmt: skip
        return made
    raise NoBackend(
        f"no installed backends can do this: {summary(selection.problem)}\n  {selection.why_not()}",
        selection.explanation().reasons(),
    )


def _make(candidate: Candidate, selection: Selection, group: dist.ProcessGroup | None) -> _Made:
    problem, tokens = selection.problem, None
    gemms: Any = None
    dispatcher, experts = candidate.dispatcher, candidate.experts
    moves = problem.parallel.moves_tokens
    if not moves and group is not None and (dispatcher.moves_tokens or dispatcher.fused):
        from moekit.runtime.group import resolve

        group = resolve(problem, group)
    if dispatcher.moves_tokens and not moves:
        dispatcher = local_spec(dispatcher)
    if problem.training:
        dispatcher = dispatcher.for_training()
    experts = replace(experts, target=experts.target_for(problem) or experts.target)
    with _blaming(dispatcher):
        dispatcher_class = dispatcher.load()
    # Experts first: they hold nothing that would have to be freed if the dispatcher fails.
    if not experts.fused:
        with _blaming(experts):
            gemms = bridge(experts.load(), experts, problem, dispatcher.format)
    if not moves:
        with _blaming(dispatcher):
            tokens = create(dispatcher_class, dispatcher, problem.dispatched, group)
            rows = check_dispatcher(tokens)
        with _blaming(experts):
            check_experts(gemms or tokens, rows)
    return _Made(selection.explanation(), dispatcher, dispatcher_class, tokens, gemms)


def _require_named(selection: Selection) -> None:
    """Raise Unsupported if a named backend cannot do the problem."""
    explanation = selection.explanation()
    reasons = {n: why for n, why in explanation.reasons().items() if n in explanation.named}
    if not reasons:
        return
    texts = []
    for key, why in reasons.items():
        kind, name = key.split(" ", 1)
        texts.append(f"{kind} {name!r} cannot do this problem: {', '.join(why)}")
    raise Unsupported(
        f"{'; '.join(texts)} (chosen {explanation.why}). See "
        "`python -m moekit explain` for what can",
        [reason for why in reasons.values() for reason in why],
    )
