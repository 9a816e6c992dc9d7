"""What runs beside the rest: values on their way, and shared experts while tokens travel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from moekit.errors import MoekitError

T = TypeVar("T")

# Side streams that nobody uses, by the stream that forked them: one for each, and another for each
# further thread that forks that stream meanwhile. No other stream uses them, and each fork waits
# for the stream it belongs to: so memory of the side stream is not used again before that stream
# has read it, without any further bookkeeping, in CUDA graphs too.
_idle: dict[tuple[torch.device, int], list[Any]] = {}


class Pending(Generic[T]):
    """A value that is on its way. `result` waits for it; calling it again is free."""

    def __init__(self, wait: Callable[[], T] | None) -> None:
        self._wait = wait
        self._lock = None if wait is None else threading.RLock()
        self._failed = ""
        self._value: T

    @classmethod
    def ready(cls, value: T) -> Pending[T]:
        made = cls(None)
        made._value = value
        return made

    def result(self) -> T:
        """The value. What raised is not tried again: from then on it raises MoekitError."""
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
    """A call whose tokens have set off, from `ModularKernel.start`; its result is (T, H).

        first, second = kernel.start(...), kernel.start(...)
        first.run()                                      # the experts; their output sets off ...
        second.run()                                     # ... and travels while these experts run
        outs = first.result(), second.result()

    `result` runs what was not run. Both belong on the stream that the call was started on, in
    whichever thread.
    """

    def __init__(self, run: Callable[[], Pending[Tensor]]) -> None:
        combining = Pending(run)
        super().__init__(lambda: combining.result().result())
        self._combining = combining

    def run(self) -> None:
        """Runs the experts and sets off their output, without waiting for it; once."""
        self._combining.result()


class Beside:
    """``function(x)`` on a stream of its own; on devices without streams, in place.

        beside = Beside(function, x)    # it may start as soon as x is there
        beside.run()                    # enqueues it
        beside.join()                   # its result; what follows on this stream waits for it

    ``join`` and the constructor belong on the same stream. The result must have been used when the
    last reference to this object goes: then another call may fork the side stream.
    """

    _idle: list[Any] | None = None

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self._function, self._x = function, x
        self._value: Tensor
        self._streams = None if x.device.type == "cpu" else torch.get_device_module(x.device)
        if self._streams is not None and not hasattr(self._streams, "Stream"):
            self._streams = None
        if self._streams is not None:
            current = self._streams.current_stream(x.device)
            self._idle = _idle.setdefault((x.device, current.stream_id), [])
            self._side = _side(self._streams, x.device, current, self._idle)
            self._side.wait_stream(current)

    def run(self) -> Tensor:
        """The result, which only the side stream may read before `join`."""
        with nullcontext() if self._streams is None else self._streams.stream(self._side):
            self._value = self._function(self._x)
        return self._value

    def join(self) -> Tensor:
        if self._streams is not None:
            self._streams.current_stream(self._x.device).wait_stream(self._side)
        return self._value

    def __del__(self) -> None:
        if self._idle is not None and hasattr(self, "_side"):
            self._idle.append(self._side)


def _side(streams: Any, device: torch.device, current: Any, idle: list[Any]) -> Any:
    try:
        return idle.pop()
    except IndexError:  # all are in use, if there are any
        side = streams.Stream(device)
    # Streams come from a pool, in turn.
    return streams.Stream(device) if side == current else side
