"""Register moekit's functions with SGLang's registry of hooks.

`HookRegistry`, SGLang's public hook, wraps functions by their names. moekit wraps:

    FusedMoE.__init__        a layer gets a quantization method that extends the one it chose
    create_moe_dispatcher    a layer whose tokens moekit moves gets a dispatcher that passes them on
    FusedMoE's loaders       a layer gets memory for new weights, and packs them after the last one

SGLang's registries of runners are not enough: its quantization methods never choose a registered
runner, and a registered fused function replaces a built-in one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moekit.engines.kernels import names_dispatcher
from moekit.engines.method import Extension, extended
from moekit_sglang import versions
from moekit_sglang.experts import LayerExperts
from moekit_sglang.problem import facts_of
from moekit_sglang.settings import SGLANG, Mode

_installed: list[Mode] = []


def install(mode: Mode) -> None:
    """Register the hooks, which SGLang applies once all plugins have registered theirs. Idempotent.

    Raises:
        MoekitError: SGLang lacks something, and the mode is REQUIRE.
    """
    if _installed:
        return
    if SGLANG.enter(mode, versions.installed(), versions.missing_hooks, _register):
        _installed.append(mode)


def _register() -> None:
    versions.register_hook(f"{versions.LAYER}.__init__", extend, "AFTER")
    versions.register_hook(versions.MAKE_DISPATCHER, make_dispatcher, "AROUND")
    for target in versions.LOADERS:
        versions.register_hook(target, load, "AROUND")


def extend(_: None, layer: Any, *args: Any, **more: Any) -> None:
    """Give a new layer a method that lets moekit compute it."""
    if _installed:  # registering another hook may have failed
        layer.quant_method = extended(layer.quant_method, Extended, _installed[0])
        layer.quant_method.moekit_loaded = set()


def make_dispatcher(stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Return a layer's dispatcher. It passes tokens on if moekit's dispatchers move them."""
    if not _installed or not names_dispatcher() or versions.all_to_all() == "none":
        return stock(*args, **more)
    sglang = versions.standard()

    class Passing(sglang.BaseDispatcher):  # type: ignore[misc,name-defined]
        def dispatch(self, hidden_states: Any, topk_output: Any) -> Any:
            return sglang.StandardDispatchOutput(hidden_states, None, topk_output)

        def combine(self, combine_input: Any) -> Any:
            return combine_input.hidden_states

    made = Passing()
    made.stock = lambda: stock(*args, **more)  # for a layer that stays with SGLang
    return made


def load(stock: Callable[..., Any], layer: Any, param: Any, *args: Any, **more: Any) -> Any:
    """Load a matrix of one expert or of all, into a parameter that has memory for it."""
    experts = getattr(layer.quant_method, "moekit_experts", None)
    if experts is None or not experts.emptied:
        if (loaded := getattr(layer.quant_method, "moekit_loaded", None)) is not None:
            loaded.add(id(param))
        return stock(layer, param, *args, **more)
    names = ("loaded_weight", "weight_name", "shard_id", "expert_id")
    named = dict(zip(names, args, strict=False)) | more
    experts.make_room(layer)
    result = stock(layer, param, *args, **more)
    experts.received(layer, param, named.get("expert_id"), named["shard_id"])
    return result


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
