"""Observers of a kernel's calls: none on one rank, and labels for torch's profiler.

`ModularKernel` tells the observer of a call where the call has come to.
`moekit.runtime.group_calls` has the observers of calls in a group.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch

from moekit.errors import PeerFailed

if TYPE_CHECKING:
    from moekit.runtime.agreement import Agreement

_profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class Observer:
    """Follows one call, and does nothing. Methods of subclasses may raise, which ends the call.

    `bool` costs no Python frame, unlike a method, and small calls pay for each.

    arranged: the arguments are right; the dispatch follows.
    sent: the dispatch is launched.
    resumed: the call goes on after `ended`, and begins to wait for the tokens.
    arrived: the tokens are here; the experts follow.
    ready: a fused kernel has its scratch; only `run` follows.
    computed: the experts are launched; the combine follows.
    combining: the combine is launched.
    ended: the call has ended, or its part that dispatches, also if it failed.
    """

    arranged = sent = resumed = arrived = ready = computed = combining = ended = staticmethod(bool)

    def failed(self, error: BaseException) -> None:
        """Take note that ``error`` ends the call, unless this observer has raised it."""


_UNOBSERVED = Observer()


class Calls:
    """Makes the observers of a kernel's calls, here of a kernel on one rank.

    agreement: lets all ranks go on together; None if the kernel is unchecked or has no group.
    """

    agreement: Agreement | None = None
    _begin: Callable[[object, object], Observer] | None = None

    def __init__(self, dispatcher: str, experts: str) -> None:
        self._names = dispatcher, experts

    def begin(self, x: object, routing: object) -> Observer:
        """Return the observer of a call with arguments whose types nobody has checked.

        Raises PeerFailed in a group that a failed call has poisoned.
        """
        observer = _UNOBSERVED if self._begin is None else self._begin(x, routing)
        return cast(Observer, _Labels(observer, *self._names)) if _profiled() else observer

    def abort(self, error: Exception, max_tokens: int | None) -> None:
        """Tell the other ranks that ``error`` keeps this rank from its next call."""
        with suppress(PeerFailed):
            observer = self.begin(None, SimpleNamespace(max_tokens=max_tokens))
            try:
                observer.failed(error)
            finally:
                observer.ended()


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
