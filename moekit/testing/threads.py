"""Run two threads alternately, so that concurrent calls meet at every operator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from moekit.training.operators import show_inside

# Seconds after which a thread goes on out of turn, as the other may wait for its lock; and while
# that one has not moved since.
_PATIENCE, _LESS_PATIENCE = 1.0, 0.001
# Seconds after which two threads count as blocked by each other.
_DEADLOCK = 600.0


class _Turns:
    """Lets two threads run alternately."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn, self._alone = 0, False
        self._blocked = -1  # the thread that did not take its turn

    def pass_on(self, me: int) -> None:
        """Let the other thread go on, and wait until it passes the turn back, ends, or blocks."""
        with self._changed:
            other = self._turn = 1 - me
            if self._blocked == me:
                self._blocked = -1
            self._changed.notify_all()
            patience = _LESS_PATIENCE if self._blocked == other else _PATIENCE
            if not self._changed.wait_for(lambda: self._turn == me or self._alone, patience):
                self._blocked = other

    def end(self) -> None:
        with self._changed:
            self._alone = True
            self._changed.notify_all()


class _TakesTurns(TorchDispatchMode):
    """Gives the turn to the other thread after every operator."""

    def __init__(self, turns: _Turns, me: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._turns, self._me = turns, me

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self._turns.pass_on(self._me)
        return result


show_inside(_TakesTurns)


def alternately(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both concurrently, each in a thread, and switch threads after every torch operator.

    Raises what one of them raises.
    """
    turns, both = _Turns(), threading.Barrier(2)

    def run(me: int, function: Callable[[], None]) -> None:
        try:
            with _TakesTurns(turns, me):
                both.wait()  # the first would run ahead of a thread that starts late
                function()
        finally:
            turns.end()

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(run, me, f) for me, f in enumerate((first, second))]
        for future in running:
            future.result(_DEADLOCK)
