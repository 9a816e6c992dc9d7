"""Shared experts: a function of every token that the model adds to the routed experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from moekit.runtime.checks import check_shared


@dataclass(frozen=True)
class SharedExperts:
    """The shared experts of a `FusedMoE` layer.

    Args:
        function: (T, H) -> (T, H), added to every token's output. It runs on a separate stream
            while tokens travel. It stays its owner's: it is no submodule of the layer, is not in
            its state_dict, and does not move with it.
        partial: ``function`` computes a slice of the intermediate size, so its output must be
            summed over the ranks that hold the same tokens.
    """

    function: Callable[[Tensor], Tensor]
    partial: bool = False

    @classmethod
    def of(cls, shared: SharedExperts | Callable[[Tensor], Tensor] | None) -> SharedExperts | None:
        """Return complete shared experts for a function, other values as they are."""
        return shared if shared is None or isinstance(shared, cls) else cls(shared)

    def __call__(self, x_TH: Tensor) -> Tensor:
        """Return the function's output; raises InvalidInput if it does not fit ``x_TH``."""
        return check_shared(self.function, x_TH)
