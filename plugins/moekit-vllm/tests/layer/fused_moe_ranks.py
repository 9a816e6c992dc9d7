"""The ranks' part of test_fused_moe_ranks.py: vLLM's layer over ranks against moekit's on one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fused_moe_cases import load_files
from moekit_vllm import FusedMoE, SharedFusedMoE

import moekit

SIZES = {"num_experts": 5, "top_k": 2, "hidden_size": 64, "intermediate_size": 96}


def run(rank: int, world_size: int, sizes: dict[str, Any], shared: bool) -> dict[str, Any]:
    """Load a layer on this rank, call it, and return its relative error and what it says."""
    torch.manual_seed(7)
    E, _, H, I = SIZES.values()
    w13, w2 = torch.randn(E, 2 * I, H) / 8, torch.randn(E, H, I) / 10
    common = dict(**SIZES, params_dtype=torch.float32, device="cpu", experts="torch")
    kind = SharedFusedMoE if shared else FusedMoE
    how = {"shared_experts": lambda x: x / world_size} if shared else {}
    layer = kind(**common, **sizes, **how, prefix="model.experts", peer_timeout=20.0)
    checkpoint = {
        f"experts.{e}.{name}_proj.weight": tensor[e]
        for e in range(E)
        for name, tensor in (("gate", w13[:, :I]), ("up", w13[:, I:]), ("down", w2))
    }
    load_files(layer, checkpoint, E, sizes.get("num_redundant_experts", 0))
    batch = rank * sizes.get("dp_size", 1) // world_size
    torch.manual_seed(100 + batch)
    x, logits = torch.randn(6, H), torch.randn(6, E)
    made = layer(x, logits)
    if shared:
        partial, made = made
        summed = partial.clone()
        if not sizes.get("reduce_results"):
            dist.all_reduce(summed)
        assert torch.allclose(summed, x)
    made = layer.maybe_all_reduce_tensor_model_parallel(made)
    other = moekit.FusedMoE(**common)
    other.load_weights(moekit.ExpertWeights(w13, w2))
    want = other(x, logits)
    said = layer.must_reduce_shared_expert_outputs()
    layer.destroy()
    return {"error": float((made - want).norm() / want.norm()), "complete": said}
