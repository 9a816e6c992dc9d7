"""Search tiles for GEMM 1 and GEMM 2, and write the tuned table of this device.

    python -m moekit tune triton --shapes mixtral,8:2:4096:14336 --quant none,fp8_block

A pool of processes first compiles every candidate into Triton's cache; then each is timed in a CUDA
graph over several routings, one shape and scheme per GPU at a time. Entries are written when they
are done, atomically. Numbers of rows that the file already has are skipped, so a stopped run can be
continued, and --rows adds to what is there.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from moekit_bench import random_weights, shape

from moekit.plugin import MoEProblem, PackedWeights, device_file

from .candidates import Attempt, attempts
from .packing import pack_weights
from .search import Case, compile_attempts, fastest_plan
from .tables import FILES, table_key

ROWS_PER_EXPERT = (0.25, 1, 4, 16, 64, 256, 1024, 4096)
# Longer calls are rare, and use the plan of the longest measured.
_MOST_TOKENS = 32768


def token_count(problem: MoEProblem, per_expert: float) -> int:
    """Return the tokens that bring about ``per_expert`` rows to each expert."""
    return max(1, round(per_expert * problem.num_experts / problem.top_k))


def rows_per_expert(problem: MoEProblem, rows: int) -> float:
    """Return the rows that each expert receives of ``rows`` tokens on average."""
    return rows * problem.top_k / problem.num_experts


def make_case(
    problem: MoEProblem, rows: int, routings: int, packed: PackedWeights | None = None
) -> Case:
    """Make a case with random weights, or those in ``packed``."""
    if packed is None:
        packed = pack_weights(
            "triton", random_weights(problem, torch.device(problem.device.type)), problem
        )
    return Case.make(problem, packed, rows, routings)


# -- processes ----------------------------------------------------------------------------------


def _tiny(problem: MoEProblem) -> MoEProblem:
    """Return a small problem whose kernels are the same: sizes have the same remainders by tiles
    and groups of 128, and are multiples of 16 (like their strides) where the problem's are."""
    sizes = problem.hidden_size, problem.intermediate_size
    hidden, inner = (2048 + n % 2048 for n in sizes)
    return replace(problem, num_experts=2, top_k=2, hidden_size=hidden, intermediate_size=inner)


def _compile(job: tuple[MoEProblem, list[Attempt]]) -> None:
    problem, wanted = job
    compile_attempts(make_case(problem, 16, 1), wanted)


def compile_all(sizes: Iterable[tuple[MoEProblem, int]]) -> None:
    """Compile all candidates of problems and numbers of rows."""
    wanted: dict[MoEProblem, dict[Attempt, None]] = {}
    for problem, rows in sizes:
        wanted.setdefault(problem, {}).update(dict.fromkeys(attempts(problem, rows)))
    compile_attempts_of(wanted)


def compile_attempts_of(wanted: Mapping[MoEProblem, Iterable[Attempt]]) -> None:
    """Compile attempts by as many processes as there are cores, up to 48."""
    small: dict[MoEProblem, dict[Attempt, None]] = {}
    for problem, found in wanted.items():
        small.setdefault(_tiny(problem), {}).update(dict.fromkeys(found))
    jobs = [
        (tiny, list(found)[i : i + 3])
        for tiny, found in small.items()
        for i in range(0, len(found), 3)
    ]
    begin, count = time.monotonic(), sum(len(found) for found in small.values())
    with _pool(min(48, os.cpu_count() or 1), torch.cuda.device_count()) as pool:
        for _ in pool.map(_compile, jobs):
            pass
    print(f"compiled {count} candidates in {time.monotonic() - begin:.0f} s", file=sys.stderr)


def _pool(workers: int, gpus: int) -> concurrent.futures.ProcessPoolExecutor:
    """Return processes that share the first ``gpus`` devices evenly."""
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(
        workers, context, _take_device, (context.Value("i", 0), gpus)
    )


def _take_device(counter: Any, gpus: int) -> None:
    with counter.get_lock():
        torch.cuda.set_device(counter.value % gpus)
        counter.value += 1


Job = tuple[str, str, Sequence[float]]
"""A shape, a scheme and the rows per expert to measure."""


def _tune(job: Job) -> tuple[dict[str, Any], float]:
    """Return the table's entry of a job, and the seconds it took."""
    name, scheme, sizes = job
    problem = shape(name).problem(quant=scheme, device="cuda")
    packed, plans, begin = None, [], time.monotonic()
    for per_expert in sizes:
        rows = token_count(problem, per_expert)
        case = make_case(problem, rows, 8 if rows <= 64 else 3 if rows < 4096 else 2, packed)
        packed = case.calls[0].weights
        found = fastest_plan(case, rows)
        if found is not None:
            plan, first, second = found
            us = [round(first.us, 1), round(second.us, 1)]
            size = {"rows_per_expert": rows_per_expert(problem, rows), "us": us}
            plans.append(size | plan.to_json())
        del case
        torch.cuda.empty_cache()
    return {**_key(problem), "plans": plans}, time.monotonic() - begin


# -- the table ----------------------------------------------------------------------------------


def _key(problem: MoEProblem) -> dict[str, Any]:
    return table_key(problem) | {"triton": triton.__version__}


def missing(table: Mapping[str, Any], problem: MoEProblem, sizes: Sequence[float]) -> list[float]:
    """Return the rows per expert that the table has no plan for, and may have."""
    key = _key(problem)
    known = {
        plan["rows_per_expert"]
        for entry in table["entries"]
        if all(entry[name] == value for name, value in key.items())
        for plan in entry["plans"]
    }
    found = []
    for size in sizes:
        rows = token_count(problem, size)
        if rows <= _MOST_TOKENS and rows_per_expert(problem, rows) not in known:
            known.add(rows_per_expert(problem, rows))
            found.append(size)
    return found


def merge(table: dict[str, Any], entry: dict[str, Any]) -> None:
    """Add the plans of ``entry`` to the table's entry of the same key, sorted by rows."""
    for known in table["entries"]:
        if all(known[name] == value for name, value in entry.items() if name != "plans"):
            plans = {p["rows_per_expert"]: p for p in (*known["plans"], *entry["plans"])}
            known["plans"] = [plans[rows] for rows in sorted(plans)]
            return
    table["entries"].append(entry)


def dumps(table: Mapping[str, Any]) -> str:
    """Return the table's JSON, a plan on a line."""
    entries = []
    for entry in table["entries"]:
        head = json.dumps({name: value for name, value in entry.items() if name != "plans"})
        plans = ",\n  ".join(map(json.dumps, entry["plans"]))
        entries.append(f'{head[:-1]}, "plans": [\n  {plans}\n ]}}')
    return '{"entries": [\n ' + ",\n ".join(entries) + "\n]}\n"


def _write(table: Mapping[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(dumps(table))
    part.replace(file)


# -- the command --------------------------------------------------------------------------------


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m moekit tune triton",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", default="mixtral,qwen3-30b,dsv3-ep8", help="names or E:K:H:I")
    parser.add_argument("--quant", default="none,fp8_block", help="quantization schemes")
    parser.add_argument("--rows", default=",".join(map(str, ROWS_PER_EXPERT)), help="per expert")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--out", type=Path, help="default: the table that moekit reads")
    args = parser.parse_args(argv)
    args.problems = {
        (name, scheme): shape(name).problem(quant=scheme, device="sm90")
        for name, scheme in itertools.product(args.shapes.split(","), args.quant.split(","))
    }
    if not torch.cuda.is_available():
        parser.error("tiles are timed on a CUDA device, and torch finds none here")
    return args


def _jobs(
    table: Mapping[str, Any], problems: Mapping[tuple[str, str], MoEProblem], sizes: list[float]
) -> list[Job]:
    """Return what is missing, one job for shapes that share an entry."""
    first: dict[str, Job] = {}
    for job, problem in problems.items():
        first.setdefault(str(_key(problem)), (*job, missing(table, problem, sizes)))
    return [job for job in first.values() if job[2]]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = _arguments(argv)
    name = device_file(torch.cuda.get_device_name())
    out = args.out or FILES.user_folder() / name
    table = json.loads(out.read_text()) if out.exists() else {"entries": []}
    jobs = _jobs(table, args.problems, [float(rows) for rows in args.rows.split(",")])
    if not jobs:
        print(f"{out} already has all of them", file=sys.stderr)
        return
    problems = [(shape(n).problem(quant=scheme, device="cuda"), sizes) for n, scheme, sizes in jobs]
    compile_all((p, token_count(p, size)) for p, sizes in problems for size in sizes)
    begin = time.monotonic()
    with _pool(min(args.gpus, len(jobs)), args.gpus) as pool:
        running = {pool.submit(_tune, job): job for job in jobs}
        for done, future in enumerate(concurrent.futures.as_completed(running), 1):
            entry, seconds = future.result()
            merge(table, entry)
            _write(table, out)
            name, scheme, _ = running[future]
            left = (time.monotonic() - begin) / done * (len(jobs) - done)
            print(
                f"[{done}/{len(jobs)}] {name} {scheme}: {seconds:.0f} s, about {left:.0f} s left",
                file=sys.stderr, flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
