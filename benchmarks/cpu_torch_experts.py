"""moekit's experts on the CPU beside transformers' own experts implementations.

    python benchmarks/cpu_torch_experts.py [--threads 1] [--shapes tiny,60,8] [--compile]
        [--experts torch,ktransformers] [--quant none,int4_w4a16_g128]

Whole block from (x, ids, weights) to out; moekit's time includes ModularKernel. --experts names the
experts backends of moekit to time. Under a --quant scheme they have quantized weights, and the
baselines, which have none, the same weights dequantized. Contestants take turns within a cell; the
table shows medians. With one thread and `torch` alone the clock is the thread's CPU time, which
other processes do not disturb. The last column is the rate at which weights are read, as a fraction
of what reading them with `torch.sum` reaches on this machine.

A lesser CPU is shown by ATEN_CPU_CAPABILITY=avx2|avx512 and ONEDNN_MAX_CPU_ISA=AVX2|AVX512_CORE|
AVX512_CORE_BF16|AVX512_CORE_AMX. torch sends no 16-bit products to oneDNN where the CPU has no
AVX-512; --no-onednn-16bit shows that: every contestant's 16-bit products then stay in torch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import moekit
from moekit.backends import cpu_costs, cpu_experts
from moekit.backends.reference import oracle

SHAPES = {  # experts, top-k, hidden, intermediate
    "tiny": (16, 2, 256, 512),
    "8": (8, 2, 1024, 3584),
    "60": (60, 4, 1024, 704),
    "mixtral-small": (8, 2, 2048, 1024),
    "qwen3-30b": (128, 8, 2048, 768),
    "qwen3-30b-32": (32, 8, 2048, 768),
}
ROUTINGS = 4  # that a cell uses in turn
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BASELINES = ("eager", "grouped_mm", "compiled")


def contestants(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    quant: str,
    backends: Sequence[str],
    compiled: bool,
):
    """name -> call(x, routing), all over the same weights; the problem and the weights."""
    experts, top_k, hidden, inner = shape
    w13 = torch.randn(experts, 2 * inner, hidden, dtype=dtype) / hidden**0.5
    w2 = torch.randn(experts, hidden, inner, dtype=dtype) / inner**0.5
    weights = moekit.ExpertWeights(w13, w2)
    problem = moekit.MoEProblem(
        num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inner,
        dtype=dtype, device="cpu", quant=quant,
    )  # fmt: skip
    weights = weights.quantize(problem.quant)
    calls = {}
    for name in backends:
        kernel = moekit.compose(problem, "local", name)
        packed = kernel.pack(weights)
        calls[name] = lambda x, routing, kernel=kernel, packed=packed: kernel(x, packed, routing)
    if problem.quant.weight is not None:
        plain = weights.canonical(problem).dequantize(problem.quant, dtype)
        w13, w2 = plain.w13, plain.w2
    for baseline in BASELINES:
        config = transformers.Qwen3MoeConfig(
            num_experts=experts, num_experts_per_tok=top_k, hidden_size=hidden,
            moe_intermediate_size=inner,
        )  # fmt: skip
        config._experts_implementation = "eager" if baseline == "compiled" else baseline
        with torch.device("meta"):
            module = Qwen3MoeExperts(config)
        module.gate_up_proj = torch.nn.Parameter(w13)
        module.down_proj = torch.nn.Parameter(w2)
        if baseline == "compiled":
            if not compiled:
                continue
            module = torch.compile(module, dynamic=True)
        calls[baseline] = lambda x, routing, module=module: module(
            x, routing.topk_ids, routing.topk_weights.to(x.dtype)
        )
    return calls, problem, weights


def read_rate() -> float:
    """Bytes a second at which all threads together read memory (the best of several sums)."""
    data = torch.ones(128 << 20, dtype=torch.float32)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / min(times)


def cell(calls, x: torch.Tensor, routings, clock, budget: float) -> dict[str, float]:
    """Median seconds of each contestant over several routings, so that weights stay cold.

    They take turns, and who begins changes: the first one leaves weights in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for routing in routings:
            call(x, routing)
    deadline = time.perf_counter() + budget * len(calls)
    turn = -1
    while time.perf_counter() < deadline or turn < 5:
        turn += 1
        for name in [*calls][turn % len(calls) :] + [*calls][: turn % len(calls)]:
            start = clock()
            calls[name](x, routings[turn % len(routings)])
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", default="tiny,mixtral-small,qwen3-30b")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--experts", default="torch", help="experts backends of moekit")
    parser.add_argument("--quant", default="none", help="schemes")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per cell and contestant")
    parser.add_argument("--compile", action="store_true", help="torch.compile'd eager, too")
    parser.add_argument("--no-onednn", action="store_true", help="torch's own kernels for all")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.backends.mkldnn.flags(enabled=not args.no_onednn):
        lines = table(args)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


def table(args: argparse.Namespace) -> list[str]:
    # A backend with threads of its own works while the calling thread waits.
    alone = args.threads == 1 and args.experts == "torch"
    clock = time.thread_time if alone else time.perf_counter
    baselines = [b for b in BASELINES if b != "compiled" or args.compile]
    backends = args.experts.split(",")
    rate = read_rate()
    lines = [
        f"torch {torch.__version__}, transformers {transformers.__version__}, moekit "
        f"{moekit.__version__}, {cpu_costs.cpu_name()}, {cpu_costs.capability()}, {args.threads} "
        f"thread(s), reads {rate / 1e9:.1f} GB/s; medians in us",
        "",
        f"| shape | dtype | quant | T | {' | '.join((*backends, *baselines))} "
        f"| {' | '.join(f'best baseline / {b} | error | weights read' for b in backends)} |",
        "|---|---|---|---|" + "---|" * (4 * len(backends) + len(baselines)),
    ]
    print("\n".join(lines))
    for name in args.shapes.split(","):
        for dtype, quant in itertools.product(args.dtypes.split(","), args.quant.split(",")):
            dtype = getattr(torch, dtype)
            calls, problem, weights = contestants(
                SHAPES[name], dtype, quant, backends, args.compile
            )
            for tokens in map(int, args.tokens.split(",")):
                x = torch.randn(tokens, problem.hidden_size, dtype=dtype)
                logits = torch.randn(ROUTINGS, tokens, problem.num_experts)
                routings = [moekit.route(one, problem.top_k, renormalize=True) for one in logits]
                routing = routings[0]
                want = oracle(x, weights, routing, problem) if tokens <= 64 else None
                took = cell(calls, x, routings, clock, args.budget)
                hit = sum(len(r.topk_ids.unique()) for r in routings) / ROUTINGS
                hit /= problem.num_experts
                nbytes = hit * sum(t.nbytes for t in weights.tensors().values())
                row = [name, str(dtype)[6:], quant, str(tokens)]
                row += [f"{took[c] * 1e6:.0f}" for c in (*backends, *baselines)]
                for backend in backends:
                    ratio = min(took[b] for b in baselines) / took[backend]
                    error = ""
                    if want is not None:
                        error = f"{relative(calls[backend], x, routing, want):.1e}"
                    row += [f"{ratio:.2f}", error, f"{nbytes / took[backend] / rate:.2f}"]
                lines.append("| " + " | ".join(row) + " |")
                print(lines[-1], flush=True)
            if "torch" in backends:
                print(f"  {name} {dtype}: {cpu_experts.choice(problem)}", flush=True)
    return lines


def relative(call, x: torch.Tensor, routing: moekit.Routing, want: torch.Tensor) -> float:
    got = call(x, routing).float()
    return float((got - want).norm() / want.norm())


if __name__ == "__main__":
    main()
