"""The contract between the kernel and its backends, for authors of backends.

A dispatcher implements `PrepareAndFinalize`, an experts backend `PermuteExpertsUnpermute`. They
exchange `Routing`, `Dispatched` and `PackedWeights`.

Shape suffixes: T tokens on this rank, K top-k, H hidden size, I intermediate size on this rank,
L local experts, R dispatched rows, C capacity of the batched layout (rows for each expert).
"""

from moekit.contract.interfaces import Adapters as Adapters
from moekit.contract.interfaces import BufferSpec as BufferSpec
from moekit.contract.interfaces import Dispatched as Dispatched
from moekit.contract.interfaces import PackedWeights as PackedWeights
from moekit.contract.interfaces import PermuteExpertsUnpermute as PermuteExpertsUnpermute
from moekit.contract.interfaces import PrepareAndFinalize as PrepareAndFinalize
from moekit.contract.interfaces import Quantizer as Quantizer
from moekit.contract.interfaces import Routing as Routing
from moekit.contract.interfaces import Unreduced as Unreduced
