"""Measure how long calls take: in CUDA graphs over several inputs, eagerly, and on the host.

`Timer` is the clock, `Prepared` a call with its inputs and its graph, and `take_turns` times
several of them in turns. docs/bench.md says how times are taken.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import MoekitError
from moekit.plugin import Routing, exchange, reason_of

from .records import Result

T = TypeVar("T")

# An eager time is the mean of this number of calls in a row, as a model makes them: a process takes
# longer for its first calls after a wait for the device. The device's queue holds their launches.
EAGER_CALLS = 24
# At least what the clock of any GPU does in a microsecond.
_CYCLES_PER_US = 2000
# For which ranks wait for each other: one of them may compile.
_PATIENCE_SECONDS = 1800.0


class DeviceLost(MoekitError, RuntimeError):
    """An error left the device unusable for this process, so nothing more can be measured."""


Call = Callable[[Tensor, Routing], Tensor]
"""A function to time: (x (T, H), routing) -> out (T, H).

Optional attributes: ``graph_safe`` (bool, default True), ``warmup(num_tokens)`` and ``adapters``.
"""


class Timer:
    """The clock of a device.

    ranks: begin every measurement together on all ranks of the default process group. All methods
    that measure or capture are collective then.
    """

    def __init__(self, device: torch.device, *, ranks: bool = False) -> None:
        self.device, self.ranks = device, ranks
        self._lead_us = 200.0 if ranks else 100.0

    def drain(self) -> None:
        """Wait until the device has nothing left to do, on all ranks."""
        synchronize(self.device)
        if self.ranks:
            dist.barrier()
            synchronize(self.device)

    def eager_us(self, function: Callable[[], object], times: int = 1) -> tuple[float, float]:
        """Return the mean microseconds of ``times`` calls in a row, until the queue is drained and
        until the last call returns. The queue is drained before them."""
        self.drain()
        start = time.perf_counter()
        for _ in range(times):
            function()
        host = time.perf_counter() - start
        synchronize(self.device)
        return (time.perf_counter() - start) * 1e6 / times, host * 1e6 / times

    def queued_us(self, function: Callable[[], object], times: int = 1) -> float:
        """Return the microseconds of one of ``times`` calls on the device, which starts when the
        first is enqueued."""
        self.drain()
        self.occupy(self._lead_us)
        start = self.mark()
        for _ in range(times):
            function()
        end = self.mark()
        synchronize(self.device)
        return self.between(start, end) / times

    def occupy(self, us: float) -> None:
        """Keep a GPU busy, so that the work that follows is enqueued before it starts."""
        if self.device.type == "cuda" and us > 0:
            torch.cuda._sleep(int(us * _CYCLES_PER_US))  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """Return a point in the device's time."""
        if self.device.type != "cuda":
            synchronize(self.device)
            return time.perf_counter()
        event: Any = torch.cuda.Event
        mark = event(enable_timing=True)
        mark.record()
        return mark

    def between(self, start: Any, end: Any) -> float:
        """Return the microseconds between two marks that the device has passed."""
        if self.device.type != "cuda":
            return float(end - start) * 1e6
        return float(start.elapsed_time(end)) * 1e3

    def capture(self, function: Callable[[], T]) -> tuple[Any, T | None, str]:
        """Return a CUDA graph of ``function``, what that returned, and why there is no graph."""
        graph, made, fault = torch.cuda.CUDAGraph(), None, ""
        try:
            with torch.cuda.graph(graph):
                made = function()
        except Exception as error:
            fault = f"capture failed: {reason_of(error)}"
        if self.ranks:
            fault = first_fault(fault)
        if fault:
            check_alive(self.device)
            return None, None, fault
        return graph, made, ""


class Prepared:
    """A call, warmed up on its inputs, and captured if the device has graphs and the call allows.

    output: the first input's output, as the timed path computed it. note: why there is no graph.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        inputs: Sequence[tuple[Any, ...]],
        device: torch.device,
        *,
        timer: Timer | None = None,
    ) -> None:
        self.call, self.inputs, self.device = call, inputs, device
        self.timer = timer or Timer(device)
        self.graph: Any = None
        self._graph_us, self._eager_us, self._host_us = (list[float]() for _ in range(3))
        self.note = ""
        warmup: Callable[[int], object] | None = getattr(call, "warmup", None)
        if warmup is not None:
            warmup(inputs[0][0].shape[0])
        for _ in range(2):  # the second time with everything that the first one compiled and cached
            self.output = self.all_calls()
        synchronize(device)
        self._capture()

    def all_calls(self) -> Any:
        """Call with every input and return the first output; the others' memory is reused."""
        first = self.call(*self.inputs[0])
        for each in self.inputs[1:]:
            self.call(*each)
        return first

    def _capture(self) -> None:
        """Replace eager calls by a graph over all inputs, or note why that is not possible."""
        if self.device.type != "cuda":
            self.note = f"no graphs on {self.device.type}" if self.device.type != "cpu" else ""
        elif not getattr(self.call, "graph_safe", True):
            self.note = "declared not graph-safe"
        else:
            self.graph, output, self.note = self.timer.capture(self.all_calls)
            if self.graph is not None:
                self.output = output

    def first_output(self) -> Any:
        """Return the output of the first input, as the timed path computes it."""
        if self.graph is None:
            return self.call(*self.inputs[0])
        self.output.fill_(float("nan"))  # what a replay does not write stays NaN
        self.graph.replay()
        synchronize(self.device)
        return self.output

    def turn(self, graph: bool) -> None:
        """Time one replay of the graph, if there is one, or the eager calls."""
        timer, count = self.timer, len(self.inputs)
        if graph:
            if self.graph is not None:
                self._graph_us.append(timer.queued_us(self.graph.replay) / count)
            return
        on_host = self.device.type == "cpu"
        eager, host = timer.eager_us(self.all_calls, 1 if on_host else -(-EAGER_CALLS // count))
        self._eager_us.append(eager / count)
        if not on_host:
            self._host_us.append(host / count)

    def time(self, replays: int) -> Result:
        """Take ``replays`` turns of each kind. Raises what the call raises."""
        for graph, _ in itertools.product((True, False), range(replays)):
            self.turn(graph)
        return self.result()

    def result(self, name: str = "") -> Result:
        """Return the medians of the turns so far."""
        graph, eager, host = (
            statistics.median(us) if us else None
            for us in (self._graph_us, self._eager_us, self._host_us)
        )
        counted = self._graph_us or self._eager_us
        return Result(
            name=name,
            us=eager if graph is None else graph,
            graph_us=graph,
            eager_us=eager,
            host_us=host,
            spread_us=(min(counted), max(counted)),
            note=self.note,
        )


def take_turns(prepared: Mapping[str, Prepared], replays: int = 10) -> dict[str, Result]:
    """Time several calls in turns, so that clock rates and temperature are the same for all.

    A call that raised has the reason, and the others are timed nevertheless. Raises DeviceLost if
    an exception left the device unusable.
    """
    failed: dict[str, str] = {}
    for graph, number in itertools.product((True, False), range(replays)):
        for name in rotated(list(prepared), number):
            if name not in failed:
                each = prepared[name]
                _, reason = attempt(each.device, each.turn, graph)
                if reason:
                    failed[name] = reason
    return {
        name: Result(name=name, reason=failed[name]) if name in failed else each.result(name)
        for name, each in prepared.items()
    }


def rotated(items: Sequence[T], number: int) -> list[T]:
    """Return all items, beginning with another one for each ``number``."""
    start = number % max(1, len(items))
    return [*items[start:], *items[:start]]


# -- devices and errors -----------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing left to do; the CPU never has."""
    torch.get_device_module(device).synchronize(device)


def release(device: torch.device) -> None:
    """Return memory to the device that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def attempt(device: torch.device, function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Return what ``function`` returns, or else None and why it failed, with its memory released.
    Raises DeviceLost if the failure left the device unusable."""
    try:
        return function(*args), ""
    except DeviceLost:
        raise
    except Exception as error:
        check_alive(device)
        reasons = getattr(error, "reasons", ()) if isinstance(error, MoekitError) else ()
        reason = "; ".join(reasons) or reason_of(error)
    release(device)  # now that no traceback keeps the tensors
    return None, reason


def check_alive(device: torch.device) -> None:
    """Raise DeviceLost if an earlier error, such as an illegal access, left the device unusable."""
    try:
        synchronize(device)
    except Exception as error:
        raise DeviceLost(f"{device} is unusable after an error: {reason_of(error)}") from error


def first_fault(fault: str) -> str:
    """Return the first fault of any rank, or an empty string. Collective."""
    group = dist.group.WORLD
    assert group is not None
    return next(filter(None, exchange("compare faults", fault, group, _PATIENCE_SECONDS)), "")
