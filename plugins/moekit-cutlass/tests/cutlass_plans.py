"""device_check.py's comparison of quack's plans: whole blocks in turns, at the clocks that a long
run leaves, beside the library's own (benchmarks/baselines/quack.py). A tile that is fastest in
`sweep`, alone and for milliseconds, need not be it here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from cutlass_device import (
    ARGS,
    DEVICE,
    SHAPES,
    chosen_shapes,
    part,
    problem_of,
    routing_of,
    say,
    tokens_of,
    weights_of,
)
from moekit_bench import Prepared, take_turns
from moekit_cutlass import providers
from moekit_cutlass.providers import Quack, QuackPlan, Tile, quack_plans

import moekit
from moekit.contract import PackedWeights
from moekit.runtime.workspace import Workspace

WIDE_FIRST = (
    Tile(256, 192, False, (2, 1)), Tile(192, 128, True, (1, 2)), Tile(128, 192, True, (1, 2)),
    Tile(128, 256, False, (1, 1)), Tile(128, 256, False, (2, 1)),
)  # fmt: skip
WIDE_SECOND = (
    Tile(256, 128, False, (1, 2)), Tile(128, 256, False, (2, 1)), Tile(256, 192, False, (1, 1)),
)  # fmt: skip
COPIED_FIRST = (
    Tile(128, 192, True, (1, 2)), Tile(128, 192, True, (1, 1)), Tile(128, 192, True, (2, 1)),
)  # fmt: skip
GATHERED_FIRST = (Tile(128, 256, False, (1, 1)),)
FETCHED = tuple(
    Tile(*tile, cluster, dynamic=True)
    for tile in ((128, 192, True), (128, 256, False))
    for cluster in ((1, 1), (2, 1))
)
SECOND = (Tile(128, 208, True, (2, 1)), Tile(128, 192, True, (1, 1)), Tile(128, 160, True, (2, 1)))


def candidates(problem: moekit.MoEProblem, rows_per_expert: int) -> Iterator[QuackPlan]:
    """The plan in use, first, and plans that differ from it in one GEMM or in the raster."""
    used = [plan for start, plan in quack_plans(problem) if start <= rows_per_expert][-1]
    yield used
    for swizzle in (4, 16):
        yield replace(
            used,
            first=replace(used.first, swizzle=swizzle),
            second=replace(used.second, swizzle=swizzle),
        )
    wide = problem.w13_rows >= 16384
    for tile in WIDE_FIRST if wide else COPIED_FIRST:
        yield replace(used, gather=False, first=tile)
    for tile in () if wide else GATHERED_FIRST:
        yield replace(used, gather=True, first=tile)
    for tile in WIDE_SECOND if wide else SECOND:
        yield replace(used, second=tile)
    for tile in FETCHED:
        yield QuackPlan(False, tile, tile)
        yield replace(used, second=tile)


def plans(backends: moekit.Registry) -> None:
    for name in chosen_shapes():
        for T in ARGS.tokens or [16384]:
            with part(f"plans {name} T={T}"):
                compare(backends, name, T)
            torch.cuda.empty_cache()


def compare(backends: moekit.Registry, name: str, T: int) -> None:
    E, K, H, inner = SHAPES[name]
    problem = problem_of(SHAPES[name], "none")
    packed: list[PackedWeights] = []
    weights = weights_of(problem)
    routings = [routing_of(problem, T) for _ in range(3)]
    pairs = [(tokens_of(problem, routing), routing) for routing in routings]
    workspace = Workspace()
    contestants: dict[str, Prepared] = {}
    for plan in dict.fromkeys(candidates(problem, T * K // E)):
        with part(f"{name} {plan}"), mock.patch.object(providers, "quack_plans", using(plan)):
            kernel = moekit.compose(
                problem, "local", "cutlass", backends=backends, checked=False, workspace=workspace
            )
            assert isinstance(kernel.experts._provider(T, K), Quack)
            if not packed:
                packed.append(kernel.pack(weights))

            def call(x, routing, kernel=kernel, weights=packed[0]):
                return kernel(x, weights, routing)

            contestants[f"{plan}{'' if contestants else ' (in use)'}"] = Prepared(
                call, pairs, DEVICE
            )
    default = quack_peer().make(problem, weights, DEVICE)
    contestants["quack's own block"] = Prepared(default, pairs, DEVICE)
    turns = take_turns(contestants, 15, host=False)
    times = {plan: turn for plan, turn in turns.items() if not isinstance(turn, Exception)}
    for plan, timing in sorted(times.items(), key=lambda item: item[1].us):
        fastest, slowest = timing.spread
        say(f"plans {name} T={T} {timing.us:8.0f} us ({fastest:.0f} to {slowest:.0f}) "
            f"{6e-6 * T * K * H * inner / timing.us:5.0f} TFLOP/s {plan}")  # fmt: skip


def quack_peer() -> ModuleType:
    """The adapter, by its path: its folder has a module named as the library is."""
    folder = Path(__file__).resolve().parents[3] / "benchmarks" / "peers"
    sys.path.append(str(folder))
    spec = importlib.util.spec_from_file_location("peer_quack", folder / "quack.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def using(plan: QuackPlan) -> Callable[[moekit.MoEProblem], tuple[tuple[int, QuackPlan]]]:
    return lambda problem: ((0, plan),)
