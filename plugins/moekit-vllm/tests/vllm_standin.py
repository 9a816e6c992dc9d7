"""A stand-in for the parts of vLLM that moekit-vllm uses, where vLLM is not installed.

The real classes do the same in `test_vllm_engine.py`.
"""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import engine_layers
import torch
from torch import nn

op_registry_oot: dict[str, type] = {}
prepared = False
# Of expert parallelism.
ranks = SimpleNamespace(cpu_group=None)
# The layers of the engine that runs, by name.
running: dict[str, SimpleNamespace] = {}
dp_metadata: SimpleNamespace | None = None


class RoutedExperts(nn.Module):
    """A layer that owns its experts' parameters and a method that applies them."""

    def __new__(cls, *args, **kwargs):
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, replacement):
        assert cls.__name__ not in op_registry_oot
        op_registry_oot[cls.__name__] = replacement
        return replacement

    def __init__(self, config, weights, *, expert_map=None, method=None, **more):
        super().__init__()
        self.layer_name = more.pop("layer_name", "model.layers.0.mlp.experts")
        self.moe_config, self.activation = config, config.activation
        self.global_num_experts = config.num_experts
        self.expert_map = expert_map
        self.apply_router_weight_on_input = False
        self.swiglu_limit = self.swiglu_alpha = self.swiglu_beta = None
        for name, value in more.items():
            setattr(self, name, value)
        self.quant_method = (method or UnquantizedFusedMoEMethod)()
        for name, value in weights.items():
            setattr(self, name, nn.Parameter(value, requires_grad=False))

    def _replace_quant_method(self, method):
        self.quant_method = method


class NoopOffloader:
    pass


offloader: object = NoopOffloader()
graphs = Enum("CUDAGraphMode", ["NONE", "PIECEWISE"])
engine = SimpleNamespace(
    compilation_config=SimpleNamespace(cudagraph_mode=graphs.NONE, cudagraph_capture_sizes=[4, 8]),
    load_config=SimpleNamespace(load_format="auto"),
    lora_config=SimpleNamespace(
        max_loras=2, max_lora_rank=4, fully_sharded_loras=False, lora_dtype=torch.float32
    ),
)


class LoRAExpertsMixin:
    """Experts that take adapters."""


class FusedMoEKernelModularImpl:
    """A kernel of vLLM."""


class ModelRoutedExperts(RoutedExperts):
    """A model's own class."""


class FusedMoEMethodBase:
    moe_quant_config = None
    is_monolithic = supports_internal_mk = False

    def process_weights_after_loading(self, layer):
        layer.prepared_by_vllm = True

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        return "vLLM's own"

    def get_fused_moe_quant_config(self, layer):
        return "vLLM's scales"

    def maybe_make_prepare_finalize(self):
        return "vLLM's dispatcher"


class UnquantizedFusedMoEMethod(FusedMoEMethodBase, nn.Module):
    pass


class OtherMethod(FusedMoEMethodBase):
    is_monolithic = True


def config(E, K, H, inner, activation="silu", **changes):
    """Return what moekit reads of vLLM's FusedMoEConfig and FusedMoEParallelConfig."""
    split = dict(ep_size=1, ep_rank=0, dp_size=1, use_ep=False)
    split |= dict(all2all_backend="allgather_reducescatter")
    split |= {n: changes.pop(n) for n in list(changes) if n in (*split, "sp_size", "pcp_size")}
    fields = dict(
        num_experts=E, num_logical_experts=E, experts_per_token=K, hidden_dim=H,
        hidden_dim_unpadded=H, intermediate_size_per_partition=inner,
        intermediate_size_per_partition_unpadded=inner, in_dtype=torch.float32,
        activation=Enum("MoEActivation", {"X": activation}).X, device="cpu", has_bias=False,
        is_lora_enabled=False, is_sequence_parallel=False, is_act_and_mul=True,
        swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None,
        moe_parallel_config=SimpleNamespace(**split),
    )  # fmt: skip
    return SimpleNamespace(**fields | changes)


def modules() -> dict[str, ModuleType]:
    """Return the modules by name, as `sys.modules` holds them."""
    here = sys.modules[__name__]
    fused = "vllm.model_executor.layers.fused_moe"
    contents = {
        "vllm.config": {"get_current_vllm_config_or_none": lambda: here.engine},
        "vllm.model_executor.custom_op": {"op_registry_oot": op_registry_oot},
        "vllm.forward_context": {
            "get_forward_context": lambda: SimpleNamespace(
                no_compile_layers=here.running, dp_metadata=here.dp_metadata
            )
        },
        "vllm.distributed": {"get_ep_group": lambda: here.ranks},
        "vllm.model_executor.utils": {"is_weights_pre_processed": lambda: here.prepared},
        "vllm.model_executor.offloader.base": {
            "NoopOffloader": NoopOffloader,
            "get_offloader": lambda: here.offloader,
        },
        f"{fused}.routed_experts": {"RoutedExperts": RoutedExperts},
        f"{fused}.fused_moe_method_base": {"FusedMoEMethodBase": FusedMoEMethodBase},
        f"{fused}.router.cpu_router": {},
        f"{fused}.experts.lora_experts_mixin": {"LoRAExpertsMixin": LoRAExpertsMixin},
        f"{fused}.modular_kernel": {"FusedMoEKernelModularImpl": FusedMoEKernelModularImpl},
        f"{fused}.config": {"FUSED_MOE_UNQUANTIZED_CONFIG": object()},
    }
    return engine_layers.modules(contents)
