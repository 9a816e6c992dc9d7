"""Check and time gradients of layers whose tokens move between GPUs, a process for each GPU.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 python benchmarks/device/gradient_ranks.py
    python benchmarks/device/gradient_ranks.py time --ranks 2 --dispatchers nvlink_ht --tokens 4096

check: relative RMS of the gradients of two calls, backward in the reverse order, against one GPU
with all tokens and experts; then how many gradients have other bits in a second run.
graph: how many gradients have other bits in replays of a CUDA graph of forward and backward.
time: µs of one GPU with all experts and as many tokens, then of the ranks' forward, backward and
both, by CUDA events (medians of 7 runs in turns, 4 steps each, the slowest rank); their ratio.

Experts: `triton`, bf16; capacity is the number of tokens. Exit code 1 if a gradient is wrong or a
line fails or takes too long; the other lines run in new processes then.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from common import say
from moekit_bench import random_weights, shape
from torch import Tensor

import moekit
from moekit import ExpertWeights, Routing
from moekit.testing.distributed import RankError, RankPool

DEVICE, EXPERTS = "cuda", "triton"
SHAPES = {"qwen3-30b": "qwen3-30b", "dsv3, 64 experts": "64:8:7168:2048"}
TARGETS = {2: 1.12, 4: 1.25}
LIMIT, CHECKED, RUNS, STEPS = 1.2e-2, 1024, 7, 4


class Layer:
    """A kernel with parameters. ``name``: of the dispatcher, or "local", for one GPU."""

    def __init__(self, name: str, sizes: str, tokens: int, whole: ExpertWeights | None = None):
        ranks = 1 if name == "local" else dist.get_world_size()
        parallel = moekit.ParallelConfig(ep_size=ranks, ep_rank=dist.get_rank() % ranks)
        options = {"training": True, "max_num_tokens": tokens, "parallel": parallel}
        self.problem = p = shape(sizes).problem(device=DEVICE, **options)
        all_experts = p.replace(parallel=moekit.ParallelConfig())
        whole = whole or random_weights(all_experts, torch.device(DEVICE))
        self.weights = whole.select(list(p.local_experts))._map(lambda t: t.requires_grad_())
        self.kernel: Any = moekit.compose(p, name, EXPERTS)

    def given(self, tokens: int, seed: int) -> list[Tensor]:
        """Return x, router weights, ids and the gradient of the output, the same on all ranks."""
        p, draw = self.problem, torch.Generator(DEVICE).manual_seed(seed)
        sizes = tokens, p.num_experts, p.top_k
        routing = moekit.simulate_routing("uniform", *sizes, device=DEVICE, generator=draw)
        x, grad = torch.randn((2, tokens, p.hidden_size), device=DEVICE, generator=draw).bfloat16()
        return [x, routing.topk_weights, routing.topk_ids, grad]

    def forward(self, given: list[Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        x, weights = (t.detach().requires_grad_() for t in given[:2])
        out = self.kernel(x, self.weights, Routing(weights, given[2]))
        return out, {"x": x, "topk_weights": weights, **self.weights.tensors()}, given[3]

    def step(self, given: list[Tensor], marks: Sequence[Any] = ()) -> dict[str, Tensor]:
        forward = self.forward(given)
        for mark in marks:
            mark.record()
        return backward(*forward)


def backward(out: Tensor, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    return dict(zip(inputs, torch.autograd.grad(out, [*inputs.values()], grad), strict=True))


def most(*values: float) -> float:
    """Return the largest value of all ranks; NaN if one has NaN."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, values)
    return max((v for each in ranks for v in each), key=lambda each: (each != each, each))


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> int:
    return int(most(sum(not torch.equal(one[key], other[key]) for key in one)))


def check(rank: int, ranks: int, name: str, sizes: str, tokens: int) -> tuple[bool, list[str]]:
    one = Layer("local", sizes, CHECKED * ranks)
    many = Layer(name, sizes, CHECKED, one.weights.detach())
    calls, errors = [], dict[str, float]()
    for seed, step in enumerate((-37, -CHECKED // (ranks - 1))):  # of the ranks' tokens, up to 0
        counts = [max(0, CHECKED + step * r) for r in range(ranks)]
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        whole = one.given(sum(counts), seed)
        calls.append((whole, mine, many.forward([t[mine] for t in whole])))
    for whole, mine, forward in reversed(calls):
        made = backward(*forward)
        for key, right in one.step(whole).items():
            right = right[
                mine if key in ("x", "topk_weights") else list(many.problem.local_experts)
            ]
            error = (made[key].float() - right.float()).norm() / right.float().norm().clamp(1e-30)
            errors[key] = most(errors.get(key, 0.0), float(error))
    other = differing(made, many.step([t[mine] for t in whole]))
    many.kernel.destroy()
    cells = [f"{key} {each:.1e}" for key, each in errors.items()]
    right_ = not other and all(each <= LIMIT for each in errors.values())
    return right_, [*cells, f"other bits in {other}"]


def graph(rank: int, ranks: int, name: str, sizes: str, tokens: int) -> tuple[bool, list[str]]:
    layer = Layer(name, sizes, CHECKED)
    given, captured = layer.given(CHECKED, rank), torch.cuda.CUDAGraph()
    want = layer.step(given)
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(captured):
        got = layer.step(given)
    for _ in range(20):
        captured.replay()
    other = differing(got, want)
    layer.kernel.destroy()
    return not other, [f"other bits in {other}"]


def time(rank: int, ranks: int, name: str, sizes: str, tokens: int) -> tuple[bool, list[str]]:
    one = Layer("local", sizes, tokens)
    layers = [one, Layer(name, sizes, tokens, one.weights.detach())]
    given = [one.given(tokens, 3 * rank + call) for call in range(3)]
    spans: list[list[tuple[float, float]]] = [[], []]
    for run in range(-2, RUNS):  # the first two warm up
        for found, layer in zip(spans, layers, strict=True):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * STEPS + 1)]
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            marks[0].record()
            for step in range(STEPS):
                layer.step(given[(run + step) % 3], marks[2 * step + 1 : 2 * step + 2])
                marks[2 * step + 2].record()
            torch.cuda.synchronize()
            us = [1e3 * marks[i].elapsed_time(marks[i + 1]) / STEPS for i in range(2 * STEPS)]
            found += [(sum(us[::2]), sum(us[1::2]))] * (run >= 0)
    base, both = (most(statistics.median(map(sum, found))) for found in spans)
    parts = [most(statistics.median(each)) for each in zip(*spans[1], strict=True)]
    layers[1].kernel.destroy()
    ratio = f"{both / base:.3f} x (target {TARGETS.get(ranks, 'none')})"
    return True, [*(f"{each:.0f}" for each in (base, *parts, both)), ratio]


def line(rank: int, ranks: int, part: str, *job: Any) -> tuple[bool, list[str]]:
    gc.collect()
    torch.cuda.empty_cache()
    return {"check": check, "graph": graph, "time": time}[part](rank, ranks, *job)


def main() -> None:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("parts", nargs="*", default=["check", "graph", "time"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--dispatchers", nargs="+", default=["nvlink_ht", "naive"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--seconds", type=float, default=240, help="for each line")
    args, count = parser.parse_args(), torch.cuda.device_count()
    say(f"torch {torch.__version__}, {count} GPUs of {args.ranks} wanted\n")
    failed, pool, jobs = list[str](), None, [
        (ranks, part, name, label, tokens)
        for ranks in args.ranks if ranks <= count for part in args.parts for label in SHAPES
        for name in args.dispatchers if (part, name) != ("graph", "naive")
        for tokens in (args.tokens if part == "time" else [CHECKED])
    ]  # fmt: skip
    for ranks, part, name, label, tokens in jobs:
        try:
            if pool is None or pool.closed or pool.world_size != ranks:
                pool = pool and pool.close()
                pool = RankPool(ranks, DEVICE, args.seconds)
            right, cells = pool.run(line, part, name, SHAPES[label], tokens)[0]
        except RankError as error:
            pool, right, cells = pool and pool.close(0), False, [f"FAILED\n{error}\n"]
        cells = [
            part,
            name,
            f"{ranks} GPUs",
            label,
            str(tokens),
            *cells,
            "ok" if right else "WRONG",
        ]
        say("|", " | ".join(cells), "|")
        failed += [f"{part} {name} {ranks} {label}"] * (not right)
    say(f"\nof {len(jobs)} lines {len(failed)} failed or are wrong", *failed)
    raise SystemExit(bool(failed) or not jobs)


if __name__ == "__main__":
    main()
