"""Typed records of a run, which docs/bench.md documents as JSON.

A `Run` has cells, and a cell has a result for each implementation, dispatcher or combination. The
names of JSON's keys are older than those of the fields, where they differ.
"""

from __future__ import annotations

import datetime
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from moekit.errors import MoekitError
from moekit.plugin import DeviceSpec, MoEProblem

from .codec import Microseconds, Positive, Share, mean, median, merged_by, named, widest, worst
from .limits import Ceilings
from .shapes import Shape
from .timer import Timing

FORMAT = 1
BACKEND, BASELINE = "moekit", "peer"  # as JSON calls them
INVARIANT = "batch-invariant"  # a backend in that mode, whose name ends with `IN_MODE`
IN_MODE = " (batch-invariant)"

M = TypeVar("M", bound="Measurement")


def now() -> str:
    """Return the time in UTC, as ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


# -- results --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The times of something, in microseconds, and whether its output is right.

    us: the time that counts, None if there is none. error: None if the output is not finite.
    reason: why it failed or is wrong. note: why there is no graph time.
    """

    us: Microseconds | None = merged_by(median, default=None)
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
    fraction: Positive | None = None
    copied: Share | None = None

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

    sequential_us: Microseconds = merged_by(median, "one_after_the_other_us")
    in_flight_us: Microseconds = merged_by(median)
    run_ahead_us: Microseconds | None = merged_by(median, default=None)  # older recordings lack it
    shared_after_us: Microseconds = merged_by(median, "after_us")
    shared_within_us: Microseconds = merged_by(median, "meanwhile_us")
    shared_concurrent_us: Microseconds = merged_by(median, "beside_us")
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
    copied: Share | None = None
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


# -- cells ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExpertsCell:
    """A shape, scheme, routing and number of tokens; flop, bytes, active_experts and rows are those
    of a call, averaged over its inputs."""

    shape: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    ep: int = 1
    dtype: str
    scheme: str
    routing: str
    tokens: int
    inputs: int = 0
    flop: float = 0.0
    bytes: float = 0.0
    active_experts: float = 0.0
    rows: float = 0.0
    limit_us: float | None = None
    results: tuple[ExpertsResult, ...] = named("contestants")


@dataclass(frozen=True, kw_only=True)
class DispatcherCell:
    scheme: str
    routing: str
    tokens: int
    results: tuple[DispatcherResult, ...] = named("dispatchers")


@dataclass(frozen=True, kw_only=True)
class LayerCell:
    scheme: str
    tokens: int
    results: tuple[LayerResult, ...] = named("pairs")

    def by_names(self) -> dict[tuple[str, str], LayerResult]:
        """Return the results by dispatcher and experts.

        Those in batch-invariant mode do other work, and are left out.
        """
        mine = (r for r in self.results if not r.experts.endswith(IN_MODE))
        return {(r.dispatcher, r.experts): r for r in mine}

    def times(self) -> dict[str, float | None]:
        """Return the microseconds of each combination, None where it failed or is wrong."""
        return {r.label: r.us if r.right else None for r in self.by_names().values()}


# -- runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceFacts:
    """The device of a run; None where a fact is unknown."""

    name: str
    type: str
    capability: tuple[int, int] | None = None
    arch: str = ""
    multiprocessors: int | None = None
    l2_bytes: int | None = None
    memory_bytes: int | None = None

    def spec(self) -> DeviceSpec:
        """Return the device as problems describe it: the CPU has no name there."""
        name = "" if self.type == "cpu" else self.name
        return DeviceSpec(self.type, self.capability, name, self.arch)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Something that was not measured, and why."""

    name: str
    reason: str
    scheme: str
    shape: str | None = None
    tokens: int | None = None

    @property
    def where(self) -> str:
        shape = "" if self.shape is None else f"{self.shape} "
        return f"{shape}{self.scheme}" + ("" if self.tokens is None else f" T={self.tokens}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings with which a run measures."""

    dtype: str = "bfloat16"
    inputs: int
    replays: int
    no_graph: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ExpertsSettings(Settings):
    dispatcher: str
    ep: int = 1  # older recordings lack it


@dataclass(frozen=True, kw_only=True)
class DispatchSettings(Settings):
    sizes: str


@dataclass(frozen=True, kw_only=True)
class LayerSettings(Settings):
    layer: str
    routing: str = "uniform"
    share_devices: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """The fields that every run records, apart from its cells and settings."""

    format: int = FORMAT
    command: str = ""
    date: str = field(default_factory=now)
    versions: dict[str, str] = field(default_factory=dict)
    device: DeviceFacts
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """An implementation over all cells of a scheme where it is right. A worst cell is named by its
    shape, routing and tokens."""

    scheme: str
    name: str
    cells: int
    of_cells: int
    fraction_geomean: float | None = None
    fraction_worst: float | None = None
    fraction_worst_cell: dict[str, Any] | None = None
    speed_geomean: float | None = named("speed_vs_best_peer_geomean", default=None)
    speed_worst: float | None = named("speed_vs_best_peer_worst", default=None)
    speed_worst_cell: dict[str, Any] | None = named("speed_vs_best_peer_worst_cell", default=None)


@dataclass(frozen=True, kw_only=True)
class ExpertsRun(Run):
    settings: ExpertsSettings
    ceilings: Ceilings | None = None
    cells: tuple[ExpertsCell, ...] = ()
    summary: tuple[SummaryRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DispatchRun(Run):
    ranks: int
    settings: DispatchSettings
    cells: tuple[DispatcherCell, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayersRun(Run):
    ranks: int
    layer: Shape
    settings: LayerSettings
    what: str = "layers"
    cells: tuple[LayerCell, ...] = ()

    def problem(self, scheme: str, tokens: int) -> MoEProblem:
        """Return the problem of a cell, as rank 0 sees it."""
        return self.layer.on_ranks(
            self.ranks, self.device.spec(), scheme, self.settings.dtype, tokens
        )

    def title(self, scheme: str) -> str:
        return f"{self.settings.layer} {scheme} on {self.ranks} ranks"

    def check_timed(self) -> None:
        """Raise MoekitError if the times of this run mean nothing."""
        if self.settings.share_devices:
            raise MoekitError(
                f"{self.ranks} ranks took turns on fewer devices (--share-devices), so their times "
                "mean nothing; measure with a device for each rank"
            )


def all_right(run: DispatchRun | LayersRun) -> bool:
    """Return whether something was measured, and all of it ran and is right."""
    results = [r for cell in run.cells for r in cell.results]
    return bool(results) and all(r.right for r in results)
