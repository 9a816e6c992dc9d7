"""One sweep for all that is measured: cells one by one, and their progress."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from .records import Cell, Refusal, Run, Settings
from .timer import DeviceLost


@dataclass(kw_only=True)
class Sweep(ABC):
    """Cells that are measured one by one, and the run that they make. measured: how many of the
    cells it has. keep: called with every measured cell, so that a run that is stopped leaves what
    it measured. end: by `time.monotonic`, when no more cells are begun."""

    schemes: Sequence[str]
    routings: Sequence[str]
    tokens: Sequence[int]
    settings: Settings
    command: str = ""
    keep: Callable[[Cell], None] | None = None
    end: float | None = None
    run: Run = field(init=False)
    cells: list[Cell] = field(init=False)
    measured: int = field(init=False, default=0)

    @abstractmethod
    def measure_cell(self, cell: Cell) -> Cell | None:
        """Return the cell with its results, or None if it cannot be measured."""

    @property
    def complete(self) -> bool:
        return self.measured == len(self.cells)

    @property
    def succeeded(self) -> bool:
        """Return whether something was measured, and all of it ran and is right."""
        results = [r for cell in self.run.cells for r in cell.results]
        return bool(results) and all(r.right for r in results)

    def measure(self) -> None:
        """Measure all cells; Ctrl-C and a lost device end it early."""
        begin, count = time.monotonic(), len(self.cells)
        try:
            for done, cell in enumerate(self.cells, 1):
                if self.end is not None and time.monotonic() > self.end:
                    say(f"the time is over; {count - done + 1} of {count} cells are left")
                    break
                text = self._measure(cell)
                took = time.monotonic() - begin
                left = timedelta(seconds=round(took / done * (count - done)))
                say(f"[{done}/{count}, {left} left] {cell}: {text}")
            self.finish()
        except DeviceLost as error:
            say(f"error: {error}; the remaining cells cannot be measured")
        except KeyboardInterrupt:
            say("interrupted; the cells measured so far are kept")

    def finish(self) -> None:  # noqa: B027 (most have nothing to free)
        """Free what cells share; not called if the sweep was interrupted or lost its device."""

    def _measure(self, cell: Cell) -> str:
        made = self.measure_cell(cell)
        if made is None:
            return "not measured"
        self.run, self.measured = self.run.adding(made), self.measured + 1
        if self.keep is not None:
            self.keep(made)
        return "; ".join(map(str, made.results)) or "nothing to measure"

    def refuse(self, name: str, reason: str, cell: Cell, tokens: int | None = None) -> None:
        """Record something that is not measured, and say so once for each reason."""
        refusal = Refusal(
            name=name, reason=reason, shape=cell.shape, scheme=cell.scheme, tokens=tokens
        )
        if (name, reason) not in {(r.name, r.reason) for r in self.run.refused}:
            say(f"{refusal.where}: without {name}: {reason}")
        self.run = replace(self.run, refused=(*self.run.refused, refusal))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
