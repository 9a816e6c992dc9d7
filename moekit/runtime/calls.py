"""Drivers of a kernel's calls: on this rank alone, or with collective checks between its ranks.

`ModularKernel` writes the flow of a call as a generator. It pauses four times: when the arguments
are checked, when the dispatch is launched, when the experts are launched, and when the combine is
launched. The last pause yields the pending output, and the one before may yield a fault of this
rank's experts: the driver raises it where other ranks hear of it, then closes the flow. `SoloCalls`
runs from pause to pause without a check; `GroupCalls` makes a collective check at each pause.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext, suppress

from torch import Tensor

from moekit.contract import PrepareAndFinalize
from moekit.errors import PeerFailed
from moekit.runtime.agreement import Agreement, CollectiveCheck, turn_in
from moekit.runtime.group import join
from moekit.runtime.overlap import Pending

Flow = Generator["Pending[Tensor] | BaseException | None", None, None]


def calls_of(
    dispatcher: PrepareAndFinalize, timeout: float, checked: bool
) -> SoloCalls | GroupCalls:
    """Return what runs the calls of a kernel with this dispatcher.

    Collective if the dispatcher has a group. Raises GroupMismatch on all ranks if only some are
    checked, and PeerFailed if a rank does not come within ``timeout`` seconds.
    """
    name, agreement = "", None
    if dispatcher.group is not None:
        name, agreement = join(dispatcher.group, timeout, checked)
    if agreement is None and not dispatcher.spec.moves_tokens:
        return SoloCalls()
    return GroupCalls(dispatcher, name, agreement)


class SoloCalls:
    """No other rank waits for this rank's calls."""

    agreement: Agreement | None = None

    def call(self, flow: Flow, x: Tensor) -> Tensor:
        for found in flow:
            if found is not None:
                out = _raised_or_pending(found, flow).result()
        return out

    def start(self, flow: Flow, x: Tensor) -> str:
        """Run the flow until the dispatch is launched. Return what `run` takes."""
        next(flow)
        next(flow)
        return ""

    def run(self, flow: Flow, started: str) -> Pending[Tensor]:
        if (fault := next(flow)) is not None:
            _raised_or_pending(fault, flow)
        return _combining(flow)

    def abort(self, error: Exception) -> None:
        """Do nothing: no rank waits."""


class GroupCalls:
    """Ranks exchange tokens, or check each other.

    With an agreement, every step of a call ends on all ranks or raises on all of them. Without
    one, a rank that fails before its dispatch tells the others through `PrepareAndFinalize.abort`.
    """

    def __init__(
        self, dispatcher: PrepareAndFinalize, name: str, agreement: Agreement | None
    ) -> None:
        """name: what all ranks call the kernel."""
        self.agreement = agreement
        self._dispatcher, self._name = dispatcher, name
        self._moves = dispatcher.spec.moves_tokens
        self._turn = nullcontext() if dispatcher.group is None else turn_in(dispatcher.group)

    def call(self, flow: Flow, x: Tensor) -> Tensor:
        with self._turn:
            return self.run(flow, self.start(flow, x)).result()

    def start(self, flow: Flow, x: Tensor) -> str:
        # Where nothing moves, all ranks hold the same tokens.
        shape = tuple(x.shape) if isinstance(x, Tensor) else ()
        same = "" if self._moves else f" with x {shape}"
        with self._check("start", same, self._dispatcher.abort if self._moves else None):
            next(flow)
        # All ranks number a call alike, so ranks that are at different calls notice.
        started = "" if self.agreement is None else f" (started at step {self.agreement.step})"
        with self._check("dispatch", started, moving=self._moves):
            next(flow)
        return started

    def run(self, flow: Flow, started: str) -> Pending[Tensor]:
        try:
            with self._check("run the experts of", started):
                if isinstance(fault := next(flow), BaseException):
                    raise fault
        except BaseException:
            flow.close()  # this rank's experts failed, or another rank's did
            raise
        with self._check("combine", started, moving=self._moves):
            return _combining(flow)

    def abort(self, error: Exception) -> None:
        """Tell the other ranks that this rank cannot start its next call."""
        check = self._check("start", "", self._dispatcher.abort)
        with suppress(type(error), PeerFailed), check:
            raise error

    def _check(
        self,
        step: str,
        more: str,
        otherwise: Callable[[str], None] | None = None,
        *,
        moving: bool = False,
    ) -> AbstractContextManager[None]:
        if self.agreement is None and otherwise is None:
            return nullcontext()
        what = f"{step} a call of {self._name}{more}"
        return CollectiveCheck(self.agreement, what, otherwise, moving=moving)


def _raised_or_pending(found: Pending[Tensor] | BaseException, flow: Flow) -> Pending[Tensor]:
    if isinstance(found, BaseException):
        flow.close()
        raise found
    return found


def _combining(flow: Flow) -> Pending[Tensor]:
    combining = next(flow)
    assert isinstance(combining, Pending), "finalize must return a Pending"
    return combining
