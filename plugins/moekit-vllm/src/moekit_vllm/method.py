"""The part of vLLM's quantization methods that moekit replaces: see `moekit.engines.method`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moekit.engines.method import Extension
from moekit_vllm import versions
from moekit_vllm.experts import LayerExperts
from moekit_vllm.problem import facts_of
from moekit_vllm.settings import VLLM

# vLLM's mark on layers whose 16-bit weights it has quantized; it removes the mark to load anew.
_QUANTIZED = "_already_called_process_weights_after_loading"


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
