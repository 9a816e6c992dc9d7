"""Balance the load of experts on two ranks: skewed routing, replicas, experts that move.

    python examples/eplb.py

The program starts two processes on the CPU (gloo). On GPUs only the backend's name and the device
change.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import moekit
from moekit.eplb import Rebalancer

RANKS, LAYERS, EXPERTS, REPLICAS, TOP_K, HIDDEN, TOKENS = 2, 2, 16, 4, 2, 256, 128


def serve(rank: int, store: str) -> None:
    """Run one rank: serve some steps, rebalance between two of them, and continue."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    problem = moekit.MoEProblem(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_redundant_experts=REPLICAS,
        parallel=moekit.ParallelConfig(ep_size=RANKS, ep_rank=rank),
        device="cpu",
    )
    kernel = moekit.compose(problem, "naive", "torch")

    # All ranks create the same experts, and each keeps those that it holds.
    torch.manual_seed(0)
    layers = []
    for _ in range(LAYERS):
        w13 = torch.randn(EXPERTS, 1024, HIDDEN, dtype=torch.bfloat16) / HIDDEN**0.5
        w2 = torch.randn(EXPERTS, HIDDEN, 512, dtype=torch.bfloat16) / 512**0.5
        held = [problem.logical_expert(slot) for slot in problem.local_experts]
        layers.append(kernel.pack(moekit.ExpertWeights(w13, w2).select(held)))

    # Ranks have different tokens, and all of them prefer the last experts.
    torch.manual_seed(1 + rank)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    popularity = torch.arange(1, EXPERTS + 1).flip(0).float().log() * -1.5
    rebalancer = Rebalancer(kernel, layers, window=100)

    def step() -> list[torch.Tensor]:
        outputs = []
        for layer, weights in enumerate(layers):
            torch.manual_seed(10 * layer + rank)  # the same routing every time, to compare
            gumbel = -torch.empty(TOKENS, EXPERTS).exponential_().log()
            logical = moekit.route(popularity + gumbel, TOP_K, renormalize=True)
            outputs.append(kernel(x, weights, rebalancer.route(logical, layer)))
        rebalancer.step()
        return outputs

    before = [step() for _ in range(3)][-1]
    for report in rebalancer.rebalance():
        if rank == 0:
            print(report)
    after = step()
    # Equal except for rounding: tokens reach other replicas, and ranks are summed in order.
    error = max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(after, before, strict=True)
    )
    agree = torch.tensor(error < 1e-2)
    dist.all_reduce(agree, op=dist.ReduceOp.MIN)
    if rank == 0:
        print(f"outputs {'agree' if agree else 'DIFFER'}: relative error {error:.1e} on rank 0")
    kernel.destroy()
    dist.destroy_process_group()
    assert agree


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo looks up the host's name
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(serve, args=(os.path.join(scratch, "store"),), nprocs=RANKS)


if __name__ == "__main__":
    main()
