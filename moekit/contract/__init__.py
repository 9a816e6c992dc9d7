"""The contract between the kernel and its backends, for authors of backends.

A dispatcher implements `PrepareAndFinalize`, an experts backend `PermuteExpertsUnpermute`. They
exchange `Routing`, `Dispatched` and `PackedWeights`.

Shape suffixes: T tokens on this rank, K top-k, H hidden size, I intermediate size on this rank,
L local experts, R dispatched rows, C capacity of the batched layout (rows for each expert).
"""

from moekit.contract.interfaces import (
    BufferSpec,
    Dispatched,
    PackedWeights,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    Unreduced,
)

__all__ = [
    "BufferSpec",
    "Dispatched",
    "PackedWeights",
    "PermuteExpertsUnpermute",
    "PrepareAndFinalize",
    "Quantizer",
    "Routing",
    "Unreduced",
]
