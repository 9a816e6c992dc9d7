"""What a person sees of a sweep while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from moekit_bench.bench.cells import Result


@dataclass
class Progress:
    """Lines on standard error, with the time that is left, guessed from the cells so far."""

    total: int
    done: int = 0
    start: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def doing(self, text: str) -> None:
        """Overwritten by whatever comes next; only for people watching."""
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def cell(self, title: str, results: Mapping[str, Result]) -> None:
        self.doing("")
        self.done += 1
        elapsed = time.monotonic() - self.start
        left = elapsed / self.done * (self.total - self.done)
        texts = [f"{name} {self._result(result)}" for name, result in results.items()]
        self.say(
            f"[{self.done}/{self.total}, {_duration(elapsed)}, {_duration(left)} left] {title}: "
            + ("; ".join(texts) or "nothing to measure")
        )

    @staticmethod
    def _result(result: Result) -> str:
        if result.timing is None:
            return f"failed ({result.reason})"
        fraction = "" if result.fraction is None else f" {result.fraction:.2f}"
        return f"{result.timing.us:.0f} us{fraction}" + (
            "" if result.right else f" {result.reason}"
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
