"""Adapters on experts (LoRA) of moekit-triton: checked, and timed beside the base, in CUDA graphs.

    python benchmarks/device/lora_rows.py [--quants none fp8_block] [--ranks 8 32] [--kernels]

Print a Markdown table per scheme: microseconds of qwen3-30b's layer without adapters, and with one
and eight adapters of each LoRA rank, where each token has one. Brackets hold the rate relative to
the base. Processes compile the kernels first, one for each scheme and T. --kernels: also print the
microseconds of each kernel, by a profiler. Exit code 1 if a number is wrong.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from common import DEVICE, Call, failures, in_turns, problem_of, routings_of, say
from moekit_bench import random_weights
from torch.profiler import ProfilerActivity, profile

import moekit
from moekit.backends.reference import oracle
from moekit.plugin import Adapters, AdapterSlots
from moekit.runtime.adapters import shapes
from moekit.testing.compare import complain


def stack_of(problem: moekit.MoEProblem) -> Adapters:
    """Return random adapters whose deltas are as large as the base's products."""
    made = {
        name: torch.randn(sizes, dtype=problem.dtype, device=DEVICE).div_(sizes[-1] ** 0.5)
        for name, sizes in shapes(problem).items()
    }
    assert problem.adapters is not None
    return Adapters(torch.rand(problem.adapters.count, device=DEVICE) + 0.5, **made)


def calls_of(kernel: Any, packed: Any, tokens: int, slots: int) -> list[Call]:
    """Return calls of several routings, in which token t has slot t modulo the slots."""
    x = torch.randn(tokens, kernel.problem.hidden_size, device=DEVICE).to(kernel.problem.dtype)
    ids = torch.arange(tokens, dtype=torch.int32, device=DEVICE) % slots if slots else None
    routings = [replace(r, adapter_ids=ids) for r in routings_of(kernel.problem, tokens)]
    return [lambda r=r: (kernel(x, packed, r), x, r) for r in routings]


def check(what: str, call: Call, kernel: Any, weights: Any, packed: Any) -> None:
    """Compare a call with the oracle, and the bits of tokens without an adapter with the base's."""
    out, x, routing = call()  # type: ignore[misc]
    want = oracle(x, weights, routing, kernel.problem, packed.adapters)
    if said := complain(out, want, kernel.problem):
        failures.append(f"{what}: {said}")
    ids = routing.adapter_ids.clone()
    ids[::2] = -1
    routing = replace(routing, adapter_ids=ids)
    mixed = kernel(x, packed, routing)
    plain = kernel(x, replace(packed, adapters=None), replace(routing, adapter_ids=None))
    if not torch.equal(mixed[::2], plain[::2]):
        failures.append(f"{what}: other bits without an adapter")


def check_replays(what: str, calls: list[Call], replays: int = 20) -> None:
    """Compare the bits of calls in one CUDA graph with the bits of each call alone."""
    want = [call()[0].clone() for call in calls]  # type: ignore[index]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [call()[0] for call in calls]  # type: ignore[index]
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    if not all(map(torch.equal, made, want)):
        failures.append(f"{what}: other bits in a graph")


def kernels(call: Call, runs: int = 5) -> str:
    """Return the microseconds of each kernel of a call."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    times = Counter[str]()
    for event in seen.events():
        times[event.name[:40]] += event.device_time
    return ", ".join(f"{name} {us / runs:.1f}" for name, us in times.items())


def measure(args: argparse.Namespace, quant: str) -> None:
    base_problem = problem_of("qwen3-30b", quant)
    weights = random_weights(base_problem, DEVICE)
    base = moekit.compose(base_problem, "local", "triton")
    base_packed = base.pack(weights)
    made: dict[int, dict[str, list[Call]]] = {
        tokens: {"base": calls_of(base, base_packed, tokens, 0)} for tokens in args.tokens
    }
    names = [(rank, slots) for rank in args.ranks for slots in args.slots]
    times: dict[int, dict[str, float]] = {tokens: {} for tokens in args.tokens}
    for rank, slots in names:
        problem = base_problem.replace(adapters=AdapterSlots(slots, rank))
        kernel = moekit.compose(problem, "local", "triton")
        packed = replace(kernel.pack(weights), adapters=stack_of(problem))
        for tokens in args.tokens:
            name = f"r {rank}, {slots}"
            calls = calls_of(kernel, packed, tokens, slots)
            if args.compile:
                calls[0]()
                made[tokens]["base"][0]()
                continue
            if slots == max(args.slots):
                check(f"{quant} T {tokens} {name}", calls[0], kernel, weights, packed)
                check_replays(f"{quant} T {tokens} {name}", calls)
            found = in_turns({"base": made[tokens]["base"], name: calls}, args.replays)
            us = {key: result.us or 0.0 for key, result in found.items()}
            times[tokens].setdefault("base", us["base"])
            times[tokens][f"{name} rate"] = us["base"] / us[name]
            times[tokens][name] = us[name]
            if args.kernels and slots == max(args.slots):
                say(f"{quant} T {tokens} {name}: {kernels(calls[0])}")
                say(f"  base: {kernels(made[tokens]['base'][0])}")
        del packed
    if args.compile:
        return
    heads = [f"r {rank}, {slots}" for rank, slots in names]
    say(f"\n{quant}, µs\n\n| T | base | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 2)}")
    for tokens, row in times.items():
        cells = (f"{row[name]:.1f} ({row[f'{name} rate']:.3f})" for name in heads)
        say(f"| {tokens} | {row['base']:.1f} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quants", nargs="+", default=["none", "fp8_block"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 32, 128])
    parser.add_argument("--slots", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 128, 1024])
    parser.add_argument("--replays", type=int, default=5)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    start = time.monotonic()
    if not args.compile:
        say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        command = [sys.executable, __file__, "--compile", "--slots", "1", "--ranks"]
        command += map(str, args.ranks)
        started = [
            subprocess.Popen([*command, "--quants", quant, "--tokens", str(tokens)])
            for quant in args.quants
            for tokens in args.tokens
        ]
        if any([process.wait() for process in started]):
            failures.append("a process that compiles failed")
        say(f"compiled in {time.monotonic() - start:.0f} s")
    for quant in args.quants:
        measure(args, quant)
    if not args.compile:
        say(f"\n{time.monotonic() - start:.0f} s, {len(failures)} failures", *failures)
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
