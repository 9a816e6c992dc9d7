"""Layers of Qwen3-30B's sizes that were composed for 8192 tokens and get fewer, on all GPUs here.

    NCCL_NVLS_ENABLE=0 python benchmarks/device/nvlink_capacity.py
    NCCL_NVLS_ENABLE=0 python benchmarks/device/nvlink_capacity.py parts

graphs   microseconds of a call in a CUDA graph of four calls, median of 15, on the slowest rank:
         nvlink_ht composed for T tokens; composed for 8192 and told `max_tokens`; not told;
         naive. The first two must give equal bits
eager    told calls of nvlink_ht and of naive without a graph, and their host time
parts    a call of two or four parts: the combine of one runs beside the experts of the next, on
         another stream

Results: benchmarks/results/2026-11-28-h200-capacity.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from moekit_bench import Prepared, Timer
from torch import Tensor

import moekit
from moekit.plugin import Routing

E, K, H, I, CAPACITY = 128, 8, 2048, 768, 8192
CALLS, TURNS = 4, 15
TOKENS, PARTS = (1, 16, 128, 512, 1024, 4096, 8192), (4096, 8192)
OBSERVER = SimpleNamespace(computed=bool, failed=print)
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rank:
    """One rank's weights, and the timing of its calls together with the other ranks'."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.device = torch.device("cuda", rank)
        self.draw = torch.Generator("cuda").manual_seed(rank)
        shapes = (E // ranks, 2 * I, H), (E // ranks, H, I)
        self.weights = moekit.ExpertWeights(*(0.02 * self.random(*s) for s in shapes))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=self.draw)

    def kernel(self, dispatcher: str, capacity: int) -> moekit.ModularKernel:
        parallel = moekit.ParallelConfig(ep_size=self.ranks, ep_rank=self.rank, dp_size=self.ranks)
        problem = moekit.MoEProblem(
            num_experts=E, top_k=K, hidden_size=H, intermediate_size=I, dtype=torch.bfloat16,
            max_num_tokens=capacity, parallel=parallel, device="cuda",
        )  # fmt: skip
        return moekit.compose(problem, dispatcher, "triton", checked=False)

    def inputs(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        def one() -> tuple[Tensor, Tensor, Tensor]:
            scores = torch.rand(tokens, E, device="cuda", generator=self.draw)
            ids = scores.argsort(1)[:, :K].int().contiguous()
            weights = torch.rand(tokens, K, device="cuda", generator=self.draw)
            return self.random(tokens, H), weights, ids

        return [one() for _ in range(CALLS)]

    def times(self, call: Call, inputs: list[tuple[Tensor, Tensor, Tensor]]) -> list[float]:
        """Return microseconds on the slowest rank: in a graph, without one, on the host."""
        timer = Timer(self.device, ranks=True)
        found = Prepared(call, inputs, self.device, timer=timer).time(TURNS)
        mine = found.graph_us, found.eager_us, found.host_us
        slowest = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.tolist()  # type: ignore[no-any-return]

    def print(self, *cells: object) -> None:
        if self.rank == 0:
            print(
                "|", " | ".join(f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells), "|"
            )


def calls_of(kernel: moekit.ModularKernel, packed: moekit.PackedWeights, most: int | None) -> Call:
    def call(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return kernel(x, packed, Routing(weights, ids, max_tokens=most))

    return call


def compare(rank: Rank) -> None:
    large, naive = rank.kernel("nvlink_ht", CAPACITY), rank.kernel("naive", CAPACITY)
    packed = large.pack(rank.weights)
    rank.print("T", "composed for T", "for 8192, told", "for 8192, not told", "naive",
               "told, eager", "host", "naive, eager", "host", "equal bits")  # fmt: skip
    for tokens in TOKENS:
        inputs = rank.inputs(tokens)
        small = rank.kernel("nvlink_ht", tokens)
        calls = [calls_of(small, packed, None)]
        calls += [calls_of(large, packed, most) for most in (tokens, None)]
        calls += [calls_of(naive, packed, tokens)]
        found = [rank.times(call, inputs) for call in calls]
        equal = all(torch.equal(calls[0](*each), calls[1](*each)) for each in inputs)
        rank.print(tokens, *(each[0] for each in found), *found[1][1:], *found[3][1:], equal)
        small.destroy()


def in_parts(kernel: moekit.ModularKernel, packed: moekit.PackedWeights, parts: int) -> Call:
    """Return calls whose transfers run on another stream, two parts ahead of the experts."""
    transfers, dispatcher = torch.cuda.Stream(priority=-1), kernel.dispatcher

    def call(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        here = torch.cuda.current_stream()
        out, each, arrived, held = torch.empty_like(x), -(-len(x) // parts), [], []
        transfers.wait_stream(here)

        def dispatch(part: int) -> None:
            rows = slice(part * each, (part + 1) * each)
            routing = Routing(weights[rows], ids[rows], max_tokens=each)
            with torch.cuda.stream(transfers):
                tokens = dispatcher.prepare(x[rows], routing, None).result()
                arrived.append((tokens, transfers.record_event(), rows))

        dispatch(0)
        dispatch(1)
        for part in range(parts):
            tokens, came, rows = arrived[part]
            here.wait_event(came)
            y, tokens, scratch = kernel._apply(tokens, packed, None, None, OBSERVER)
            transfers.wait_event(here.record_event())
            with torch.cuda.stream(transfers):
                dispatcher.finalize(y, tokens, out[rows])
            held.append((y, scratch))
            if part + 2 < parts:
                dispatch(part + 2)
        here.wait_stream(transfers)
        for _, scratch in held:
            scratch.give_back()
        return out

    return call


def split(rank: Rank) -> None:
    kernel = rank.kernel("nvlink_ht", CAPACITY)
    packed = kernel.pack(rank.weights)
    rank.print("T", "whole", "two parts", "four parts")
    for tokens in PARTS:
        inputs = rank.inputs(tokens)
        calls = [calls_of(kernel, packed, tokens), *(in_parts(kernel, packed, n) for n in (2, 4))]
        rank.print(tokens, *(rank.times(call, inputs)[0] for call in calls))


def main(rank: int, ranks: int, store: str, work: str) -> None:
    torch.cuda.set_device(rank)
    torch.set_grad_enabled(False)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    (split if work == "parts" else compare)(Rank(rank, ranks))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    gpus, path = torch.cuda.device_count(), f"/tmp/nvlink-capacity-{os.getpid()}"
    print(f"{gpus} x {torch.cuda.get_device_name()}")
    mp.spawn(main, (gpus, path, sys.argv[1] if len(sys.argv) > 1 else ""), gpus)
