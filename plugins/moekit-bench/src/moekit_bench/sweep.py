"""One sweep for all that is measured: cells one by one, and their progress."""

from __future__ import annotations

import itertools
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from .records import Cell, Refusal, Run, Settings
from .timer import DeviceLost


class Progress:
    """A line on standard error for each cell, or silence."""

    def __init__(self, total: int, *, silent: bool = False) -> None:
        self._total, self._silent = total, silent
        self._done, self._begin = 0, time.monotonic()

    def say(self, text: str) -> None:
        if not self._silent:
            print(text, file=sys.stderr, flush=True)

    def done(self, text: str) -> None:
        self._done += 1
        took = time.monotonic() - self._begin
        left = timedelta(seconds=round(took / self._done * (self._total - self._done)))
        self.say(f"[{self._done}/{self._total}, {left} left] {text}")


@dataclass(kw_only=True)
class Sweep(ABC):
    """Cells that are measured one by one, and the run that they make.

    run: the run so far. cells: what to measure, in order; measured: how many of them it has. keep:
    called with every measured cell, so that a run that is stopped leaves what it measured. leader:
    whether this process reports and keeps; of several ranks one does. end: by `time.monotonic`,
    when no more cells are begun.
    """

    schemes: Sequence[str]
    routings: Sequence[str]
    tokens: Sequence[int]
    settings: Settings
    command: str = ""
    keep: Callable[[Cell], None] | None = None
    leader: bool = True
    end: float | None = None
    run: Run = field(init=False)
    cells: list[Cell] = field(init=False)
    progress: Progress = field(init=False)
    measured: int = field(init=False, default=0)

    def all_cells(self, shapes: Iterable[str]) -> list[Cell]:
        every = itertools.product(shapes, self.schemes, self.routings, self.tokens)
        return [Cell(shape=s, scheme=q, routing=r, tokens=t) for s, q, r, t in every]

    @abstractmethod
    def measure_cell(self, cell: Cell) -> Cell | None:
        """Return the cell with its results, or None if it cannot be measured."""

    @property
    def complete(self) -> bool:
        return self.measured == len(self.cells)

    @property
    def succeeded(self) -> bool:
        """Return whether the results are right."""
        return self.run.all_right()

    def late(self) -> bool:
        """Return whether the time is over."""
        return self.end is not None and time.monotonic() > self.end

    def measure(self) -> None:
        """Measure all cells; Ctrl-C and a lost device end it early."""
        self.progress = Progress(len(self.cells), silent=not self.leader)
        try:
            for done, cell in enumerate(self.cells):
                if self.late():
                    left = len(self.cells) - done
                    self.progress.say(
                        f"the time is over; {left} of {len(self.cells)} cells are left"
                    )
                    break
                self._measure(cell)
            self.finish()
        except DeviceLost as error:
            self.progress.say(f"error: {error}; the remaining cells cannot be measured")
        except KeyboardInterrupt:
            self.progress.say("interrupted; the cells measured so far are kept")

    def finish(self) -> None:  # noqa: B027 (most have nothing to free)
        """Free what cells share; not called if the sweep was interrupted or lost its device."""

    def _measure(self, cell: Cell) -> None:
        made = self.measure_cell(cell)
        text = "not measured"
        if made is not None:
            self.run, self.measured = self.run.adding(made), self.measured + 1
            text = "; ".join(map(str, made.results)) or "nothing to measure"
            if self.leader and self.keep is not None:
                self.keep(made)
        self.progress.done(f"{cell}: {text}")

    def refuse(self, name: str, reason: str, cell: Cell, tokens: int | None = None) -> None:
        """Record something that is not measured, and say so once for each reason."""
        refusal = Refusal(
            name=name, reason=reason, shape=cell.shape, scheme=cell.scheme, tokens=tokens
        )
        if (name, reason) not in {(r.name, r.reason) for r in self.run.refused}:
            self.progress.say(f"{refusal.where}: without {name}: {reason}")
        self.run = replace(self.run, refused=(*self.run.refused, refusal))
