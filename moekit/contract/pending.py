"""Values that are not there yet, and calls in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from moekit.errors import MoekitError

T = TypeVar("T")


class Pending(Generic[T]):
    """A value that is not there yet. `result` waits for it once, and returns it again for free."""

    _lock: threading.RLock | None = None
    _failed = ""
    _value: T

    def __init__(self, wait: Callable[[], T]) -> None:
        self._wait: Callable[[], T] | None = wait
        self._lock = threading.RLock()

    @classmethod
    def ready(cls, value: T) -> Pending[T]:
        """Return a pending value that is there already."""
        made = cls.__new__(cls)
        made._value = value
        return made

    def result(self) -> T:
        """Wait for the value. A wait that raised is not repeated: later calls raise MoekitError."""
        if self._lock is not None:
            with self._lock:  # of two threads, one waits for the other
                self._settle()
        if self._failed:
            raise MoekitError(f"this call failed before, start another: {self._failed}")
        return self._value

    def _settle(self) -> None:
        wait, self._wait = self._wait, None
        if wait is None:
            return
        try:
            self._value = wait()
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            raise


class InFlight(Pending[Tensor]):
    """A dispatched call, from `ModularKernel.start`; its result is (T, H).

        first, second = kernel.start(...), kernel.start(...)
        first.run()                                # its experts; its output is in flight ...
        second.run()                               # ... while these experts run
        outs = first.result(), second.result()

    `result` runs what was not run. Call both on the stream that the call was started on, in any
    thread. Take the result also where a later start raises: a dropped call keeps its buffer.
    """

    def __init__(self, run: Callable[[], Pending[Tensor]]) -> None:
        combining = Pending(run)
        super().__init__(lambda: combining.result().result())
        self._combining = combining

    def run(self) -> None:
        """Run the experts and launch the combine, once, without waiting for the output."""
        self._combining.result()
