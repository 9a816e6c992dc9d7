"""Observers of calls in a group of ranks: one call at a time, and collective checks.

A checked observer waits at each point until the other ranks have come as well, and raises what
they report.
"""

from __future__ import annotations

from functools import partial
from threading import RLock

from torch import Tensor

from moekit.contract import PrepareAndFinalize
from moekit.runtime.agreement import Agreement
from moekit.runtime.calls import Calls, Observer
from moekit.runtime.group import join
from moekit.untrusted.code import describe


class GroupCalls(Calls):
    """Makes the observers of calls that move tokens, or that several ranks make together."""

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
        super().__init__(dispatcher.spec.name, experts)
        moves, turn = dispatcher.spec.moves_tokens, RLock()
        if dispatcher.group is not None:
            name, agreement = join(dispatcher.group, timeout, checked)
            turn = agreement.turn
            if checked:
                self.agreement = agreement
                self._begin = partial(_Checked, agreement, name, moves)
        if moves and self.agreement is None:
            self._begin = partial(_Unchecked, turn, dispatcher)


class _InTurn(Observer):
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

    def __init__(
        self, turn: RLock, dispatcher: PrepareAndFinalize, x: object, routing: object
    ) -> None:
        super().__init__(turn)
        self._dispatcher: PrepareAndFinalize | None = dispatcher
        self._routing = routing

    def arranged(self) -> None:  # type: ignore[override]
        self._dispatcher = None

    def failed(self, error: BaseException) -> None:
        # `abort` waits for the other ranks: no interrupt may do that.
        if self._dispatcher is not None and isinstance(error, Exception):
            most = getattr(self._routing, "max_tokens", None)
            self._dispatcher.serving(most).abort(describe(error))


class _Checked(_InTurn):
    """A checked call: each of its steps ends on all ranks, or raises on all of them."""

    def __init__(
        self, agreement: Agreement, name: str, moves: bool, x: object, routing: object
    ) -> None:
        super().__init__(agreement.turn)
        self._agreement, self._name, self._moves = agreement, name, moves
        self._step = "start"  # under way on this rank; "" once the other ranks know how it ended
        if moves:
            most = getattr(routing, "max_tokens", None)
            self._more = "" if most is None else f" with max_tokens={most}"
        else:  # all ranks hold the same tokens
            self._more = f" with x {tuple(x.shape) if isinstance(x, Tensor) else ()}"
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

    def ready(self) -> None:  # type: ignore[override]
        self._agree("run the fused kernel of")

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
