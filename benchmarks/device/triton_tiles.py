"""Time moekit-triton's GEMMs of large calls tile by tile on a GPU, in turns.

    python benchmarks/device/triton_tiles.py [--shapes mixtral] [--tokens 4096 16384]

bf16, uniform routing, two routings in a CUDA graph each; turns of 10 ms, medians of 5, after a
second of work, since clocks fall under load. GEMM 1's time includes copying x to expert-sorted
rows. "both": specialized tiles of both GEMMs, with x copied before GEMM 1, or ahead of its tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import torch
from moekit_bench import Timer, shape
from moekit_triton.heuristics import sorted_plan
from moekit_triton.kernels.tiles import OrderedTile, SortedTile, SpecializedTile
from moekit_triton.plans import Copied, CopiedAhead, Sorted
from moekit_triton.search import Case, Launches, interleaved_us
from moekit_triton.tune import random_packed


def tiles(best: SpecializedTile, columns: int) -> Iterator[tuple[str, OrderedTile]]:
    """Yield the specialized tile of `sorted_plan` and others of its size."""
    plain = SortedTile(128, columns, 64, best.group_m)
    for halves in (True, False):
        named = " halves" if halves else ""
        yield f"specialized{named}", replace(best, halves=halves)
        yield f"tile for tile{named}", replace(plain, halves=halves)
    if columns == 256:  # with a gate, registers are too few
        yield "persistent", replace(plain, persistent=True)


def alternatives(case: Case, plan: Sorted) -> Iterator[tuple[str, list[tuple[str, Launches]]]]:
    """Yield a GEMM, and the launches that compute it, by name."""
    first = [(name, Copied(tile, tile)) for name, tile in tiles(plan.first, 128)]
    yield "first", [(name, case.launches(one, "gemm_1")) for name, one in first]
    second = [(name, Copied(tile, tile)) for name, tile in tiles(plan.second, 256)]
    yield "second", [(name, case.launches(one, "gemm_2")) for name, one in second]
    whole = [kind(plan.first, plan.second) for kind in (Copied, CopiedAhead)]
    yield "both", [(one.kind, case.launches(one, "gemm_1", "gemm_2")) for one in whole]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["qwen3-30b", "dsv3-ep8", "mixtral"])
    parser.add_argument("--tokens", nargs="*", type=int, default=[4096, 16384])
    args = parser.parse_args()
    timer = Timer(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("\n| shape | T | GEMM | us | TFLOP/s | tiles |\n|---|---|---|---|---|---|", flush=True)
    for name in args.shapes:
        problem = shape(name).problem(device="cuda")
        plan, packed = sorted_plan(problem, 1024.0), None
        for tokens in args.tokens:
            case = Case.make(problem, packed or random_packed(problem), tokens, 2)
            packed = case.calls[0].weights
            for gemm, found in alternatives(case, plan):
                names, launches = zip(*found, strict=True)
                interleaved_us(timer, launches, 1e6 / len(found), 1)  # warms the GPU for a second
                times = interleaved_us(timer, launches, 10e3)
                flop = 2 * tokens * problem.top_k
                flop *= problem.hidden_size * problem.local_intermediate_size
                flop *= {"first": 2, "second": 1, "both": 3}[gemm]
                for us, label in sorted(zip(times, names, strict=True)):
                    each = us / len(case.calls)
                    print(f"| {name} | {tokens} | {gemm} | {each:.0f} | {flop / each / 1e6:.0f} | "
                          f"{label} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
