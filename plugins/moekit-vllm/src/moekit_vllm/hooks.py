"""The class and the methods that moekit puts in the place of vLLM's.

`PluggableLayer.register_oot` is vLLM's public hook for classes that replace a layer. A class that
replaces `RoutedExperts` differs in one thing: its quantization method extends the one that vLLM
chose (see `moekit.engines.method`). vLLM creates and loads the weights as before.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moekit.engines.method import Extension, extended
from moekit_vllm import versions
from moekit_vllm.experts import LayerExperts
from moekit_vllm.problem import facts_of
from moekit_vllm.settings import VLLM, Mode

# vLLM's mark on layers whose 16-bit weights it has quantized; it removes the mark to load anew.
_QUANTIZED = "_already_called_process_weights_after_loading"


def install(mode: Mode) -> None:
    """Replace vLLM's `RoutedExperts` and the classes that models derive from it. Idempotent.

    Raises:
        MoekitError: It is impossible, and the mode is REQUIRE.
    """
    entered = False
    try:
        register = partial(_replace_layers, mode)
        entered = VLLM.enter(mode, versions.installed(), versions.missing_hooks, register)
    finally:
        if not entered:
            with suppress(Exception):
                uninstall()


def _replace_layers(mode: Mode) -> None:
    replaced = versions.replaced_layers()
    for stock in versions.layer_classes():
        taken = replaced.get(stock.__name__)
        if taken is None:
            stock.register_oot(_subclass(stock, mode))
        elif not hasattr(taken, "made_by_moekit"):
            other = f"{taken.__module__}.{taken.__qualname__}"
            why = f"another plugin has replaced that class by {other}"
            VLLM.decline(mode, f"every layer of class {stock.__name__}", why)


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


class Extended(Extension):
    """A method of vLLM whose layer moekit computes, unless vLLM keeps it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the layer's parameters for moekit, or let vLLM prepare them for its kernel.

        vLLM calls it again after each update of the weights in place. If it has quantized the
        weights itself, it calls it once more, when the layer has nothing left to quantize.
        """
        online = bool(getattr(self, "uses_meta_device", False))
        if online and getattr(layer, _QUANTIZED, False):
            return
        if not self.moekit_pack(layer, VLLM, LayerExperts.of, facts_of, layer.layer_name):
            super().process_weights_after_loading(layer)
            return
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        if self.moekit_experts.lora is not None:
            self.moe_kernel = self.moekit_experts.lora.kernel_for(layer)
        if online:
            setattr(layer, _QUANTIZED, True)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *args: Any,
        **more: Any,
    ) -> Any:
        """Compute the routed experts: x (T, H), weights and ids (T, K) -> (T, H)."""
        experts = self.moekit_experts
        if experts is None:
            return super().apply(layer, x, topk_weights, topk_ids, *args, **more)
        if torch.compiler.is_compiling():
            return torch.ops.moekit.vllm_experts(x, topk_weights, topk_ids, layer.layer_name)
        return experts(x, topk_weights, topk_ids)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Return scales for vLLM's kernel; none, where the layer no longer has them."""
        if self.moekit_experts is not None:
            return versions.no_quant_config()
        return super().get_fused_moe_quant_config(layer)

    @property
    def is_monolithic(self) -> bool:
        """Return whether the method chooses experts; moekit leaves that to vLLM's router."""
        return self.moekit_experts is None and bool(super().is_monolithic)

    @property
    def supports_internal_mk(self) -> bool:
        """Return whether the method moves tokens between ranks, in place of vLLM's runner."""
        experts = self.moekit_experts
        if experts is None:
            return bool(super().supports_internal_mk)
        return experts.dispatches or experts.lora is not None

    @property
    def skip_forward_padding(self) -> bool:
        """Return whether the method takes rows as narrow as the model's hidden size."""
        return self.moekit_experts is None and bool(super().skip_forward_padding)

    @property
    def has_unpadded_output(self) -> bool:
        """Return whether the method returns rows as narrow as the model's hidden size."""
        return self.moekit_experts is None and bool(super().has_unpadded_output)

    def maybe_make_prepare_finalize(self, *args: Any, **more: Any) -> Any:
        """Return vLLM's dispatcher (0.26 asks for one), or None where moekit's kernel runs."""
        if self.moekit_experts is not None:
            return None
        return super().maybe_make_prepare_finalize(*args, **more)
