"""Layers of Qwen3-30B's sizes that were composed for 8192 tokens and get fewer, on all GPUs here.

    NCCL_NVLS_ENABLE=0 python benchmarks/device/nvlink_capacity.py
    NCCL_NVLS_ENABLE=0 python benchmarks/device/nvlink_capacity.py parts

graphs   microseconds of a call in a CUDA graph of four calls, median of 15, on the slowest rank:
         nvlink_ht composed for T tokens; composed for 8192 and told `max_tokens`; not told;
         naive. The first two must give equal bits
eager    the same calls without a graph, and their host time
parts    a call of two or four parts: the combine of one runs beside the experts of the next, on
         another stream

Results: benchmarks/results/2026-11-28-h200-capacity.md.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import moekit
from moekit.plugin import Routing

E, K, H, I, CAPACITY = 128, 8, 2048, 768, 8192
CALLS, TURNS = 4, 15
GRAPHS, EAGER, PARTS = (1, 16, 128, 512, 1024, 4096, 8192), (16, 128, 1024, 4096), (4096, 8192)
OBSERVER = SimpleNamespace(computed=bool, failed=print)
Call = Callable[[int], Tensor]


class Rank:
    """One rank's weights, and the timing of its calls together with the other ranks'."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
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

    def slowest(self, times: list[float]) -> float:
        found = torch.tensor(statistics.median(times))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def in_graph(self, call: Call) -> tuple[float, list[Tensor]]:
        """Return microseconds of a call, and the outputs."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in (*range(CALLS), *range(CALLS)):
                call(i)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs = [call(i) for i in range(CALLS)]
        times = []
        for _ in range(3 + TURNS):
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / CALLS)
        return self.slowest(times[3:]), outs

    def eager(self, call: Call) -> tuple[float, float]:
        """Return microseconds of a call, and of its host time."""
        times, hosts = [], []
        for _ in range(3 + TURNS):
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call(0)
            begin.record()
            started = time.perf_counter()
            for i in range(CALLS):
                call(i)
            hosts.append((time.perf_counter() - started) * 1e6 / CALLS)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / CALLS)
        return self.slowest(times[3:]), self.slowest(hosts[3:])

    def print(self, *cells: object) -> None:
        if self.rank == 0:
            print(
                "|", " | ".join(f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells), "|"
            )


def calls_of(
    kernel: moekit.ModularKernel, packed: moekit.PackedWeights, inputs: list, most: int | None
) -> Call:
    def call(i: int) -> Tensor:
        x, weights, ids = inputs[i]
        return kernel(x, packed, Routing(weights, ids, max_tokens=most))

    return call


def compare(rank: Rank) -> None:
    large, naive = rank.kernel("nvlink_ht", CAPACITY), rank.kernel("naive", CAPACITY)
    packed = large.pack(rank.weights)
    rank.print("T", "composed for T", "for 8192, told", "for 8192, not told", "naive", "equal bits")
    for tokens in GRAPHS:
        inputs = rank.inputs(tokens)
        small = rank.kernel("nvlink_ht", tokens)
        want_us, want = rank.in_graph(calls_of(small, packed, inputs, None))
        told_us, told = rank.in_graph(calls_of(large, packed, inputs, tokens))
        other_us, _ = rank.in_graph(calls_of(large, packed, inputs, None))
        naive_us, _ = rank.in_graph(calls_of(naive, packed, inputs, None))
        equal = all(map(torch.equal, want, told))
        rank.print(tokens, want_us, told_us, other_us, naive_us, equal)
        small.destroy()
    rank.print("T", "nvlink_ht eager", "host", "naive eager", "host")
    for tokens in EAGER:
        inputs = rank.inputs(tokens)
        found = [rank.eager(calls_of(k, packed, inputs, tokens)) for k in (large, naive)]
        rank.print(tokens, *found[0], *found[1])


def in_parts(
    kernel: moekit.ModularKernel, packed: moekit.PackedWeights, inputs: list, parts: int
) -> Call:
    """Return calls whose transfers run on another stream, two parts ahead of the experts."""
    transfers, dispatcher = torch.cuda.Stream(priority=-1), kernel.dispatcher

    def call(i: int) -> Tensor:
        (x, weights, ids), here = inputs[i], torch.cuda.current_stream()
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
        whole, _ = rank.in_graph(calls_of(kernel, packed, inputs, tokens))
        parts = [rank.in_graph(in_parts(kernel, packed, inputs, n))[0] for n in (2, 4)]
        rank.print(tokens, whole, *parts)


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
