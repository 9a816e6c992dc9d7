"""Check moekit-triton with 4-bit weights on a GPU, then time its tiles, in about 90 s.

    python benchmarks/device/triton_packed.py [--only TEXT] [--no-times] [--shapes NAMES]

Numbers: every scheme, both formats, several sizes and tokens against the fp32 oracle. Times: the
whole block for int4 in groups of 128 in a CUDA graph over several routings, with the heuristic's
tiles and others, in turns, and `marlin` where its operator loads. A fraction is the time limit
(reading the active experts' weights at 4.49 TB/s, or the FLOP) over the time. The last line counts
failures. --only: schemes with TEXT in their name (only int4_w4a16_g128 is timed).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import time
import traceback

import torch
from moekit_bench import (
    Case,
    KernelCall,
    inputs,
    known_ceilings,
    limit_us,
    random_weights,
    run_cell,
    shape,
)
from moekit_triton.heuristics import Planner
from moekit_triton.kernels.tiles import CHUNK, GemmTile
from moekit_triton.plans import Direct, Gathered

import moekit
from moekit.problem.quant import SCHEMES
from moekit.runtime.workspace import Workspace
from moekit.testing.cases import make_case
from moekit.testing.cases import random_weights as telling_weights
from moekit.testing.compare import complain, errors

FORMATS = (("local", "triton"), ("batched_reference", "triton_batched"))
# Some experts of mixtral and of qwen3-30b; gpt-oss's sizes are no multiple of 128.
CHECKED = ("4:2:4096:3584", "32:8:2048:768", "8:4:2880:720")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # cpu: to try the script
TIMED = "int4_w4a16_g128"
TOKENS = (1, 4, 16, 64, 256)


def schemes() -> list[str]:
    return [n for n in sorted(SCHEMES) if n in moekit.registry().expert("triton").schemes
            and SCHEMES[n].weight and SCHEMES[n].weight.packed]  # fmt: skip


def check(job: tuple[str, str]) -> list[str]:
    """Return a line for each case of a scheme and sizes; failures begin with FAIL."""
    (scheme, sizes), lines = job, []
    for name in sizes.split(","):
        for dtype in (torch.bfloat16, torch.float16):
            more = {"activation": "swigluoai", "has_bias": True} if ":2880:" in name else {}
            problem = shape(name).problem(quant=scheme, dtype=dtype, device=DEVICE, **more)
            weights = telling_weights(problem)
            for tokens in (1, 5, 70, 300):
                case = make_case(problem, tokens, "masked", weights=weights)
                want = case.reference()
                for dispatcher, experts in FORMATS:
                    what = f"{scheme} {name} {problem.dtype_name} T={tokens} {experts}"
                    try:
                        kernel = moekit.compose(problem, dispatcher, experts, workspace=Workspace())
                        packed = kernel.pack(case.weights)
                        out = kernel(case.x, packed, case.routing)
                        again = kernel(case.x, packed, case.routing)
                        wrong = complain(out, want, problem)
                        if not torch.equal(out.view(torch.int16), again.view(torch.int16)):
                            wrong += " two calls differ"
                        state = f"FAIL {what}: {wrong}" if wrong else f"ok {what}"
                        lines.append(f"{state} error {errors(out, want).rms:.1e}")
                    except Exception:
                        lines.append(f"FAIL {what}: {traceback.format_exc(limit=-3)}")
    return lines


def tiles(problem: moekit.MoEProblem, tokens: int) -> list[Gathered]:
    """Return plans to compare with the heuristic's."""

    def one(
        bm: int, first: tuple[int, int], second: tuple[int, int], stages: int, k: int = 1
    ) -> Gathered:
        n1, n2 = (GemmTile(bm, n, CHUNK, 8, w, stages) for n, w in (first, second))
        kind = Direct if tokens == 1 and bm <= 16 else Gathered
        return kind(n1, n2, True, k)

    most = tokens * problem.top_k / problem.num_experts
    bm = 8 if most <= 4 else 16 if most <= 10 else 32 if most <= 24 else 64
    found = [one(bm, (64, 4), (64, 4), 5), one(bm, (64, 4), (64, 4), 3)]
    if bm <= 32:
        found += [one(bm, (32, 2), (32, 2), 5), one(bm, (128, 8), (128, 8), 3)]
        found += [one(bm, (64, 4), (16, 1), 6), one(2 * bm, (64, 4), (64, 4), 4)]
        if tokens * problem.top_k <= 4:
            found += [one(bm, (64, 4), (64, 4), 5, 4), one(bm, (32, 2), (32, 2), 5, 4)]
        elif bm <= 16:
            found += [one(bm, (32, 1), (32, 1), 5), one(bm, (16, 1), (16, 1), 6)]
    else:
        found += [one(32, (64, 4), (64, 4), 4), one(bm, (128, 8), (128, 8), 3)]
    return found


class Tiled(KernelCall):
    """A kernel whose experts use the given plan."""

    def __init__(self, problem: moekit.MoEProblem, packed: object, plan: Gathered | None) -> None:
        kernel = moekit.compose(problem, "local", "triton", checked=False)
        if plan is not None:
            kernel.experts.plan = lambda rows, slots: plan
        super().__init__(kernel, packed)


def compile_tiles(job: tuple[int, Gathered | None, int]) -> None:
    """Fill Triton's cache with small tensors of the same kind."""
    slots, plan, tokens = job
    problem = shape(f"16:{slots}:512:512").problem(quant=TIMED, device=DEVICE)
    weights = random_weights(problem, DEVICE)
    kernel = moekit.compose(problem, "local", "triton", checked=False)
    call = Tiled(problem, kernel.pack(weights), plan)
    call(*inputs("uniform", tokens, 1, problem, DEVICE)[0])


def times(names: list[str], pool: concurrent.futures.Executor) -> None:
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    ceilings = known_ceilings(name)
    jobs = set()
    for name in names:
        p = shape(name).problem(quant=TIMED, device=DEVICE)
        for tokens in TOKENS:
            plans = tiles(p, tokens)
            plans.append(Planner(p).plan(tokens, p.top_k))
            jobs |= {(p.top_k, plan, min(tokens, 8)) for plan in plans}
    list(pool.map(compile_tiles, jobs))
    for name in names:
        problem = shape(name).problem(quant=TIMED, device=DEVICE)
        weights: moekit.ExpertWeights = random_weights(problem, DEVICE)
        kernel = moekit.compose(problem, "local", "triton", checked=False)
        packed = kernel.pack(weights)
        others: dict[str, KernelCall] = {}
        try:
            marlin = moekit.compose(problem, "local", "marlin", checked=False)
            others["marlin"] = KernelCall(marlin, marlin.pack(weights))
        except moekit.MoekitError as error:
            print(f"no marlin: {str(error).splitlines()[0]}")
        for tokens in TOKENS:
            calls: dict[str, KernelCall] = {"triton": Tiled(problem, packed, None), **others}
            for plan in tiles(problem, tokens):
                calls[plan.describe()] = Tiled(problem, packed, plan)
            case = Case.make(problem, weights, tokens)
            results = run_cell(case, calls, replays=7)
            limit = limit_us(case.work, problem, ceilings)
            chosen = Planner(problem).plan(tokens, problem.top_k).describe()
            print(f"{name} T={tokens} heuristic {chosen}", flush=True)
            for what, r in results.items():
                us = "" if r.us is None else f"{r.us:8.1f} us"
                part = "" if r.us is None or limit is None else f" {limit / r.us:.2f}"
                print(f"    {what:28s}{us}{part} {r.reason}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--shapes", default="mixtral,qwen3-30b")
    parser.add_argument("--checked", default=",".join(CHECKED), help="sizes E:K:H:I")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--no-numbers", action="store_true")
    args = parser.parse_args()
    begin, context = time.monotonic(), multiprocessing.get_context("spawn")
    lines: list[str] = []
    with concurrent.futures.ProcessPoolExecutor(12, mp_context=context) as pool:
        wanted = [] if args.no_numbers else schemes()
        jobs = [(s, args.checked) for s in wanted if args.only in s]
        for found in pool.map(check, jobs):
            lines += found
            ok = [line for line in found if line.startswith("ok")]
            print(found[0].split()[1], f"{len(ok)} of {len(found)} right, worst error",
                  max((line.split()[-1] for line in ok), key=float, default="-"))  # fmt: skip
            print(*(line for line in found if line.startswith("FAIL")), sep="\n", flush=True)
        print(f"numbers: {time.monotonic() - begin:.0f} s", flush=True)
        if not args.no_times:
            times(args.shapes.split(","), pool)
    failures = sum(line.startswith("FAIL") for line in lines)
    print(f"{failures} failures of {len(lines)}, {time.monotonic() - begin:.0f} s")
    raise SystemExit(failures > 0 or not (lines or args.no_numbers))


if __name__ == "__main__":
    main()
