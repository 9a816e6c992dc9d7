"""Register moekit's `RoutedExperts` with vLLM.

`PluggableLayer.register_oot` is vLLM's public hook for classes that replace a layer. A class that
replaces `RoutedExperts` differs in one thing: `moekit_vllm.method` extends the quantization method
that vLLM chose. vLLM creates and loads the weights as before, for every quantization method.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from moekit.engines.method import extended
from moekit.errors import MoekitError
from moekit.plugin import reason_of
from moekit_vllm import versions
from moekit_vllm.method import Extended
from moekit_vllm.settings import VLLM, Mode


def install(mode: Mode) -> None:
    """Replace vLLM's `RoutedExperts` and the classes that models derive from it. Idempotent.

    Raises:
        MoekitError: It is impossible, and the mode is REQUIRE.
    """
    try:
        if reasons := VLLM.unsupported(versions.installed()) or versions.missing_hooks():
            VLLM.decline(mode, "every MoE layer", "; ".join(reasons))
            return
        replaced = versions.replaced_layers()
        for stock in versions.layer_classes():
            taken = replaced.get(stock.__name__)
            if taken is None:
                stock.register_oot(_subclass(stock, mode))
            elif not hasattr(taken, "made_by_moekit"):
                other = f"{taken.__module__}.{taken.__qualname__}"
                why = f"another plugin has replaced that class by {other}"
                VLLM.decline(mode, f"every layer of class {stock.__name__}", why)
    except (MoekitError, KeyboardInterrupt):
        raise
    except BaseException as error:  # importing vLLM may raise SystemExit
        with suppress(Exception):
            uninstall()
        why = f"vLLM has other modules than expected ({reason_of(error)})"
        VLLM.decline(mode, "every MoE layer", why)


def uninstall() -> None:
    """Give vLLM its classes back; layers that exist keep what computes them."""
    replaced = versions.replaced_layers()
    for name in [n for n, taken in replaced.items() if hasattr(taken, "made_by_moekit")]:
        del replaced[name]


def _subclass(stock: Any, mode: Mode) -> Any:
    class Layer(stock):  # type: ignore[misc]  # vLLM declares no types here
        """vLLM's experts of one layer, whose quantization method moekit extends."""

        made_by_moekit = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.quant_method: Any = extended(self.quant_method, Extended, mode)

        def _replace_quant_method(self, method: Any) -> None:
            """Keep moekit's method instead: it computes adapters (LoRA)."""
            if getattr(self.quant_method, "moekit_experts", None) is None:
                super()._replace_quant_method(method)

    Layer.__name__, Layer.__qualname__ = stock.__name__, stock.__qualname__
    return Layer
