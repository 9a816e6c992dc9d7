"""Benchmarks of moekit's backends, and the tuner that fills its tables.

`python -m moekit bench` and `python -m moekit tune` are its commands. From Python, `measure` times
a single call, and `run_cell` checks and times several in turns. docs/bench.md says how times are
taken.
"""

from __future__ import annotations

from .accuracy import oracle_rows, relative_error, sampled_rows
from .experts import Case, run_cell
from .implementations import Implementation, KernelCall, Unavailable, backends, baselines
from .limits import Ceilings, Work, known_ceilings, limit_us, work
from .records import Measurement
from .report import Table
from .shapes import ROUTINGS, SHAPES, Inputs, Shape, inputs, random_weights, routing, shape
from .timer import Call, DeviceLost, Prepared, Timer, Timing, measure, take_turns

__all__ = [
    "ROUTINGS",
    "SHAPES",
    "Call",
    "Case",
    "Ceilings",
    "DeviceLost",
    "Implementation",
    "Inputs",
    "KernelCall",
    "Measurement",
    "Prepared",
    "Shape",
    "Table",
    "Timer",
    "Timing",
    "Unavailable",
    "Work",
    "backends",
    "baselines",
    "inputs",
    "known_ceilings",
    "limit_us",
    "measure",
    "oracle_rows",
    "random_weights",
    "relative_error",
    "routing",
    "run_cell",
    "sampled_rows",
    "shape",
    "take_turns",
    "work",
]
