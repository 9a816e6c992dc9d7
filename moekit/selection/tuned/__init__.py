"""Choice by measurement: tuned tables, and what is chosen from them.

    table.py   measured times, and the files that keep them
    choice.py  a problem's times, or the nearest shape's, and what follows from them
    plan.py    from times over tokens to a choice for each range of tokens

`moekit.selection.policy` uses them; nothing here imports a backend. moekit-bench measures and
writes the tables (``python -m moekit tune``). docs/bench.md documents the files.
"""

from moekit.selection.tuned.choice import Choice as Choice
from moekit.selection.tuned.choice import Found as Found
from moekit.selection.tuned.choice import lookup as lookup
from moekit.selection.tuned.files import VARIABLE as VARIABLE
from moekit.selection.tuned.plan import TOLERANCE as TOLERANCE
from moekit.selection.tuned.plan import Buckets as Buckets
from moekit.selection.tuned.plan import Curve as Curve
from moekit.selection.tuned.plan import Plan as Plan
from moekit.selection.tuned.plan import join as join
from moekit.selection.tuned.plan import plan as plan
from moekit.selection.tuned.plan import serving as serving
from moekit.selection.tuned.plan import split as split
from moekit.selection.tuned.plan import time_at as time_at
from moekit.selection.tuned.table import Key as Key
from moekit.selection.tuned.table import Record as Record
from moekit.selection.tuned.table import read as read
