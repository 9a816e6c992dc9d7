"""What FusedMoE costs over the kernel that it composes: same backends, weights, tokens, routings.

    python benchmarks/layer_overhead.py [--experts triton] [--quant none,fp8_block]
        [--shapes qwen3-30b,mixtral] [--tokens 1,16,64,256,1024,4096] [--out FILE.md]

kernel, layer: microseconds of one call in a CUDA graph over several inputs (median of replays that
take turns), both given ids and weights. routed: the layer given logits, so that it also routes.
host: until an eager call returns, from a drained queue; compiled: the layer through torch.compile,
as one operator. Fails when the layer's geometric mean over the kernel exceeds 1.02 in graphs.
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import statistics
import sys
from pathlib import Path

import torch
from moekit_bench import KernelCall, Prepared, Timing, inputs, random_weights, shape, take_turns

import moekit

BOUND = 1.02
COLUMNS = ("kernel", "layer", "routed", "compiled")


class LayerCall:
    """The layer as something to time; ``logits``: by the routing they stand for, else given ids."""

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


def cell(sizes, quant: str, experts: str, tokens: int, weights, device) -> dict[str, Timing]:
    """Times of all contestants for one shape, scheme and T."""
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
    kernel = layer.kernel
    # Several inputs, so that weights do not stay in the cache.
    pairs = inputs("uniform", tokens, 3, problem, device)
    logits = {id(routing): torch.randn(tokens, problem.num_experts, device=device)
              for _, routing in pairs}  # fmt: skip
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    calls = {
        "kernel": KernelCall(kernel, layer.packed),
        "layer": LayerCall(layer),
        "routed": LayerCall(layer, logits=logits),
        "compiled": LayerCall(layer, compiled),
    }
    prepared = {name: Prepared(call, pairs, device) for name, call in calls.items()}
    wrong = (prepared["kernel"].first_output() != prepared["layer"].first_output()).any()
    assert not wrong, "the layer computes something else"
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
    lines = [
        f"{where}, torch {torch.__version__}, moekit {moekit.__version__}, experts {args.experts}; "
        "us",
        "",
        "| shape | quant | T | kernel | layer | layer / kernel | routed | host: "
        + " | host: ".join(COLUMNS)
        + " |",  # fmt: skip
        "|---" * (7 + len(COLUMNS)) + "|",
    ]
    print("\n".join(lines))
    ratios = []
    with torch.inference_mode():
        for name in args.shapes.split(","):
            for quant in args.quant.split(","):
                sizes = shape(name)
                weights = random_weights(sizes.problem(quant=quant, device=device), device)
                for tokens in map(int, args.tokens.split(",")):
                    times = cell(sizes, quant, args.experts, tokens, weights, device)
                    ratio = times["layer"].us / times["kernel"].us
                    ratios.append(ratio)
                    host = [times[c].host_us or times[c].eager_us for c in COLUMNS]
                    row = [name, quant, str(tokens)]
                    row += [f"{times[c].us:.1f}" for c in ("kernel", "layer")]
                    row += [f"{ratio:.3f}", f"{times['routed'].us:.1f}"]
                    lines.append("| " + " | ".join([*row, *(f"{us:.0f}" for us in host)]) + " |")
                    print(lines[-1], flush=True)
                    gc.collect()
                del weights
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    graphs = device.type == "cuda" and times["kernel"].graph_us is not None
    lines += ["", f"layer / kernel: geometric mean {mean:.3f}, worst {max(ratios):.3f}"
              + ("" if graphs else "; eager, as there are no graphs")]  # fmt: skip
    print("\n".join(lines[-2:]))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    if graphs and mean > BOUND:
        sys.exit(f"the layer costs more than {BOUND - 1:.0%} over its kernel")


if __name__ == "__main__":
    main()
