"""Searches tiles for GEMM 1 and GEMM 2, apart, and writes what `config` looks up.

    python -m moekit_triton.tune --shapes mixtral,8:2:4096:14336 --quant none,fp8_block --out FILE

Every candidate is compiled by a pool of processes into Triton's cache first, then timed in a CUDA
graph over several routings, a shape and scheme on each GPU. An entry is written when it is done,
atomically, and one that the file holds already is skipped, so that a stopped run goes on where it
was.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from moekit import MoEProblem, registry
from moekit.bench.shapes import random_weights, shape

from .align import AlignedPairs, align, align_capacity, align_scratch
from .config import (
    PACKED_BLOCK_M,
    fusable,
    num_sms,
    operand_bits,
    sorting_pays,
    table_key,
    tma_possible,
)
from .experts import TritonExperts
from .gemm import Epilogue, GemmConfig, Rows, grouped_gemm
from .packed import CHUNK
from .rows import Activation, ValidRows, activate_rows
from .sorted_gemm import gather_rows, sorted_gemm

ROWS_PER_EXPERT = (0.25, 1, 4, 16, 64, 256, 1024, 4096)
_SHARED = 227 << 10
# Longer calls than this are rare, and take the plan of the longest measured.
_MOST_TOKENS = 32768
# Microseconds beyond which a launch's own time is small beside the kernel's.
_TELLING = 200.0


def candidates(problem: MoEProblem, per_expert: float, wide: int) -> list[GemmConfig]:
    """Tiles worth timing; wide: rows of weights behind an output column."""
    a_bits, w_bits = operand_bits(problem)
    blocks_m = [b for b in (16, 32, 64, 128) if b == 16 or per_expert * 3 >= b]
    blocks_m = blocks_m[-2:] if per_expert < 200 else [64, 128]
    if w_bits == 4:
        return _packed_candidates([8, 16] if per_expert <= 4 else blocks_m, wide)
    block_scales = problem.quant.name.endswith("_block")
    found = []
    for block_m, columns, warps, tma in itertools.product(
        blocks_m, (64, 128, 256), (4, 8), (True, False)
    ):
        for block_k in (128,) if block_scales or a_bits == 8 else (64, 128):
            block_n = columns // wide
            if tma and not tma_possible(problem) or block_n < 32:
                continue
            per_thread = block_m * columns / (32 * warps)
            promoted = 2 if a_bits == 8 else 1
            if not 8 <= per_thread * promoted <= 256 or (
                block_m < 64 and warps == 8 and columns < 128
            ):
                continue
            stage = (block_m * a_bits + columns * w_bits) * block_k // 8
            stages = min(5 if block_m <= 32 else 4, (_SHARED - block_m * columns) // stage)
            if stages >= 2:
                found.append(GemmConfig(block_m, block_n, block_k, 8, warps, stages, tma))
    return found


def _packed_candidates(blocks_m: Sequence[int], wide: int) -> list[GemmConfig]:
    """4 bits: a warp makes 16 rows of weights, or 32 of them for few columns."""
    found = []
    tiles = ((16, 1), (32, 2), (64, 4), (64, 2), (128, 8), (128, 4))
    for block_m, (block_n, warps), stages in itertools.product(
        [b for b in blocks_m if b <= PACKED_BLOCK_M], tiles, (3, 5)
    ):
        per_thread = block_m * block_n * wide / (32 * warps)  # sums, and partial ones besides
        if per_thread <= (32 if block_n > 16 * warps else 64):
            stage = (16 * block_m + 4 * block_n * wide) * CHUNK // 8
            if stages * stage <= _SHARED and (block_m < 64 or block_n >= 64):
                found.append(GemmConfig(block_m, block_n, CHUNK, 8, warps, stages))
    return found


def sorted_candidates(problem: MoEProblem, rows: int, wide: int) -> list[GemmConfig]:
    """Tiles for rows in order, see `sorted_gemm`; none where that does not pay."""
    if not sorting_pays(problem, rows, problem.top_k):
        return []
    shapes = [(128, 256, 8, 4), (128, 256, 8, 3), (128, 128, 4, 4), (64, 256, 4, 4)]
    return [
        GemmConfig(m, columns // wide, 64, group, warps, stages, True, persistent)
        for m, columns, warps, stages in shapes
        for group in (4, 8, 16)
        for persistent in ((False,) if wide == 2 else (False, True))
    ]


def variations(best: GemmConfig) -> list[GemmConfig]:
    """Neighbours of a good tile."""
    found = [replace(best, group_m=g) for g in (1, 4, 16, 32) if g != best.group_m]
    if best.num_stages > 2:
        found.append(replace(best, num_stages=best.num_stages - 1))
    return found


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
        self, gemm: str, config: GemmConfig, fused: bool = True, in_order: bool = False
    ) -> list[Callable[[], None]]:
        """gemm: `first` or `second`; in_order: rows in the order of their experts."""
        if in_order:
            return (self.sorted_first if gemm == "first" else self.sorted_second)(config)
        return self.first(config, fused) if gemm == "first" else self.second(config)

    def rows_for(self, block_m: int) -> list[AlignedPairs]:
        p, found = self.problem, []
        for ids in self.ids:
            capacity = align_capacity(ids.numel(), p.num_local_experts, block_m)

            def ints(n: int) -> Tensor:
                return torch.empty(n, dtype=torch.int32, device="cuda")

            aligned = AlignedPairs(ints(capacity), ints(capacity // block_m), ints(1), block_m)
            scratch = ints(align_scratch(ids.numel(), p.num_local_experts))
            align(ids, p.num_local_experts, aligned, scratch)
            found.append(aligned)
        return found

    def first(self, config: GemmConfig, fused: bool) -> list[Callable[[], None]]:
        p, w, calls = self.problem, self.packed, []
        quantized = p.quant.activation is not None
        static = quantized and p.quant.activation.static
        kind = "none" if not quantized else "tensor" if static else "group"
        scale = w.shared["a2_scale"] if static else self.a_scale
        epilogue = Epilogue(self.activation, kind, scale) if fused else None
        for ids, aligned in zip(self.ids, self.rows_for(config.block_m), strict=True):

            def call(ids: Tensor = ids, aligned: AlignedPairs = aligned) -> None:
                grouped_gemm(
                    self.x, w["w13"], self.a if fused else self.h,
                    Rows.aligned(aligned, p.top_k), config, a_scale=self.x_scale,
                    w_scale=w.get("w13_scale"), w_offset=w.get("w13_offset"), epilogue=epilogue,
                )  # fmt: skip
                if not fused:
                    activate_rows(
                        self.h, self.a, self.activation, ValidRows(ids=ids),
                        scale=scale if quantized else None, static_scale=static,
                    )  # fmt: skip

            calls.append(call)
        return calls

    def sorted_first(self, config: GemmConfig) -> list[Callable[[], None]]:
        """Copying included, the price that both GEMMs pay for order."""
        p, routings = self.problem, self.rows_for(config.block_m)
        entries = routings[0].pairs_S.numel()
        x_SH = self.x.new_empty(entries, p.hidden_size)
        a_SI = self.a.new_empty(entries, p.local_intermediate_size)

        def call(aligned: AlignedPairs) -> None:
            gather_rows(self.x, aligned, p.top_k, x_SH)
            sorted_gemm(
                x_SH, self.packed["w13"], a_SI, aligned, config, num_sms(p),
                activation=self.activation,
            )  # fmt: skip

        return [partial(call, aligned) for aligned in routings]

    def sorted_second(self, config: GemmConfig) -> list[Callable[[], None]]:
        routings = self.rows_for(config.block_m)
        a_SI = torch.randn(
            routings[0].pairs_S.numel(), self.a.shape[1], dtype=self.a.dtype, device="cuda"
        )

        def call(aligned: AlignedPairs) -> None:
            w, sms = self.packed["w2"], num_sms(self.problem)
            sorted_gemm(a_SI, w, self.y, aligned, config, sms, by_pair=True)

        return [partial(call, aligned) for aligned in routings]

    def second(self, config: GemmConfig) -> list[Callable[[], None]]:
        w = self.packed

        def call(aligned: AlignedPairs) -> Callable[[], None]:
            return lambda: grouped_gemm(
                self.a, w["w2"], self.y, Rows.aligned(aligned), config, a_scale=self.a_scale,
                w_scale=w.get("w2_scale"), w_offset=w.get("w2_offset"),
            )  # fmt: skip

        return [call(aligned) for aligned in self.rows_for(config.block_m)]


def microseconds(calls: Sequence[Callable[[], None]], enough: float = float("inf")) -> float:
    """Of one call: a graph over all, the fastest of a few replays. A call far slower than `enough`
    is told by one launch."""
    calls[0]()
    once = _elapsed(calls[0])
    if once > max(_TELLING, 1.5 * enough):
        return once
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    replays = 5 if once < 10 * _TELLING else 2
    return min(_elapsed(graph.replay) for _ in range(replays)) / len(calls)


def _elapsed(call: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _try(calls: Callable[[], list[Callable[[], None]]], enough: float) -> float:
    try:
        return microseconds(calls(), enough)
    except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError):
        return float("inf")


def tune_size(case: Case, per_expert: float) -> dict[str, Any] | None:
    """The fastest plan: both GEMMs with one block_m and one order, each with its own tile."""
    p = case.problem
    wide = 2 if p.activation.gated else 1
    # (block_m, in order) -> gemm -> microseconds, tile, fused
    found: dict[tuple[int, bool], dict[str, tuple[float, GemmConfig, bool]]] = {}

    def attempt(gemm: str, config: GemmConfig, fused: bool = True, in_order: bool = False) -> None:
        best = found.setdefault((config.block_m, in_order), {})
        enough = best.get(gemm, (float("inf"),))[0]
        us = _try(partial(case.calls, gemm, config, fused, in_order), enough)
        if us < enough:
            best[gemm] = us, config, fused

    for config in candidates(p, per_expert, wide):
        if fusable(p, config.block_n):
            attempt("first", config)
    for config in candidates(p, per_expert, 1):
        if not fusable(p, 128) or p.quant.activation is not None:
            attempt("first", config, fused=False)
        attempt("second", config)
    for gemm, (_, config, fused) in [item for best in found.values() for item in best.items()]:
        for other in variations(config):
            attempt(gemm, other, fused)
    for gemm, columns in (("first", wide), ("second", 1)):
        for config in sorted_candidates(p, len(case.x), columns):
            attempt(gemm, config, in_order=True)
    both = {key: best for key, best in found.items() if len(best) == 2}
    if not both:
        return None
    (_, in_order), best = min(both.items(), key=lambda item: sum(us for us, *_ in item[1].values()))
    (us1, first_config, fused), (us2, second_config, _) = best["first"], best["second"]
    return {
        "rows_per_expert": per_expert, "us": [round(us1, 1), round(us2, 1)], "fused": fused,
        "sorted": in_order, "first": asdict(first_config), "second": asdict(second_config),
    }  # fmt: skip


def _compile(job: tuple[str, str, bool, list[dict[str, Any]]]) -> None:
    """Runs every config once on tiny tensors of the same kind, which fills Triton's cache."""
    scheme, gemm, in_order, configs = job
    sizes = {"hidden_size": 512, "intermediate_size": 512}
    problem = MoEProblem(num_experts=2, top_k=2, quant=scheme, device="cuda", **sizes)
    case = _case(problem, 16, 1)
    for values in configs:
        values = dict(values)
        fused = values.pop("fused", True)
        _try(partial(case.calls, gemm, GemmConfig(**values), fused, in_order), enough=0.0)


def _case(problem: MoEProblem, rows: int, routings: int, packed: Any = None) -> Case:
    experts = TritonExperts(registry().expert("triton"), problem)
    if packed is None:
        packed = experts.pack(random_weights(problem, torch.device("cuda")))
    return Case.make(experts, packed, rows, routings)


def compile_all(schemes: Iterable[str]) -> None:
    """All candidates of all sizes, by as many processes as there are cores, up to 48."""
    jobs: list[tuple[str, str, bool, list[dict[str, Any]]]] = []
    for scheme in schemes:
        p = MoEProblem(num_experts=8, top_k=2, hidden_size=4096, intermediate_size=4096,
                       quant=scheme, device="cuda")  # fmt: skip
        wanted: dict[tuple[str, bool], dict[str, dict[str, Any]]] = {
            (gemm, order): {} for gemm in ("first", "second") for order in (False, True)
        }
        for per_expert in ROWS_PER_EXPERT:
            for c in candidates(p, per_expert, 2):
                if fusable(p, c.block_n):
                    wanted["first", False][repr(c)] = {**asdict(c), "fused": True}
            for c in candidates(p, per_expert, 1):
                if p.quant.activation is not None:
                    wanted["first", False][repr(c) + "apart"] = {**asdict(c), "fused": False}
                wanted["second", False][repr(c)] = asdict(c)
        for gemm, columns in (("first", 2), ("second", 1)):
            for c in sorted_candidates(p, 1 << 14, columns):
                wanted[gemm, True][repr(c)] = asdict(c)
        for (gemm, order), unique in wanted.items():
            configs = list(unique.values())
            jobs += [(scheme, gemm, order, configs[i : i + 3]) for i in range(0, len(configs), 3)]
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
        rows = max(1, round(per_expert * problem.num_experts / problem.top_k))
        if rows > _MOST_TOKENS:
            break
        case = _case(problem, rows, 8 if rows <= 64 else 3 if rows < 4096 else 2, packed)
        packed = case.packed
        plan = tune_size(case, rows * problem.top_k / problem.num_experts)
        if plan is not None:
            plans.append(plan)
        del case
        torch.cuda.empty_cache()
    return {**_key(problem), "plans": plans}, time.monotonic() - begin


def _key(problem: MoEProblem) -> dict[str, Any]:
    return table_key(problem) | {"triton": triton.__version__}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moekit_triton.tune", description=__doc__)
    parser.add_argument("--shapes", default="mixtral,qwen3-30b,dsv3-ep8")
    parser.add_argument("--quant", default="none,fp8_block")
    parser.add_argument("--rows", default=",".join(map(str, ROWS_PER_EXPERT)))
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    schemes, sizes = args.quant.split(","), [float(rows) for rows in args.rows.split(",")]
    device = re.sub(r"\W+", "_", torch.cuda.get_device_name())
    out = args.out or Path(__file__).parent / "tuned" / f"{device}.json"
    table = json.loads(out.read_text()) if out.exists() else {"entries": []}
    jobs = []
    for name, scheme in itertools.product(args.shapes.split(","), schemes):
        key = _key(shape(name).problem(quant=scheme, device="cuda"))
        if not any(all(entry[k] == v for k, v in key.items()) for entry in table["entries"]):
            jobs.append((name, scheme, sizes))
    if not jobs:
        print(f"{out} has them all", file=sys.stderr)
        return
    compile_all({scheme: None for _, scheme, _ in jobs})
    begin = time.monotonic()
    with _pool(min(args.gpus, len(jobs)), args.gpus) as pool:
        running = {pool.submit(_tune, job): job for job in jobs}
        for done, future in enumerate(concurrent.futures.as_completed(running), 1):
            entry, seconds = future.result()
            table["entries"].append(entry)
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
