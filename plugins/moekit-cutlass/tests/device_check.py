"""Runs both backends on a Hopper GPU with the true libraries: right numbers first, then times.

    MOEKIT_VLLM_PATH=<.../vllm> python plugins/moekit-cutlass/tests/device_check.py --site <DIR>

--site: a folder named site-packages with quack, nvidia_cutlass_dsl, tvm_ffi ... unpacked in it.
--only: some of `probe w4a8 numbers graph time profile sweep plans` (default: all; an illegal memory
access ends a whole process: run each in its own). --variants: some of `quack quack-copy torch
torch-slow-accum vllm`. --schemes: cut numbers, graph, time. --shapes, --tokens: cut the times.
--budget: seconds for the sweep of quack's tiles. Nothing need be installed besides torch, triton
and pluggy; cutlass_*.py beside this file belong to it. A failing part prints its traceback and the
rest goes on; what failed is listed last, and the exit code is 1. With $OUT set, times go to
$OUT/cutlass_times.jsonl.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path

import torch
from cutlass_device import (
    ARGS,
    BF16_PEAK,
    FAILURES,
    FP8_PEAK,
    LIMIT,
    READ,
    SCHEMES,
    SHAPES,
    TOKENS,
    VARIANTS,
    NaNWorkspace,
    bad,
    chosen_schemes,
    chosen_shapes,
    error_of,
    family,
    microseconds,
    only,
    part,
    problem_of,
    registry,
    routing_of,
    say,
    tokens_of,
    weights_of,
)
from cutlass_libraries import probe, probe_w4a8, sweep
from cutlass_plans import plans
from moekit_cutlass import library

import moekit
from moekit.backends.reference import oracle
from moekit.kernel import ModularKernel
from moekit.runtime.workspace import Workspace


def numbers(backends: moekit.Registry) -> None:
    pairs = (("local", "cutlass"), ("batched_reference", "cutlass_batched"))
    for scheme in chosen_schemes(*SCHEMES):
        odd = (8, 2, 512, 256) if scheme == library.W4A8 else (8, 2, 320, 272)
        shapes = [odd, (8, 2, 1024, 512), (40, 4, 2048, 768)]
        for variant in VARIANTS[family(scheme)]:
            worst, calls = 0.0, 0
            for dispatcher, experts in pairs:
                for index, shape in enumerate(shapes):
                    changes = [{}]
                    if index == 1:
                        changes += [
                            {"has_bias": True},
                            {"activation": "relu2"},
                            {"activation": moekit.Activation("silu", limit=0.5)},
                            {"activation": "swigluoai", "has_bias": True},
                            {"parallel": moekit.ParallelConfig(ep_size=3, ep_rank=1, dp_size=1)},
                            {"dtype": torch.float16},
                        ]
                    for change in changes:
                        what = f"numbers {scheme} {variant} {experts} {shape} {change}"
                        if change.get("dtype") == torch.float16 and (scheme, variant) == (
                            "none", "torch"
                        ):  # fmt: skip
                            continue
                        with part(what), only(scheme, variant):
                            problem = problem_of(shape, scheme, **change)
                            refused = backends.expert(experts).unsupported(problem)
                            if refused and "dtype" in change:
                                say(f"skipped {what}: {'; '.join(refused)}")
                                continue
                            kernel = moekit.compose(
                                problem, dispatcher, experts, backends=backends,
                                workspace=NaNWorkspace(), checked=False,
                            )  # fmt: skip
                            weights = weights_of(problem)
                            packed = kernel.pack(weights)
                            for T in (0, 1, 7, 133, 1500, -133):
                                crowded, T = T < 0, abs(T)
                                routing = routing_of(problem, T, holes=0.2, crowded=crowded)
                                x = tokens_of(problem, routing)
                                out, again = (kernel(x, packed, routing) for _ in range(2))
                                want = oracle(x, weights, routing, problem)
                                error = error_of(out, want) if T else 0.0
                                calls += 1
                                worst = max(worst, error) if error == error else error
                                if not error < LIMIT[family(scheme)] * (2 if T < 9 else 1):
                                    bad(f"WRONG {what} T={T} {crowded=}: {error:.2e}")
                                if not torch.equal(out, again):
                                    bad(f"NOT DETERMINISTIC {what} T={T} {crowded=}")
            say(f"numbers {scheme} {variant}: {calls} calls, worst error {worst:.2e}")


def graph_of(kernel: ModularKernel, packed, inputs) -> torch.cuda.CUDAGraph:
    for x, routing, out in inputs:
        kernel(x, packed, routing, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, routing, out in inputs:
            kernel(x, packed, routing, out=out)
    return graph


def graph(backends: moekit.Registry) -> None:
    for scheme in chosen_schemes("none", "fp8_channel_token", "fp8_tensor_static", library.W4A8):
        for variant in VARIANTS[family(scheme)]:
            with part(f"graph {scheme} {variant}"), only(scheme, variant):
                problem = problem_of((8, 2, 1024, 512), scheme)
                kernel = moekit.compose(
                    problem, "local", "cutlass", backends=backends, checked=False
                )
                weights = weights_of(problem)
                packed, routing = kernel.pack(weights), routing_of(problem, 133)
                x = tokens_of(problem, routing)
                out = torch.empty_like(x)
                captured = graph_of(kernel, packed, [(x, routing, out)])
                errors = []
                for holes in (0.0, 0.3, 1.0):
                    new = routing_of(problem, 133, holes=holes)
                    x.copy_(tokens_of(problem, new))
                    routing.topk_ids.copy_(new.topk_ids)
                    routing.topk_weights.copy_(new.topk_weights)
                    out.fill_(float("nan"))
                    captured.replay()
                    torch.cuda.synchronize()
                    errors.append(error_of(out, oracle(x, weights, new, problem)))
                right = all(e < LIMIT[family(scheme)] for e in errors)
                told = f"graph {scheme} {variant} {' '.join(f'{e:.1e}' for e in errors)}"
                say(f"ok {told}") if right else bad(f"WRONG {told}")


def limit_of(shape: tuple[int, int, int, int], T: int, scheme: str) -> float:
    """Microseconds: arithmetic, or the bytes of the experts that expectedly get a token."""
    E, K, H, inner = shape
    flops, size = {
        "none": (BF16_PEAK, 2), "fp8": (FP8_PEAK, 1), "w4a8": (FP8_PEAK, 0.5)
    }[family(scheme)]  # fmt: skip
    active = E * (1 - (1 - K / E) ** T)
    return 1e6 * max(6 * T * K * H * inner / flops, 3 * active * H * inner * size / READ)


def times(backends: moekit.Registry) -> None:
    folder = os.environ.get("OUT")
    for name, shape in chosen_shapes().items():
        for scheme in chosen_schemes("none", "fp8_channel_token", library.W4A8):
            problem = problem_of(shape, scheme)
            weights = weights_of(problem)
            for variant in VARIANTS[family(scheme)]:
                with part(f"time {name} {scheme} {variant}"), only(scheme, variant):
                    kernel = moekit.compose(
                        problem, "local", "cutlass", backends=backends, checked=False,
                        workspace=Workspace(),
                    )  # fmt: skip
                    packed = kernel.pack(weights)
                    for T in ARGS.tokens or TOKENS:
                        routings = [routing_of(problem, T) for _ in range(3)]
                        x = tokens_of(problem, routings[0])
                        inputs = [(x, routing, torch.empty_like(x)) for routing in routings]
                        us = microseconds(graph_of(kernel, packed, inputs).replay, 3)
                        E, K, H, inner = shape
                        tflops = 6e-6 * T * K * H * inner / us
                        bound = limit_of(shape, T, scheme)
                        say(
                            f"time {name:10} {scheme:17} {variant:16} T {T:5} {us:9.0f} us "
                            f"{tflops:6.0f} TFLOP/s {bound / us:.2f} of the limit, states "
                            f"{kernel.memory(T).total >> 20} MiB"
                        )
                        if folder:
                            record = dict(
                                shape=name, scheme=scheme, variant=variant, T=T, us=us, limit=bound
                            )
                            with open(Path(folder) / "cutlass_times.jsonl", "a") as file:
                                file.write(json.dumps(record) + "\n")


def profile(backends: moekit.Registry) -> None:
    """Microseconds of each kernel in one eager call."""
    for name, T in (("mixtral", 4096), ("mixtral", 16384), ("qwen3-30b", 16384)):
        for scheme, variant in (
            ("none", "quack"), ("none", "quack-copy"), ("none", "torch"),
            ("fp8_channel_token", "torch"), ("fp8_channel_token", "vllm"),
        ):  # fmt: skip
            if variant not in VARIANTS[family(scheme)]:
                continue
            with part(f"profile {name} {scheme} {variant}"), only(scheme, variant):
                problem = problem_of(SHAPES[name], scheme)
                kernel = moekit.compose(
                    problem, "local", "cutlass", backends=backends, checked=False
                )
                packed, routing = kernel.pack(weights_of(problem)), routing_of(problem, T)
                x = tokens_of(problem, routing)
                kernel(x, packed, routing)
                torch.cuda.synchronize()
                with torch.profiler.profile() as recorded:
                    kernel(x, packed, routing)
                    torch.cuda.synchronize()
                events = [e for e in recorded.key_averages() if e.device_time_total > 0]
                events.sort(key=lambda e: -e.self_device_time_total)
                say(f"profile {name} T={T} {scheme} {variant}")
                for event in [e for e in events if e.self_device_time_total][:9]:
                    say(f"  {event.self_device_time_total:9.0f} us x{event.count} {event.key[:90]}")


def main() -> int:
    say("torch", torch.__version__, torch.cuda.get_device_name(), sys.version.split()[0])
    for name in ("triton", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            say(name, importlib.metadata.version(name))
    for name in ("quack", "torch", "vllm"):
        say(f"provider {name}:", library.missing(name) or "usable")
    torch.manual_seed(0)
    backends = registry()
    steps = {
        "probe": probe,
        "w4a8": probe_w4a8,
        "numbers": lambda: numbers(backends),
        "graph": lambda: graph(backends),
        "time": lambda: times(backends),
        "profile": lambda: profile(backends),
        "sweep": sweep,
        "plans": lambda: plans(backends),
    }
    for name in ARGS.only or steps:
        start = time.monotonic()
        say(f"== {name}")
        with part(name):
            steps[name]()
        say(f"== {name} took {time.monotonic() - start:.0f} s")
    say(f"{len(FAILURES)} failures", *FAILURES, sep="\n  ")
    return int(bool(FAILURES))


if __name__ == "__main__":
    sys.exit(main())
