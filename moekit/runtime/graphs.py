"""Small calls as CUDA graphs: what a few tokens need takes the host longer than the device.

    graphed = moekit.runtime.graphs.GraphedKernel(kernel, weights, max_tokens=16)
    out = graphed(x, routing)

A size's first call runs eagerly, the second captures, all later ones copy the inputs in one launch
and replay in another.
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

from moekit.contract import PackedWeights, Routing
from moekit.errors import InvalidInput, Unsupported
from moekit.kernel import ModularKernel
from moekit.runtime.workspace import is_capturing

logger = logging.getLogger("moekit")

# Graphs share memory and the stream that they are captured on: one thread at a time launches them.
_lock = threading.RLock()


def unsupported(kernel: ModularKernel) -> list[str]:
    """Why calls of ``kernel`` cannot be captured one by one; an empty list means they can."""
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
    """A function of tensors with T rows, replayed: one graph for each T up to max_rows.

    function: it also takes ``out``, such a tensor as it returns, to write its result to; a capture
    calls it on another stream. Calls are not replayed, but go to it, with more rows, or with other
    dtypes than the graph's; while the current stream is being captured; while the last output of
    that T is in use. That output belongs to the graph, and is handed out again once no tensor
    refers to it: so whoever reads it on another stream must join that stream before dropping it
    (``record_stream`` does not protect it).

    Any thread may call it, on any stream; replays on different streams wait for each other.
    """

    def __init__(self, function: Callable[..., Tensor], max_rows: int) -> None:
        if max_rows < 1:
            raise InvalidInput(f"graphs of at most {max_rows} tokens: want at least 1")
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
                if graph is not None and graph.takes(inputs):
                    return graph.replay(inputs)
        return self._function(*inputs)

    @property
    def nbytes(self) -> int:
        """Bytes of inputs and outputs that the graphs hold; all graphs share one pool besides."""
        with _lock:
            return sum(t.nbytes for g in self._graphs.values() for t in (*g.inputs, g.out))

    def _new(self, rows: int, inputs: Sequence[Tensor]) -> _Graph | None:
        if is_capturing(inputs[0].device):
            return None
        if rows not in self._called:  # sizes that never come again need no graph
            self._called.add(rows)
            return None
        try:
            made = self._graphs[rows] = _Graph(self._function, inputs)
        except RuntimeError as error:  # what a library does that its spec did not say
            self._max_rows = 0
            logger.warning("moekit: calls stay eager, as capturing a CUDA graph failed: %s", error)
            return None
        return made


class GraphedKernel(Graphed):
    """``kernel`` on ``weights``, as `Graphed`: x (T, H), routing -> (T, H).

    Weights may change in place; for others, make another one. Raises Unsupported with the reasons
    of `unsupported`.
    """

    def __init__(self, kernel: ModularKernel, weights: PackedWeights, max_tokens: int = 16) -> None:
        if reasons := unsupported(kernel):
            name = kernel.experts.spec.name
            raise Unsupported(f"no graphs of {name}: {'; '.join(reasons)}", reasons)

        def call(x: Tensor, w: Tensor, ids: Tensor, out: Tensor | None = None) -> Tensor:
            return kernel(x, weights, Routing(w, ids), out=out)

        super().__init__(call, max_tokens)

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:  # type: ignore[override]
        return super().__call__(x, routing.topk_weights, routing.topk_ids)


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
        self._stream: Any = None  # the one that it last ran on

    def takes(self, inputs: Sequence[Tensor]) -> bool:
        for t, (shape, dtype, device) in zip(inputs, self._kinds, strict=True):
            if t.shape != shape or t.dtype != dtype or t.device != device:
                return False
        return _uses(self._storage) == self._own_uses and not is_capturing(self._device)

    def replay(self, inputs: Sequence[Tensor]) -> Tensor:
        self._stream = follow(self._device, self._stream)
        # As bytes, one launch copies all dtypes.
        torch._foreach_copy_(self._bytes, [_bytes(t) for t in inputs])
        self._replay()
        return self.out.detach()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _uses(storage: torch.UntypedStorage) -> int:
    """How many tensors, and other things, refer to ``storage``."""
    return torch._C._storage_Use_Count(storage._cdata)


# -- CUDA ---------------------------------------------------------------------------------------

# The stream that graphs of a device last ran on.
_last: dict[torch.device, Any] = {}


def follow(device: torch.device, reader: Any = None) -> Any:
    """Graphs share memory: what follows on the current stream, which is returned, waits for them on
    any other one. reader: a stream that may still read the output; the current one waits for it.
    """
    current = torch.cuda.current_stream(device)
    last = _last.get(device)
    for other in (last,) if reader == last else (last, reader):
        if other is not None and current != other:
            current.wait_stream(other)
    _last[device] = current
    return current


@cache
def _pool(device: torch.device) -> tuple[Any, Any, Any]:
    """A memory pool for all graphs of a device, a stream to capture on, and a graph without which
    the pool would end with the last of the others."""
    cuda: Any = torch.cuda  # in part untyped
    pool, stream, first = cuda.graph_pool_handle(), cuda.Stream(device), cuda.CUDAGraph()
    with cuda.stream(stream), _capturing(first, pool):
        torch.zeros(1, device=device)
    return pool, stream, first


def capture(
    function: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> tuple[Callable[[], None], Tensor]:
    """``function(*inputs)`` as a graph: what replays it, and its output.

    The output lies outside the pool: there, later graphs could use its memory, or it could lie in
    memory that earlier ones use.
    """
    device = inputs[0].device
    with torch.cuda.device(device):
        pool, stream, _ = _pool(device)
        follow(device)
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                # This compiles, and allocates, what these very inputs need.
                out = torch.empty_like(function(*inputs))
                with _capturing(graph, pool):
                    function(*inputs, out=out)
        finally:
            current.wait_stream(stream)
    return graph.replay, out


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """`torch.cuda.graph` also collects garbage and empties the cache, which is too slow here."""
    collects = gc.isenabled()
    gc.disable()  # a graph that is freed during the capture would spoil it
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
