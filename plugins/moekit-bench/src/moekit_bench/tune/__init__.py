"""`python -m moekit tune`: measure what the choice of backends is made from."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    from moekit_bench.tune.cli import main as run

    return run(argv)
