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
from .results import Overlap
from .shapes import Inputs
from .timer import Timer, rotated

# How long the device is kept busy while a few eager calls are enqueued.
_LEAD_US = 3000.0


class OverlapTimer:
    """Times the fields of `Overlap` on the device, with its queue full, eager; on two inputs.

    The shared experts are an MLP of the size of one expert.
    """

    def __init__(
        self, timer: Timer, kernel: moekit.ModularKernel, packed: PackedWeights, inputs: Inputs
    ) -> None:
        self.timer, self.kernel, self.packed = timer, kernel, packed
        self.batches = [inputs[0], inputs[-1]]
        p, device = kernel.problem, timer.device
        generator = torch.Generator(device).manual_seed(7)

        def normal(rows: int, columns: int) -> Tensor:
            made = torch.randn(rows, columns, device=device, generator=generator)
            return made.mul_(columns**-0.5).to(p.dtype)

        self.up = normal(p.local_intermediate_size, p.hidden_size)
        self.down = normal(p.hidden_size, p.local_intermediate_size)

    def shared(self, x: Tensor) -> Tensor:
        out: Tensor = torch.nn.functional.silu(x @ self.up.T) @ self.down.T
        return out

    def sequential(self) -> list[Tensor]:
        return [self.kernel(x, self.packed, routing) for x, routing in self.batches]

    def in_flight(self) -> list[Tensor]:
        started = [self.kernel.start(x, self.packed, routing) for x, routing in self.batches]
        return [call.result() for call in started]

    def run_ahead(self) -> list[Tensor]:
        started = [self.kernel.start(x, self.packed, routing) for x, routing in self.batches]
        for call in started:
            call.run()
        return [call.result() for call in started]

    def shared_after(self) -> list[Tensor]:
        x, routing = self.batches[0]
        return [self.kernel(x, self.packed, routing).add_(self.shared(x))]

    def shared_within(self) -> list[Tensor]:
        x, routing = self.batches[0]
        return [self.kernel(x, self.packed, routing, shared=self.shared)]

    def shared_concurrent(self) -> list[Tensor]:
        x, routing = self.batches[0]
        shared = ConcurrentExperts(self.shared, x)
        out = self.kernel.start(x, self.packed, routing, meanwhile=shared.run).result()
        return [out.add_(shared.join())]

    def measure(self, replays: int) -> Overlap:
        """Time all schedules in turns. Collective."""
        schedules: list[Callable[[], list[Tensor]]] = [
            self.sequential, self.in_flight, self.run_ahead,
            self.shared_after, self.shared_within, self.shared_concurrent,
        ]  # fmt: skip
        outs, times = {}, {}
        for schedule in schedules:
            schedule()
            outs[schedule.__name__], times[schedule.__name__] = schedule(), list[float]()
        for turn in range(2 * replays):
            for schedule in rotated(schedules, turn):
                times[schedule.__name__].append(self.timer.queued_us(schedule, _LEAD_US))
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
