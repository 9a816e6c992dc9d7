"""Measure what FusedMoE costs over the kernel that it composes.

    python benchmarks/layer_overhead.py [--experts triton] [--quant none,fp8_block]
        [--shapes qwen3-30b,mixtral] [--tokens 1,16,64,256,1024,4096] [--out FILE.md]

All columns use the same backends, weights, tokens and routings. kernel, layer: microseconds of one
call in a CUDA graph over several inputs (medians of replays in turns), both given ids and weights.
routed: the layer given logits, so that it also routes. host: until an eager call returns, from a
drained queue. compiled: the layer through torch.compile, as one operator. The script fails if the
layer's geometric mean over the kernel exceeds 1.02 in graphs.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import platform
import statistics
import sys
from pathlib import Path

import torch
from moekit_bench import (
    KernelCall,
    Prepared,
    Table,
    Timing,
    inputs,
    random_weights,
    shape,
    take_turns,
)

import moekit

BOUND = 1.02
COLUMNS = ("kernel", "layer", "routed", "compiled")


class LayerCall:
    """The layer as a call to time.

    logits: of each routing, by its id; the layer routes by them. Without, it gets ids and weights.
    """

    def __init__(self, layer, call=None, logits=None) -> None:
        self.layer, self.logits = layer, logits
        self.call = layer if call is None else call
        self.graph_safe = layer.graph_safe

    def __call__(self, x, routing):
        if self.logits is not None:
            return self.call(x, self.logits[id(routing)])
        return self.call(x, topk_weights=routing.topk_weights, topk_ids=routing.topk_ids)

    def warmup(self, num_tokens: int) -> None:
        self.layer.warmup(num_tokens)


def measure(sizes, quant: str, experts: str, tokens: int, weights, device) -> dict[str, Timing]:
    """Return the timing of every column for one shape, scheme and T."""
    problem = sizes.problem(quant=quant, device=device)
    layer = moekit.FusedMoE(
        problem.num_experts,
        problem.top_k,
        problem.hidden_size,
        problem.intermediate_size,
        params_dtype=problem.dtype,
        quant=quant,
        activation=problem.activation,
        has_bias=problem.has_bias,
        experts=experts,
        device=device,
        checked=False,
    )
    layer.load_weights(weights)
    # Several inputs, so that weights do not stay in the cache.
    drawn = inputs("uniform", tokens, 3, problem, device)
    logits = {id(r): torch.randn(tokens, problem.num_experts, device=device) for _, r in drawn}
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    calls = {
        "kernel": KernelCall(layer.kernel, layer.packed),
        "layer": LayerCall(layer),
        "routed": LayerCall(layer, logits=logits),
        "compiled": LayerCall(layer, compiled),
    }
    prepared = {name: Prepared(call, drawn, device) for name, call in calls.items()}
    wrong = (prepared["kernel"].first_output() != prepared["layer"].first_output()).any()
    assert not wrong, "the layer and its kernel return different outputs"
    times = take_turns(prepared, replays=20)
    for timing in times.values():
        if isinstance(timing, Exception):
            raise timing
    layer.destroy()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", default="triton")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--shapes", default="qwen3-30b,mixtral")
    parser.add_argument("--tokens", default="1,16,64,256,1024,4096")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    title = (
        f"{where}, torch {torch.__version__}, moekit {moekit.__version__}, experts {args.experts}; "
        "us"
    )
    host = (f"host: {name}" for name in COLUMNS)
    table = Table("shape", "quant", "T", "kernel", "layer", "layer / kernel", "routed", *host)
    print("\n".join([title, "", *table]))
    ratios = []
    with torch.inference_mode():
        for name, quant in itertools.product(args.shapes.split(","), args.quant.split(",")):
            sizes = shape(name)
            weights = random_weights(sizes.problem(quant=quant, device=device), device)
            for tokens in map(int, args.tokens.split(",")):
                times = measure(sizes, quant, args.experts, tokens, weights, device)
                us = {column: f"{times[column].us:.1f}" for column in COLUMNS}
                ratios.append(times["layer"].us / times["kernel"].us)
                host = (f"{times[c].host_us or times[c].eager_us:.0f}" for c in COLUMNS)
                row = (us["kernel"], us["layer"], f"{ratios[-1]:.3f}", us["routed"], *host)
                print(table.add(name, quant, tokens, *row), flush=True)
                gc.collect()
            del weights
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    graphs = device.type == "cuda" and times["kernel"].graph_us is not None
    summary = f"layer / kernel: geometric mean {mean:.3f}, worst {max(ratios):.3f}"
    summary += "" if graphs else "; eager, as there are no graphs"
    print(f"\n{summary}")
    if args.out:
        args.out.write_text("\n".join([title, "", *table, "", summary]) + "\n")
    if graphs and mean > BOUND:
        sys.exit(f"the layer costs more than {BOUND - 1:.0%} over its kernel")


if __name__ == "__main__":
    main()
