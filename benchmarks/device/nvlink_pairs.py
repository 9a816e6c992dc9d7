"""Times of dispatch and combine in a CUDA graph, one rank for each GPU of this host.

    python benchmarks/device/nvlink_pairs.py [--dispatchers naive,nvlink_ht] [--tokens 16,128]
    python benchmarks/device/nvlink_pairs.py --tiles       # also other tiles of nvlink_ht

Hidden size 7168, top 8 of 256 experts, bf16 and fp8 blocks. Each pair's result is compared with the
sum that it must be, in 20 replays with random delays between the ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import moekit
from moekit.plugin import Routing, quant

EXPERTS, TOP_K, HIDDEN = 256, 8, 7168
REPEATS, PAIRS = 5, 8
# Programs, tokens and columns of a step, warps: beside the tile that is chosen.
TILES = {
    128: [(64, 2, 4096, 8), (32, 4, 4096, 16), (128, 1, 8192, 8)],
    4096: [(32, 8, 1024, 16), (64, 8, 1024, 16), (128, 4, 1024, 8)],
}


class Pair:
    """Dispatch and combine of random tokens, whose experts return what they get."""

    def __init__(self, name: str, tokens: int, scheme: str) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        problem = moekit.MoEProblem(
            num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, intermediate_size=256,
            max_num_tokens=tokens, quant=scheme, device="cuda",
            parallel=moekit.ParallelConfig(ep_size=ranks, ep_rank=rank),
        )  # fmt: skip
        self.dispatcher = moekit.compose(problem, name, "torch").dispatcher
        self.x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.x)
        found = moekit.route(torch.randn(tokens, EXPERTS, device="cuda"), TOP_K)
        dtype = getattr(torch, self.dispatcher.spec.ids_dtype)
        self.routing = Routing(found.topk_weights, found.topk_ids.to(dtype).contiguous())
        hit = torch.div(found.topk_ids, EXPERTS // ranks, rounding_mode="floor")
        self.copies = torch.stack([(hit == r).any(1) for r in range(ranks)]).sum(0)[:, None]
        if name == "naive":  # every rank gets every token
            self.copies = torch.full_like(self.copies, ranks)
        self.quantize: Callable[..., tuple[Tensor, Tensor]] | None = None
        if scheme != "none":
            assert problem.quant.activation is not None
            sent = quant.quantize(self.x, problem.quant.activation, None, None)
            self.quantize = lambda x, valid: sent

    def __call__(self, copy: bool = False) -> None:
        tokens = self.dispatcher.prepare(self.x, self.routing, self.quantize).result()
        y = self.dispatcher.output(tokens)
        if y is None:
            y = tokens.x
        elif copy:
            y.copy_(tokens.x)
        self.dispatcher.finalize(y, tokens, self.out).result()

    def microseconds(self) -> float:
        graph = captured(lambda: [self() for _ in range(PAIRS)])
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            dist.barrier()
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * start.elapsed_time(end) / PAIRS)
        return min(times)

    def error(self) -> float:
        """The largest relative RMS error of 20 replays."""
        graph, errors = captured(lambda: self(copy=True)), []
        for turn in range(20):
            self.x.copy_(torch.randn_like(self.x))
            self.out.fill_(float("nan"))
            if (turn + dist.get_rank()) % 3 == 0:
                torch.cuda._sleep(200_000)
            graph.replay()
            want = self.x.float() * self.copies
            errors.append(float((self.out.float() - want).norm() / want.norm()))
        return max(errors)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def on_rank(rank: int, ranks: int, args: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29633")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=ranks, device_id=device)
    for name in args.dispatchers.split(","):
        for tokens in map(int, args.tokens.split(",")):
            for scheme in ("none", "fp8_block"):
                pair = Pair(name, tokens, scheme)
                error = f"{pair.error():.1e}" if scheme == "none" else ""
                say(f"| {name} | {scheme} | {tokens} | {pair.microseconds():.1f} | {error} |")
                if args.tiles and name == "nvlink_ht" and scheme == "none":
                    for part in ("dispatch", "combine"):
                        for tile in TILES.get(tokens, ()):
                            us = other_tile(pair, part, tile)
                            say(f"| {part} {tile} | | {tokens} | {us:.1f} | |")
                pair.dispatcher.destroy()
    dist.barrier()
    dist.destroy_process_group()


def other_tile(pair: Pair, part: str, tile: tuple[int, int, int, int]) -> float:
    from moekit_nvlink.dispatcher import Tile

    with mock.patch.object(Tile, f"of_{part}", staticmethod(lambda *_: Tile(*tile))):
        return pair.microseconds()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dispatchers", default="naive,nvlink_ht")
    parser.add_argument("--tokens", default="16,128,1024,4096")
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args()
    print("| dispatcher | scheme | T | pair, us | error |\n|---|---|---|---|---|", flush=True)
    ranks = torch.cuda.device_count()
    mp.spawn(on_rank, (ranks, args), ranks)


if __name__ == "__main__":
    main()
