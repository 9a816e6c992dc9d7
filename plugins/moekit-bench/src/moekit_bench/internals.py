"""The names that this package needs from moekit beyond its public ones.

Everything else is imported from `moekit`, `moekit.plugin`, `moekit.errors` and `moekit.testing`.
The README lists these names too; a change of one of them in the core is a change here.
"""

from moekit.backends.reference import oracle as oracle
from moekit.layer.simulate import SIMULATED as SIMULATED
from moekit.problem import DTYPES as DTYPES
from moekit.problem.tolerance import benchmark_bound as benchmark_bound
from moekit.runtime.adapters import shapes as shapes
from moekit.selection.judge import named as named
from moekit.selection.tuned import table as table
from moekit.selection.tuned import user_path as user_path
from moekit.selection.tuned.table import Key as Key
from moekit.selection.tuned.table import Record as Record
from moekit.selection.tuned.table import Table as Table
