"""Buffers that several layers of a process use in turn, and a buffer for each in-flight call."""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moekit.errors import InvalidInput

T = TypeVar("T")

# The stream of the last launch in each group, and the number by which CUDA knows the stream.
_last: WeakKeyDictionary[dist.ProcessGroup, list[Any]] = WeakKeyDictionary()


class SharedBuffers(Generic[T]):
    """One set of buffers for each key, shared by the layers of one process.

    The last lease that ends frees its set. Sets that are left at exit are freed then.
    """

    def __init__(self, free: Callable[[T], None]) -> None:
        self._free = free
        self._held: dict[Hashable, T] = {}
        self._leases: Counter[Hashable] = Counter()
        atexit.register(self.clear)

    def lease(self, key: Hashable, make: Callable[[], T]) -> Lease[T]:
        """Return a lease of the set of ``key``, which names the group and all sizes.

        Collective if ``make`` is.
        """
        if key not in self._held:
            self._held[key] = _made(make)
        self._leases[key] += 1
        return Lease(self._held[key], partial(self._end, key))

    def _end(self, key: Hashable) -> None:
        self._leases[key] -= 1
        if not self._leases[key]:
            del self._leases[key]
            if key in self._held:
                self._free(self._held.pop(key))

    def clear(self) -> None:
        """Free all sets."""
        while self._held:
            self._free(self._held.popitem()[1])


class Lease(Generic[T]):
    """One layer's use of a set of `SharedBuffers`, until `release`."""

    def __init__(self, value: T, end: Callable[[], None]) -> None:
        self._value: T | None = value
        self._end = end

    @property
    def held(self) -> bool:
        """Return whether the lease still holds its buffers."""
        return self._value is not None

    @property
    def value(self) -> T:
        """The set of buffers."""
        assert self._value is not None, "called after destroy()"
        return self._value

    def release(self) -> None:
        """Give up the set; idempotent. Collective if freeing is."""
        if self._value is not None:
            self._value = None
            self._end()


class CallBuffers(Generic[T]):
    """A buffer for each in-flight call, which has it to itself from its dispatch to its combine.

    All ranks take and return buffers in one order. `keep_order` lets the device work of a group run
    in the order of its launches, on whichever streams: kernels that wait for other ranks may fill a
    GPU, so two ranks that run two of them in different orders would wait for each other.
    """

    def __init__(
        self, make: Callable[[], T], group: dist.ProcessGroup, most: int | None = 2
    ) -> None:
        """Make the first buffer; collective if ``make`` is.

        most: calls that may be in flight; None: no limit.
        """
        self._make, self._most, self._last = make, most, _last.setdefault(group, [None, None])
        self.all = [_made(make)]
        self._busy: set[int] = set()

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of the last launch in the group, after which all launches have ended."""
        return self._last[0]  # type: ignore[no-any-return]

    @property
    def in_flight(self) -> int:
        """The number of buffers that calls use."""
        return len(self._busy)

    def take(self) -> T:
        """Return a buffer that no call uses. Collective where it must be made.

        Raises InvalidInput if too many calls are in flight, or if it would be made while a CUDA
        graph is captured.
        """
        buffer = next((each for each in self.all if id(each) not in self._busy), None)
        if buffer is None:
            calls = len(self.all)
            if calls == self._most:
                raise InvalidInput(
                    f"{calls} calls are in flight, which is the limit: take the result of one "
                    "before you start another"
                )
            if _has_device() and torch.cuda.is_current_stream_capturing():
                raise InvalidInput(
                    f"{calls + 1} calls in flight need another buffer, which cannot be made while "
                    "a CUDA graph is captured: have as many calls in flight once before capturing"
                )
            buffer = _made(self._make)
            self.all.append(buffer)
        self._busy.add(id(buffer))
        self.keep_order()
        return buffer

    def give_back(self, buffer: T) -> None:
        """Return a buffer after the launch of its call's last kernel."""
        self._busy.discard(id(buffer))

    def keep_order(self) -> None:
        """Let what is launched next run after what was launched in the group before.

        CUDA graphs are ordered by their replays.
        """
        if not _has_device():
            return
        number = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        if number != self._last[1] and not torch.cuda.is_current_stream_capturing():
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
            self._last[:] = torch.cuda.current_stream(), number


def _made(make: Callable[[], T]) -> T:
    """Return ``make()``, whose tensors can be written in and outside of inference mode."""
    with torch.inference_mode(False):
        return make()


def _has_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
