"""Time moekit's experts on the CPU and transformers' own experts implementations.

    python benchmarks/cpu_torch_experts.py [--threads 1] [--shapes tiny,60,8] [--compile]
        [--experts torch,ktransformers] [--quant none,int4_w4a16_g128]

The whole block is timed, from (x, ids, weights) to out; moekit's time includes ModularKernel.
--experts names the experts backends of moekit. Under a --quant scheme they have quantized weights;
the baselines know no such scheme and have the same weights dequantized. All implementations take
turns within a cell, and the table shows medians. With one thread and `torch` alone the clock is
the thread's CPU time, which other processes do not disturb. The last column is the rate at which
weights are read, as a fraction of the rate that `torch.sum` reaches on this machine.

ATEN_CPU_CAPABILITY=avx2|avx512 and ONEDNN_MAX_CPU_ISA=AVX2|AVX512_CORE|AVX512_CORE_BF16|
AVX512_CORE_AMX stand for a lesser CPU. Where a CPU has no AVX-512, torch sends no 16-bit products
to oneDNN; --no-onednn keeps all products in torch's own kernels.
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
from moekit_bench import Table, Timer
from moekit_bench.timer import rotated
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
ROUTINGS = 4  # a cell uses them in turns
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BASELINES = ("eager", "grouped_mm", "compiled")


def implementations(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    quant: str,
    backends: Sequence[str],
    compiled: bool,
):
    """Return name -> call(x, routing), all with the same weights, the problem and the weights."""
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
    """Return the bytes/s at which all threads together read memory, the best of several sums."""
    data = torch.ones(128 << 20, dtype=torch.float32)
    timer = Timer(data.device)
    return data.nbytes / min(timer.eager_us(data.sum)[0] for _ in range(5)) * 1e6


def cell(calls, x: torch.Tensor, routings, clock, budget: float) -> dict[str, float]:
    """Return the median seconds of each call over several routings, so that weights stay cold.

    The calls take turns, and another one begins each time: it leaves weights in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for routing in routings:
            call(x, routing)
    deadline = time.perf_counter() + budget * len(calls)
    turn = -1
    while time.perf_counter() < deadline or turn < 5:
        turn += 1
        for name in rotated(list(calls), turn):
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
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for each call in a cell")
    parser.add_argument("--compile", action="store_true", help="also eager, compiled")
    parser.add_argument("--no-onednn", action="store_true", help="torch's own kernels only")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.backends.mkldnn.flags(enabled=not args.no_onednn):
        title, table = measure(args)
    if args.out:
        args.out.write_text("\n".join([title, "", *table]) + "\n")


def measure(args: argparse.Namespace) -> tuple[str, Table]:
    # A backend that has its own threads works while the calling thread waits.
    alone = args.threads == 1 and args.experts == "torch"
    clock = time.thread_time if alone else time.perf_counter
    baselines = [b for b in BASELINES if b != "compiled" or args.compile]
    backends = args.experts.split(",")
    rate = read_rate()
    title = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, moekit "
        f"{moekit.__version__}, {cpu_costs.cpu_name()}, {cpu_costs.capability()}, {args.threads} "
        f"thread(s), reads {rate / 1e9:.1f} GB/s; medians in us"
    )
    ratios = (c for b in backends for c in (f"best baseline / {b}", "error", "weights read"))
    table = Table("shape", "dtype", "quant", "T", *backends, *baselines, *ratios)
    print("\n".join([title, "", *table]))
    for name in args.shapes.split(","):
        for dtype, quant in itertools.product(args.dtypes.split(","), args.quant.split(",")):
            dtype = getattr(torch, dtype)
            calls, problem, weights = implementations(
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
                print(table.add(*row), flush=True)
            if "torch" in backends:
                print(f"  {name} {dtype}: {cpu_experts.choice(problem)}", flush=True)
    return title, table


def relative(call, x: torch.Tensor, routing: moekit.Routing, want: torch.Tensor) -> float:
    got = call(x, routing).float()
    return float((got - want).norm() / want.norm())


if __name__ == "__main__":
    main()
