"""Print the microseconds of each kernel of a call, by torch's profiler, in the order of a call.

    python benchmarks/device/kernels.py --shapes qwen3-30b --tokens 1 16 --experts triton
    python benchmarks/device/kernels.py --ep 2 --tokens 1           # the first of two ranks' share
    python benchmarks/device/kernels.py --adapters 1:8 8:8 --quant fp8_block --tokens 1024

A call is a replay of a CUDA graph over several inputs, as `python -m moekit bench` times it.
--ep N: the experts of the first of N ranks, all of which have the tokens. --adapters N:RANK: also
with N adapters (LoRA) of that rank.
"""

from __future__ import annotations

import argparse
from itertools import product

import torch
from common import DEVICE, part, problem_of, run_parts, say
from moekit_bench import Case, Prepared, random_weights
from moekit_bench.implementations import backends, beside
from torch.profiler import ProfilerActivity, profile

import moekit


def kernels(args: argparse.Namespace) -> None:
    names = beside(args.experts, [f"adapters {each}" for each in args.adapters])
    (ranks,) = map(int, args.ep)
    parallel = moekit.ParallelConfig(ep_size=ranks, dp_size=1)
    for shape, quant in product(args.shapes, args.quant):
        problem = problem_of(shape, quant, parallel=parallel)
        weights = random_weights(problem, DEVICE)
        for made in backends(names):
            with part(f"{shape} {quant} {made.name}"), torch.inference_mode():
                call = made.make(problem, weights, DEVICE)
                for tokens in args.tokens:
                    case = Case.make(problem, weights, tokens)
                    prepared = Prepared(call, case.inputs_of(call), DEVICE)
                    assert prepared.graph is not None, prepared.note
                    say(f"{shape} {quant} T={tokens} {made.name}: {shown(prepared)}")


def shown(prepared: Prepared) -> str:
    """Return the kernels of a call with their times, means over the inputs."""
    prepared.graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        prepared.graph.replay()
        torch.cuda.synchronize()
    count = len(prepared.inputs)
    events = [e for e in seen.events() if e.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    each = len(events) // count
    us = [sum(e.device_time for e in events[i::each]) / count for i in range(each)]
    return ", ".join(f"{events[i].name[:40]} {us[i]:.1f}" for i in range(each))


if __name__ == "__main__":
    run_parts(__doc__, {"kernels": kernels}, (1, 16, 1024), ("qwen3-30b",), experts=("triton",),
              quant=("none",), ep=("1",), adapters=())  # fmt: skip
