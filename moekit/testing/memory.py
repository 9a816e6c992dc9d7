"""Watching allocations: how many bytes a call holds at its peak, and NaN in every fresh one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moekit.contract import BufferSpec
from moekit.runtime.workspace import Layout, Scratch, Workspace

_POISON = 0xFF  # all bits set: NaN in every float format, -1 in the integers

_aten = torch.ops.aten
_UNINITIALISED = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


def poison(tensor: Tensor) -> Tensor:
    """Fills the whole storage behind ``tensor`` with NaN (integers: -1), and returns ``tensor``."""
    storage = tensor.untyped_storage()
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(_POISON)
    return tensor


class PoisonedWorkspace(Workspace):
    """An arena that comes back full of NaN every time."""

    def take(self, wanted: Layout | Sequence[BufferSpec], device: torch.device) -> Scratch:
        scratch = super().take(wanted, device)
        for buffer in scratch[:1]:  # all of them lie in one storage
            poison(buffer)
        return scratch


class _PoisonFresh(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _UNINITIALISED and result.numel():
            poison(result)
            if result.is_cuda:  # whoever asked for it may write it on another stream
                torch.cuda.current_stream(result.device).synchronize()
        return result


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Within it ``torch.empty`` and its kin return NaN, as real memory might."""
    with _PoisonFresh():  # type: ignore[no-untyped-call]
        yield


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that come into being, until they die."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()
        self._older: list[Any] = []  # kept, so that their addresses are not used again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self._older.append(storage)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _forget(self, address: int, nbytes: int) -> None:
        self._known.discard(address)
        self.live -= nbytes


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in an operator's arguments or results (pytree's functions take much longer)."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))


def measure(device: torch.device, function: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that ``function`` holds at its peak, and those still held when it has returned.

    What it returns is dropped before the second count. On an accelerator the allocator is asked;
    on the CPU every torch operation is watched (memory that C++ frees before an operation returns
    is not seen).
    """
    if device.type == "cpu":
        mode = _Live()
        with mode:
            function()
        gc.collect()
        return mode.peak, mode.live
    gc.collect()
    module = torch.get_device_module(device)
    module.synchronize()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    function()
    module.synchronize()
    peak = module.max_memory_allocated() - before
    gc.collect()
    return peak, module.memory_allocated() - before


def slack(device: torch.device, stated: int) -> int:
    """How far a measurement may exceed what was stated: allocator rounding and small indices."""
    return 32 * 1024 + stated // 50 if device.type == "cpu" else 256 * 1024 + stated // 50
