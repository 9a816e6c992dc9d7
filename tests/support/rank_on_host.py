"""One rank of test_hosts.py: python rank_on_host.py DEVICE RANK RANKS PORT."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from moekit_naive.board import board_of

import moekit
from moekit.backends.reference import oracle

DEVICE = sys.argv[1]
RANK, RANKS, PORT = map(int, sys.argv[2:])


def main() -> None:
    store = dist.TCPStore("127.0.0.1", PORT, is_master=False)
    if DEVICE == "cuda":
        torch.cuda.set_device(RANK)
    backends = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[DEVICE]
    dist.init_process_group(backends, rank=RANK, world_size=RANKS, store=store)
    one = moekit.MoEProblem(
        num_experts=4, top_k=2, hidden_size=32, intermediate_size=16, dtype=torch.float32,
        device=DEVICE,
    )  # fmt: skip
    parallel = moekit.ParallelConfig(ep_size=RANKS, ep_rank=RANK, dp_size=RANKS)
    draw, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(RANK + 1)
    whole = moekit.ExpertWeights(
        torch.randn(4, 32, 32, generator=draw) / 6, torch.randn(4, 32, 16, generator=draw) / 4
    )
    for checked in (True, False):
        kernel = moekit.compose(one.replace(parallel=parallel), "naive", checked=checked)
        if DEVICE == "cpu":
            assert board_of(dist.group.WORLD, 30.0) is None, "hosts share no memory"
        packed = kernel.pack(whole.select(range(2 * RANK, 2 * RANK + 2)).to(DEVICE))
        for tokens in (3 + 2 * RANK, RANK, 0):
            x = torch.randn(tokens, 32, generator=own)
            ids = torch.rand(tokens, 4, generator=own).argsort(1)[:, :2]
            weights = torch.rand(tokens, 2, generator=own)
            routing = moekit.Routing(weights, ids)
            want = oracle(x, whole, routing, one)
            x, routing = x.to(DEVICE), moekit.Routing(*(t.to(DEVICE) for t in (weights, ids)))
            out = kernel(x, packed, routing)
            assert torch.allclose(out.cpu(), want, atol=1e-4), f"{tokens} tokens"
        kernel.destroy()
    dist.barrier()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
