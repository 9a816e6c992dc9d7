"""`python -m moekit bench`: how fast, against what is possible, and is it right?

`moekit tune` measures through the same functions: build a `Case`, hand it and the calls to
`run_cell`, or time a single call with `measure`. docs/bench.md says how times are taken.
"""

from __future__ import annotations

from moekit_bench.bench.cells import Case, Result, Unavailable, run_cell
from moekit_bench.bench.cli import main
from moekit_bench.bench.contestants import Contestant, KernelCall, experts, peers
from moekit_bench.bench.limits import Ceilings, known_ceilings, limit_us, work
from moekit_bench.bench.measure import Call, DeviceLost, Timing, measure
from moekit_bench.bench.shapes import (
    ROUTINGS,
    SHAPES,
    Shape,
    inputs,
    random_weights,
    routing,
    shape,
)

__all__ = [
    "ROUTINGS",
    "SHAPES",
    "Call",
    "Case",
    "Ceilings",
    "Contestant",
    "DeviceLost",
    "KernelCall",
    "Result",
    "Shape",
    "Timing",
    "Unavailable",
    "experts",
    "inputs",
    "known_ceilings",
    "limit_us",
    "main",
    "measure",
    "peers",
    "random_weights",
    "routing",
    "run_cell",
    "shape",
    "work",
]
