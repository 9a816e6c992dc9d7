"""Run an expert-parallel MoE layer: each rank holds a share of the experts and its own tokens.

    torchrun --nproc-per-node 2 examples/ep_ranks.py

It runs on GPUs (NCCL) if every rank has one, else on the CPU (gloo).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import moekit
from moekit.backends.reference import oracle

EXPERTS, TOP_K, HIDDEN, INNER = 16, 4, 512, 256


def start() -> torch.device:
    """Join the process group that torchrun describes, and return this rank's device."""
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpus else "cpu"
    device = torch.device(device)
    if on_gpus:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo looks up the host's name
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    return device


@torch.inference_mode()
def main() -> None:
    device = start()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    shared = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, device=device, dtype=torch.bfloat16)
    torch.nn.init.eye_(shared.weight)
    layer = moekit.FusedMoE(
        EXPERTS,
        TOP_K,
        HIDDEN,
        INNER,
        dp_size=ranks,
        enable_expert_parallel=True,
        expert_placement_strategy="round_robin",
        shared_experts=shared,
        device=device,
    )

    # Every rank creates all experts here; `layer.load_checkpoint` reads only this rank's.
    torch.manual_seed(0)
    weights = moekit.ExpertWeights(
        torch.randn(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16) / HIDDEN**0.5,
        torch.randn(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16) / INNER**0.5,
    )
    layer.load_weights(weights.select(layer.local_experts))

    # Ranks have different numbers of tokens, and the last rank has none.
    torch.manual_seed(1 + rank)
    tokens = 0 if 0 < rank == ranks - 1 else 32 + 8 * rank
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    logits = torch.randn(tokens, EXPERTS, device=device)
    out = layer(x, logits)

    routing = moekit.route(logits, TOP_K, renormalize=True)
    whole = layer.problem.replace(parallel=moekit.ParallelConfig())
    want = oracle(x, weights.to(device), routing, whole) + x.float()
    error = float((out.float() - want).norm() / want.norm()) if tokens else 0.0
    held = ", ".join(map(str, layer.local_experts))
    # One write per line: torchrun's workers are unbuffered, and ranks share the terminal.
    print(f"rank {rank}: experts {held}; {tokens} tokens, error {error:.1e}\n", end="")
    if rank == 0:
        print(layer, flush=True)
    layer.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()
    assert error < 8e-3


if __name__ == "__main__":
    main()
