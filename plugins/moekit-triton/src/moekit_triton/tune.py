"""Search tiles for GEMM 1 and GEMM 2, and write the tuned table of this device.

    python -m moekit tune triton --shapes mixtral,8:2:4096:14336 --quant none,fp8_block

A pool of processes first compiles every candidate into Triton's cache; then each is timed in a CUDA
graph over several routings, one shape, scheme and number of rows per GPU at a time. Each plan is
written when it is found, atomically. Numbers of rows that the file already has are skipped, so a
run that was stopped, or whose --seconds were over, is continued by the same command, and --rows
adds to what is there. All GPUs of the current device's kind are used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from moekit_bench import random_weights, shape

from moekit.errors import MoekitError
from moekit.plugin import (
    DeviceSpec,
    MoEProblem,
    PackedWeights,
    check_writable,
    device_file,
    replace_file,
)

from . import moekit_experts
from .packing import pack_weights
from .search import Attempt, Case, attempts, compile_attempts, fastest_plan
from .tables import FILES, table_key

ROWS_PER_EXPERT = (0.25, 1, 4, 16, 64, 256, 1024, 4096)
# Longer calls are rare, and use the plan of the longest measured.
_MOST_TOKENS = 32768
# Rows of a case that only compiles: enough that its workspace has room for expert-sorted rows.
_TINY_ROWS = 128

Plans = dict[float, dict[str, Any]]
"""A table's records of plans, by rows per expert."""
Table = dict[str, Plans]
"""The plans of a table's entries, by the JSON of what identifies an entry."""


def token_count(problem: MoEProblem, per_expert: float) -> int:
    """Return the tokens that bring about ``per_expert`` rows to each expert."""
    return max(1, round(per_expert * problem.num_experts / problem.top_k))


def rows_per_expert(problem: MoEProblem, rows: int) -> float:
    """Return the rows that each expert receives of ``rows`` tokens on average."""
    return rows * problem.top_k / problem.num_experts


def random_packed(problem: MoEProblem) -> PackedWeights:
    """Return random weights as the kernels take them, on the problem's device."""
    weights = random_weights(problem, torch.device(problem.device.type))
    return pack_weights("triton", weights, problem)


# -- processes ----------------------------------------------------------------------------------


def _tiny(problem: MoEProblem) -> MoEProblem:
    """Return a small problem with the same kernels: top_k is a constant of GEMM 1. Sizes have the
    same remainders by tiles and groups of 128. They and their strides are multiples of 16 where
    the problem's are."""
    sizes = problem.hidden_size, problem.intermediate_size
    hidden, inner = (2048 + n % 2048 for n in sizes)
    experts = problem.top_k
    return replace(problem, num_experts=experts, hidden_size=hidden, intermediate_size=inner)


def _compile(problem: MoEProblem, wanted: list[Attempt]) -> None:
    compile_attempts(Case.make(problem, random_packed(problem), _TINY_ROWS, 1), wanted)


def compile_all(
    wanted: Iterable[tuple[MoEProblem, Iterable[Attempt]]], end: float = math.inf
) -> None:
    """Compile attempts of problems by as many processes as there are cores, up to 48.

    end: by `time.monotonic`; from then on jobs compile what they time themselves.
    """
    small: dict[MoEProblem, dict[Attempt, None]] = {}
    for problem, found in wanted:
        small.setdefault(_tiny(problem), {}).update(dict.fromkeys(found))
    jobs = [
        (tiny, list(found)[i : i + 3])
        for tiny, found in small.items()
        for i in range(0, len(found), 3)
    ]
    begin, count = time.monotonic(), sum(len(found) for found in small.values())
    with _pool(min(48, os.cpu_count() or 1), _devices()) as pool:
        for done in _finished([pool.submit(_compile, *job) for job in jobs], end):
            done.result()
    print(f"compiled {count} candidates in {time.monotonic() - begin:.0f} s", file=sys.stderr)


def _finished(futures: Collection[Future[Any]], end: float) -> Iterator[Future[Any]]:
    """Yield futures as they finish; from ``end`` on, cancel those that have not begun."""
    for future in as_completed(futures):
        if time.monotonic() > end:
            for each in futures:
                each.cancel()
        if not future.cancelled():
            yield future


def _devices() -> list[int]:
    """Return the devices of the current one's kind, beginning with it."""
    current, name = torch.cuda.current_device(), torch.cuda.get_device_name()
    others = [i for i in range(torch.cuda.device_count()) if i != current]
    return [current, *(i for i in others if torch.cuda.get_device_name(i) == name)]


def _pool(workers: int, devices: Sequence[int]) -> ProcessPoolExecutor:
    """Return processes that share the devices evenly."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, _take_device, (context.Value("i", 0), devices))


def _take_device(counter: Any, devices: Sequence[int]) -> None:
    with counter.get_lock():
        torch.cuda.set_device(devices[counter.value % len(devices)])
        counter.value += 1


class Job(NamedTuple):
    """A plan to find: of a shape, a scheme and a number of rows per expert."""

    shape: str
    scheme: str
    rows: float

    @property
    def problem(self) -> MoEProblem:
        return shape(self.shape).problem(quant=self.scheme, device="cuda")

    def __str__(self) -> str:
        return f"{self.shape} {self.scheme}, {self.rows:g} rows an expert"


_packed: dict[tuple[str, str], PackedWeights] = {}  # of a worker's last job alone


def _tune(job: Job) -> tuple[str, Plans]:
    """Return the key of a job's entry and its plan, or no plan if no tile runs here."""
    problem, key = job.problem, (job.shape, job.scheme)
    if key not in _packed:
        _packed.clear()
        torch.cuda.empty_cache()
        _packed[key] = random_packed(problem)
    rows, plans = token_count(problem, job.rows), Plans()
    routings = 8 if rows <= 64 else 3 if rows < 4096 else 2
    found = fastest_plan(Case.make(problem, _packed[key], rows, routings), rows)
    if found is not None:
        plan, first, second = found
        us = [round(first.us, 1), round(second.us, 1)]
        per_expert = rows_per_expert(problem, rows)
        plans[per_expert] = {"rows_per_expert": per_expert, "us": us, "plan": plan.describe()}
    torch.cuda.empty_cache()
    return _key(problem), plans


# -- the table ----------------------------------------------------------------------------------


def _key(problem: MoEProblem) -> str:
    return json.dumps(table_key(problem) | {"triton": triton.__version__})


def missing(table: Table, problem: MoEProblem, sizes: Sequence[float]) -> list[float]:
    """Return the rows per expert that the table has no plan for, and may have."""
    known, found = set(table.get(_key(problem), ())), []
    for size in sizes:
        rows = token_count(problem, size)
        if rows <= _MOST_TOKENS and rows_per_expert(problem, rows) not in known:
            known.add(rows_per_expert(problem, rows))
            found.append(size)
    return found


def loads(text: str) -> Table:
    """Return the table of a file's JSON."""
    table: Table = {}
    for entry in json.loads(text)["entries"]:
        plans = {plan["rows_per_expert"]: plan for plan in entry.pop("plans")}
        table.setdefault(json.dumps(entry), {}).update(plans)
    return table


def dumps(table: Table) -> str:
    """Return the table's JSON, a plan on a line, sorted by rows."""
    entries = []
    for key, plans in table.items():
        lines = ",\n  ".join(json.dumps(plans[rows]) for rows in sorted(plans))
        entries.append(f'{key[:-1]}, "plans": [\n  {lines}\n ]}}')
    return '{"entries": [\n ' + ",\n ".join(entries) + "\n]}\n"


# -- the command --------------------------------------------------------------------------------


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m moekit tune triton",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rows = ",".join(map(str, ROWS_PER_EXPERT))
    parser.add_argument("--shapes", default="mixtral,qwen3-30b,dsv3-ep8", help="names or E:K:H:I")
    parser.add_argument("--quant", default="none,fp8_block", help="quantization schemes")
    parser.add_argument("--rows", type=numbers_above_0, default=rows, help="per expert")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no plan after this time"
    )
    parser.add_argument(
        "--out", type=Path, help="a file, or a folder; default: the table that moekit reads"
    )
    args = parser.parse_args(argv)
    args.problems = {
        (name, scheme): shape(name).problem(quant=scheme, device="sm90")
        for name, scheme in itertools.product(args.shapes.split(","), args.quant.split(","))
    }
    if not torch.cuda.is_available():
        parser.error("tiles are timed on a CUDA device, and torch finds none here")
    return args


def numbers_above_0(text: str) -> list[float]:
    """Read a list of numbers above 0."""
    found = [float(part) for part in text.split(",")]
    if not all(0 < number < math.inf for number in found):
        raise ValueError
    return found


def _jobs(
    table: Table, problems: Mapping[tuple[str, str], MoEProblem], sizes: list[float]
) -> Iterator[Job]:
    """Yield what is missing and runs here, once for shapes that share an entry."""
    device, spec, seen = DeviceSpec.of(torch.device("cuda")), moekit_experts()[0], set()
    for (name, scheme), problem in problems.items():
        if reasons := spec.unsupported(problem.replace(device=device)):
            print(f"{name} {scheme} is left out: {'; '.join(reasons)}", file=sys.stderr)
        elif _key(problem) not in seen:
            seen.add(_key(problem))
            yield from (Job(name, scheme, rows) for rows in missing(table, problem, sizes))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 1 if something is left to do, 130 if stopped.
    Raises MoekitError if the table cannot be read or written, or a worker process died."""
    args, begin = _arguments(argv), time.monotonic()
    file = device_file(torch.cuda.get_device_name())
    out = args.out or FILES.user_folder() / file
    if out.is_dir():
        out /= file
    check_writable(out, "name another file with --out, or a folder of yours in MOEKIT_TUNED")
    table: Table = {}
    if out.exists():
        FILES.read(out)  # raises for a wrong table, before hours are spent
        table = loads(out.read_text())
    jobs = list(_jobs(table, args.problems, args.rows))
    if not jobs:
        print(f"{out} already has all of them", file=sys.stderr)
        return 0
    try:
        problems = [(job.problem, job.rows) for job in jobs]
        wanted = ((p, attempts(p, token_count(p, rows))) for p, rows in problems)
        compile_all(wanted, begin + args.seconds / 2)
        devices = _devices()
        with _pool(min(len(devices), len(jobs)), devices) as pool:
            running = {pool.submit(_tune, job): job for job in jobs}
            try:
                left = len(jobs) - _collect(running, table, out, begin + args.seconds)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    except KeyboardInterrupt:
        print(f"stopped; {out} has what was found: run it again to continue", file=sys.stderr)
        return 130
    except BrokenProcessPool as error:
        raise MoekitError(
            "a worker process died: the GPU failed (its error is above), or memory was short; "
            f"{out} has what was found: run it again to continue"
        ) from error
    if left:
        print(f"{left} of {len(jobs)} plans are left: run it again to continue", file=sys.stderr)
    return int(left > 0)


def _collect(
    running: Mapping[Future[tuple[str, Plans]], Job], table: Table, out: Path, end: float
) -> int:
    """Write each plan when it is found, and return how many were."""
    found = 0
    for done, future in enumerate(_finished(running, end), 1):
        text = "no plan, no tile compiles and runs on this GPU"
        try:
            key, plans = future.result()
        except torch.OutOfMemoryError:
            key, plans, text = "", {}, "no plan, it needs more memory than the GPU has"
        if plans:
            table.setdefault(key, {}).update(plans)
            replace_file(out, dumps(table))
            text = "done"
        found += bool(plans)
        print(f"[{done}/{len(running)}] {running[future]}: {text}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
