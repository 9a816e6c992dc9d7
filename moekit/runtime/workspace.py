"""Scratch memory: arenas that lend experts the buffers that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from moekit.contract import BufferSpec

# Layouts that an arena remembers; beyond, it forgets them all.
_MAX_LAYOUTS = 4096


class Layout:
    """The places of a backend's buffers in an arena, computed once."""

    def __init__(self, specs: Sequence[BufferSpec]) -> None:
        self._specs = tuple(specs)
        self.nbytes = Workspace.nbytes_for(specs)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the buffers as disjoint parts of ``buffer`` (uint8)."""
        views, offset = [], 0
        for spec in self._specs:
            views.append(buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape))
            offset += Workspace.nbytes_for([spec])
        return views


layout_of = lru_cache(_MAX_LAYOUTS)(lambda *specs: Layout(specs))  # layers share layouts


class Located(tuple[Tensor, ...]):
    """Tensors that stay where they are, their addresses, the remainders of these divided by 16, and
    views that begin where the tensors do."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.addresses = [each.data_ptr() for each in self]
        self.remainders = tuple([address % 16 for address in self.addresses])
        self._views: dict[tuple[Any, ...], Tensor] = {}

    def view(self, *part: Any) -> Tensor:
        """Return the view of (index, shape, strides), which calls of one size share."""
        if part not in self._views:
            self._views[part] = self[part[0]].as_strided(*part[1:])
        return self._views[part]


class Scratch(Located):
    """Disjoint uninitialized tensors. They belong to the call that took them until `give_back`."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        super().__init__(buffers)
        # The arena, and the list of idle arenas that it returns to.
        self.lent: tuple[_Arena, list[_Arena]] | None = None

    def give_back(self) -> None:
        """Return the memory for the next call on this stream; idempotent."""
        lent, self.lent = self.lent, None
        if lent is not None:
            arena, idle = lent
            idle.append(arena)


class _Arena:
    """A buffer, and the layouts that calls used on it."""

    __slots__ = ("_buffer", "laid_out", "nbytes")

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self.nbytes = buffer, buffer.nbytes
        self.laid_out: dict[Layout, Scratch] = {}

    def lay_out(self, layout: Layout) -> Scratch:
        if len(self.laid_out) >= _MAX_LAYOUTS:
            self.laid_out.clear()
        scratch = self.laid_out[layout] = Scratch(layout.views(self._buffer))
        return scratch


class Workspace:
    """Lends scratch memory to calls, from any thread and any stream, for any number of layers.

    A device's default stream has one growing arena, and one more for each further call that runs
    there at the same time in another thread. A call keeps its arena until it has launched its
    work; the next call on the default stream takes the same one, in any thread. On other streams
    calls take scratch from torch's allocator, which reuses memory by stream. So no scratch stays
    in the pool of a CUDA graph that is captured or that torch.compile warms up, and none is lost
    when a stream ends.
    """

    _ALIGN = 256
    _default: Workspace

    def __init__(self) -> None:
        self._idle: dict[torch.device, list[_Arena]] = {}

    @classmethod
    def default(cls) -> Workspace:
        """Return the process-wide workspace."""
        return cls._default

    @classmethod
    def nbytes_for(cls, specs: Sequence[BufferSpec]) -> int:
        """Return the bytes of an arena that holds these buffers at once."""
        return sum(-(-s.nbytes // cls._ALIGN) * cls._ALIGN for s in specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas that no call is using."""
        return sum(arena.nbytes for idle in self._idle.values() for arena in idle)

    def take(self, wanted: Layout | Sequence[BufferSpec], device: torch.device) -> Scratch:
        """Return scratch for the current stream of ``device``; end with `Scratch.give_back`."""
        layout = wanted if isinstance(wanted, Layout) else Layout(wanted)
        capturing, stream = _probe(device)
        if stream() or capturing():
            return Scratch(layout.views(_allocate(layout.nbytes, device)))
        idle = self._idle.get(device) or self._idle.setdefault(device, [])
        arena: _Arena | None
        try:
            arena = idle.pop()
        except IndexError:  # none is idle
            arena = None
        if arena is None or arena.nbytes < layout.nbytes:
            arena = None  # frees the outgrown buffer first
            arena = _Arena(_allocate(layout.nbytes, device))
        scratch = arena.laid_out.get(layout)
        if scratch is None:
            scratch = arena.lay_out(layout)
        scratch.lent = arena, idle
        return scratch


Workspace._default = Workspace()


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # calls outside of inference mode must be able to write to it
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


@cache
def _probe(device: torch.device) -> tuple[Callable[[], bool], Callable[[], int]]:
    """Return functions: whether the current stream of ``device`` is captured, and its id."""
    if device.type == "cpu":
        return bool, int  # False and 0
    module: Any = torch.get_device_module(device)
    capturing = getattr(module, "is_current_stream_capturing", bool)
    if device.type == "cuda":
        # Index -1 means this thread's current device.
        index = -1 if device.index is None else device.index
        return capturing, partial(torch._C._cuda_getCurrentRawStream, index)
    if hasattr(module, "current_stream"):
        return capturing, lambda: int(module.current_stream(device).stream_id)
    return capturing, int


def is_capturing(device: torch.device) -> bool:
    return _probe(device)[0]()


def settle(device: torch.device) -> None:
    """Wait for the current stream, so that any stream and thread may use its results."""
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    if hasattr(module, "current_stream") and not is_capturing(device):
        module.current_stream(device).synchronize()
