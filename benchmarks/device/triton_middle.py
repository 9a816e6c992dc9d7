"""Time token tiles of moekit-triton's large calls in 16 bits, and other plans, on a GPU.

    python benchmarks/device/triton_middle.py [--cells qwen3-30b:4096 ...]

For every cell: both GEMMs apart, tile by tile (GEMM 1's time includes copying x), then whole blocks
with the chosen plan, `sorted_plan`'s, and the best few tiles of both GEMMs. Uniform routing, three
routings in a CUDA graph each; turns of 10 ms, medians of 5, after half a second of work, since
clocks fall under load. Every plan's result is compared with the fp32 oracle (relative RMS). The
last table has each cell's fastest plan in the form of the tuned tables. Exit code 1 if a result is
wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from common import failures, part, say, verdict
from moekit_bench import Timer, random_weights, shape
from moekit_triton.calls import Buffers, Call
from moekit_triton.heuristics import Planner, sorted_plan
from moekit_triton.kernels.tiles import OrderedTile, TokenTile
from moekit_triton.packing import pack_weights
from moekit_triton.plans import Copied, TilePlan
from moekit_triton.search import Attempt, Case, Step, interleaved_us
from moekit_triton.tune import compile_all, rows_per_expert

from moekit.backends.reference import oracle
from moekit.contract import Routing
from moekit.problem import MoEProblem
from moekit.problem.weights import ExpertWeights

CELLS = ("qwen3-30b:1024", "qwen3-30b:4096", "qwen3-30b:16384", "dsv3-ep8:1024", "dsv3-ep8:4096",
         "mixtral:1024")  # fmt: skip
_LIMIT = 8e-3
_BEST = 2  # tiles of each GEMM that whole blocks are timed with


def tiles(problem: MoEProblem, step: Step, groups: Sequence[int] = (1, 4, 8)) -> list[OrderedTile]:
    """Return the tiles of a GEMM: `sorted_plan`'s, and all of tokens."""
    usual = sorted_plan(problem, 256.0)
    first = usual.first if step == "gemm_1" else usual.second
    new = TokenTile(128), TokenTile(256)
    wanted = dict.fromkeys(
        replace(tile, group_m=group) for tile in (first, *new) for group in groups
    )
    return list(wanted)


def calls_of(
    problem: MoEProblem, weights: ExpertWeights, rows: int, routings: int
) -> tuple[Case, torch.Tensor]:
    """Return a cell's calls, and the oracle's result of the first."""
    packed = pack_weights("triton", weights, problem)
    made = Case.make(problem, packed, rows, routings).calls
    x = torch.randn(rows, problem.hidden_size, device="cuda").to(problem.dtype)
    sorted_rows = sorted_plan(problem, 256.0).workspace(made[0].layer, rows, problem.top_k)
    # The planned workspace has room for expert-sorted rows only where they pay.
    memory = [
        buffer if buffer.numel() >= math.prod(spec.shape) else torch.empty(
            spec.shape, dtype=spec.dtype, device="cuda")
        for buffer, spec in zip(made[0].workspace, sorted_rows, strict=True)
    ]  # fmt: skip
    calls = []
    for call in made:
        share = torch.rand(call.ids_RK.shape, device="cuda").softmax(dim=1)
        calls.append(call._replace(x=x, x_scale=None, weights_RK=share, workspace=Buffers(*memory)))
    routing = Routing(calls[0].weights_RK, calls[0].ids_RK)
    return Case(problem, calls), oracle(x, weights, routing, problem)


def error_of(plan: TilePlan, call: Call, want: torch.Tensor) -> float:
    """Return the relative RMS of a plan's result, with NaN in all floating-point memory before."""
    for buffer in (*call.workspace, call.y):
        if buffer.is_floating_point():
            buffer.view(torch.uint8).fill_(0xFF)
    plan.launch(call)
    return float((call.y.float() - want).norm() / want.norm())


def timed(case: Case, plans: Sequence[TilePlan], *steps: Step) -> list[float]:
    """Return the microseconds of one call of each plan: of some steps, or of the whole block."""
    timer = Timer(torch.device("cuda"))
    launches = [
        case.launches(plan, *steps) if steps else _blocks(plan, case.calls) for plan in plans
    ]
    interleaved_us(timer, launches, 0.5e6 / len(plans), 1)  # warms the GPU for half a second
    return [us / len(case.calls) for us in interleaved_us(timer, launches, 10e3)]


def _blocks(plan: TilePlan, calls: Sequence[Call]) -> list[Any]:
    return [lambda call=call: plan.launch(call) for call in calls]


def best_tiles(case: Case, step: Step, name: str) -> list[OrderedTile]:
    """Time a GEMM tile by tile, print the times, and return the fastest tiles."""
    p = case.problem
    found = tiles(p, step)
    us = timed(case, [Copied(tile, tile) for tile in found], step)
    rows = case.calls[0].ids_RK.numel()
    flop = 2 * rows * p.hidden_size * p.local_intermediate_size * (1 + (step == "gemm_1"))
    for each, tile in sorted(zip(us, found, strict=True), key=lambda pair: pair[0]):
        say(f"| {name} | {step} | {each:.1f} | {flop / each / 1e6:.0f} | {tile.describe()} "
            f"g{tile.group_m} |")  # fmt: skip
    new = [i for i in sorted(range(len(us)), key=us.__getitem__) if isinstance(found[i], TokenTile)]
    return [found[i] for i in new[:_BEST]]


def cell(problem: MoEProblem, weights: ExpertWeights, rows: int, name: str) -> str:
    """Time a cell. Return the fastest plan's record."""
    case, want = calls_of(problem, weights, rows, 3)
    first, second = (best_tiles(case, step, name) for step in ("gemm_1", "gemm_2"))
    usual = sorted_plan(problem, 256.0)
    plans: dict[str, Any] = {
        "chosen": Planner(problem).plan(rows, problem.top_k),
        "sorted": Copied(usual.first, usual.second),
    }
    for i, (one, two) in enumerate(itertools.product(first, second)):
        plans[f"tokens {i}"] = Copied(one, two)
    if first and second:
        plans["tokens first"] = Copied(first[0], usual.second)
        plans["tokens second"] = Copied(usual.first, second[0])
    errors = [error_of(plan, case.calls[0], want) for plan in plans.values()]
    us = timed(case, list(plans.values()))
    for took, error, (label, plan) in sorted(
        zip(us, errors, plans.items(), strict=True), key=lambda each: each[0]
    ):
        right = verdict(f"{name} {label}", error, _LIMIT)
        groups = f"g{plan.first.group_m} g{plan.second.group_m}"
        say(f"| {name} | {label} | {took:.1f} | {us[0] / took:.3f} | {error:.2e} {right} | "
            f"{plan.describe()} {groups} |")  # fmt: skip
    best = list(plans.values())[us.index(min(us))]
    record = {"rows_per_expert": rows_per_expert(problem, rows), "plan": best.describe()}
    return f"{name} {min(us):.1f} us: {json.dumps(record)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", default=CELLS, help="SHAPE:TOKENS")
    parser.add_argument("--limit", type=int, default=300, help="seconds, after which it ends")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit, exit=True)  # a kernel may wait forever
    torch.manual_seed(0)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    steps: tuple[Step, ...] = ("gemm_1", "gemm_2")
    names = dict.fromkeys(cell.rsplit(":", 1)[0] for cell in args.cells)
    wanted: dict[MoEProblem, list[Attempt]] = {}
    for name in names:
        problem = shape(name).problem(device="cuda")
        # Tiles that differ in group_m alone are one kernel.
        found = [Attempt(s, Copied(t, t)) for s in steps for t in tiles(problem, s, groups=[8])]
        for tokens in tokens_of(args.cells, name):
            found += [Attempt(s, Planner(problem).plan(tokens, problem.top_k)) for s in steps]
        wanted[problem] = found
    compile_all(wanted.items())
    say("\n| cell | what | us | TFLOP/s; or chosen plan's time / this | tile; or error | plan |")
    say("|---|---|---|---|---|---|")
    lines: list[str] = []
    for name in names:
        problem = shape(name).problem(device="cuda")
        weights = random_weights(problem, torch.device("cuda"))
        for tokens in tokens_of(args.cells, name):
            with part(title := f"{name} {tokens}"):
                lines.append(cell(problem, weights, tokens, title))
            torch.cuda.empty_cache()
    say("\n".join(["", *lines, f"{len(failures)} failures", *failures]))
    raise SystemExit(bool(failures))


def tokens_of(cells: Sequence[str], name: str) -> list[int]:
    """Return the tokens of a shape's cells."""
    return [int(tokens) for shape, tokens in (c.rsplit(":", 1) for c in cells) if shape == name]


if __name__ == "__main__":
    main()
