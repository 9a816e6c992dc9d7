"""Typed records of a run, which docs/bench.md documents as JSON.

A `Run` has cells, and a cell has a result for each implementation, dispatcher or combination. The
names of JSON's keys are older than those of the fields, where they differ.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

from moekit.errors import MoekitError
from moekit.plugin import DeviceSpec, MoEProblem

from .codec import named
from .limits import Ceilings
from .results import IN_MODE, DispatcherResult, ExpertsResult, LayerResult
from .shapes import Shape

FORMAT = 1


def now() -> str:
    """Return the time in UTC, as ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


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
        """Return the results by dispatcher and experts."""
        return {(r.dispatcher, r.experts): r for r in self.results}

    def times(self) -> dict[str, float | None]:
        """Return the microseconds of each combination, None where it failed or is wrong.

        Those in batch-invariant mode do other work, and are left out.
        """
        mine = [r for r in self.results if not r.experts.endswith(IN_MODE)]
        return {r.label: r.us if r.right else None for r in mine}


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
