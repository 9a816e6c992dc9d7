"""The `torch` experts on the CPU beside transformers' own experts implementations.

    python benchmarks/cpu_torch_experts.py [--threads 1] [--shapes tiny,60,8] [--out FILE.md]

Whole block from (x, ids, weights) to out; moekit's time includes ModularKernel. Contestants take
turns within a cell; the table shows medians. With one thread the clock is the thread's CPU time,
which other processes do not disturb.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import moekit
from moekit.reference import oracle

SHAPES = {  # experts, top-k, hidden, intermediate
    "tiny": (16, 2, 256, 512),
    "8": (8, 2, 1024, 3584),
    "60": (60, 4, 1024, 704),
    "qwen3-30b": (128, 8, 2048, 768),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PEERS = ("eager", "grouped_mm")


def contestants(shape: tuple[int, int, int, int], dtype: torch.dtype):
    """name -> call(x, routing), all over the same weights; and the moekit problem and weights."""
    experts, top_k, hidden, inner = shape
    w13 = torch.randn(experts, 2 * inner, hidden, dtype=dtype) / hidden**0.5
    w2 = torch.randn(experts, hidden, inner, dtype=dtype) / inner**0.5
    weights = moekit.ExpertWeights(w13, w2)
    problem = moekit.MoEProblem(
        num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inner,
        dtype=dtype, device="cpu",
    )  # fmt: skip
    kernel = moekit.compose(problem, "local", "torch")
    packed = kernel.pack(weights)
    calls = {"moekit": lambda x, routing: kernel(x, packed, routing)}
    for peer in PEERS:
        config = transformers.Qwen3MoeConfig(
            num_experts=experts, num_experts_per_tok=top_k, hidden_size=hidden,
            moe_intermediate_size=inner,
        )  # fmt: skip
        config._experts_implementation = peer
        with torch.device("meta"):
            module = Qwen3MoeExperts(config)
        module.gate_up_proj = torch.nn.Parameter(w13)
        module.down_proj = torch.nn.Parameter(w2)
        calls[peer] = lambda x, routing, module=module: module(
            x, routing.topk_ids, routing.topk_weights.to(x.dtype)
        )
    return calls, problem, weights


def cell(calls, x: torch.Tensor, routing: moekit.Routing, clock, budget: float) -> dict[str, float]:
    """Median seconds of each contestant, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(x, routing)
    deadline = time.perf_counter() + budget * len(calls)
    while time.perf_counter() < deadline or len(times["moekit"]) < 5:
        for name, call in calls.items():
            start = clock()
            call(x, routing)
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", default="tiny,8,60,qwen3-30b")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per cell and contestant")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    lines = [
        f"torch {torch.__version__}, transformers {transformers.__version__}, moekit "
        f"{moekit.__version__}, {platform.machine()}, {args.threads} thread(s); medians in us",
        "",
        "| shape | dtype | T | moekit | " + " | ".join(PEERS) + " | best peer / moekit | error |",
        "|---|---|---|---|" + "---|" * (len(PEERS) + 2),
    ]
    print("\n".join(lines))
    for name in args.shapes.split(","):
        for dtype in (torch.bfloat16, torch.float32):
            calls, problem, weights = contestants(SHAPES[name], dtype)
            for tokens in TOKENS:
                x = torch.randn(tokens, problem.hidden_size, dtype=dtype)
                routing = moekit.route(
                    torch.randn(tokens, problem.num_experts), problem.top_k, renormalize=True
                )
                want = oracle(x, weights, routing, problem) if tokens <= 64 else None
                error = "" if want is None else f"{relative(calls, x, routing, want):.1e}"
                took = cell(calls, x, routing, clock, args.budget)
                ratio = min(took[p] for p in PEERS) / took["moekit"]
                row = [name, str(dtype)[6:], str(tokens)]
                row += [f"{took[c] * 1e6:.0f}" for c in ("moekit", *PEERS)]
                lines.append("| " + " | ".join([*row, f"{ratio:.2f}", error]) + " |")
                print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


def relative(calls, x: torch.Tensor, routing: moekit.Routing, want: torch.Tensor) -> float:
    got = calls["moekit"](x, routing).float()
    return float((got - want).norm() / want.norm())


if __name__ == "__main__":
    main()
