"""The part of SGLang's quantization methods that moekit replaces.

A method creates a layer's parameters, prepares them after loading, and applies them. SGLang asks a
method for its class and attributes in many places. So moekit's object has the attributes of
SGLang's, and a class that extends SGLang's under the same name.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from moekit.errors import MoekitError
from moekit.plugin import reason_of
from moekit_sglang import versions
from moekit_sglang.experts import LayerExperts
from moekit_sglang.problem import shape
from moekit_sglang.settings import SGLANG, Mode


def extended(method: Any, mode: Mode) -> Any:
    """Return a method that lets moekit compute its layer, with the attributes of ``method``."""
    stock: Any = type(method)
    made = object.__new__(_extended(stock))
    object.__setattr__(made, "__dict__", vars(method))  # shared: bound methods may refer to it
    made.moekit_mode, made.moekit_experts, made.moekit_loaded = mode, None, set()
    return made


@cache
def _extended(stock: Any) -> Any:
    class Extended(stock):  # type: ignore[misc]  # SGLang declares no types here
        """A method whose layer moekit computes, unless SGLang keeps it.

        moekit_mode: What to do if moekit cannot compute the layer; OFF once SGLang keeps it.
        moekit_experts: What computes the layer; None before the weights are loaded, and where
            SGLang's own method does.
        moekit_loaded: The ids of the parameters that SGLang has loaded.
        """

        moekit_mode: Mode
        moekit_experts: LayerExperts | None
        moekit_loaded: set[int]

        def process_weights_after_loading(self, layer: Any) -> None:
            """Pack the layer's parameters for moekit, or let SGLang prepare them for its kernel.

            SGLang calls it again after it has loaded new weights from files. Raises MoekitError if
            moekit cannot take them. It keeps the layer: CUDA graphs that were captured would go on
            with its former weights.
            """
            before = self.moekit_experts
            if self.moekit_mode is not Mode.OFF:
                try:
                    self.moekit_experts = LayerExperts.of(layer, self, before)
                except Exception as error:  # of any kind: SGLang has a kernel
                    reason = str(error) if isinstance(error, MoekitError) else reason_of(error)
                    if before is not None:
                        raise MoekitError(
                            f"moekit computes MoE layer {layer.layer_id}, but not with its new "
                            f"weights: {reason}; send weights that fit, or restart the engine"
                        ) from error
                    SGLANG.decline(self.moekit_mode, shape(layer), reason)
                    self.moekit_mode = Mode.OFF  # SGLang keeps the layer through all updates
            if self.moekit_experts is None:
                if (make := getattr(layer.dispatcher, "stock", None)) is not None:
                    layer.dispatcher = make()
                super().process_weights_after_loading(layer)

        def restore_weights_before_loading(self, layer: Any) -> None:
            """Undo what SGLang's kernel needs (0.5.23); moekit makes room when weights come."""
            if self.moekit_experts is None:
                super().restore_weights_before_loading(layer)

        def apply(self, layer: Any, dispatch_output: Any, *args: Any, **more: Any) -> Any:
            """Compute the routed experts: tokens (T, H), weights and ids (T, K) -> (T, H)."""
            if self.moekit_experts is None:
                return super().apply(layer, dispatch_output, *args, **more)
            out = self.moekit_experts(dispatch_output.hidden_states, dispatch_output.topk_output)
            return versions.standard(out)

    Extended.__name__, Extended.__qualname__ = stock.__name__, stock.__qualname__
    Extended.__module__ = stock.__module__
    return Extended
