"""A progress bar for long loads."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_QUICK = 1.0  # seconds; what takes less is not worth a bar
_REFRESH = 0.1
_WIDTH = 24


class Progress:
    """One line on standard error that says how far a load is.

    ``shown``: None shows it where standard error is a terminal, and only once the load has taken
    a second; True always, False never.
    """

    def __init__(self, total: int, title: str, shown: bool | None = None) -> None:
        self.total = max(total, 1)
        self.title = title
        self.done = 0
        self._wanted = sys.stderr.isatty() if shown is None else shown
        self._start = time.monotonic()
        self._next = self._start + (0.0 if shown else _QUICK)
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._drawn:
            self._draw(time.monotonic())
            print(file=sys.stderr, flush=True)

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self._wanted and (now := time.monotonic()) >= self._next:
            self._next = now + _REFRESH
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._drawn = True
        elapsed = max(now - self._start, 1e-9)
        share = min(self.done / self.total, 1.0)
        left = elapsed / share - elapsed if share else 0.0
        bar = "#" * round(share * _WIDTH)
        print(
            f"\r\033[K{self.title} [{bar:<{_WIDTH}}] {self.done / 1e9:.1f}/{self.total / 1e9:.1f} "
            f"GB, {self.done / elapsed / 1e9:.2f} GB/s, {left:.0f} s left",
            end="",
            file=sys.stderr,
            flush=True,
        )
