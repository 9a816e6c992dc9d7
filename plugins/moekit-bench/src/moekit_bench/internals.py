"""The names that this package needs from moekit beyond its public ones.

Everything else is imported from `moekit`, `moekit.plugin`, `moekit.errors` and `moekit.testing`.
The README lists these names too; a change of one of them in the core is a change here.
"""

from moekit.backends.reference import expert_mlp
from moekit.layer.simulate import SIMULATED
from moekit.problem import DTYPES
from moekit.problem.tolerance import benchmark_bound
from moekit.runtime.overlap import ConcurrentExperts as ConcurrentExperts
from moekit.selection.composite import find_experts
from moekit.selection.tuned import table as tuned_tables
from moekit.selection.tuned.choice import Found
from moekit.selection.tuned.files import device_file
from moekit.selection.tuned.plan import serving
from moekit.selection.tuned.plan import split as buckets
from moekit.selection.tuned.table import Key, Record, Table

__all__ = [
    "DTYPES",
    "SIMULATED",
    "ConcurrentExperts",
    "Found",
    "Key",
    "Record",
    "Table",
    "benchmark_bound",
    "buckets",
    "device_file",
    "expert_mlp",
    "find_experts",
    "serving",
    "tuned_tables",
]
