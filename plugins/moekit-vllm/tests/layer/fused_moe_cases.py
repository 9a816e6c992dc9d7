"""Layers with vLLM's interface for tests, and loading into them."""

from __future__ import annotations

from typing import Any

import torch
from layer_cases import E, H, I, K
from moekit_vllm import FusedMoE
from torch import Tensor

SIZES = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I}


def make(**arguments: Any) -> FusedMoE:
    return FusedMoE(**{**SIZES, "params_dtype": torch.float32, "device": "cpu", **arguments})


def stacks(E: int = E, H: int = H, I: int = I) -> dict[str, Tensor]:
    shapes = {"w1": (E, I, H), "w3": (E, I, H), "w2": (E, H, I)}
    return {shard: torch.randn(shape) / shape[2] ** 0.5 for shard, shape in shapes.items()}


def push(layer: FusedMoE, tensors: dict[str, Tensor], suffix: str = "weight") -> None:
    for shard, stack in tensors.items():
        name = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
        param = layer.get_parameter(name)
        for expert, tensor in enumerate(stack):
            assert layer.weight_loader(param, tensor, f"a.b.{name}", shard, expert) is None


def loaded(**arguments: Any) -> tuple[FusedMoE, dict[str, Tensor]]:
    layer, tensors = make(**arguments), stacks()
    push(layer, tensors)
    layer.process_weights_after_loading()
    return layer, tensors


def load_files(
    layer: FusedMoE, tensors: dict[str, Tensor], num_experts: int, redundant: int = 0
) -> None:
    """Load a checkpoint's tensors by vLLM's loop, and pack them."""
    mapping = FusedMoE.make_expert_params_mapping(
        ckpt_gate_proj_name="gate_proj",
        ckpt_down_proj_name="down_proj",
        ckpt_up_proj_name="up_proj",
        num_experts=num_experts,
        num_redundant_experts=redundant,
    )
    params = dict(layer.named_parameters())
    for name, tensor in tensors.items():
        for param_name, weight_name, expert, shard in mapping:
            if weight_name in name:
                mapped = name.replace(weight_name, param_name)
                param = params[mapped.rpartition(".")[2]]
                if param.weight_loader(param, tensor, mapped, shard, expert, return_success=True):
                    break
    layer.process_weights_after_loading()
