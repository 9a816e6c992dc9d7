"""Search tiles for GEMM 1 and GEMM 2, and write the tuned table of this device.

    python -m moekit tune triton --shapes mixtral,8:2:4096:14336 --quant none,fp8_block

A pool of processes first compiles every candidate into Triton's cache; then each is timed in a CUDA
graph over several routings, one shape, scheme and number of rows per GPU at a time. Each plan is
written when it is found, atomically. Numbers of rows that the file already has are skipped, so a
run that was stopped, or whose --seconds were over, is continued by the same command, and --rows
adds to what is there.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
# Rows of a case that only compiles: from so many, workspace has room for expert-sorted rows.
_TINY_ROWS = 128


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


def _compile(job: tuple[MoEProblem, list[Attempt]], end: float) -> int:
    """Compile, and return how many candidates; none after ``end``, by `time.monotonic`."""
    problem, wanted = job
    if time.monotonic() > end:
        return 0
    compile_attempts(make_case(problem, _TINY_ROWS, 1), wanted)
    return len(wanted)


def compile_all(
    sizes: Iterable[tuple[MoEProblem, int]], end: float = math.inf, *, token_tiles: bool = False
) -> None:
    """Compile all candidates of problems and numbers of rows."""
    wanted: dict[MoEProblem, dict[Attempt, None]] = {}
    for problem, rows in sizes:
        wanted.setdefault(problem, {}).update(
            dict.fromkeys(attempts(problem, rows, token_tiles=token_tiles))
        )
    compile_attempts_of(wanted, end)


def compile_attempts_of(
    wanted: Mapping[MoEProblem, Iterable[Attempt]], end: float = math.inf
) -> None:
    """Compile attempts by as many processes as there are cores, up to 48.

    What is not compiled at ``end``, by `time.monotonic`, is left to its first launch.
    """
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
        done = sum(pool.map(_compile, jobs, itertools.repeat(end)))
    print(
        f"compiled {done} of {count} candidates in {time.monotonic() - begin:.0f} s",
        file=sys.stderr,
    )


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


class Job(NamedTuple):
    """A plan to find: of a shape, a scheme and a number of rows per expert."""

    shape: str
    scheme: str
    rows: float

    def __str__(self) -> str:
        return f"{self.shape} {self.scheme}, {self.rows:g} rows an expert"


class _Weights:
    """The packed weights of a worker's last job, which most often are those of its next one."""

    _key: tuple[str, str] | None = None
    _packed: PackedWeights | None = None

    @classmethod
    def of(cls, job: Job, problem: MoEProblem) -> PackedWeights:
        if cls._key != job[:2] or cls._packed is None:
            cls._packed = None
            torch.cuda.empty_cache()
            device = torch.device(problem.device.type)
            cls._packed = pack_weights("triton", random_weights(problem, device), problem)
            cls._key = job[:2]
        return cls._packed


def _tune(job: Job, end: float, token_tiles: bool) -> dict[str, Any] | None:
    """Return the table's entry of a job; None after ``end``, by `time.monotonic`."""
    if time.monotonic() > end:
        return None
    problem = shape(job.shape).problem(quant=job.scheme, device="cuda")
    rows, plans = token_count(problem, job.rows), []
    routings = 8 if rows <= 64 else 3 if rows < 4096 else 2
    case = make_case(problem, rows, routings, _Weights.of(job, problem))
    found = fastest_plan(case, rows, token_tiles=token_tiles)
    del case
    if found is not None:
        plan, first, second = found
        us = [round(first.us, 1), round(second.us, 1)]
        size = {"rows_per_expert": rows_per_expert(problem, rows), "us": us}
        plans.append(size | plan.to_json())
    torch.cuda.empty_cache()
    return {**_key(problem), "plans": plans}


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
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no plan after this time"
    )
    parser.add_argument(
        "--token-tiles", action="store_true",
        help="also try the swap-AB tiles of large GEMMs, which have not run on a GPU yet",
    )  # fmt: skip
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
    """Return what is missing, once for shapes that share an entry."""
    first: dict[str, list[Job]] = {}
    for (name, scheme), problem in problems.items():
        found = [Job(name, scheme, rows) for rows in missing(table, problem, sizes)]
        first.setdefault(str(_key(problem)), found)
    return [job for found in first.values() for job in found]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 1 if something is left to do."""
    begin = time.monotonic()
    args = _arguments(argv)
    end = begin + args.seconds
    out = args.out or FILES.user_folder() / device_file(torch.cuda.get_device_name())
    table = json.loads(out.read_text()) if out.exists() else {"entries": []}
    jobs = _jobs(table, args.problems, [float(rows) for rows in args.rows.split(",")])
    if not jobs:
        print(f"{out} already has all of them", file=sys.stderr)
        return 0
    problems = [(shape(j.shape).problem(quant=j.scheme, device="cuda"), j.rows) for j in jobs]
    # Timing needs the other half of the time.
    compile_all(
        ((p, token_count(p, rows)) for p, rows in problems),
        begin + args.seconds / 2,
        token_tiles=args.token_tiles,
    )
    began, left = time.monotonic(), 0
    with _pool(min(args.gpus, len(jobs)), args.gpus) as pool:
        running = {pool.submit(_tune, job, end, args.token_tiles): job for job in jobs}
        for done, future in enumerate(concurrent.futures.as_completed(running), 1):
            entry = future.result()
            if entry is None:
                left += 1
                continue
            merge(table, entry)
            _write(table, out)
            seconds = (time.monotonic() - began) / done * (len(jobs) - done)
            print(
                f"[{done}/{len(jobs)}] {running[future]}: about {seconds:.0f} s left",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    if left:
        print(
            f"{left} of {len(jobs)} plans are left after {args.seconds:.0f} s: run it again",
            file=sys.stderr,
        )
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
