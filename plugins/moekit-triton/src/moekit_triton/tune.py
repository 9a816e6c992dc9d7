"""Searches tiles for GEMM 1 and GEMM 2, apart, and writes what `config` looks up.

    python -m moekit_triton.tune --shapes mixtral,8:2:4096:14336 --quant none,fp8_block --out FILE

Every candidate is compiled by a pool of processes into Triton's cache first, then timed in a CUDA
graph over several routings. A shape's plans are written when it is done, atomically, and a shape
that the file holds already is skipped, so that a stopped run goes on where it was.
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
from .config import fusable, operand_bits, table_key, tma_possible
from .experts import TritonExperts
from .gemm import Epilogue, GemmConfig, Rows, grouped_gemm
from .rows import Activation, ValidRows, activate_rows

ROWS_PER_EXPERT = (0.25, 1, 4, 16, 64, 256, 1024, 4096)
_SHARED = 227 << 10


def candidates(problem: MoEProblem, per_expert: float, wide: int) -> list[GemmConfig]:
    """Tiles worth timing; wide: rows of weights behind an output column."""
    a_bits, w_bits = operand_bits(problem)
    blocks_m = [b for b in (16, 32, 64, 128) if b == 16 or per_expert * 3 >= b]
    blocks_m = blocks_m[-2:] if per_expert < 200 else [64, 128]
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
                    w_scale=w.get("w13_scale"), epilogue=epilogue,
                )  # fmt: skip
                if not fused:
                    activate_rows(
                        self.h, self.a, self.activation, ValidRows(ids=ids),
                        scale=scale if quantized else None, static_scale=static,
                    )  # fmt: skip

            calls.append(call)
        return calls

    def second(self, config: GemmConfig) -> list[Callable[[], None]]:
        w = self.packed

        def call(aligned: AlignedPairs) -> Callable[[], None]:
            return lambda: grouped_gemm(
                self.a, w["w2"], self.y, Rows.aligned(aligned), config, a_scale=self.a_scale,
                w_scale=w.get("w2_scale"),
            )  # fmt: skip

        return [call(aligned) for aligned in self.rows_for(config.block_m)]


def microseconds(calls: Sequence[Callable[[], None]]) -> float:
    """Of one call: a graph over all, the fastest of a few replays."""
    for call in calls[:1]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    best = float("inf")
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / len(calls))
    return best


def _try(calls: Callable[[], list[Callable[[], None]]]) -> float:
    try:
        return microseconds(calls())
    except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError):
        return float("inf")


def tune_size(case: Case, per_expert: float) -> dict[str, Any] | None:
    """The fastest plan: both GEMMs with one block_m, each with its own tile."""
    p = case.problem
    wide = 2 if p.activation.gated else 1
    firsts: dict[int, tuple[float, GemmConfig, bool]] = {}
    seconds: dict[int, tuple[float, GemmConfig]] = {}

    def first(config: GemmConfig, fused: bool) -> None:
        us = _try(partial(case.first, config, fused))
        if us < firsts.get(config.block_m, (float("inf"),))[0]:
            firsts[config.block_m] = us, config, fused

    def second(config: GemmConfig) -> None:
        us = _try(partial(case.second, config))
        if us < seconds.get(config.block_m, (float("inf"),))[0]:
            seconds[config.block_m] = us, config

    for config in candidates(p, per_expert, wide):
        if fusable(p, config.block_n):
            first(config, True)
    for config in candidates(p, per_expert, 1):
        if not fusable(p, 128) or p.quant.activation is not None:
            first(config, False)
        second(config)
    for _, config, fused in list(firsts.values()):
        for other in variations(config):
            first(other, fused)
    for _, config in list(seconds.values()):
        for other in variations(config):
            second(other)
    both = [b for b in firsts if b in seconds]
    if not both:
        return None
    block = min(both, key=lambda b: firsts[b][0] + seconds[b][0])
    us1, first_config, fused = firsts[block]
    us2, second_config = seconds[block]
    return {
        "rows_per_expert": per_expert, "us": [round(us1, 1), round(us2, 1)], "fused": fused,
        "first": asdict(first_config), "second": asdict(second_config),
    }  # fmt: skip


def _compile(job: tuple[str, bool, list[dict[str, Any]]]) -> None:
    """Runs every config once on tiny tensors of the same kind, which fills Triton's cache."""
    scheme, first, configs = job
    sizes = {"hidden_size": 512, "intermediate_size": 512}
    problem = MoEProblem(num_experts=2, top_k=2, quant=scheme, device="cuda", **sizes)
    case = _case(problem, 16, 1)
    for values in configs:
        values = dict(values)
        fused = values.pop("fused", False)
        config = GemmConfig(**values)
        _try(partial(case.first, config, fused) if first else partial(case.second, config))


def _case(problem: MoEProblem, rows: int, routings: int, packed: Any = None) -> Case:
    experts = TritonExperts(registry().expert("triton"), problem)
    if packed is None:
        packed = experts.pack(random_weights(problem, torch.device("cuda")))
    return Case.make(experts, packed, rows, routings)


def compile_all(schemes: Iterable[str], activation: str = "silu") -> None:
    """All candidates of all sizes, by as many processes as there are cores."""
    jobs: list[tuple[str, bool, list[dict[str, Any]]]] = []
    for scheme in schemes:
        p = MoEProblem(num_experts=8, top_k=2, hidden_size=4096, intermediate_size=4096,
                       quant=scheme, device="cuda")  # fmt: skip
        first: dict[str, dict[str, Any]] = {}
        second: dict[str, dict[str, Any]] = {}
        for per_expert in ROWS_PER_EXPERT:
            for c in candidates(p, per_expert, 2):
                if fusable(p, c.block_n):
                    first[repr(c)] = {**asdict(c), "fused": True}
            for c in candidates(p, per_expert, 1):
                if p.quant.activation is not None:
                    first[repr(c) + "apart"] = {**asdict(c), "fused": False}
                second[repr(c)] = asdict(c)
        for is_first, configs in ((True, list(first.values())), (False, list(second.values()))):
            jobs += [(scheme, is_first, configs[i : i + 3]) for i in range(0, len(configs), 3)]
    workers = min(16, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    begin, count = time.monotonic(), sum(len(job[2]) for job in jobs)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for _ in pool.map(_compile, jobs):
            pass
    print(f"compiled {count} candidates in {time.monotonic() - begin:.0f} s", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moekit_triton.tune", description=__doc__)
    parser.add_argument("--shapes", default="mixtral,qwen3-30b,dsv3-ep8")
    parser.add_argument("--quant", default="none,fp8_block")
    parser.add_argument("--rows", default=",".join(map(str, ROWS_PER_EXPERT)))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    schemes = args.quant.split(",")
    device = re.sub(r"\W+", "_", torch.cuda.get_device_name())
    out = args.out or Path(__file__).parent / "tuned" / f"{device}.json"
    table = json.loads(out.read_text()) if out.exists() else {"entries": []}
    compile_all(schemes)
    for scheme, sizes in itertools.product(schemes, map(shape, args.shapes.split(","))):
        problem = sizes.problem(quant=scheme, device="cuda")
        key = table_key(problem) | {"triton": triton.__version__}
        if any(all(entry[k] == v for k, v in key.items()) for entry in table["entries"]):
            continue
        packed, plans, begin = None, [], time.monotonic()
        for per_expert in map(float, args.rows.split(",")):
            rows = max(1, round(per_expert * problem.num_experts / problem.top_k))
            case = _case(problem, rows, 3 if rows < 4096 else 2, packed)
            packed = case.packed
            plan = tune_size(case, rows * problem.top_k / problem.num_experts)
            if plan is not None:
                plans.append(plan)
                print(sizes.name, scheme, plan, file=sys.stderr, flush=True)
        table["entries"].append({**key, "plans": plans})
        part = out.with_suffix(".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(table, indent=1))
        part.replace(out)
        print(f"{sizes.name} {scheme}: {time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
