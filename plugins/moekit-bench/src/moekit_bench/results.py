"""The results in a cell: measurements of one implementation, dispatcher or combination."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .codec import mean, median, merged_by, widest, worst
from .timer import Timing

BACKEND, BASELINE = "moekit", "peer"  # as JSON calls them
INVARIANT = "batch-invariant"  # a backend in that mode, whose name ends with `IN_MODE`
IN_MODE = " (batch-invariant)"

M = TypeVar("M", bound="Measurement")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The times of something, in microseconds, and whether its output is right.

    us: the time that counts, None if there is none. error: None if the output is not finite.
    reason: why it failed or is wrong. note: why there is no graph time.
    """

    us: float | None = merged_by(median, default=None)
    graph_us: float | None = merged_by(median, default=None)
    eager_us: float | None = merged_by(median, default=None)
    host_us: float | None = merged_by(median, default=None)
    spread_us: tuple[float, float] | None = merged_by(widest, default=None)
    error: float | None = merged_by(worst, default=None)
    right: bool = merged_by(all, default=False)
    reason: str = ""
    note: str = ""

    @classmethod
    def of(cls: type[M], timing: Timing, error: float, bound: float, **more: Any) -> M:
        """Return the record of a timing and a relative error."""
        return cls(
            us=timing.us,
            graph_us=timing.graph_us,
            eager_us=timing.eager_us,
            host_us=timing.host_us,
            spread_us=timing.spread,
            error=error if math.isfinite(error) else None,
            right=error <= bound,
            note=timing.note,
            **more,
        )

    @property
    def eager(self) -> bool:
        """Return whether the time that counts is an eager one on a device that has graphs."""
        return self.graph_us is None and (self.host_us is not None or bool(self.note))


@dataclass(frozen=True, kw_only=True)
class Result(Measurement, ABC):
    """A measurement with a name, as a cell records it."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Return the name of what was measured."""

    def __str__(self) -> str:
        if self.us is None:
            return f"{self.label} failed ({self.reason})"
        wrong = "" if self.right else f", wrong (error {shown_error(self.error)})"
        return f"{self.label} {self.us:.0f} us{wrong}"


def shown_error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


@dataclass(frozen=True, kw_only=True)
class ExpertsResult(Result):
    """An experts backend or a baseline. copied: see `copied_share`."""

    name: str
    kind: str = BACKEND
    fraction: float | None = None
    copied: float | None = None

    @property
    def label(self) -> str:
        return self.name

    def __str__(self) -> str:
        fraction = "" if self.us is None or self.fraction is None else f" {self.fraction:.2f}"
        return super().__str__() + fraction


@dataclass(frozen=True, kw_only=True)
class DispatcherResult(Result):
    """A dispatcher without experts. link_rows, rows: (token, rank) rows that a rank sends to other
    ranks in a call, and those that it sends at all; the rates are in 1e9 bytes/s."""

    name: str
    dispatch_us: float | None = merged_by(median, default=None)
    combine_us: float | None = merged_by(median, default=None)
    link_rows: float | None = merged_by(mean, default=None)
    rows: float | None = merged_by(mean, default=None)
    dispatch_row_bytes: int | None = None
    combine_row_bytes: int | None = None
    dispatch_link_gbs: float | None = None
    dispatch_deepep_gbs: float | None = None
    combine_link_gbs: float | None = None
    combine_deepep_gbs: float | None = None
    num_sms: int | None = None
    buffer_bytes: int | None = merged_by(worst, default=None)

    @property
    def label(self) -> str:
        return self.name

    def with_rates(self) -> DispatcherResult:
        """Return the result with its rates, which follow from the other fields."""

        def gbs(rows: float | None, row_bytes: int | None, us: float | None) -> float | None:
            return rows * row_bytes / us / 1e3 if rows is not None and row_bytes and us else None

        return replace(
            self,
            dispatch_link_gbs=gbs(self.link_rows, self.dispatch_row_bytes, self.dispatch_us),
            dispatch_deepep_gbs=gbs(self.rows, self.dispatch_row_bytes, self.dispatch_us),
            combine_link_gbs=gbs(self.link_rows, self.combine_row_bytes, self.combine_us),
            combine_deepep_gbs=gbs(self.rows, self.combine_row_bytes, self.combine_us),
        )


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The times of overlapped work, and how far its outputs are from those of sequential work.

    sequential, in_flight, run_ahead: two micro-batches; the second one is dispatched before the
    experts of the first one run, or its experts run, too, before the first result is awaited.
    shared_after, shared_within, shared_concurrent: a call with shared experts after it, within it
    on its stream, and on a separate stream. error_*: None where an output is not finite.
    """

    sequential_us: float = merged_by(median, "one_after_the_other_us")
    in_flight_us: float = merged_by(median)
    run_ahead_us: float | None = merged_by(median, default=None)  # older recordings lack it
    shared_after_us: float = merged_by(median, "after_us")
    shared_within_us: float = merged_by(median, "meanwhile_us")
    shared_concurrent_us: float = merged_by(median, "beside_us")
    error_in_flight: float | None = merged_by(worst)
    error_run_ahead: float | None = merged_by(worst, default=None)
    error_within: float | None = merged_by(worst, "error_meanwhile")
    error_concurrent: float | None = merged_by(worst, "error_beside")

    @property
    def error(self) -> float | None:
        """Return the largest difference; None if an output is not finite."""
        ahead = [] if self.run_ahead_us is None else [self.error_run_ahead]
        errors = [self.error_in_flight, *ahead, self.error_within, self.error_concurrent]
        largest: float | None = worst(errors)
        return largest


@dataclass(frozen=True, kw_only=True)
class LayerResult(Result):
    """A whole layer: a combination of dispatcher and experts."""

    dispatcher: str
    experts: str
    buffer_bytes: int | None = merged_by(worst, default=None)
    stated_bytes: int | None = merged_by(worst, default=None)
    copied: float | None = None
    overlap: Overlap | None = None

    @property
    def label(self) -> str:
        return combination(self.dispatcher, self.experts)


def combination(dispatcher: str, experts: str) -> str:
    return f"{dispatcher} + {experts}"


def copied_share(given: Mapping[str, Any], packed: Any) -> float:
    """Return how much memory packed weights take that the canonical tensors do not.

    Args:
        given: The canonical tensors by name.
        packed: PackedWeights made of them.

    Returns:
        Bytes of packed tensors that are no views of canonical ones, as a share of those.
    """
    known = {t.untyped_storage().data_ptr() for t in given.values()}
    parts = (*packed.experts.values(), *packed.shared.values())
    own = sum(t.nbytes for t in parts if t.untyped_storage().data_ptr() not in known)
    return round(float(own / sum(t.nbytes for t in given.values())), 4)
