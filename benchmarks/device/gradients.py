"""Check and time gradients on one GPU, beside the chain of torch's grouped GEMMs.

    python benchmarks/device/gradients.py                    # check, then time
    python benchmarks/device/gradients.py check --shapes qwen3-30b
    python benchmarks/device/gradients.py kernels tiles --shapes qwen3-30b --tokens 16384

check: the relative RMS of each gradient of a call of 1024 tokens against fp32.
time: forward and backward in µs by CUDA events, launches included (no CUDA graph): medians of 8
calls in turns, over three uniform routings; TFLOP/s of 18 R H I; the bytes that a call saves and
its peak above what was there before (with the gradients). The baseline is `F.grouped_mm` with
autograd, in the order of operations of transformers 5.24's grouped_mm. `add` accumulates the
weights' gradients in fp32 buffers.
kernels: the times of each kernel of a step (torch.profiler).
tiles: µs of each product of a step, tile by tile; the first is the rule's.

Exit code 1 if a gradient is wrong.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from common import DEVICE, part, problem_of, routings_of, run_parts, say, verdict
from moekit_bench import random_weights
from torch import Tensor

import moekit
from moekit import ExpertWeights, MoEProblem, Routing

SHAPES = ("qwen3-30b", "olmoe", "mixtral", "dsv3-ep8")
EXPERTS = "triton"
_LIMIT = 1.2e-2
_CHECKED = 1024  # tokens

Layer = Callable[[Tensor, ExpertWeights, Routing], Tensor]


def grouped_mm(x_TH: Tensor, weights: ExpertWeights, routing: Routing) -> Tensor:
    """Compute silu experts with a gate and without biases as transformers' grouped_mm does."""
    (T, K), H = routing.topk_ids.shape, x_TH.shape[1]
    ids_S, order_S = torch.sort(routing.topk_ids.reshape(-1))
    x_SH = x_TH[order_S // K]
    counts_L = torch.histc(ids_S.float(), bins=len(weights.w13), min=0, max=len(weights.w13) - 1)
    ends_L = counts_L.cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(x_SH, weights.w13.mT, offs=ends_L).chunk(2, dim=-1)
    y_SH = F.grouped_mm(F.silu(gate) * up, weights.w2.mT, offs=ends_L)
    weighted = y_SH * routing.topk_weights.reshape(-1)[order_S].unsqueeze(-1)
    back_S = torch.empty_like(order_S)
    back_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return weighted[back_S].view(T, K, H).sum(dim=1).to(x_TH.dtype)


def layer_of(problem: MoEProblem, add_to: ExpertWeights | None = None) -> Layer:
    kernel: Any = moekit.compose(problem, "local", EXPERTS)
    return lambda x, weights, routing: kernel(x, weights, routing, add_to=add_to)


class Step:
    """Inputs and parameters of a shape, and a step of a layer."""

    def __init__(self, name: str, tokens: int) -> None:
        self.problem = problem_of(name, training=True)
        torch.manual_seed(0)
        self.weights = random_weights(self.problem, DEVICE)._map(lambda t: t.requires_grad_())
        self.routings = routings_of(self.problem, tokens)
        sizes = tokens, self.problem.hidden_size
        self.x, self.grad = (torch.randn(sizes, device=DEVICE).bfloat16() for _ in range(2))
        self.x.requires_grad_()

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"x": self.x, **self.weights.tensors()}

    def routing(self, index: int) -> Routing:
        made = self.routings[index % len(self.routings)]
        return Routing(made.topk_weights.detach().requires_grad_(), made.topk_ids)

    def forward(self, layer: Layer, index: int = 0) -> tuple[Tensor, Routing]:
        routing = self.routing(index)
        return layer(self.x, self.weights, routing), routing

    def backward(self, y: Tensor, routing: Routing) -> dict[str, Tensor | None]:
        inputs = {"topk_weights": routing.topk_weights, **self.inputs}
        made = torch.autograd.grad(y, list(inputs.values()), self.grad, allow_unused=True)
        return dict(zip(inputs, made, strict=True))


def expected(step: Step, routing: Routing) -> Iterator[tuple[str, int | None, Tensor]]:
    """Yield gradients in fp32: each expert's matrices with its index, then x and topk_weights."""
    x, weights, grad = step.x.detach().float(), step.weights.detach(), step.grad.float()
    dx, dp = torch.zeros_like(x), torch.zeros_like(routing.topk_weights)
    for expert in range(step.problem.num_local_experts):
        token, slot = (routing.topk_ids == expert).nonzero(as_tuple=True)
        held = x[token], weights.w13[expert].float(), weights.w2[expert].float()
        x_e, w13, w2, p = (
            t.detach().requires_grad_() for t in (*held, routing.topk_weights[token, slot])
        )
        gate, up = (x_e @ w13.T).chunk(2, dim=1)
        y = p[:, None] * ((F.silu(gate) * up) @ w2.T)
        of_x, dw13, dw2, of_p = torch.autograd.grad(y, (x_e, w13, w2, p), grad[token])
        dx.index_add_(0, token, of_x)
        dp[token, slot] = of_p
        yield "w13", expert, dw13
        yield "w2", expert, dw2
    yield "x", None, dx
    yield "topk_weights", None, dp


def check(args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    say("| shape | layer | x | topk_weights | w13 | w2 | same bits twice |")
    say("|---|---|---|---|---|---|---|")
    for name in args.shapes:
        step = Step(name, _CHECKED)
        for title, layer in {EXPERTS: layer_of(step.problem), "grouped_mm": grouped_mm}.items():
            with part(f"check {name} {title}"):
                y, routing = step.forward(layer)
                made, again = step.backward(y, routing), step.backward(*step.forward(layer))
                wrong, right = dict[str, float](), dict[str, float]()
                for key, expert, want in expected(step, routing):
                    whole = made[key]
                    assert whole is not None
                    got = whole.float() if expert is None else whole[expert].float()
                    wrong[key] = wrong.get(key, 0) + float((got - want).square().sum())
                    right[key] = right.get(key, 0) + float(want.square().sum())
                errors = {key: (wrong[key] / right[key]) ** 0.5 for key in wrong}
                cells = [
                    f"{errors[key]:.1e} {verdict(f'{name} {title} {key}', errors[key], _LIMIT)}"
                    for key in ("x", "topk_weights", "w13", "w2")
                ]
                same = all(torch.equal(made[key], again[key]) for key in made)
                if title == EXPERTS:
                    verdict(f"{name} {title}: other bits in a second run", 1.0 - same, 0.0)
                say("|", " | ".join([name, title, *cells, str(same)]), "|")
        del step
        torch.cuda.empty_cache()


def measured(step: Step, layer: Layer) -> tuple[int, int]:
    """Return the bytes that a call saves for its backward, and a step's peak."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y, routing = step.forward(layer)
    saved = torch.cuda.memory_allocated() - before - y.nbytes
    made = step.backward(y, routing)
    peak = torch.cuda.max_memory_allocated() - before
    del made
    return saved, peak


def times(step: Step, layers: Mapping[str, Layer], calls: int = 8) -> dict[str, list[float]]:
    """Return the medians of forward and backward in µs; layers take turns."""
    found: dict[str, list[tuple[float, float]]] = {title: [] for title in layers}
    for index in range(-2, calls):  # the first two warm up
        for title, layer in layers.items():
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda.synchronize()
            marks[0].record()
            y, routing = step.forward(layer, index)
            marks[1].record()
            made = step.backward(y, routing)
            marks[2].record()
            torch.cuda.synchronize()
            del made, y
            if index >= 0:
                spans = zip(marks, marks[1:], strict=False)
                one, two = (1e3 * a.elapsed_time(b) for a, b in spans)
                found[title].append((one, two))
    return {title: [statistics.median(v) for v in zip(*pairs, strict=True)]
            for title, pairs in found.items()}  # fmt: skip


def time(args: argparse.Namespace) -> None:
    say("| shape | tokens | layer | forward | backward | both µs | TFLOP/s | saved MB | peak MB |")
    say("|---|---|---|---|---|---|---|---|---|")
    for name in args.shapes:
        for tokens in args.tokens:
            with part(f"time {name} {tokens}"):
                step = Step(name, tokens)
                zeros = step.weights.detach()._map(lambda t: torch.zeros_like(t, dtype=torch.float))
                p = step.problem
                layers = {EXPERTS: layer_of(p), f"{EXPERTS} add": layer_of(p, zeros),
                          "grouped_mm": grouped_mm}  # fmt: skip
                us = times(step, layers)
                flop = 18 * tokens * p.top_k * p.hidden_size * p.intermediate_size
                for title, layer in layers.items():
                    (one, two), (saved, peak) = us[title], measured(step, layer)
                    say(f"| {name} | {tokens} | {title} | {one:.0f} | {two:.0f} | {one + two:.0f} "
                        f"| {flop / (one + two) / 1e6:.0f} | {saved / 1e6:.0f} "
                        f"| {peak / 1e6:.0f} |")  # fmt: skip
                del step, zeros, layers, layer
            torch.cuda.empty_cache()


def kernels(args: argparse.Namespace) -> None:
    """Print the kernels of a step that take at least 1 % of its time."""
    for name in args.shapes:
        for tokens in args.tokens:
            step = Step(name, tokens)
            layer = layer_of(step.problem)
            times(step, {EXPERTS: layer}, 1)
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                times(step, {EXPERTS: layer}, 3)
            say(f"\n{name} {tokens}: µs a step, in the order of a step")
            events = [e for e in profile.events() if e.device_type.name == "CUDA"]
            order, total = dict[str, float](), sum(e.device_time for e in events)
            each = len(events) // 5  # two warm up; kernels of one name stay apart by position
            for position, event in enumerate(events[-3 * each :]):
                key = f"{position % each:2} {event.name[:60]}"
                order[key] = order.get(key, 0.0) + event.device_time / 3
            for key, took in order.items():
                if took > 0.01 * total / 5:
                    say(f"{took:9.1f}  {key}")


def using(tiles: Any) -> Any:
    """Let every step run with these tiles."""
    from moekit_triton import training

    return mock.patch.object(training, "choose_tiles", lambda problem, count: tiles)


def tiles(args: argparse.Namespace) -> None:
    """Time forward and backward with other tiles for one product after another."""
    from moekit_triton.training import choose_tiles

    for name in args.shapes:
        for tokens in args.tokens:
            step = Step(name, tokens)
            layer = layer_of(step.problem)
            rule = choose_tiles(step.problem, tokens * step.problem.top_k)
            say(f"\n{name} {tokens}: forward, backward µs")
            tried = [
                (product, each)
                for product, tile in vars(rule).items()
                for each in dict.fromkeys((tile, *others(product, tile)))
            ]
            plans = [replace(rule, **{product: tile}) for product, tile in tried]
            with ProcessPoolExecutor(8, get_context("spawn")) as pool:
                list(pool.map(compile_plan, [name] * len(plans), plans))
            for (product, tile), plan in zip(tried, plans, strict=True):
                with using(plan), part(f"{product} {tile.describe()}"):
                    one, two = times(step, {EXPERTS: layer}, 5)[EXPERTS]
                    say(f"{product:9} {tile.describe():32} {one:9.1f} {two:9.1f}")


def compile_plan(name: str, plan: Any) -> None:
    """Fill Triton's cache: run a small step in another process."""
    step = Step(name, 256)
    with using(plan), suppress(Exception):  # the run that is timed shows it
        step.backward(*step.forward(layer_of(step.problem)))


def others(product: str, tile: Any) -> list[Any]:
    """Return tiles to try in place of one. All products but the outer ones share block_m."""
    changes: list[dict[str, Any]] = [
        {"num_stages": 3}, {"group_m": 4}, {"group_m": 16}, {"num_warps": 4},
        {"block_n": tile.block_n // 2, "num_warps": 4}, {"block_n": tile.block_n // 2},
    ]  # fmt: skip
    if product.startswith("outer"):
        changes += [{"block_m": 256, "block_n": 128}, {"block_k": 128, "num_stages": 2},
                    {"block_k": 32}]  # fmt: skip
    else:
        changes += [{"tma": not tile.tma}]
    return [replace(tile, **each) for each in changes]


if __name__ == "__main__":
    run_parts(__doc__, {"check": check, "time": time, "kernels": kernels, "tiles": tiles},
              (1024, 4096, 16384), SHAPES, ("check", "time"))  # fmt: skip
