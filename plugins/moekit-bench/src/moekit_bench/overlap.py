"""Measure what overlapping saves: micro-batches in flight, and shared experts beside a call."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import moekit
from moekit.plugin import PackedWeights

from .internals import ConcurrentExperts
from .records import Overlap
from .shapes import Inputs
from .timer import Timer, rotated

# How long the device is kept busy while a few eager calls are enqueued.
_LEAD_US = 3000.0


def measure_overlap(
    timer: Timer,
    kernel: moekit.ModularKernel,
    packed: PackedWeights,
    inputs: Inputs,
    replays: int,
) -> Overlap:
    """Time the fields of `Overlap` in turns, eager, with the device's queue full. Collective.

    There are two micro-batches. The shared experts are an MLP of the size of one expert.
    """
    batches, (x, routing) = [inputs[0], inputs[-1]], inputs[0]
    p, generator = kernel.problem, torch.Generator(timer.device).manual_seed(7)

    def normal(rows: int, columns: int) -> Tensor:
        made = torch.randn(rows, columns, device=timer.device, generator=generator)
        return made.mul_(columns**-0.5).to(p.dtype)

    up = normal(p.local_intermediate_size, p.hidden_size)
    down = normal(p.hidden_size, p.local_intermediate_size)

    def shared(x: Tensor) -> Tensor:
        out: Tensor = torch.nn.functional.silu(x @ up.T) @ down.T
        return out

    def in_flight(*, ahead: bool = False) -> list[Tensor]:
        started = [kernel.start(x, packed, routing) for x, routing in batches]
        for call in started if ahead else ():
            call.run()
        return [call.result() for call in started]

    def concurrent() -> list[Tensor]:
        beside = ConcurrentExperts(shared, x)
        out = kernel.start(x, packed, routing, meanwhile=beside.run).result()
        return [out.add_(beside.join())]

    schedules: dict[str, Callable[[], list[Tensor]]] = {
        "sequential": lambda: [kernel(x, packed, routing) for x, routing in batches],
        "in_flight": in_flight,
        "run_ahead": lambda: in_flight(ahead=True),
        "shared_after": lambda: [kernel(x, packed, routing).add_(shared(x))],
        "shared_within": lambda: [kernel(x, packed, routing, shared=shared)],
        "shared_concurrent": concurrent,
    }
    outs = {}
    for name, schedule in schedules.items():
        schedule()
        outs[name] = schedule()
    times: dict[str, list[float]] = {name: [] for name in schedules}
    for turn in range(2 * replays):
        for name in rotated(list(schedules), turn):
            times[name].append(timer.queued_us(schedules[name], _LEAD_US))
    us = {f"{name}_us": statistics.median(values) for name, values in times.items()}
    return Overlap(
        **us,
        error_in_flight=difference(outs["in_flight"], outs["sequential"]),
        error_run_ahead=difference(outs["run_ahead"], outs["sequential"]),
        error_within=difference(outs["shared_within"], outs["shared_after"]),
        error_concurrent=difference(outs["shared_concurrent"], outs["shared_after"]),
    )


def difference(some: list[Tensor], others: list[Tensor]) -> float | None:
    """Return the largest relative difference of outputs; None if one is not finite."""
    both = zip(some, others, strict=True)
    found = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in both]
    return max(found) if all(map(math.isfinite, found)) else None
