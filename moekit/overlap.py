"""Work beside the current stream: shared experts run while the routed tokens travel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

# A side stream for each stream that forked one. No other stream uses it, and each fork waits for
# the stream it belongs to: so memory of the side stream is not used again before the current
# stream has read it, without any further bookkeeping, in CUDA graphs too.
_sides: dict[tuple[torch.device, int], Any] = {}


class Beside:
    """``function(x)`` on a stream of its own; on devices without streams, in place.

        beside = Beside(function, x)    # it may start as soon as x is there
        beside.run()                    # enqueues it
        beside.join()                   # its result; what follows on this stream waits for it

    ``join`` and the constructor belong on the same stream.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self._function, self._x = function, x
        self._value: Tensor
        self._streams = None if x.device.type == "cpu" else torch.get_device_module(x.device)
        if self._streams is not None and not hasattr(self._streams, "Stream"):
            self._streams = None
        if self._streams is not None:
            current = self._streams.current_stream(x.device)
            self._side = _side(self._streams, x.device, current)
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


def _side(streams: Any, device: torch.device, current: Any) -> Any:
    key = (device, current.stream_id)
    side = _sides.get(key)
    if side is None:
        side = streams.Stream(device)
        if side == current:  # streams come from a pool, in turn
            side = streams.Stream(device)
        _sides[key] = side
    return side
