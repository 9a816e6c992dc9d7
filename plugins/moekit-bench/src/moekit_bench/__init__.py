"""Benchmarks of moekit's backends, and the tuner that fills its tables.

`python -m moekit bench` and `python -m moekit tune` are its commands. From Python, `Prepared.time`
times a single call, and `run_cell` checks and times several in turns. docs/bench.md says how times
are taken.
"""

from __future__ import annotations

from .cases import Case, run_cell
from .implementations import KernelCall, Unavailable
from .limits import Work, known_ceilings, limit_us, work
from .records import Ceilings, Result
from .report import Table
from .shapes import SHAPES, inputs, random_weights, shape
from .timer import EAGER_CALLS, Prepared, Timer, take_turns

__all__ = [
    "EAGER_CALLS",
    "SHAPES",
    "Case",
    "Ceilings",
    "KernelCall",
    "Prepared",
    "Result",
    "Table",
    "Timer",
    "Unavailable",
    "Work",
    "inputs",
    "known_ceilings",
    "limit_us",
    "random_weights",
    "run_cell",
    "shape",
    "take_turns",
    "work",
]
