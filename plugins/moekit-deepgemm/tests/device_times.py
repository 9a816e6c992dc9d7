"""Times of whole blocks and of the bare GEMMs, for device_check.py."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from device_common import (
    SHAPES,
    TOKENS,
    backends,
    error_of,
    experts_of,
    make_routing,
    make_weights,
    part,
    problem_of,
    say,
)
from moekit_bench import Prepared, take_turns
from moekit_deepgemm.plan import expected_slab_rows
from moekit_kernels.align import SortedAssignments, align

import moekit
from moekit.backends.reference import oracle
from moekit.contract import Dispatched, Routing
from moekit.problem import quant
from moekit.runtime.workspace import Workspace

# Microseconds of the pipeline that the issue names, on an H200 (shared/measured.md)
MEASURED = {
    "mixtral": (145, 496, 497, 506, 959, 3162, 12579),
    "qwen3-30b": (40, 223, 318, 324, 341, 698, 2241),
    "dsv3-ep8": (144, 525, 531, 544, 998, 3203, 13323),
}
FP8_FLOPS, BF16_FLOPS, BANDWIDTH = 1424e12, 791e12, 4.49e12
ROUTINGS = 3


def prepared(calls: list[Callable[[], object]]) -> Prepared:
    """A graph over all calls, for moekit_bench to time: its inputs are not looked at."""
    turn, unused = itertools.cycle(calls), torch.empty(1, device="cuda")

    def call(x: torch.Tensor, routing: Routing) -> torch.Tensor:
        next(turn)()
        return x

    made = Prepared(call, [(unused, Routing(unused, unused))] * len(calls), unused.device)
    assert made.graph is not None, made.note
    return made


def timed(calls: list[Callable[[], object]]) -> float:
    """Microseconds of one call in a graph, median of 10 replays."""
    made = prepared(calls)
    return statistics.median(made.graph_us() for _ in range(10))


def limit_us(p: moekit.MoEProblem, tokens: int) -> float:
    pairs = tokens * p.top_k
    per_expert = p.hidden_size * (p.w13_rows + p.intermediate_size)
    active = p.num_experts * (1 - (1 - p.top_k / p.num_experts) ** tokens)
    fp8 = p.quant.activation is not None
    flops = 2 * pairs * per_expert / (FP8_FLOPS if fp8 else BF16_FLOPS)
    return max(flops, active * per_expert * (1 if fp8 else 2) / BANDWIDTH) * 1e6


def standard_calls(p, experts, packed, x, routings, out, workspace):
    """(whole blocks, bare GEMMs): a call for each routing."""
    scratch = workspace.take(experts.workspace(len(x)), x.device)
    blocks, bare = [], []
    for routing in routings:
        tokens = Dispatched(x, None, routing.topk_ids, routing.topk_weights)
        blocks.append(lambda tokens=tokens: experts.apply(out, tokens, packed, scratch))
        plan = experts._plan(routing.topk_ids.numel())
        ends_L = torch.zeros(p.num_local_experts, dtype=torch.int32, device="cuda")
        rows = torch.empty(routing.topk_ids.numel(), dtype=torch.int32, device="cuda")
        layout = SortedAssignments(None, None, None, plan.block_m, rows, ends_L)
        align(routing.topk_ids, p.num_local_experts, layout, scratch[2])
        first, second = experts._first(plan, scratch[3:]), experts._second(plan, scratch[3:])

        def gemms(plan=plan, ends_L=ends_L, first=first, second=second) -> None:
            for name, (a, scale, result) in (("w13", first), ("w2", second)):
                experts._gemm(a, scale, packed, name, result, ends_L, plan)

        bare.append(gemms)
    return blocks, bare


def time_standard(shapes: list[str], token_counts: list[int], **changes) -> None:
    for shape in shapes:
        p = problem_of(SHAPES[shape], **changes)
        with part(f"time {shape}"):
            weights = make_weights(p)
            workspace = Workspace()
            packed = experts_of(p, "deepgemm").pack(weights.canonical(p))
            for tokens in token_counts:
                with part(f"time {shape} T={tokens}"):
                    time_cell(shape, p, tokens, weights, packed, workspace)
            del weights, packed, workspace
        torch.cuda.empty_cache()


def time_cell(shape, p, tokens, weights, packed, workspace) -> None:
    x = torch.randn(tokens, p.hidden_size, device="cuda").bfloat16()
    routings = [make_routing(p, tokens) for _ in range(ROUTINGS)]
    out = torch.empty_like(x)
    limit, flop = limit_us(p, tokens), 6 * tokens * p.top_k * p.hidden_size * p.intermediate_size
    default = experts_of(p, "deepgemm")
    chosen = default._plan(tokens * p.top_k).block_m
    others = [b for b in (16, 32, 64, 128) if b != chosen]
    if tokens * p.top_k / p.num_experts > 64 or p.quant.activation is None:
        others = [b for b in others if b >= 64]
    for block_m in (None, *others):
        with part(f"{shape} T={tokens} block_m={block_m}"):
            experts = experts_of(p, "deepgemm", block_m)
            blocks, bare = standard_calls(p, experts, packed, x, routings, out, workspace)
            block_us, bare_us = timed(blocks), timed(bare)
            note = ""
            if block_m is None:
                blocks[0]()
                error = error_of(out, oracle(x, weights, routings[0], p))
                note = f" error {error:.2e}"
                if p.quant.activation is not None and tokens in TOKENS:
                    measured = MEASURED[shape][TOKENS.index(tokens)]
                    note += f" measured/this {measured / block_us:.2f}"
                kernel = moekit.compose(
                    p, "local", "deepgemm", workspace=workspace, backends=backends()
                )
                calls = [lambda r=r, kernel=kernel: kernel(x, packed, r, out=out) for r in routings]
                note += f" kernel() {timed(calls):.1f}"
            tag = f"{chosen}*" if block_m is None else str(block_m)
            say(f"{shape:9} {p.quant.name:9} T={tokens:5} block_m {tag:4} block {block_us:8.1f} us "
                f"bare GEMMs {bare_us:8.1f} us limit/block {limit / block_us:.2f} "
                f"{flop / block_us * 1e-6:6.0f} TFLOP/s{note}")  # fmt: skip


def time_expected(shapes: list[str], token_counts: list[int]) -> None:
    """The bare GEMMs when the library is told of other numbers of rows an expert: it chooses its
    tiles by them. In turns, so that clocks are the same for all."""
    for shape, tokens in itertools.product(shapes, token_counts):
        p = problem_of(SHAPES[shape])
        x = torch.randn(tokens, p.hidden_size, device="cuda").bfloat16()
        out, workspace = torch.empty_like(x), Workspace()
        routings = [make_routing(p, tokens) for _ in range(ROUTINGS)]
        packed = experts_of(p, "deepgemm").pack(make_weights(p).canonical(p))
        default = experts_of(p, "deepgemm")._plan(tokens * p.top_k)
        if default.expected_m is None:
            say(f"expected {shape} T={tokens}: by the number of pairs")
            continue
        contestants = {}
        for expected_m in (default.expected_m * n // 4 for n in (1, 2, 3, 4, 8)):
            plan = replace(default, expected_m=max(1, expected_m))
            with part(f"expected {shape} T={tokens} {plan}"):
                experts = experts_of(p, "deepgemm")
                experts._plan = lambda pairs, plan=plan: plan
                experts._first_use = lambda key, device: False  # smaller sizes are not needed
                blocks, bare = standard_calls(p, experts, packed, x, routings, out, workspace)
                for block in blocks:  # fills what the bare GEMMs read
                    block()
                contestants[str(plan.expected_m)] = prepared(bare)
        for expected_m, timing in take_turns(contestants, 15, host=False).items():
            told = "" if int(expected_m) != default.expected_m else " (in use)"
            us = timing if isinstance(timing, Exception) else f"{timing.us:.1f} us"
            say(f"expected {shape:9} T={tokens:5} expected_m {expected_m:5}{told} bare GEMMs {us}")
        del packed, workspace
        torch.cuda.empty_cache()


def bare_masked(experts, packed, scratch, counts, y) -> Callable[[], None]:
    p, slab = experts.problem, y.shape[1]
    expected_m = expected_slab_rows(slab, p.top_k, p.num_physical_experts)
    first = experts._input(slab, p.hidden_size, scratch)
    second = experts._input(slab, p.local_intermediate_size, scratch)
    h = experts._output(slab, p.w13_rows, scratch)

    def gemms() -> None:
        experts._gemm(*first, packed, "w13", h, counts, expected_m)
        experts._gemm(*second, packed, "w2", y, counts, expected_m)

    return gemms


def time_batched(shapes: list[str]) -> None:
    for shape in shapes:
        p = problem_of(SHAPES[shape])
        with part(f"batched {shape}"):
            experts = experts_of(p, "deepgemm_batched")
            packed = experts.pack(make_weights(p).canonical(p))
            workspace = Workspace()
            for tokens in (16, 128, 512):
                slab = -(-tokens // 128) * 128
                x = torch.randn(p.num_local_experts, slab, p.hidden_size, device="cuda").bfloat16()
                q, scale = quant.quantize(x, p.quant.activation)
                y = torch.empty_like(x)
                scratch = workspace.take(experts.workspace(slab), x.device)
                made = {"bf16 in": [], "fp8 in": [], "bare GEMMs": []}
                for _ in range(ROUTINGS):
                    ids = make_routing(p, tokens).topk_ids.flatten()
                    counts = torch.bincount(ids, minlength=p.num_local_experts).int()
                    for name, given in (("bf16 in", (x, None)), ("fp8 in", (q, scale))):
                        arrived = Dispatched(*given, expert_num_tokens=counts)
                        made[name].append(partial(experts.apply, y, arrived, packed, scratch))

                    made["bare GEMMs"].append(bare_masked(experts, packed, scratch, counts, y))
                times = ", ".join(f"{name} {timed(calls):.1f} us" for name, calls in made.items())
                say(f"batched {shape:9} T={tokens} C={slab}: {times}, limit "
                    f"{limit_us(p, tokens):.1f}")  # fmt: skip
        torch.cuda.empty_cache()


def profile(shapes: list[str]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    for shape in shapes:
        p = problem_of(SHAPES[shape])
        experts = experts_of(p, "deepgemm")
        packed = experts.pack(make_weights(p).canonical(p))
        for tokens in (16, 1024, 16384):
            x = torch.randn(tokens, p.hidden_size, device="cuda").bfloat16()
            out, routing = torch.empty_like(x), make_routing(p, tokens)
            blocks, _ = standard_calls(p, experts, packed, x, [routing], out, Workspace())
            blocks[0]()
            torch.cuda.synchronize()
            with record(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(3):
                    blocks[0]()
                torch.cuda.synchronize()
            rows = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:10]
            text = [f"{e.key[:48]} {e.self_device_time_total / 3:.1f}" for e in rows]
            say(f"profile {shape} T={tokens}, us a call: " + "; ".join(text))
            begin = time.perf_counter()
            for _ in range(20):
                blocks[0]()
            host = (time.perf_counter() - begin) / 20
            torch.cuda.synchronize()
            if tokens == 16:
                say(f"profile {shape} T={tokens}: host time of an eager call {host * 1e6:.0f} us")
