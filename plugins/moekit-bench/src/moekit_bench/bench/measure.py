"""How long a call takes: CUDA graphs over several inputs, eager, and on the host alone.

`moekit bench` and `moekit tune` both measure here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moekit.contract import Routing
from moekit.errors import MoekitError
from moekit_bench.bench.limits import synchronize
from moekit_bench.bench.shapes import Inputs

# Cycles that the device is kept busy with, so that it starts on a replay with all of it enqueued.
_SLEEP_CYCLES = 200_000


class Call(Protocol):
    """What is timed: (x (T, H), routing) -> out (T, H).

    Optional attributes: ``graph_safe`` (bool, default True), ``warmup(num_tokens)``, ``note``.
    """

    def __call__(self, x: Tensor, routing: Routing, /) -> Tensor: ...


class DeviceLost(MoekitError, RuntimeError):
    """An error that leaves the device unusable for this process; nothing more can be measured."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call. Medians; ``spread``: (fastest, slowest) of what ``us`` is of.

    us: what counts, the graph's time if there is one, else the eager time.
    graph_us: one replay of a graph over all inputs, divided by their number.
    eager_us: all inputs called in a row, from a drained queue to a drained queue, divided likewise.
    host_us: until the call returns, from a drained queue; None on the CPU, where it is eager_us.
    note: why there is no graph time.
    """

    us: float
    graph_us: float | None
    eager_us: float
    host_us: float | None
    spread: tuple[float, float]
    note: str = ""


class Prepared:
    """A call warmed up on its inputs, and captured if the device has graphs and the call allows."""

    def __init__(self, call: Call, pairs: Inputs, device: torch.device, graph: bool = True) -> None:
        self.call, self.pairs, self.device = call, pairs, device
        self.graph: Any = None
        self.note = ""
        warmup: Callable[[int], object] | None = getattr(call, "warmup", None)
        if warmup is not None:
            warmup(pairs[0][0].shape[0])
        for _ in range(2):  # the second time with everything that the first one compiled and cached
            for x, routing in pairs:
                self.output = call(x, routing)
        synchronize(device)
        if device.type != "cuda":
            self.note = f"no graphs on {device.type}" if device.type != "cpu" else ""
        elif not graph:
            self.note = "graphs not asked for"
        elif not getattr(call, "graph_safe", True):
            self.note = "declared not graph-safe"
        else:
            self._capture()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                # Only the first output is kept, for `first_output`; the others' memory is reused.
                self.output = self.call(*self.pairs[0])
                for x, routing in self.pairs[1:]:
                    self.call(x, routing)
        except Exception as error:
            check_alive(self.device)
            self.note = f"capture failed: {first_line(error)}"
            return
        self.graph = graph

    def first_output(self) -> Tensor:
        """The output for the first input, as the timed path computes it."""
        if self.graph is None:
            return self.call(*self.pairs[0])
        self.output.fill_(float("nan"))  # what a replay does not write stays NaN
        self.graph.replay()
        synchronize(self.device)
        return self.output

    def graph_us(self) -> float:
        """One replay, with the launch itself hidden behind a busy device."""
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        sleep = getattr(torch.cuda, "_sleep", None)
        if sleep is not None:
            sleep(_SLEEP_CYCLES)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / len(self.pairs)

    def eager_us(self) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        for x, routing in self.pairs:
            self.call(x, routing)
        synchronize(self.device)
        return (time.perf_counter() - start) * 1e6 / len(self.pairs)

    def host_us(self) -> list[float]:
        times = []
        for x, routing in self.pairs:
            synchronize(self.device)
            start = time.perf_counter()
            self.call(x, routing)
            times.append((time.perf_counter() - start) * 1e6)
        synchronize(self.device)
        return times


def measure(
    call: Call, pairs: Inputs, device: torch.device, *, replays: int = 10, graph: bool = True
) -> Timing:
    """Times one call on ``pairs``; compiles and warms up first. Raises what the call raises."""
    with torch.inference_mode():
        prepared = Prepared(call, pairs, device, graph)
        result = take_turns({"": prepared}, replays)[""]
    if isinstance(result, Exception):
        raise result
    return result


def take_turns(
    contestants: Mapping[str, Prepared], replays: int = 10, *, host: bool = True
) -> dict[str, Timing | Exception]:
    """Times all contestants in turns, so that clocks and temperature are the same for all.

    One that fails gets its exception; the others go on. Raises DeviceLost.
    """
    graph: dict[str, list[float]] = {name: [] for name in contestants}
    eager: dict[str, list[float]] = {name: [] for name in contestants}
    on_host: dict[str, list[float]] = {name: [] for name in contestants}
    failed: dict[str, Exception] = {}

    def turn(name: str, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            check_alive(contestants[name].device)
            failed[name] = error

    def eagerly(name: str, prepared: Prepared, with_host: bool) -> None:
        eager[name].append(prepared.eager_us())
        if with_host and prepared.device.type != "cpu":
            on_host[name] += prepared.host_us()

    for number in range(replays):
        for name, prepared in _rotated(contestants, number):
            if name not in failed and prepared.graph is not None:
                turn(name, lambda n=name, p=prepared: graph[n].append(p.graph_us()))  # type: ignore[misc]
    for number in range(replays):
        for name, prepared in _rotated(contestants, number):
            if name not in failed:
                turn(name, lambda n=name, p=prepared: eagerly(n, p, host))  # type: ignore[misc]
    return {
        name: failed[name]
        if name in failed
        else _timing(graph[name], eager[name], on_host[name], prepared.note)
        for name, prepared in contestants.items()
    }


def _rotated(contestants: Mapping[str, Prepared], number: int) -> Iterator[tuple[str, Prepared]]:
    """All of them, beginning with another one each time."""
    items = list(contestants.items())
    start = number % max(1, len(items))
    return iter(items[start:] + items[:start])


def _timing(
    graph: Sequence[float], eager: Sequence[float], host: Sequence[float], note: str
) -> Timing:
    counted = graph or eager
    return Timing(
        us=statistics.median(counted),
        graph_us=statistics.median(graph) if graph else None,
        eager_us=statistics.median(eager),
        host_us=statistics.median(host) if host else None,
        spread=(min(counted), max(counted)),
        note=note,
    )


def check_alive(device: torch.device) -> None:
    """Raises DeviceLost if an earlier error (an illegal access, say) took the device with it."""
    try:
        synchronize(device)
    except Exception as error:
        raise DeviceLost(f"{device} is unusable after an error: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
