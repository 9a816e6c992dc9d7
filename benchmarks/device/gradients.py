"""Look into a training step on one GPU. `python -m moekit bench --train` checks and times steps.

    python benchmarks/device/gradients.py --shapes qwen3-30b --tokens 16384
    python benchmarks/device/gradients.py kernels --experts triton cutlass
    python benchmarks/device/gradients.py kernels --adapters 1:8 --tokens 16384

kernels: the times of each kernel of a step (torch.profiler). --adapters N:RANK: of a step that
trains N adapters (LoRA) of that rank over frozen experts.
tiles: µs of forward and backward, with one product's tile after another; the first is the rule's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from common import DEVICE, part, problem_of, routings_of, run_parts, say
from moekit_bench import random_weights
from moekit_bench.shapes import random_adapters
from torch import Tensor

import moekit
from moekit import ExpertWeights, Routing
from moekit.plugin import Adapters, AdapterSlots

SHAPES = ("qwen3-30b", "olmoe", "mixtral", "dsv3-ep8")

Layer = Callable[[Tensor, ExpertWeights, Routing], Tensor]


class Step:
    """Inputs and parameters of a shape, and a step of a layer."""

    def __init__(self, name: str, tokens: int, adapters: str = "") -> None:
        count, rank = map(int, adapters.split(":")) if adapters else (0, 0)
        room = AdapterSlots(count, rank) if adapters else None
        self.problem = problem_of(name, training=True, adapters=room)
        torch.manual_seed(0)
        self.weights, self.adapters = random_weights(self.problem, DEVICE), None
        self.trained: ExpertWeights | Adapters = self.weights
        if room is None:
            self.trained = self.weights = self.weights._map(lambda t: t.requires_grad_())
        else:
            self.trained = self.adapters = random_adapters(self.problem, DEVICE)
            self.slots = (torch.arange(tokens, device=DEVICE) % count).int()
        self.routings = routings_of(self.problem, tokens)
        sizes = tokens, self.problem.hidden_size
        self.x, self.grad = (torch.randn(sizes, device=DEVICE).bfloat16() for _ in range(2))
        self.x.requires_grad_()

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"x": self.x, **self.trained.tensors()}

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


def layer_of(step: Step, experts: str) -> Layer:
    kernel: Any = moekit.compose(step.problem, "local", experts)
    if step.adapters is None:
        return kernel  # type: ignore[no-any-return]
    packed = replace(kernel.pack(step.weights), adapters=step.adapters)
    return lambda x, _, routing: kernel(x, packed, replace(routing, adapter_ids=step.slots))


def times(step: Step, layers: Mapping[str, Layer], calls: int = 8) -> dict[str, list[float]]:
    """Return medians in µs of forward and backward; layers take turns."""
    found: dict[str, list[tuple[float, ...]]] = {title: [] for title in layers}
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
    return {title: [statistics.median(v) for v in zip(*each, strict=True)]
            for title, each in found.items()}  # fmt: skip


def kernels(args: argparse.Namespace) -> None:
    """Print the kernels of a step that take at least 1 % of its time."""
    sizes = args.shapes, args.tokens, args.experts, args.adapters or [""]
    for name, tokens, title, adapters in product(*sizes):
        step = Step(name, tokens, adapters)
        layers = {title: layer_of(step, title)}
        times(step, layers, 1)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            times(step, layers, 3)
        say(f"\n{name} {tokens} {title}{adapters and f' {adapters}'}: µs of a step, in its order")
        events = [e for e in profile.events() if e.device_type.name == "CUDA"]
        order, total = dict[str, float](), sum(e.device_time for e in events)
        each = len(events) // 5  # two warm up; kernels of one name stay apart by position
        for position, event in enumerate(events[-3 * each :]):
            key = f"{position % each:2} {event.name[:60]}"
            order[key] = order.get(key, 0.0) + event.device_time / 3
        for key, took in order.items():
            if took > 0.01 * total / 5:
                say(f"{took:9.1f}  {key}")


def training_of(experts: str) -> Any:
    """Return the module of the experts' backward: it chooses the tiles."""
    return import_module(f"moekit_{experts}.training")


def using(experts: str, tiles: Any) -> Any:
    """Let every step run with these tiles."""
    return mock.patch.object(training_of(experts), "choose_tiles", lambda *_: tiles)


def tiles(args: argparse.Namespace) -> None:
    """Time forward and backward with other tiles for one product after another."""
    for name, tokens, title in product(args.shapes, args.tokens, args.experts):
        step = Step(name, tokens)
        layers = {title: layer_of(step, title)}
        rule = training_of(title).choose_tiles(step.problem, tokens * step.problem.top_k)
        say(f"\n{name} {tokens} {title}: forward, backward µs")
        tried = [
            (step_product, each)
            for step_product, tile in vars(rule).items()
            for each in dict.fromkeys((tile, *OTHERS[title](step_product, tile)))
        ]
        plans = [replace(rule, **{step_product: tile}) for step_product, tile in tried]
        count = len(plans)
        with ProcessPoolExecutor(8, get_context("spawn")) as pool:
            list(pool.map(compile_plan, [name] * count, [title] * count, plans))
        for (step_product, tile), plan in zip(tried, plans, strict=True):
            words = tile.describe() if title == "triton" else str(tile)
            with using(title, plan), part(f"{step_product} {words}"):
                one, two = times(step, layers, 5)[title]
                say(f"{step_product:9} {words:32} {one:9.1f} {two:9.1f}")


def compile_plan(name: str, experts: str, plan: Any) -> None:
    """Fill the cache of Triton or quack: run a small step in another process."""
    step = Step(name, 256)
    with using(experts, plan), suppress(Exception):  # the run that is timed shows it
        step.backward(*step.forward(layer_of(step, experts)))


def triton_tiles(step_product: str, tile: Any) -> list[Any]:
    """Return tiles to try in place of one. All products but the outer ones share block_m."""
    if not hasattr(tile, "num_stages"):  # specialized warps
        return [replace(tile, group_m=group_m) for group_m in (4, 16)]
    changes: list[dict[str, Any]] = [
        {"num_stages": 3}, {"group_m": 4}, {"group_m": 16}, {"num_warps": 4},
        {"block_n": tile.block_n // 2, "num_warps": 4}, {"block_n": tile.block_n // 2},
    ]  # fmt: skip
    if step_product.startswith("outer"):
        changes += [{"block_m": 256, "block_n": 128}, {"block_k": 128, "num_stages": 2},
                    {"block_k": 32}]  # fmt: skip
    else:
        changes += [{"tma": not tile.tma}]
    return [replace(tile, **each) for each in changes]


def quack_tiles(step_product: str, tile: Any) -> list[Any]:
    """Return tiles to try in place of one. A gather excludes clusters along N and a counter."""
    sizes = (
        (128, 192, True),
        (128, 128, True),
        (128, 160, True),
        (128, 256, False),
        (256, 128, False),
    )
    changes: list[dict[str, Any]] = [
        dict(zip(("m", "n", "pingpong"), s, strict=True)) for s in sizes
    ]
    changes += [{"cluster": (1, 1)}]
    if step_product in ("down", "back"):
        changes += [{"cluster": (1, 2)}, {"dynamic": True}]
    return [replace(tile, **each) for each in changes]


OTHERS: Mapping[str, Callable[[str, Any], list[Any]]] = {
    "triton": triton_tiles, "cutlass": quack_tiles,
}  # fmt: skip

if __name__ == "__main__":
    run_parts(__doc__, {"kernels": kernels, "tiles": tiles}, (4096, 16384), SHAPES,
              experts=("triton",), adapters=())  # fmt: skip
