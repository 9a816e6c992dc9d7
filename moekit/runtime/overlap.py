"""Shared experts concurrent with a transfer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

# Idle side streams by the stream that forks them: one each, and one more for each further thread
# that forks the same stream at the same time. Only that stream uses them, and each fork waits for
# it: so torch reuses memory of the side stream only after that stream has read it, without further
# bookkeeping, in CUDA graphs too.
_idle: dict[tuple[torch.device, int], list[Any]] = {}


class ConcurrentExperts:
    """Run shared experts, ``function(x)``, on a side stream; without ``streams``, in place.

        shared = ConcurrentExperts(function, x)    # the side stream waits for x
        shared.run()                               # enqueues the function
        shared.join()                              # returns its result; this stream waits for it

    Call the constructor and `join` on the same stream. Use the result before the last reference to
    this object goes: then another call may fork the side stream.
    """

    _idle: list[Any] | None = None

    def __init__(
        self, function: Callable[[Tensor], Tensor], x: Tensor, streams: bool = True
    ) -> None:
        self._function, self._x = function, x
        self._value: Tensor
        streams = streams and x.device.type != "cpu"
        module = torch.get_device_module(x.device) if streams else None
        self._streams = module if hasattr(module, "Stream") else None
        if self._streams is not None:
            current = self._streams.current_stream(x.device)
            self._idle = _idle.setdefault((x.device, current.stream_id), [])
            self._side = _side(self._streams, x.device, current, self._idle)
            self._side.wait_stream(current)

    def run(self) -> Tensor:
        """Return the result, which only the side stream may read before `join`."""
        with nullcontext() if self._streams is None else self._streams.stream(self._side):
            self._value = self._function(self._x)
        return self._value

    def join(self) -> Tensor:
        """Return the result; work that follows on the current stream waits for it."""
        if self._streams is not None:
            self._streams.current_stream(self._x.device).wait_stream(self._side)
        return self._value

    def __del__(self) -> None:
        if self._idle is not None and hasattr(self, "_side"):
            self._idle.append(self._side)


def _side(streams: Any, device: torch.device, current: Any, idle: list[Any]) -> Any:
    try:
        return idle.pop()
    except IndexError:  # none is idle
        side = streams.Stream(device)
    # Streams come from a pool, in turn.
    return streams.Stream(device) if side == current else side
