"""Searches tiles for GEMM 1 and GEMM 2, apart, and writes what `config` looks up.

    python -m moekit_triton.tune --shapes mixtral,8:2:4096:14336 --quant none,fp8_block --out FILE

Every candidate is compiled by a pool of processes into Triton's cache first, then timed in a CUDA
graph over several routings, a shape and scheme on each GPU. An entry is written when it is done,
atomically, and numbers of rows that the file's entry has a plan for are skipped, so that a stopped
run goes on where it was, and --rows adds to what is there; the shipped entries lack some of the
default ones on purpose.
"""

from __future__ import annotations

import argparse
import bisect
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from moekit_bench import random_weights, shape
from moekit_kernels.align import COUNTERS, SortedAssignments, align, align_capacity, align_scratch
from moekit_kernels.rows import Activation, ValidRows, activate_rows
from moekit_kernels.sorted_rows import copy_rows, copy_rows_quantized
from torch import Tensor

from moekit.plugin import MoEProblem, registry

from .candidates import candidates, sorted_candidates, variations
from .config import Order, fusable, num_sms, order_wins, sorting_pays
from .experts import TritonExperts
from .gemm import Epilogue, GemmConfig, Rows, grouped_gemm
from .sorted_gemm import Scales, sorted_gemm
from .tables import table_key

ROWS_PER_EXPERT = (0.25, 1, 4, 16, 64, 256, 1024, 4096)
# Longer calls than this are rare, and take the plan of the longest measured.
_MOST_TOKENS = 32768
# Microseconds beyond which a launch's own time is small beside the kernel's.
_TELLING = 200.0
# Microseconds of work after which the clock has settled.
_SETTLED = 10e3
# How many of each kind are timed again, and of kinds how close to the fastest.
_FINALISTS, _CLOSE = 3, 1.08


@dataclass(frozen=True)
class Case:
    """Tensors of one shape and scheme, and routings of one size."""

    problem: MoEProblem
    packed: Any
    ids: Sequence[Tensor]
    x: Tensor
    x_scale: Tensor | None
    a: Tensor
    a_scale: Tensor | None
    h: Tensor
    y: Tensor
    activation: Activation

    @classmethod
    def make(cls, experts: TritonExperts, packed: Any, rows: int, routings: int) -> Case:
        p, device = experts.problem, torch.device("cuda")
        K, pairs = p.top_k, rows * p.top_k
        scores = torch.rand(routings, rows, p.num_experts, device=device)
        ids = [s.topk(K, dim=1).indices for s in scores]
        x = torch.randn(rows, p.hidden_size, dtype=p.dtype, device=device)
        a = torch.randn(pairs, p.local_intermediate_size, dtype=p.dtype, device=device)
        x_scale = a_scale = None
        if p.quant.activation is not None:
            (x, x_scale), (a, a_scale) = (experts.quantize(t, packed, None) for t in (x, a))
        h = torch.empty(pairs, p.w13_rows, dtype=p.dtype, device=device)
        y = torch.empty(pairs, p.hidden_size, dtype=p.dtype, device=device)
        return cls(p, packed, ids, x, x_scale, a, a_scale, h, y, experts._activation)

    def calls(
        self, gemm: str, config: GemmConfig, fused: bool = True, order: Order = "pairs"
    ) -> list[Callable[[], None]]:
        """gemm: `first` or `second`."""
        if gemm == "second":
            return (self.second if order == "pairs" else self.sorted_second)(config)
        if order in ("copied", "ahead"):
            return self.copied_first(config, ahead=order == "ahead")
        return self.first(config, fused, in_order=order == "sorted")

    def rows_for(self, block_m: int) -> list[SortedAssignments]:
        p, found = self.problem, []
        for ids in self.ids:
            capacity = align_capacity(ids.numel(), p.num_local_experts, block_m)

            def ints(n: int) -> Tensor:
                return torch.empty(n, dtype=torch.int32, device="cuda")

            aligned = SortedAssignments(
                ints(capacity), ints(capacity // block_m), ints(1), block_m, ints(ids.numel()),
                counters=ints(COUNTERS + capacity // block_m),
            )  # fmt: skip
            scratch = ints(align_scratch(ids.numel(), p.num_local_experts))
            align(ids, p.num_local_experts, aligned, scratch)
            found.append(aligned)
        return found

    def first(self, config: GemmConfig, fused: bool, in_order: bool) -> list[Callable[[], None]]:
        p, w, calls = self.problem, self.packed, []
        quantized = p.quant.activation is not None
        static = quantized and p.quant.activation.static
        kind = "none" if not quantized else "tensor" if static else "group"
        scale = w.shared["a2_scale"] if static else self.a_scale
        epilogue = Epilogue(self.activation, kind, scale) if fused else None
        routings = self.rows_for(config.block_m)
        out = self.a if fused else self.h
        if in_order:
            out = out.new_empty(routings[0].assignments_S.numel(), out.shape[1])
        for ids, aligned in zip(self.ids, routings, strict=True):

            def call(ids: Tensor = ids, aligned: SortedAssignments = aligned) -> None:
                grouped_gemm(
                    self.x, w["w13"], out,
                    Rows.aligned(aligned, p.top_k, in_order=in_order), config, a_scale=self.x_scale,
                    w_scale=w.get("w13_scale"), w_offset=w.get("w13_offset"), epilogue=epilogue,
                )  # fmt: skip
                if not fused:
                    activate_rows(
                        self.h, self.a, self.activation, ValidRows(ids=ids),
                        scale=scale if quantized else None, static_scale=static,
                    )  # fmt: skip

            calls.append(call)
        return calls

    def copied_first(self, config: GemmConfig, ahead: bool) -> list[Callable[[], None]]:
        """Copying included, the price that both GEMMs pay for order."""
        p, routings = self.problem, self.rows_for(config.block_m)
        entries, pairs, sms = routings[0].assignments_S.numel(), len(self.y), num_sms(p)
        x_SH = self.x.new_empty(entries, p.hidden_size)
        a_SI = self.a.new_empty(entries, p.local_intermediate_size)
        scales, _ = self._scales(entries)

        def call(aligned: SortedAssignments) -> None:
            if scales is not None:
                copy_rows_quantized(self.x, self.x_scale, aligned, x_SH, scales.a_GS)
            elif not ahead:
                copy_rows(self.x, aligned, x_SH)
            sorted_gemm(
                x_SH, self.packed["w13"], a_SI, aligned, config, pairs, sms,
                activation=self.activation, scales=scales,
                x_RK=self.x if ahead else None,
            )  # fmt: skip

        return [partial(call, aligned) for aligned in routings]

    def joined(self, first: GemmConfig, second: GemmConfig) -> list[Callable[[], None]]:
        """Both products, copying included."""
        from .specialized_block import specialized_block

        p, w, routings = self.problem, self.packed, self.rows_for(first.block_m)
        entries, pairs, sms = routings[0].assignments_S.numel(), len(self.y), num_sms(p)
        x_SH = self.x.new_empty(entries, p.hidden_size)
        a_SI = self.a.new_empty(entries, p.local_intermediate_size)

        def call(aligned: SortedAssignments) -> None:
            copy_rows(self.x, aligned, x_SH)
            specialized_block(
                x_SH, w["w13"], a_SI, w["w2"], x_SH, aligned, first, second, pairs, sms
            )  # fmt: skip

        return [partial(call, aligned) for aligned in routings]

    def sorted_second(self, config: GemmConfig) -> list[Callable[[], None]]:
        routings = self.rows_for(config.block_m)
        entries, pairs, sms = routings[0].assignments_S.numel(), len(self.y), num_sms(self.problem)
        in_order = config.specialized
        a_SI = self.a.repeat(triton.cdiv(entries, pairs), 1)[:entries]
        y = self.y.new_empty(entries, self.y.shape[1]) if in_order else self.y
        _, scales = self._scales(entries)

        def call(aligned: SortedAssignments) -> None:
            sorted_gemm(
                a_SI, self.packed["w2"], y, aligned, config, pairs, sms, by_pair=not in_order,
                scales=scales,
            )  # fmt: skip

        return [partial(call, aligned) for aligned in routings]

    def _scales(self, entries: int) -> tuple[Scales, Scales] | tuple[None, None]:
        """Of both products, for rows in order."""
        if self.x_scale is None or self.a_scale is None:
            return None, None
        x_scale, a_scale = (
            torch.full((s.shape[1], entries), float(s.mean()), device="cuda")
            for s in (self.x_scale, self.a_scale)
        )
        w13, w2 = self.packed["w13_scale"], self.packed["w2_scale"]
        return Scales(w13, x_scale, torch.empty_like(a_scale)), Scales(w2, a_scale)

    def second(self, config: GemmConfig) -> list[Callable[[], None]]:
        w = self.packed

        def call(aligned: SortedAssignments) -> Callable[[], None]:
            return lambda: grouped_gemm(
                self.a, w["w2"], self.y, Rows.aligned(aligned), config, a_scale=self.a_scale,
                w_scale=w.get("w2_scale"), w_offset=w.get("w2_offset"),
            )  # fmt: skip

        return [call(aligned) for aligned in self.rows_for(config.block_m)]


class Timer:
    """Graphs over the same product's calls, one for each way to do it."""

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._calls: list[object] = []  # graphs do not keep tensors that were there before

    def add(self, calls: Sequence[Callable[[], None]]) -> None:
        calls[0]()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        self.graphs.append(graph)
        self._calls.append(calls)

    def microseconds(self, least: float, rounds: int) -> list[float]:
        """Of one replay each, in turns of ``least`` microseconds: medians of ``rounds``. Long
        products lower the clock, which is the same for all in turns."""
        once = [_elapsed(graph.replay) for graph in self.graphs]
        took: list[list[float]] = [[] for _ in once]
        for _, (i, graph) in itertools.product(range(rounds), enumerate(self.graphs)):
            replays = max(1, int(least / once[i]))
            took[i].append(_elapsed(lambda g=graph, n=replays: _repeat(g, n)) / replays)
        return [statistics.median(us) for us in took]


def _repeat(graph: torch.cuda.CUDAGraph, times: int) -> None:
    for _ in range(times):
        graph.replay()


def _elapsed(call: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


@dataclass(frozen=True, order=True)
class Timed:
    """What `Case.calls` was asked for, and the microseconds that one call took."""

    us: float
    config: GemmConfig = field(compare=False)
    fused: bool = field(compare=False)
    order: Order = field(compare=False)


Chosen = tuple[Timed, Timed, Order]


def joinable(problem: MoEProblem, first: GemmConfig, second: GemmConfig) -> bool:
    return problem.quant.weight is None and first.specialized and second.specialized


class Search:
    """The fastest tiles of one size: for either product and each (block_m, order)."""

    def __init__(self, case: Case) -> None:
        self._case = case
        # (gemm, block_m, order) -> what was tried
        self.found: dict[tuple[str, int, Order], list[Timed]] = {}

    def attempt(
        self, gemm: str, config: GemmConfig, fused: bool = True, order: Order = "pairs"
    ) -> None:
        found = self.found.setdefault((gemm, config.block_m, order), [])
        enough = found[0].us if found else float("inf")
        try:
            calls = self._case.calls(gemm, config, fused, order)
            calls[0]()
            us = _elapsed(calls[0])
            if us < max(_TELLING, 1.5 * enough):
                timer = Timer()
                timer.add(calls)
                (us,) = timer.microseconds(0.0, 4)
                us /= len(calls)
        except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError):
            return
        bisect.insort(found, Timed(us, config, fused, order))

    def settle(self) -> Chosen | None:
        """GEMM 1 and 2 of one block_m and fitting orders. Of the best few the pair decides: what
        wins by itself need not win behind another kernel, or in one launch with it."""
        groups = []
        for (gemm, block_m, order), firsts in self.found.items():
            # GEMM 2 does not see who sorted.
            behind: Order = "pairs" if order == "pairs" else "sorted"
            seconds = self.found.get(("second", block_m, behind), [])
            if gemm == "first" and firsts and seconds:
                groups.append((firsts, seconds))
        if not groups:
            return None
        fastest = min(first[0].us + second[0].us for first, second in groups)
        finalists = [
            (*pair, pair[0].order)
            for firsts, seconds in groups
            if firsts[0].us + seconds[0].us < _CLOSE * fastest
            for pair in itertools.product(firsts[:_FINALISTS], seconds[:_FINALISTS])
        ]
        finalists += [
            (first, second, "joined")
            for first, second, order in finalists
            if order == "copied" and joinable(self._case.problem, first.config, second.config)
        ]
        us = self._together(finalists)
        return finalists[us.index(min(us))]

    def _together(self, finalists: Sequence[Chosen]) -> list[float]:
        """Microseconds of a replay of both GEMMs, one behind the other for each routing, in
        turns."""
        made: dict[int, list[Callable[[], None]]] = {}
        timer = Timer()
        for *pair, order in finalists:
            if order == "joined":
                timer.add(self._case.joined(*(t.config for t in pair)))
                continue
            for gemm, t in zip(("first", "second"), pair, strict=True):
                if id(t) not in made:
                    made[id(t)] = self._case.calls(gemm, t.config, t.fused, t.order)
            both = zip(*(made[id(t)] for t in pair), strict=True)
            timer.add([partial(_both, *calls) for calls in both])
        return timer.microseconds(_SETTLED, 5)


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


Attempt = tuple[str, GemmConfig, bool, Order]
"""Arguments of `Search.attempt`."""


def attempts(problem: MoEProblem, per_expert: float) -> Iterator[Attempt]:
    """What is worth timing for so many rows per expert: other orders only where none has won
    everywhere."""
    p, wide = problem, 2 if problem.activation.gated else 1
    in_order = sorting_pays(p, _rows(p, per_expert), p.top_k)
    if not (in_order and order_wins(p, per_expert)):
        for config in candidates(p, per_expert, wide):
            if fusable(p, config.block_n):
                yield "first", config, True, "pairs"
        for config in candidates(p, per_expert, 1):
            if p.quant.activation is not None:
                yield "first", config, False, "pairs"
            yield "second", config, True, "pairs"
    if in_order:
        for config in sorted_candidates(p, wide):
            yield "first", config, True, "copied"
            if config.specialized and p.quant.weight is None:
                yield "first", config, True, "ahead"
        yield from (("second", config, True, "sorted") for config in sorted_candidates(p, 1))


def _rows(problem: MoEProblem, per_expert: float) -> int:
    return max(1, round(per_expert * problem.num_experts / problem.top_k))


def _per_expert(problem: MoEProblem, rows: int) -> float:
    return rows * problem.top_k / problem.num_experts


def tune_size(case: Case, per_expert: float) -> dict[str, Any] | None:
    """The fastest plan: both GEMMs with one block_m and one order, each with its own tile."""
    search = Search(case)
    for gemm, config, fused, order in attempts(case.problem, per_expert):
        search.attempt(gemm, config, fused, order)
    gathers = case.problem.quant.weight is None and ("second", 128, "sorted") in search.found
    for (gemm, _, order), found in list(search.found.items()):
        if order == "pairs" and found:
            for other in variations(found[0].config):
                search.attempt(gemm, other, found[0].fused)
    for best in search.found.get(("first", 128, "pairs"), [])[:_FINALISTS]:
        if gathers and best.fused:  # GEMM 1 may sort, by tiles that do well without
            search.attempt("first", best.config, order="sorted")
    chosen = search.settle()
    if chosen is None:
        return None
    first, second, order = chosen
    return {
        "rows_per_expert": per_expert, "us": [round(first.us, 1), round(second.us, 1)],
        "fused": first.fused, "order": order,
        "first": asdict(first.config), "second": asdict(second.config),
    }  # fmt: skip


def _tiny(problem: MoEProblem) -> MoEProblem:
    """A problem whose kernels are the same: tiles and groups of 128 leave as much of its sizes, and
    what is a multiple of 16 in them (strides of scales, too) is one here."""
    sizes = problem.hidden_size, problem.intermediate_size
    hidden, inner = (2048 + n % 2048 for n in sizes)
    return replace(problem, num_experts=2, top_k=2, hidden_size=hidden, intermediate_size=inner)


def _compile(job: tuple[MoEProblem, str, Order, list[dict[str, Any]]]) -> None:
    """Runs every config once on tiny tensors, which fills Triton's cache."""
    problem, gemm, order, configs = job
    case = make_case(problem, 16, 1)
    for values in configs:
        values = dict(values)
        fused = values.pop("fused")
        with suppress(
            triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError
        ):
            case.calls(gemm, GemmConfig(**values), fused, order)[0]()


def make_case(problem: MoEProblem, rows: int, routings: int, packed: Any = None) -> Case:
    experts = TritonExperts(registry().expert("triton"), problem)
    if packed is None:
        packed = experts.pack(random_weights(problem, torch.device("cuda")))
    return Case.make(experts, packed, rows, routings)


def compile_all(wanted_sizes: Iterable[tuple[MoEProblem, float]]) -> None:
    """All candidates, by as many processes as there are cores, up to 48."""
    jobs: list[tuple[MoEProblem, str, Order, list[dict[str, Any]]]] = []
    wanted_of: dict[MoEProblem, dict[tuple[str, Order], dict[Attempt, None]]] = {}
    for p, per_expert in wanted_sizes:
        wanted = wanted_of.setdefault(_tiny(p), {})
        for attempt in attempts(p, per_expert):
            gemm, _, _, order = attempt
            wanted.setdefault((gemm, order), {})[attempt] = None
    for tiny, wanted in wanted_of.items():
        for (gemm, order), unique in wanted.items():
            configs = [{**asdict(config), "fused": fused} for _, config, fused, _ in unique]
            jobs += [(tiny, gemm, order, configs[i : i + 3]) for i in range(0, len(configs), 3)]
    begin, count = time.monotonic(), sum(len(job[3]) for job in jobs)
    with _pool(min(48, os.cpu_count() or 1), torch.cuda.device_count()) as pool:
        for _ in pool.map(_compile, jobs):
            pass
    print(f"compiled {count} candidates in {time.monotonic() - begin:.0f} s", file=sys.stderr)


def _pool(workers: int, gpus: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes that share the first `gpus` devices evenly."""
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(
        workers, context, _take_device, (context.Value("i", 0), gpus)
    )


def _take_device(counter: Any, gpus: int) -> None:
    with counter.get_lock():
        torch.cuda.set_device(counter.value % gpus)
        counter.value += 1


def _tune(job: tuple[str, str, Sequence[float]]) -> tuple[dict[str, Any], float]:
    """The table's entry of one (shape, scheme, rows per expert), and the seconds it took."""
    name, scheme, sizes = job
    problem = shape(name).problem(quant=scheme, device="cuda")
    packed, plans, begin = None, [], time.monotonic()
    for per_expert in sizes:
        rows = _rows(problem, per_expert)
        case = make_case(problem, rows, 8 if rows <= 64 else 3 if rows < 4096 else 2, packed)
        packed = case.packed
        plan = tune_size(case, _per_expert(problem, rows))
        if plan is not None:
            plans.append(plan)
        del case
        torch.cuda.empty_cache()
    return {**_key(problem), "plans": plans}, time.monotonic() - begin


def _key(problem: MoEProblem) -> dict[str, Any]:
    return table_key(problem) | {"triton": triton.__version__}


def missing(table: Mapping[str, Any], problem: MoEProblem, sizes: Sequence[float]) -> list[float]:
    """The rows per expert that the table's entry of ``problem`` has no plan for, and may have."""
    key = _key(problem)
    known = {
        plan["rows_per_expert"]
        for entry in table["entries"]
        if all(entry[name] == value for name, value in key.items())
        for plan in entry["plans"]
    }
    found = []
    for size in sizes:
        rows = _rows(problem, size)
        if rows <= _MOST_TOKENS and _per_expert(problem, rows) not in known:
            known.add(_per_expert(problem, rows))
            found.append(size)
    return found


def merge(table: dict[str, Any], entry: dict[str, Any]) -> None:
    """Puts the plans of ``entry`` into the table's entry of the same key, in the order of rows."""
    for known in table["entries"]:
        if all(known[name] == value for name, value in entry.items() if name != "plans"):
            plans = {p["rows_per_expert"]: p for p in (*known["plans"], *entry["plans"])}
            known["plans"] = [plans[rows] for rows in sorted(plans)]
            return
    table["entries"].append(entry)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moekit_triton.tune", description=__doc__)
    parser.add_argument("--shapes", default="mixtral,qwen3-30b,dsv3-ep8")
    parser.add_argument("--quant", default="none,fp8_block")
    parser.add_argument("--rows", default=",".join(map(str, ROWS_PER_EXPERT)))
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    schemes, sizes = args.quant.split(","), [float(rows) for rows in args.rows.split(",")]
    problems = {
        (name, scheme): shape(name).problem(quant=scheme, device="sm90")
        for name, scheme in itertools.product(args.shapes.split(","), schemes)
    }
    if not torch.cuda.is_available():
        parser.error("tiles are timed on a CUDA device, and torch sees none here")
    device = re.sub(r"\W+", "_", torch.cuda.get_device_name())
    out = args.out or Path(__file__).parent / "tuned" / f"{device}.json"
    table = json.loads(out.read_text()) if out.exists() else {"entries": []}
    first = {}  # of shapes that share an entry, whose plans serve all of them
    for job, problem in problems.items():
        first.setdefault(str(_key(problem)), (*job, missing(table, problem, sizes)))
    jobs = [(name, scheme, lacking) for name, scheme, lacking in first.values() if lacking]
    if not jobs:
        print(f"{out} has them all", file=sys.stderr)
        return
    compile_all(
        (shape(name).problem(quant=scheme, device="cuda"), size)
        for name, scheme, lacking in jobs
        for size in lacking
    )
    begin = time.monotonic()
    with _pool(min(args.gpus, len(jobs)), args.gpus) as pool:
        running = {pool.submit(_tune, job): job for job in jobs}
        for done, future in enumerate(concurrent.futures.as_completed(running), 1):
            entry, seconds = future.result()
            merge(table, entry)
            part = out.with_suffix(".part")
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(table, indent=1))
            part.replace(out)
            name, scheme, _ = running[future]
            left = (time.monotonic() - begin) / done * (len(jobs) - done)
            print(
                f"[{done}/{len(jobs)}] {name} {scheme}: {seconds:.0f} s, about {left:.0f} s left",
                file=sys.stderr, flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
