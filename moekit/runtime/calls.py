"""Observers of a kernel's calls: collective checks, and labels for torch's profiler.

`ModularKernel` tells the observer of a call where the call has come to. In a group, the observer
waits there until the other ranks have come as well, and raises what they report.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import RLock
from typing import Protocol, cast

import torch
from torch import Tensor

from moekit.contract import PrepareAndFinalize
from moekit.errors import PeerFailed
from moekit.runtime.agreement import Agreement, turn_in
from moekit.runtime.group import join
from moekit.untrusted.code import describe

_profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class Observer(Protocol):
    """Follows one call. All methods but `failed` may raise, which ends the call."""

    def arranged(self) -> object:
        """Pass from the arguments, which are right, to the dispatch."""

    def sent(self) -> object:
        """Pass the launch of the dispatch."""

    def resumed(self) -> object:
        """Go on after `ended`, and begin to wait for the tokens."""

    def arrived(self) -> object:
        """Pass to the experts: the tokens are here."""

    def computed(self) -> object:
        """Pass from the launch of the experts to the combine."""

    def combining(self) -> object:
        """Pass the launch of the combine."""

    def failed(self, error: BaseException) -> object:
        """Take note that ``error`` ends the call, unless this observer has raised it."""

    def ended(self) -> object:
        """Pass the end of the call, or of its part that dispatches, also if it failed."""


class _Unobserved:
    """Does nothing. `bool` costs no Python frame, unlike a method, and small calls pay for each."""

    arranged = sent = resumed = arrived = computed = combining = ended = staticmethod(bool)

    def failed(self, error: BaseException) -> None:
        """Do nothing: no rank waits."""


_UNOBSERVED = _Unobserved()


class Calls:
    """Makes the observers of a kernel's calls.

    agreement: lets all ranks go on together; None if the kernel is unchecked or has no group.
    """

    def __init__(
        self, dispatcher: PrepareAndFinalize, experts: str, timeout: float, checked: bool
    ) -> None:
        """Join the group of the dispatcher, if it has one; then this is collective.

        Args:
            experts: the name in their spec.
            timeout: seconds to wait for another rank.

        Raises:
            GroupMismatch: on all ranks, if only some are checked.
            PeerFailed: a rank does not come within ``timeout`` seconds.
        """
        self.agreement: Agreement | None = None
        self._turn = RLock()
        if dispatcher.group is not None:
            self._name, self.agreement = join(dispatcher.group, timeout, checked)
            self._turn = turn_in(dispatcher.group)
        self._dispatcher, self._experts = dispatcher, experts
        self._moves = dispatcher.spec.moves_tokens
        self._alone = self.agreement is None and not self._moves

    def begin(self, x: object, routing: object) -> Observer:
        """Return the observer of a call with arguments whose types nobody has checked.

        Raises PeerFailed in a group that a failed call has poisoned.
        """
        observer = _UNOBSERVED if self._alone else self._in_group(x, routing)
        if _profiled():
            names = self._dispatcher.spec.name, self._experts
            return cast(Observer, _Labels(observer, *names))
        return observer

    def abort(self, error: Exception) -> None:
        """Tell the other ranks that ``error`` keeps this rank from its next call."""
        with suppress(PeerFailed):
            observer = self.begin(None, None)
            try:
                observer.failed(error)
            finally:
                observer.ended()

    def _in_group(self, x: object, routing: object) -> Observer:
        if self.agreement is None:
            return _Unchecked(self._turn, self._dispatcher)
        if self._moves:
            most = getattr(routing, "max_tokens", None)
            same = "" if most is None else f" with max_tokens={most}"
        else:  # all ranks hold the same tokens
            same = f" with x {tuple(x.shape) if isinstance(x, Tensor) else ()}"
        return _Checked(self._turn, self.agreement, self._name, self._moves, same)


class _InTurn(_Unobserved):
    """A call of a group, whose collectives must run in one order on all ranks.

    turn: the lock that a thread holds while its call runs.
    """

    def __init__(self, turn: RLock) -> None:
        self._turn = turn
        turn.acquire()

    def resumed(self) -> None:  # type: ignore[override]
        self._turn.acquire()

    def ended(self) -> None:  # type: ignore[override]
        self._turn.release()


class _Unchecked(_InTurn):
    """A call that moves tokens. If it fails before its dispatch, the other ranks hear of it."""

    def __init__(self, turn: RLock, dispatcher: PrepareAndFinalize) -> None:
        super().__init__(turn)
        self._abort: Callable[[str], None] | None = dispatcher.abort

    def arranged(self) -> None:  # type: ignore[override]
        self._abort = None

    def failed(self, error: BaseException) -> None:
        # `abort` waits for the other ranks: no interrupt may do that.
        if self._abort is not None and isinstance(error, Exception):
            self._abort(describe(error))


class _Checked(_InTurn):
    """A checked call: each of its four steps ends on all ranks, or raises on all of them."""

    def __init__(
        self, turn: RLock, agreement: Agreement, name: str, moves: bool, same: str
    ) -> None:
        """same: what must be equal on all ranks, as text."""
        super().__init__(turn)
        self._agreement, self._name, self._moves = agreement, name, moves
        self._step = "start"  # under way on this rank; "" once the other ranks know how it ended
        self._more = same
        self._enter()

    def arranged(self) -> None:  # type: ignore[override]
        self._agree("dispatch")
        # All ranks count their steps, so they notice if they are at different calls.
        self._more = f" (started at step {self._agreement.step})"

    def sent(self) -> None:  # type: ignore[override]
        self._agree("run the experts of", moving=self._moves)

    def resumed(self) -> None:  # type: ignore[override]
        super().resumed()
        self._enter()

    def computed(self) -> None:  # type: ignore[override]
        self._agree("combine")

    def combining(self) -> None:  # type: ignore[override]
        self._agree("", moving=self._moves)

    def failed(self, error: BaseException) -> None:
        if what := self._ending():
            self._agreement.agree(what, describe(error))

    def _enter(self) -> None:
        """Raise PeerFailed in a poisoned group, where a device may wait without end."""
        step = self._step
        try:
            self._agreement.enter(self._ending())
        except BaseException:
            self.ended()
            raise
        self._step = step

    def _agree(self, following: str, *, moving: bool = False) -> None:
        """End the step on all ranks, or raise PeerFailed on all; then pass to the next."""
        self._agreement.agree(self._ending(), moving=moving)
        self._step = following

    def _ending(self) -> str:
        """Return what other ranks know the step as, and leave it: no error of it is told twice."""
        step, self._step = self._step, ""
        return step and f"{step} a call of {self._name}{self._more}"


class _Labels:
    """Labels the dispatch, the experts and the combine in torch's profiler."""

    def __init__(self, observer: Observer, dispatcher: str, experts: str) -> None:
        self._observer = observer
        self._label: torch.profiler.record_function | None = None
        self._begins = {
            "arranged": f"moekit dispatch: {dispatcher}",
            "arrived": f"moekit experts: {experts}",
            "computed": f"moekit combine: {dispatcher}",
        }

    def __getattr__(self, point: str) -> Callable[..., None]:
        return partial(self._pass, point)

    def _pass(self, point: str, *error: BaseException) -> None:
        """End the label that is under way, pass the point, and begin the label that follows."""
        if self._label is not None:
            self._label.__exit__(None, None, None)
            self._label = None
        getattr(self._observer, point)(*error)
        if point in self._begins:
            self._label = torch.profiler.record_function(self._begins[point])
            self._label.__enter__()  # type: ignore[no-untyped-call]
