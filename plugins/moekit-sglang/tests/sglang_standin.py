"""A stand-in for the parts of SGLang that moekit-sglang uses, with its names and order of calls.

test_sglang_real.py needs SGLang, and tests what the stand-in cannot show. Its registry of hooks
wraps as SGLang's does, but only methods and functions, after and around.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import engine_layers
import torch
from torch import nn

HookType = Enum("HookType", {"AFTER": "after", "AROUND": "around"})
arguments = SimpleNamespace()
split = SimpleNamespace(moe_ep_size=1, moe_ep_rank=0, moe_ep_group=None)
chosen = SimpleNamespace(runner="auto", all_to_all="none", amx=False, dp_tokens=None)


def reset() -> None:
    """Forget what tests have set."""
    vars(arguments).clear()
    vars(arguments).update(device="cpu", disable_cuda_graph=False, cpu_offload_gb=0)
    arguments.chunked_prefill_size = 64
    vars(split).update(moe_ep_size=1, moe_ep_rank=0, moe_ep_group=None)
    vars(chosen).update(runner="auto", all_to_all="none", amx=False, dp_tokens=None)


class HookRegistry:
    hooks: dict[str, list[tuple[Any, Callable[..., Any]]]] = {}

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], kind: Any) -> None:
        cls.hooks.setdefault(target, []).append((kind, hook))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in cls.hooks.items():
            path, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(path)
            for kind, hook in hooks:
                setattr(owner, name, _wrapped(getattr(owner, name), hook, kind))


def _wrapped(stock: Any, hook: Any, kind: Any) -> Any:
    def wrapper(*args: Any, **more: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(stock, *args, **more)
        result = stock(*args, **more)
        changed = hook(result, *args, **more)
        return result if changed is None else changed

    return wrapper


class TopK(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: Any = None


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: Any
    topk_output: TopK


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


class BaseDispatcher:
    pass


class StandardDispatcher(BaseDispatcher):
    """Maps ids of all ranks' experts to this rank's, unless told not to."""

    skip_local_expert_mapping = False

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def dispatch(self, hidden_states: torch.Tensor, topk_output: TopK) -> Any:
        if self.layer.moe_ep_size > 1 and not self.skip_local_expert_mapping:
            ids = topk_output.topk_ids - self.layer.moe_ep_rank * self.layer.num_local_experts
            topk_output = topk_output._replace(topk_ids=ids)
        return StandardDispatchOutput(hidden_states, None, topk_output)

    def combine(self, combine_input: Any) -> torch.Tensor:
        return combine_input.hidden_states


def create_moe_dispatcher(layer: Any) -> Any:
    return StandardDispatcher(layer)


class Method:
    """A quantization method that marks the layers it prepares, and computes zeros."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.prepared_by_sglang = True

    def restore_weights_before_loading(self, layer: Any) -> None:
        layer.restored_by_sglang = True

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        return StandardCombineInput(torch.zeros_like(dispatch_output.hidden_states))


def method(name: str, **fields: Any) -> Any:
    """Return a method of a class with the name of one of SGLang's."""
    return type(name, (Method,), {})(**fields)


class FusedMoE(nn.Module):
    """A layer with given parameters and SGLang's loaders."""

    def __init__(self, parameters: dict[str, torch.Tensor], quant_method: Any, **config: Any):
        super().__init__()
        self.layer_id = 3
        self.moe_ep_size, self.moe_ep_rank = split.moe_ep_size, split.moe_ep_rank
        self.num_fused_shared_experts = config.pop("shared", 0)
        self.should_fuse_routed_scaling_factor_in_topk = config.pop("fuses", False)
        w2 = next(t for n, t in parameters.items() if n.startswith("w2_"))
        self.num_local_experts = len(w2)
        self.num_experts = self.num_local_experts * self.moe_ep_size
        self.hidden_size = config.pop("hidden")
        self.intermediate_size_per_partition = config.pop("inner")
        if (scheme := config.pop("scheme", None)) is not None:
            self.scheme = scheme
        fields = dict(
            top_k=2, params_dtype=torch.float32, activation="silu", is_gated=True, no_combine=False,
            apply_router_weight_on_input=False, routed_scaling_factor=None, gemm1_alpha=None,
            gemm1_clamp_limit=None, swiglu_limit=None, gate_up_interleaved=True,
        )  # fmt: skip
        self.moe_runner_config = SimpleNamespace(**fields | config)
        self.quant_method = quant_method
        for name, tensor in parameters.items():
            param = nn.Parameter(tensor.clone(), requires_grad=False)
            param.weight_loader = self.weight_loader
            self.register_parameter(name, param)
        module = sys.modules["sglang.srt.layers.moe.fused_moe_triton.layer"]
        self.dispatcher = module.create_moe_dispatcher(self)

    def weight_loader(self, param: Any, loaded_weight: Any, weight_name: str, **of: Any) -> None:
        of["expert_id"] -= self.moe_ep_rank * self.num_local_experts
        if 0 <= of["expert_id"] < self.num_local_experts:
            self._weight_loader_impl(
                param=param, loaded_weight=loaded_weight, weight_name=weight_name, **of
            )

    def _weight_loader_impl(
        self, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        held = param.data[expert_id]
        if shard_id in ("w1", "w3"):
            held = held.chunk(2)[shard_id == "w3"]
        held.copy_(loaded_weight)

    def weight_loader_fused(
        self, param: Any, loaded_weight: torch.Tensor, weight_name: str, shard_id: str
    ) -> None:
        param.data.copy_(loaded_weight)

    def forward(self, x: torch.Tensor, topk: TopK) -> torch.Tensor:
        dispatched = self.dispatcher.dispatch(hidden_states=x, topk_output=topk)
        made = self.quant_method.apply(layer=self, dispatch_output=dispatched)
        return self.dispatcher.combine(combine_input=made)


def modules() -> dict[str, ModuleType]:
    """Return the stand-in's modules by SGLang's names, with new classes that hooks may change."""
    layer = type("FusedMoE", (FusedMoE,), {})
    srt, moe = "sglang.srt", "sglang.srt.layers.moe"
    contents = {
        f"{srt}.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        f"{srt}.runtime_context": {
            "get_server_args": lambda: arguments,
            "get_parallel": lambda: split,
        },
        f"{moe}.fused_moe_triton.layer": {
            "FusedMoE": layer,
            "create_moe_dispatcher": create_moe_dispatcher,
        },
        f"{moe}.token_dispatcher.standard": {
            "BaseDispatcher": BaseDispatcher,
            "StandardCombineInput": StandardCombineInput,
            "StandardDispatchOutput": StandardDispatchOutput,
        },
        f"{moe}.utils": {
            "get_moe_runner_backend": lambda: SimpleNamespace(value=chosen.runner),
            "get_moe_a2a_backend": lambda: SimpleNamespace(value=chosen.all_to_all),
        },
        f"{srt}.layers.dp_attention": {"get_dp_global_num_tokens": lambda: chosen.dp_tokens},
        f"{srt}.utils": {"cpu_has_amx_support": lambda: chosen.amx},
    }
    return engine_layers.modules(contents)
