"""Time moekit-triton's plans for 16 bits where an expert has one tile of rows, on a GPU.

    python benchmarks/device/triton_rows.py [--shapes qwen3-30b,40:8:1536:512] [--rows 32,64,112]

The script times whole blocks for every shape and number of rows per expert, by the chosen plan and
by the plans below, which differ in the size of their tiles. Times are medians of 5 turns of 10 ms,
after half a second of work, of three uniform routings in a CUDA graph. Every plan's result is
compared with the fp32 oracle; the exit code is 1 if one is wrong. Results:
benchmarks/results/2026-11-26-h100.md.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from dataclasses import replace

import torch
from common import failures, part, say, verdict
from moekit_bench import random_weights, shape
from moekit_triton.heuristics import Planner
from moekit_triton.kernels.tiles import GemmTile, TokenTile
from moekit_triton.plans import Copied, Gathered, TilePlan
from moekit_triton.search import Attempt
from moekit_triton.tune import compile_all
from triton_middle import calls_of, error_of, timed

from moekit import MoEProblem

SHAPES = (
    "16:1:5120:8192,16:4:6144:10752,64:8:4096:3072,128:8:4096:1408,40:8:1536:512,64:6:2048:1408,"
    "256:8:3072:1536,512:10:2048:512,qwen3-30b"
)
_LIMIT = 8e-3


def gathered(rows: int, first: str, second: str, group_m: int = 8) -> Gathered:
    """Return the plan; a tile is columns, k, warps and stages, as in "64 128 4 3"."""
    tiles = [
        GemmTile(rows, n, k, group_m, w, s, halves=rows == 128, tma=True)
        for n, k, w, s in (map(int, tile.split()) for tile in (first, second))
    ]
    return Gathered(replace(tiles[0], tma=rows != 128), tiles[1], fused=True)


PLANS: dict[str, TilePlan] = {
    "128 rows, 64 × 128, 8 warps": gathered(128, "64 128 8 3", "128 64 4 3"),
    "128 rows, 64 × 128, 4 warps": gathered(128, "64 128 4 3", "128 64 4 3"),
    "128 rows, 64 × 128, 4 warps, group_m 1": gathered(128, "64 128 4 3", "128 64 4 3", group_m=1),
    "128 rows, 64 × 64, 4 warps": gathered(128, "64 64 4 3", "128 64 4 3"),
    "128 rows, 128 × 64, 8 warps": gathered(128, "128 64 8 4", "256 64 8 4"),
    "64 rows, 64 × 64": gathered(64, "64 64 4 4", "128 64 4 4"),
    "64 rows, 64 × 128": gathered(64, "64 128 4 3", "128 128 4 3"),
    "64 rows, 32 × 64": gathered(64, "32 64 4 4", "128 128 4 2"),
    "token tiles": Copied(TokenTile(256), TokenTile(256)),
}


def tokens(problem: MoEProblem, rows: float) -> int:
    return max(1, round(rows * problem.num_experts / problem.top_k))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default="24,32,40,48,56,64,80,96,112")
    args = parser.parse_args()
    torch.manual_seed(0)
    problems = {name: shape(name).problem(device="cuda") for name in args.shapes.split(",")}
    wanted = {
        p: [Attempt(step, plan) for plan in PLANS.values() for step in ("gemm_1", "gemm_2")]
        for p in problems.values()
    }
    compile_all(wanted.items())
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: us, and in brackets the time "
        "relative to the chosen plan's")  # fmt: skip
    ratios: dict[tuple[float, str], list[float]] = defaultdict(list)
    for name, problem in problems.items():
        weights = random_weights(problem, torch.device("cuda"))
        for rows in map(float, args.rows.split(",")):
            with part(title := f"{name}, {rows:g} rows an expert"):
                count = tokens(problem, rows)
                case, want = calls_of(problem, weights, count, 3)
                plans = {"chosen": Planner(problem).plan(count, problem.top_k), **PLANS}
                for label, plan in plans.items():
                    verdict(f"{title}: {label}", error_of(plan, case.calls[0], want), _LIMIT)
                us = dict(zip(plans, timed(case, list(plans.values())), strict=True))
                say(f"{title}: {plans['chosen'].describe()}")
                for label, took in us.items():
                    ratios[rows, label].append(took / us["chosen"])
                    say(f"    {label}: {took:.1f} ({took / us['chosen']:.3f})")
    for (rows, label), each in sorted(ratios.items()):
        say(f"{rows:g} rows, {label}: {math.exp(sum(map(math.log, each)) / len(each)):.3f} of the "
            "chosen plan's time (geometric mean)")  # fmt: skip
    say("\n".join([f"{len(failures)} failures", *failures]))
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
