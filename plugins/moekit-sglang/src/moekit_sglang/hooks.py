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
from moekit.engines.method import extended
from moekit.errors import MoekitError
from moekit.plugin import reason_of
from moekit_sglang import versions
from moekit_sglang.method import Extended
from moekit_sglang.settings import SGLANG, Mode

_installed: list[Mode] = []


def install(mode: Mode) -> None:
    """Register the hooks, which SGLang applies once all plugins have registered theirs. Idempotent.

    Raises:
        MoekitError: SGLang lacks something, and the mode is REQUIRE.
    """
    if _installed:
        return
    try:
        if reasons := SGLANG.unsupported(versions.installed()) or versions.missing_hooks():
            SGLANG.decline(mode, "every MoE layer", "; ".join(reasons))
            return
        versions.register_hook(f"{versions.LAYER}.__init__", extend, "AFTER")
        versions.register_hook(versions.MAKE_DISPATCHER, make_dispatcher, "AROUND")
        for target in versions.LOADERS:
            versions.register_hook(target, load, "AROUND")
        _installed.append(mode)
    except (MoekitError, KeyboardInterrupt):
        raise
    except BaseException as error:  # importing SGLang may raise SystemExit
        why = f"SGLang has other modules than expected ({reason_of(error)})"
        SGLANG.decline(mode, "every MoE layer", why)


def extend(_: None, layer: Any, *args: Any, **more: Any) -> None:
    """Give a new layer a method that lets moekit compute it."""
    layer.quant_method = extended(layer.quant_method, Extended, _installed[0])
    layer.quant_method.moekit_loaded = set()


def make_dispatcher(stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Return a layer's dispatcher. It passes tokens on if moekit's dispatchers move them."""
    if not names_dispatcher() or versions.all_to_all() == "none":
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
