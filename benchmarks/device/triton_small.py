"""Check moekit-triton on a few tokens on a GPU, and time its launch plans.

    python benchmarks/device/triton_small.py [--only numbers,table,sweep] [--shapes a,b]

numbers: dot products against the oracle for all schemes, dtypes and activations; results with and
without programmatic dependent launch (PDL) must be equal bit by bit. table: microseconds of the
whole block in a CUDA graph by dot products, direct and gathered GEMMs, each with PDL and without.
sweep: the block by dot products with other parameters of each kernel. A pool of processes compiles
the kernels first. Exit code 1 if a number is wrong.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from moekit_bench import (
    Case,
    Prepared,
    known_ceilings,
    limit_us,
    random_weights,
    shape,
    take_turns,
)
from moekit_kernels import launch
from moekit_triton.experts import TritonExperts
from moekit_triton.heuristics import Planner, dot_products, dots_pay
from moekit_triton.kernels.tiles import DotTile
from moekit_triton.plans import Direct, Gathered, StandardPlan
from torch import Tensor

import moekit
from moekit.contract import Dispatched, PackedWeights, Routing
from moekit.problem import DTYPES, MoEProblem
from moekit.problem.quant import SCHEMES
from moekit.runtime.workspace import Workspace
from moekit.testing.cases import make_case
from moekit.testing.compare import complain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATHS = ("dot_products", "direct", "gathered")
_PARTS = 8  # of the numbers, each a process


def plan_for(problem: MoEProblem, rows: int, path: str) -> StandardPlan:
    """Return the best plan of a kind; "direct" needs blocks of 16 rows or fewer."""
    if path == "dot_products":
        return dot_products(problem, rows, problem.top_k)
    per_expert = rows * problem.top_k / problem.num_physical_experts
    plan = Planner(problem).tiles(per_expert, sort=False)
    assert isinstance(plan, Gathered)
    kind = Direct if path == "direct" and plan.block_m <= 16 else Gathered
    return kind(plan.first, plan.second, plan.fused)


class Variant:
    """A call of the block with a given plan, with PDL or without."""

    def __init__(
        self, kernel: moekit.ModularKernel, packed: PackedWeights, plan: StandardPlan, pdl: bool
    ) -> None:
        self.kernel, self.packed, self.plan, self.pdl = kernel, packed, plan, pdl

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        launch.pdl_enabled = lambda device: self.pdl
        experts: Any = self.kernel.experts
        experts.plan = lambda rows, top_k: self.plan
        return self.kernel(x, self.packed, routing)


# -- compile ------------------------------------------------------------------------------------


def sweep_plans(problem: MoEProblem, tokens: int) -> Iterator[tuple[str, StandardPlan]]:
    """Yield plans with each config of one kernel and the usual one of the other; some of both."""
    usual = dot_products(problem, tokens, problem.top_k)
    for up, down in itertools.product(((2, 2), (2, 4), (4, 8)), ((2, 4), (2, 8), (4, 8), (8, 8))):
        plan = replace(usual, up=DotTile(*up), down=DotTile(*down))
        yield f"both {plan.up.describe()} | {plan.down.describe()}", plan
    for rows, warps in itertools.product((1, 2, 4, 8), (2, 4, 8)):
        yield f"up rows {rows} warps {warps}", replace(usual, up=DotTile(rows, warps))
        yield f"down rows {rows} warps {warps}", replace(usual, down=DotTile(rows, warps))


def compile_one(job: tuple[str, str, bool, bool, tuple[int, ...]]) -> None:
    """Run every plan once on weights of any value, which fills Triton's cache."""
    name, scheme, pdl, sweep, counts = job
    launch.pdl_enabled = lambda device: pdl
    problem = shape(name).problem(quant=scheme, device=DEVICE)
    experts: Any = TritonExperts(moekit.registry().expert("triton"), problem)
    one = experts.pack(random_weights(problem.replace(num_experts=problem.top_k), cuda()))
    arrays = {
        key: torch.zeros((problem.num_experts, *t.shape[1:]), dtype=t.dtype, device=DEVICE)
        for key, t in one.experts.items()
    }
    packed = PackedWeights("triton", arrays, one.shared)
    plans = [(t, plan_for(problem, t, path)) for t in counts for path in PATHS]
    if sweep:
        plans = [(t, plan) for t in counts for _, plan in sweep_plans(problem, t)]
    for rows, plan in plans:
        experts.plan = lambda rows, top_k, plan=plan: plan
        x = torch.zeros(rows, problem.hidden_size, dtype=problem.dtype, device=DEVICE)
        ids = torch.arange(problem.top_k, device=DEVICE).repeat(rows, 1)
        tokens = Dispatched(x, None, ids, torch.ones(ids.shape, device=DEVICE))
        experts.apply(x, tokens, packed, Workspace().take(experts.workspace(rows), x.device))
    torch.cuda.synchronize()


def cuda() -> torch.device:
    return torch.device(DEVICE)


# -- numbers ------------------------------------------------------------------------------------


def problems() -> Iterator[MoEProblem]:
    """Yield whole tiles and odd sizes of every scheme, then dtypes and activations."""
    odd: dict[str, Any] = dict(num_experts=9, top_k=3, hidden_size=264, intermediate_size=136)
    even: dict[str, Any] = dict(num_experts=9, top_k=2, hidden_size=1024, intermediate_size=512)
    for scheme in sorted(moekit.registry().expert("triton").schemes):
        weight = SCHEMES[scheme].weight
        if (
            weight is None
            or not weight.packed
            or dots_pay(MoEProblem(**even, quant=scheme, device=DEVICE), 1, 2)
        ):
            yield MoEProblem(**odd, quant=scheme, device=DEVICE, has_bias=True)
            yield MoEProblem(**even, quant=scheme, device=DEVICE)
    for dtype in ("float16", "float32"):
        yield MoEProblem(**even, dtype=DTYPES[dtype], device=DEVICE)
    for name in sorted(moekit.problem.activation.ACTIVATIONS):
        yield MoEProblem(**odd, dtype=torch.float32, activation=name, device=DEVICE, has_bias=True)


def numbers(part: int) -> tuple[int, list[str]]:
    """Return how many cases of this part ran, and a line for each wrong one."""
    wrong, count = [], 0
    for problem in list(problems())[part::_PARTS]:
        kernel = moekit.compose(problem, "local", "triton")
        for rows in (1, 2):
            case = make_case(problem, rows, "masked", key=rows)
            packed, want, got = kernel.pack(case.weights), case.reference(), []
            for pdl in (False, True, True):
                call = Variant(kernel, packed, plan_for(problem, rows, "dot_products"), pdl)
                scratch = kernel.workspace.take(kernel.experts.workspace(rows), cuda())
                for buffer in scratch:
                    buffer.view(-1).view(torch.uint8).fill_(255)
                scratch.give_back()
                got.append(call(case.x, case.routing).clone())
            complaint = complain(got[0], want, problem)
            if not torch.equal(got[0], got[1]) or not torch.equal(got[1], got[2]):
                complaint += "; differs between calls, or with PDL"
            count += 1
            if complaint:
                wrong.append(f"WRONG {problem!r} T={rows}: {complaint}")
    return count, wrong


# -- times --------------------------------------------------------------------------------------


def cell(
    name: str,
    scheme: str,
    tokens: int,
    weights: Any,
    plans: list[tuple[str, StandardPlan, bool]],
) -> tuple[float, dict[str, float]]:
    problem = shape(name).problem(quant=scheme, device=DEVICE)
    case = Case.make(problem, weights, tokens)
    kernel = moekit.compose(problem, "local", "triton", workspace=Workspace())
    packed = kernel.pack(weights)
    with torch.inference_mode():
        ready = {
            label: Prepared(Variant(kernel, packed, plan, pdl), case.inputs, cuda())
            for label, plan, pdl in plans
        }
        times = take_turns(ready, 10)
    limit = limit_us(case.work, problem, known_ceilings(torch.cuda.get_device_name()))
    return limit or 0.0, {n: float("nan") if r.us is None else r.us for n, r in times.items()}


def table(name: str, scheme: str, weights: Any, counts: tuple[int, ...]) -> None:
    problem = shape(name).problem(quant=scheme, device=DEVICE)
    labels = [f"{path}{'+pdl' if pdl else ''}" for path in PATHS for pdl in (False, True)]
    print(f"\n{name} {scheme}\n| T | limit | {' | '.join(labels)} | best/limit | chosen |")
    for tokens in counts:
        plans = [
            (label, plan_for(problem, tokens, label.split("+")[0]), label.endswith("+pdl"))
            for label in labels
        ]
        limit, us = cell(name, scheme, tokens, weights, plans)
        chosen = Planner(problem).plan(tokens, problem.top_k)
        cells = " | ".join(f"{us[label]:.1f}" for label in labels)
        best = limit / min(us.values())
        print(f"| {tokens} | {limit:.1f} | {cells} | {best:.2f} | {chosen.kind} |", flush=True)


def sweep(name: str, scheme: str, weights: Any, counts: tuple[int, ...]) -> None:
    problem = shape(name).problem(quant=scheme, device=DEVICE)
    for tokens in counts:
        usual = dot_products(problem, tokens, problem.top_k)
        plans = [(label, plan, True) for label, plan in sweep_plans(problem, tokens)]
        limit, us = cell(name, scheme, tokens, weights, [*plans, ("usual", usual, True)])
        print(f"\n{name} {scheme} T={tokens}, limit {limit:.1f}, usual {usual.describe()}")
        for kind in ("usual", "up", "down", "both"):
            found = sorted((t, label) for label, t in us.items() if label.startswith(kind))
            print("  " + " · ".join(f"{label} {t:.1f}" for t, label in found), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="numbers,table")
    parser.add_argument("--shapes", default="qwen3-30b,mixtral,dsv3-ep8")
    parser.add_argument("--quant", default="none,fp8_block")
    parser.add_argument("--tokens", default="1,2,4,8,16")
    args = parser.parse_args()
    counts = tuple(map(int, args.tokens.split(",")))
    only, names, schemes = args.only.split(","), args.shapes.split(","), args.quant.split(",")
    begin = time.monotonic()
    jobs = [
        (n, s, pdl, kind == "sweep", counts)
        for n, s, kind in itertools.product(names, schemes, only)
        for pdl in ((True,) if kind == "sweep" else (False, True))
        if kind != "numbers"
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1), context) as pool:
        checking = [pool.submit(numbers, i) for i in range(_PARTS) if "numbers" in only]
        compiling = [pool.submit(compile_one, job) for job in jobs]
        checked = [future.result() for future in checking]
        wrong = [line for _, lines in checked for line in lines]
        count = sum(n for n, _ in checked)
        print("\n".join([*wrong, f"numbers: {count - len(wrong)} of {count} right"]), flush=True)
        for future in compiling:
            future.result()
    print(f"compiled and checked after {time.monotonic() - begin:.0f} s", flush=True)
    for name, scheme in itertools.product(names, schemes):
        if set(only) <= {"numbers"}:
            break
        weights = random_weights(shape(name).problem(quant=scheme, device=DEVICE), cuda())
        if "table" in only:
            table(name, scheme, weights, counts)
        if "sweep" in only:
            sweep(name, scheme, weights, counts)
        del weights
        torch.cuda.empty_cache()
    print(f"done after {time.monotonic() - begin:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
