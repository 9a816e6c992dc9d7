"""Measure how fast experts move between GPUs, and what routing to replicas costs.

    python benchmarks/device/eplb_times.py

This needs 2 to 8 GPUs. Each holds its part of a DeepSeek-V3 layer in fp8 (256 experts and 32
replicas over 8 ranks). It measures migrations of all experts, and of a few, which is usual.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from moekit import PackedWeights, Routing, to_physical
from moekit.eplb import LoadWindow, Placement, migrate
from moekit.testing.distributed import RankPool

EXPERTS, PHYSICAL = 32, 36  # on each rank
SHAPES = {
    "w13": (4096, 7168, torch.uint8),
    "w13_scale": (32, 56, torch.float32),
    "w2": (7168, 2048, torch.uint8),
    "w2_scale": (56, 16, torch.float32),
}


def marked(placement: Placement, rank: int) -> PackedWeights:
    """Return tensors in which each expert's elements identify it."""
    held = torch.tensor(placement.on_rank(rank), device="cuda")
    tensors = {}
    for name, (rows, columns, dtype) in SHAPES.items():
        tensor = torch.empty(len(held), rows, columns, dtype=dtype, device="cuda")
        tensors[name] = tensor.copy_((held % 251).to(dtype)[:, None, None])
    return PackedWeights("triton", tensors)


def moves(rank: int, world_size: int, staging_bytes: int, few: bool) -> tuple[int, int, float]:
    """Return experts received by all ranks, bytes moved, and seconds of the third migration."""
    experts = EXPERTS * world_size
    slots = tuple(slot % experts for slot in range(PHYSICAL * world_size))
    now = Placement(slots, experts, world_size)
    packed = marked(now, rank)
    for _ in range(3):
        held = list(now.physical_to_logical)
        if few:  # neighbouring ranks exchange an expert
            for r in range(world_size - 1):
                a, b = now.slots(r).start + 10, now.slots(r + 1).start + 8
                held[a], held[b] = held[b], held[a]
        else:  # every rank gets the experts of the next one, in the opposite order
            held = [e for r in range(world_size) for e in now.on_rank((r + 1) % world_size)[::-1]]
        new = Placement(tuple(held), experts, world_size)
        dist.barrier()
        report = migrate(packed, now, new, dist.group.WORLD, staging_bytes=staging_bytes)
        now = new
        wanted = marked(now, rank)
        assert all(torch.equal(packed[name], wanted[name]) for name in SHAPES), "wrong bytes"
        del wanted
    return report.received, report.bytes_moved, report.seconds


def routing_times(rank: int, world_size: int) -> dict[int, float]:
    """Return microseconds of counting and routing T tokens in a CUDA graph, by T."""
    window = LoadWindow(1, 256, 8, "cuda")
    placement = Placement(tuple(slot % 256 for slot in range(288)), 256, 8)
    table = placement.logical_to_physical("cuda")
    found = {}
    for tokens in (1, 64, 1024, 8192):
        ids = torch.rand(tokens, 256, device="cuda").argsort(dim=1)[:, :8].contiguous()
        routing = Routing(torch.ones(tokens, 8, device="cuda"), ids)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for capturing in (False, True):
            with torch.cuda.graph(graph) if capturing else torch.cuda.stream(stream):
                for _ in range(20):
                    window.record(ids)
                    to_physical(routing, table, rank)
            torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found[tokens] = start.elapsed_time(end) * 1e3 / 20
    return found


def main() -> None:
    world_size = torch.cuda.device_count()
    sys.path.insert(0, str(Path(__file__).parent))
    print(f"{world_size} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    with RankPool(world_size, "cuda", timeout=240) as pool:
        for few in (True, False):
            for staging in (2**24, 2**27, 2**30):
                results = pool.run(moves, staging, few)
                received, moved, _ = results[0]
                seconds = max(result[2] for result in results)
                print(
                    f"staging {staging >> 20:5} MiB: {received:4} experts, "
                    f"{moved / 2**30:6.2f} GiB in {seconds * 1e3:7.1f} ms: "
                    f"{moved / world_size / seconds / 1e9:6.1f} GB/s received per GPU"
                )
        for tokens, micros in pool.run(routing_times)[0].items():
            print(f"count and route {tokens:5} tokens, top 8 of 256: {micros:6.1f} us in a graph")


if __name__ == "__main__":
    main()
