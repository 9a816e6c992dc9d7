"""The part of SGLang's quantization methods that moekit replaces: see `moekit.engines.method`."""

from __future__ import annotations

from typing import Any

from moekit.engines.method import Extension
from moekit_sglang import versions
from moekit_sglang.experts import LayerExperts
from moekit_sglang.problem import facts_of
from moekit_sglang.settings import SGLANG


class Extended(Extension):
    """Override a method of SGLang. moekit_loaded: ids of the parameters that SGLang has loaded."""

    moekit_loaded: set[int]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the layer's parameters for moekit, or let SGLang prepare them for its kernel.

        SGLang calls it again after it has loaded new weights from files.
        """
        name = f"MoE layer {layer.layer_id}"
        if not self.moekit_pack(layer, SGLANG, LayerExperts.of, facts_of, name):
            if (make := getattr(layer.dispatcher, "stock", None)) is not None:
                layer.dispatcher = make()
            super().process_weights_after_loading(layer)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Restore the checkpoint's layout (0.5.23); moekit does so when weights come."""
        if self.moekit_experts is None:
            super().restore_weights_before_loading(layer)

    def apply(self, layer: Any, dispatch_output: Any, *args: Any, **more: Any) -> Any:
        """Compute the routed experts: tokens (T, H), weights and ids (T, K) -> (T, H)."""
        if self.moekit_experts is None:
            return super().apply(layer, dispatch_output, *args, **more)
        out = self.moekit_experts(dispatch_output.hidden_states, dispatch_output.topk_output)
        return versions.standard().StandardCombineInput(out)
