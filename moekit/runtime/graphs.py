"""Small calls as CUDA graphs, because a call of few tokens takes the host longer than the device.

    graphed = Graphed(lambda x, w, ids, out=None: kernel(x, packed, Routing(w, ids), out=out), 16)
    out = graphed(x, routing.topk_weights, routing.topk_ids)

The first call of a size runs eagerly and the second captures a graph. All later calls copy the
inputs in one launch and replay the graph in another.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moekit.errors import InvalidInput
from moekit.runtime.workspace import is_capturing

logger = logging.getLogger("moekit")

# Graphs share memory and the stream they are captured on, so one thread at a time launches them.
_lock = threading.RLock()


def unsupported(kernel: Any) -> list[str]:
    """Return why a `ModularKernel`'s calls cannot be captured one by one; empty if they can."""
    reasons = [
        f"{spec.name} does not declare graph_safe"
        for spec in (kernel.dispatcher.spec, kernel.experts.spec)
        if not spec.graph_safe
    ]
    if kernel.checked:
        reasons.append("a checked call waits for the device")
    if kernel.dispatcher.spec.moves_tokens:
        reasons.append(
            f"{kernel.dispatcher.spec.name} moves tokens: ranks would capture at different times"
        )
    if kernel.problem.device.type != "cuda":
        reasons.append(f"{kernel.problem.device.type} has no CUDA graphs")
    return reasons


class Graphed:
    """A function of tensors with T rows, replayed as one graph for each T up to max_rows.

    The output belongs to the graph, which returns it again once no tensor refers to it. So code
    that reads it on another stream must join that stream before it drops the output
    (``record_stream`` does not protect it). The function is called eagerly with more rows or other
    dtypes than the graph has, while the current stream is being captured, and while the last
    output of that T is in use.

    Any thread may call it, on any stream; replays on different streams wait for each other.

    function: also takes ``out``, a tensor like its result, to write to. A capture calls it on
        another stream.
    """

    def __init__(self, function: Callable[..., Tensor], max_rows: int) -> None:
        if max_rows < 1:
            raise InvalidInput(f"graphs need at least 1 token (got max_tokens={max_rows})")
        self._function, self._max_rows = function, max_rows
        self._called: set[int] = set()
        self._graphs: dict[int, _Graph] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        rows = inputs[0].shape[0]
        if 0 < rows <= self._max_rows:
            with _lock:
                graph = self._graphs.get(rows)
                if graph is None:
                    graph = self._new(rows, inputs)
                out = None if graph is None else graph.replay(inputs)
            if out is not None:
                return out
        return self._function(*inputs)

    def _new(self, rows: int, inputs: Sequence[Tensor]) -> _Graph | None:
        device = inputs[0].device
        if is_capturing(device):
            return None
        if rows not in self._called:  # a size that is called once needs no graph
            self._called.add(rows)
            return None
        if not follow(device):
            return None
        try:
            made = self._graphs[rows] = _Graph(self._function, inputs)
        except RuntimeError as error:  # a library that is not graph_safe, against its spec
            self._max_rows = 0
            logger.warning("moekit: calls stay eager, as capturing a CUDA graph failed: %s", error)
            return None
        return made


class _Graph:
    """One captured call, its inputs and its output."""

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.inputs = [t.clone(memory_format=torch.contiguous_format) for t in inputs]
            self._bytes = [_bytes(t) for t in self.inputs]
            self._replay, self.out = capture(function, self.inputs)
        self._kinds = [(t.shape, t.dtype, t.device) for t in self.inputs]
        self._device = self.out.device
        self._storage = self.out.untyped_storage()
        self._own_uses = _uses(self._storage)
        self._stream: Any = None  # the stream that it last ran on

    def replay(self, inputs: Sequence[Tensor]) -> Tensor | None:
        """Return the output for ``inputs``, or None where the graph cannot serve this call."""
        for t, (shape, dtype, device) in zip(inputs, self._kinds, strict=True):
            if t.shape != shape or t.dtype != dtype or t.device != device:
                return None
        if _uses(self._storage) != self._own_uses or is_capturing(self._device):
            return None
        stream = follow(self._device, self._stream)
        if stream is None:
            return None
        self._stream = stream
        # As bytes, one launch copies all dtypes.
        torch._foreach_copy_(self._bytes, [_bytes(t) for t in inputs])
        self._replay()
        return self.out.detach()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _uses(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and other objects that refer to ``storage``."""
    return torch._C._storage_Use_Count(storage._cdata)


# -- CUDA ---------------------------------------------------------------------------------------

# The stream that graphs of a device last ran on.
_last: dict[torch.device, Any] = {}


def follow(device: torch.device, reader: Any = None) -> Any:
    """Make the current stream wait for graphs on other streams, as they share memory; return it.

    Return None, and wait for nothing, while such a stream is being captured by another thread: the
    current stream would become a part of that capture.

    reader: a stream that may still read the output; the current stream also waits for it.
    """
    current = torch.cuda.current_stream(device)
    last = _last.get(device)
    streams = (last,) if reader == last else (last, reader)
    others = [each for each in streams if each is not None and each != current]
    for other in others:
        with torch.cuda.stream(other):
            if torch.cuda.is_current_stream_capturing():
                return None
    for other in others:
        current.wait_stream(other)
    _last[device] = current
    return current


@cache
def _pool(device: torch.device) -> tuple[Any, Any, Any]:
    """Return a memory pool for all graphs of a device, a stream to capture on, and a graph.

    The graph keeps the pool alive when all other graphs are gone.
    """
    cuda: Any = torch.cuda  # in part untyped
    pool, stream, first = cuda.graph_pool_handle(), cuda.Stream(device), cuda.CUDAGraph()
    with cuda.stream(stream), _capturing(first, pool):
        torch.zeros(1, device=device)
    return pool, stream, first


def capture(
    function: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> tuple[Callable[[], None], Tensor]:
    """Capture ``function(*inputs)``; return a function that replays it, and its output.

    The current stream must have waited for other graphs (`follow`). The output is allocated outside
    the pool, where other graphs could use the same memory.
    """
    device = inputs[0].device
    with torch.cuda.device(device):
        pool, stream, _ = _pool(device)
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                # An eager call compiles and allocates what these inputs need.
                out = torch.empty_like(function(*inputs))
                with _capturing(graph, pool):
                    function(*inputs, out=out)
        finally:
            current.wait_stream(stream)
    return graph.replay, out


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture without the garbage collection of `torch.cuda.graph`, which is too slow here."""
    collects = gc.isenabled()
    gc.disable()  # a graph that is freed during the capture would make it fail
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if collects:
            gc.enable()
