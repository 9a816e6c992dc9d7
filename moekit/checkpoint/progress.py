"""Report the progress of a long load: by tqdm where it is installed, else in the log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("moekit")

_DELAY = 1.0  # seconds before a bar appears

Report = Callable[[Path, int], object]
"""Called with the file and the number of bytes of each part that was read."""


@contextmanager
def progress(total: int, title: str, shown: bool | None = None) -> Iterator[Report]:
    """Yield the function to report each part with.

    Args:
        total: Bytes that are read in the end.
        title: What happens, for example "loading experts".
        shown: True reports always, False never. None reports where standard error is a terminal;
            a bar then appears only if the load takes over a second.
    """
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda file, nbytes: None
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        yield _log(total, title)
        return
    delay = 0.0 if shown else _DELAY
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, delay=delay) as bar:
        yield lambda file, nbytes: bar.update(nbytes)


def _log(total: int, title: str) -> Report:
    """Return a function that logs a line for each file it sees first."""
    seen: set[Path] = set()
    done = 0

    def report(file: Path, nbytes: int) -> None:
        nonlocal done
        if file not in seen:
            seen.add(file)
            logger.info("moekit: %s: %s, %.1f of %.1f GB", title, file, done / 1e9, total / 1e9)
        done += nbytes

    return report
