"""Register moekit's `RoutedExperts` with vLLM.

`PluggableLayer.register_oot` is vLLM's public hook for classes that replace a layer. The class that
replaces `RoutedExperts` differs in one thing: when it is made, `MoekitMethod` extends the
quantization method that vLLM chose. Weights are created and loaded by vLLM as before, for every
quantization method alike.
"""

from __future__ import annotations

from typing import Any

from moekit_vllm import versions
from moekit_vllm.method import extend
from moekit_vllm.settings import Mode

_LAYER = "RoutedExperts"
_LAYERS = "every MoE layer"


def install(mode: Mode) -> bool:
    """Replace vLLM's `RoutedExperts`, and return whether moekit's is the one in use. Idempotent.

    Raises:
        MoekitError: It is impossible, and the mode is REQUIRE.
    """
    reasons = versions.unsupported(versions.installed()) or versions.missing_hooks()
    if reasons:
        mode.decline(_LAYERS, "; ".join(reasons))
        return False
    taken = versions.replaced_layers().get(_LAYER)
    if taken is not None and not hasattr(taken, "made_by_moekit"):
        other = f"{taken.__module__}.{taken.__qualname__}"
        mode.decline(_LAYERS, f"another plugin has replaced {_LAYER} by {other}")
        return False
    if taken is None:
        stock = versions.routed_experts()
        stock.register_oot(_subclass(stock, mode))
    return True


def uninstall() -> None:
    """Give vLLM its `RoutedExperts` back; layers that exist keep what computes them."""
    taken = versions.replaced_layers().get(_LAYER)
    if taken is not None and hasattr(taken, "made_by_moekit"):
        del versions.replaced_layers()[_LAYER]


def _subclass(stock: Any, mode: Mode) -> Any:
    class RoutedExperts(stock):  # type: ignore[misc]  # vLLM declares no types here
        """vLLM's experts of one layer, whose quantization method moekit extends."""

        made_by_moekit = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            extend(self.quant_method, mode)

    return RoutedExperts
