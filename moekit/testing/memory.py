"""Watch allocations: fill new memory with NaN, and count the bytes that a call holds."""

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
from moekit.kernel import ModularKernel
from moekit.runtime.workspace import Layout, Scratch, Workspace
from moekit.testing.cases import device_of
from moekit.training.operators import show_inside

_POISON = 0xFF  # all bits set: NaN in every float format
# Not -1, which is a meaningful id: memory that nobody wrote must not say "no expert".
_INTEGER_POISON, _INTEGERS = 1, (torch.int16, torch.int32, torch.int64)

_aten = torch.ops.aten
_UNINITIALISED = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


def poison(tensor: Tensor) -> Tensor:
    """Fill the whole storage of ``tensor`` with NaN (integers: 1), and return ``tensor``."""
    whole, dtype = tensor.untyped_storage(), tensor.dtype
    value = _INTEGER_POISON if dtype in _INTEGERS else _POISON
    as_dtype = dtype if dtype in _INTEGERS else torch.uint8
    torch.empty(0, dtype=as_dtype, device=tensor.device).set_(whole).fill_(value)
    return tensor


class PoisonedWorkspace(Workspace):
    """A workspace that is full of NaN whenever it is lent, also behind each buffer."""

    _GUARD = BufferSpec((1 << 18,), torch.uint8)

    def __init__(self) -> None:
        super().__init__()
        self._guards: Sequence[Tensor] = ()

    def take(self, wanted: Layout | Sequence[BufferSpec], device: torch.device) -> Scratch:
        self.check()  # the next call's buffers may lie there
        specs = wanted._specs if isinstance(wanted, Layout) else wanted
        taken = super().take([each for spec in specs for each in (spec, self._GUARD)], device)
        for buffer in taken[:1]:  # all of them lie in one storage
            poison(buffer.view(-1).view(torch.uint8))
        scratch, self._guards = Scratch(taken[::2]), taken[1::2]
        scratch.lent = taken.lent
        for buffer in scratch:
            if buffer.dtype in _INTEGERS:
                buffer.fill_(_INTEGER_POISON)
        return scratch

    def check(self) -> None:
        """Assert that no call wrote behind its buffers."""
        for index, guard in enumerate(self._guards):
            written = int((guard != _POISON).sum())
            assert not written, (
                f"the call wrote {written} bytes behind the end of workspace buffer {index}: "
                "workspace() asks for too little"
            )


class _PoisonFresh(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func in _UNINITIALISED and result.numel():
            poison(result)
            if result.is_cuda:  # the caller may write it on another stream
                torch.cuda.current_stream(result.device).synchronize()
        return result


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Let ``torch.empty`` and its variants return NaN, as real memory may."""
    with _PoisonFresh():  # type: ignore[no-untyped-call]
        yield


class _Live(TorchDispatchMode):
    """Counts the bytes of new storages until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()
        self._older: list[Any] = []  # kept, so that no new storage gets their address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self._older.append(storage)
        result = func(*args, **kwargs or {})
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


for _mode in (_PoisonFresh, _Live):
    show_inside(_mode)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results of an operator (much faster than pytree)."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))


def measure(
    device: torch.device, function: Callable[[], Any], *, collect: bool = True
) -> tuple[int, int]:
    """Return the bytes that ``function`` holds at its peak, and those that it leaves behind.

    Its result is dropped before the second count. On an accelerator the allocator counts the bytes
    that were requested: its blocks may be larger by a megabyte. On the CPU every torch operation is
    watched; memory that an operation frees itself is not seen.

    Args:
        collect: whether to collect garbage before the second count, which takes a second.
    """
    if device.type == "cpu":
        mode = _Live()
        with older_objects_skipped():
            with mode:
                function()
            if collect:
                gc.collect()
        return mode.peak, mode.live
    gc.collect()
    module = torch.get_device_module(device)

    def requested(when: str) -> int:
        module.synchronize()
        stats = module.memory_stats()
        # Allocators other than torch's own count blocks only.
        kind = "requested" if stats.get("requested_bytes.all.peak") else "allocated"
        return int(stats.get(f"{kind}_bytes.all.{when}", 0))

    before = requested("current")
    module.reset_peak_memory_stats()
    function()
    peak = requested("peak") - before
    gc.collect()
    return peak, requested("current") - before


def beyond_stated(
    kernel: ModularKernel, num_tokens: int, call: Callable[[], Any], returned: int = 0
) -> str:
    """Say by how much the peak of a call exceeds kernel.memory() and what it returns, or ""."""
    kernel.workspace = Workspace()
    device, stated = device_of(kernel.problem), kernel.memory(num_tokens)
    most = stated.total + returned
    peak, _ = measure(device, call, collect=False)
    if peak <= most + slack(device, most):
        return ""
    return f"a call of {num_tokens} tokens held {peak} bytes, stated are {most}: {stated}"


@contextmanager
def older_objects_skipped() -> Iterator[None]:
    """Let collections skip what exists, as modules do: all of them take 0.3 s each time."""
    frozen = gc.get_freeze_count()
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


@contextmanager
def most_memory(device: torch.device) -> Iterator[int]:
    """Yield an accelerator's free bytes, and give back what the block allocates at its end."""
    module = torch.get_device_module(device)
    module.empty_cache()
    yield int(module.mem_get_info(device)[0])
    gc.collect()
    module.empty_cache()


def slack(device: torch.device, stated: int) -> int:
    """Return by how many bytes a measurement may exceed the statement (allocator, indices)."""
    return 32 * 1024 + stated // 50 if device.type == "cpu" else 256 * 1024 + stated // 50
