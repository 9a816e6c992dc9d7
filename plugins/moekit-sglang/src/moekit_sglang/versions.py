"""The names of SGLang that this package uses. Versions differ in a few of them."""

from __future__ import annotations

import importlib.metadata
import pkgutil
from contextlib import suppress
from importlib import import_module
from typing import Any

_MOE = "sglang.srt.layers.moe"
LAYER = f"{_MOE}.fused_moe_triton.layer.FusedMoE"
# The first one loads a matrix of one of this rank's experts, the second one of all experts.
LOADERS = (f"{LAYER}._weight_loader_impl", f"{LAYER}.weight_loader_fused")
MAKE_DISPATCHER = f"{_MOE}.fused_moe_triton.layer.create_moe_dispatcher"


def installed() -> str | None:
    """Return the installed version of SGLang, or None."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("sglang")
    return None


def found(target: str) -> Any:
    """Return the object that a dotted name stands for, or None if this version has none."""
    with suppress(ImportError, AttributeError):
        return pkgutil.resolve_name(target)
    return None


def missing_hooks() -> list[str]:
    """Return the names that the installed SGLang lacks; empty if it has all of them.

    If SGLang lacks a module, or an import fails, this raises the error of the import.
    """
    pkgutil.resolve_name(LAYER)
    return [f"SGLang has no {name}" for name in (*LOADERS, MAKE_DISPATCHER) if found(name) is None]


def register_hook(target: str, hook: Any, kind: str) -> None:
    """Wrap a function of SGLang: ``kind`` is a name of SGLang's HookType."""
    registry = import_module("sglang.srt.plugins.hook_registry")
    registry.HookRegistry.register(target, hook, registry.HookType[kind])


def argument(name: str, default: Any = None) -> Any:
    """Return an argument of the engine; ``default`` if this version has no such argument."""
    return getattr(import_module("sglang.srt.runtime_context").get_server_args(), name, default)


def runner(layer: Any) -> str:
    """Return the name of the runner that SGLang would use for a layer, or "auto"."""
    chosen = getattr(layer, "runner_backend", None)  # 0.5.23 resolves it for each layer
    chosen = chosen or import_module(f"{_MOE}.utils").get_moe_runner_backend()
    return str(chosen.value)


def all_to_all() -> str:
    """Return the name of the backend by which SGLang moves tokens between ranks, or "none"."""
    return str(import_module(f"{_MOE}.utils").get_moe_a2a_backend().value)


def standard() -> Any:
    """Return SGLang's module of the dispatcher that moves nothing, and of what methods return."""
    return import_module(f"{_MOE}.token_dispatcher.standard")


def expert_ranks() -> Any:
    """Return SGLang's group of the ranks over which it spreads whole experts."""
    return import_module("sglang.srt.runtime_context").get_parallel().moe_ep_group


def most_tokens() -> int | None:
    """Return the most tokens that any rank passes to an MoE layer of this forward pass, or None."""
    counts = import_module("sglang.srt.layers.dp_attention").get_dp_global_num_tokens()
    return None if not counts else max(counts)


def most_scheduled() -> int:
    """Return the most tokens that a rank passes to an MoE layer, as the engine schedules them."""
    prefill = argument("chunked_prefill_size") or -1
    prefill = prefill if prefill > 0 else argument("max_prefill_tokens") or 1
    decode = (argument(f"cuda_graph_max_bs{phase}") for phase in ("", "_decode", "_prefill"))
    return max(prefill, *(size or 1 for size in decode))


def most_captured() -> int:
    """Return the tokens of the largest CUDA graph of decoding, or 0 if the engine captures none."""
    if argument("device") == "cpu" or argument("disable_cuda_graph", False):
        return 0
    return max(argument(f"cuda_graph_max_bs{phase}") or 1 for phase in ("", "_decode"))


def has_cpu_kernel() -> bool:
    """Return whether SGLang has kernels for experts on this machine's CPU: they need AMX."""
    return bool(import_module("sglang.srt.utils").cpu_has_amx_support())
