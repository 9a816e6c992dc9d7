"""Choice by measurement: tuned tables, what is chosen from them, and the command that fills them.

    moekit/tune/table.py   measured times, and the files that keep them
    moekit/tune/plan.py    from times over tokens to a choice per range of tokens
    moekit/tune/choice.py  a problem's times, or the nearest shape's, and what follows from them
    moekit/tune/cli.py     ``python -m moekit tune``: measures, by moekit_bench
    moekit/tune/ranks.py   the same for pairs of dispatcher and experts on several ranks
    moekit/tune/write.py   where measurements go, and what they were made with
    moekit/tune/regret.py  what the choice loses

`moekit.selection.select` uses the first three, which import no backend. docs/bench.md documents the file.
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
