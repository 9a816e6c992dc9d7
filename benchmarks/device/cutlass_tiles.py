"""quack's tiles: single GEMMs tile by tile, and whole blocks by plan, in turns on a hot GPU.

    python benchmarks/device/cutlass_tiles.py [sweep plans] [--shapes mixtral] [--tokens 4096]

A tile that is fastest in `sweep`, alone and for milliseconds, need not be the fastest in `plans`,
which times whole blocks at the clock rates that a long run leaves, beside quack's own block.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from common import DEVICE, normal, part, problem_of, routings_of, run_parts, say, tflops, us_of
from moekit_bench import Prepared, random_weights, take_turns
from moekit_cutlass import providers
from moekit_cutlass.kernels import Groups, sort_assignments
from moekit_cutlass.providers import Quack, QuackPlan, Tile, quack_plans
from moekit_kernels.align import align_scratch

import moekit
from moekit.plugin import Workspace

FIRST_TILES = [
    Tile(m, n, pingpong, cluster)
    for m, n, pingpong in (
        (128, 192, True), (128, 160, True), (128, 128, True), (192, 128, True), (64, 256, True),
        (256, 128, False), (256, 192, False), (128, 256, False),
    )
    for cluster in ((2, 1), (1, 1), (1, 2))
]  # fmt: skip
SECOND_TILES = [*FIRST_TILES, *(Tile(m, 208, m == 128, (2, 1)) for m in (128, 256))]


def sorted_groups(ids_RK: torch.Tensor, experts: int) -> Groups:
    """Return expert-sorted rows, with the index of each row's source."""
    n = ids_RK.numel()

    def ints(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=DEVICE)

    groups = Groups(ids_RK, ints(n).view(ids_RK.shape), ints(experts + 1), ints(n))
    sort_assignments(groups, ints(align_scratch(n, experts)))
    return groups


# Tiles that `plans` tries in place of the plan's own, for a wide GEMM 1 and for others.
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


def sweep(args: argparse.Namespace) -> None:
    """Time each GEMM alone: GEMM 1 with a fused gather, GEMM 1 on copied rows, GEMM 2."""
    for step in ("gather", "copied", "second"):
        failing: set[Tile] = set()
        for name, tokens in ((n, T) for T in args.tokens for n in args.shapes):
            p = problem_of(name)
            n, k = (p.hidden_size, p.local_intermediate_size)
            n, k = (n, k) if step == "second" else (p.w13_rows, n)
            S = tokens * p.top_k
            w = normal(p.num_experts, n, k, std=k**-0.5)
            groups = sorted_groups(routings_of(p, tokens, 1)[0].topk_ids, p.num_experts)
            x = normal(tokens if step == "gather" else S, k)
            columns = n if step == "second" else p.local_intermediate_size
            out = torch.empty(S, columns, device=DEVICE, dtype=x.dtype)
            times = []
            for tile in SECOND_TILES if step == "second" else FIRST_TILES:
                if tile in failing or (step == "gather" and tile.cluster[1] > 1):
                    continue
                quack = Quack(p, QuackPlan(gather=step == "gather", first=tile, second=tile))
                call = quack.second if step == "second" else quack.first
                try:
                    times.append((us_of([partial(call, x, w, groups, out, None)], 5), tile))
                except Exception as error:
                    failing.add(tile)
                    say(f"sweep {step} {tile}: {type(error).__name__}: {str(error)[:160]}")
            for us, tile in sorted(times, key=lambda item: item[0])[:5]:
                rate = 2e-6 * S * n * k / us
                say(f"sweep {step} {name} T={tokens} {us:8.0f} us {rate:5.0f} TFLOP/s {tile}")


def candidates(problem: moekit.MoEProblem, rows_per_expert: int) -> Iterator[QuackPlan]:
    """Return the plan in use, then plans that differ from it in one GEMM or in the raster."""
    used = [plan for start, plan in quack_plans(problem) if start <= rows_per_expert][-1]
    yield used
    for swizzle in (4, 16):
        first, second = (replace(tile, swizzle=swizzle) for tile in (used.first, used.second))
        yield replace(used, first=first, second=second)
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


def plans(args: argparse.Namespace) -> None:
    for name in args.shapes:
        for tokens in args.tokens:
            with part(f"plans {name} T={tokens}"):
                compare(name, tokens)
            torch.cuda.empty_cache()


def compare(name: str, tokens: int) -> None:
    problem = problem_of(name)
    weights, packed, workspace = random_weights(problem, DEVICE), None, Workspace()
    inputs = [(normal(tokens, problem.hidden_size), r) for r in routings_of(problem, tokens)]
    found: dict[str, Prepared] = {}
    rows_per_expert = tokens * problem.top_k // problem.num_experts
    for plan in dict.fromkeys(candidates(problem, rows_per_expert)):
        table = ((0, plan),)
        with (
            part(f"{name} {plan}"),
            mock.patch.object(providers.library, "PREFERRED", {"none": ((0, ("quack",)),)}),
            mock.patch.object(providers, "quack_plans", lambda problem, t=table: t),
        ):
            kernel = moekit.compose(problem, "local", "cutlass", checked=False, workspace=workspace)
            packed = packed or kernel.pack(weights)
            label = f"{plan}{'' if found else ' (in use)'}"
            found[label] = Prepared(lambda x, r, k=kernel, w=packed: k(x, w, r), inputs, DEVICE)
    own = quack_baseline().make(problem, weights, DEVICE)
    found["quack's own block"] = Prepared(own, inputs, DEVICE)
    turns = take_turns(found, 15)
    times = [(r.us, r) for r in turns.values() if r.us is not None]
    for us, result in sorted(times, key=lambda item: item[0]):
        fastest, slowest = result.spread_us or (us, us)
        say(f"plans {name} T={tokens} {us:8.0f} us ({fastest:.0f} to {slowest:.0f}) "
            f"{tflops(problem, tokens, us):5.0f} TFLOP/s {result.name}")  # fmt: skip


def quack_baseline() -> ModuleType:
    """Return benchmarks/baselines/quack.py, loaded by its path: the library has the same name."""
    folder = Path(__file__).resolve().parents[1] / "baselines"
    sys.path.append(str(folder))
    spec = importlib.util.spec_from_file_location("baseline_quack", folder / "quack.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    run_parts(__doc__, {"sweep": sweep, "plans": plans}, tokens=(4096, 16384))
