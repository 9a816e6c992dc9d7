"""Buffers that several layers of a process use in turn."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Shared(Generic[T]):
    value: T
    users: int = 0


class SharedBuffers(Generic[T]):
    """One set of buffers for each key, shared by the layers of one process.

    `acquire` makes a set at its first use, and `release` frees it with its last user. Sets that
    are left at exit are freed then.
    """

    def __init__(self, free: Callable[[T], None]) -> None:
        self._free = free
        self._held: dict[Hashable, _Shared[T]] = {}
        atexit.register(self.clear)

    def acquire(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the set of ``key``, which names the group and all sizes.

        Collective if ``make`` is.
        """
        shared = self._held.get(key)
        if shared is None:
            shared = self._held[key] = _Shared(make())
        shared.users += 1
        return shared.value

    def release(self, key: Hashable) -> None:
        """Give up one use of ``key``; an unknown key is ignored. Collective if freeing is."""
        shared = self._held.get(key)
        if shared is None:
            return
        shared.users -= 1
        if not shared.users:
            del self._held[key]
            self._free(shared.value)

    def clear(self) -> None:
        """Free all sets."""
        while self._held:
            _, shared = self._held.popitem()
            self._free(shared.value)
