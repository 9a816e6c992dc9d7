"""Choice by measurement: tuned tables, and what is chosen from them.

    table.py   measured times, and the files that keep them
    choice.py  a problem's times, or the nearest shape's, and what follows from them
    plan.py    from times over tokens to a choice for each range of tokens

`moekit.selection.policy` uses them; nothing here imports a backend. moekit-bench measures and
writes the tables (``python -m moekit tune``). docs/bench.md documents the files.
"""

from __future__ import annotations

from moekit.selection.tuned.choice import Choice, Found, lookup
from moekit.selection.tuned.plan import (
    TOLERANCE,
    Buckets,
    Curve,
    Plan,
    join,
    plan,
    serving,
    split,
    time_at,
)
from moekit.selection.tuned.table import VARIABLE, Key, Record, read

__all__ = [
    "TOLERANCE",
    "VARIABLE",
    "Buckets",
    "Choice",
    "Curve",
    "Found",
    "Key",
    "Plan",
    "Record",
    "join",
    "lookup",
    "plan",
    "read",
    "serving",
    "split",
    "time_at",
]
