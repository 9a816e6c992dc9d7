"""Times the products of large calls tile by tile, in turns, on a GPU.

    python plugins/moekit-triton/tests/tiles_device.py [--shapes mixtral] [--tokens 4096 16384]

bf16, uniform routing, two routings in a CUDA graph each; turns of 10 ms, medians of 5, after a
second of work: clocks fall under load, for all alike. Rows in the order of their experts; GEMM 1's
time includes copying them there. both: specialized tiles of both products, with x copied before
GEMM 1, ahead of its tiles, or before both in one launch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

_PLUGIN = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_PLUGIN.parents[1]), str(_PLUGIN / "src")]

import torch  # noqa: E402
from moekit_bench import shape  # noqa: E402
from moekit_triton.config import Plan, sorted_plan  # noqa: E402
from moekit_triton.gemm import GemmConfig  # noqa: E402
from moekit_triton.tune import Case, Timer, make_case  # noqa: E402


def tiles(best: GemmConfig) -> Iterator[tuple[str, GemmConfig]]:
    """best: by specialized warps, as `sorted_plan` has it."""
    plain = replace(best, specialized=False)
    for halves in (True, False):
        named = " halves" if halves else ""
        yield f"specialized{named}", replace(best, halves=halves)
        yield f"tile for tile{named}", replace(plain, halves=halves)
    if best.block_n == 256:  # with a gate, registers are too few
        yield "persistent", replace(plain, halves=False, persistent=True)


def orders(case: Case, plan: Plan) -> Iterator[tuple[str, list[Callable[[], None]]]]:
    """Both products, by each way for rows to come into order."""
    second = case.calls("second", plan.second, order="sorted")
    for order in ("copied", "ahead"):
        first = case.calls("first", plan.first, order=order)
        yield order, [call for pair in zip(first, second, strict=True) for call in pair]
    yield "joined", case.joined(plan.first, plan.second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["qwen3-30b", "dsv3-ep8", "mixtral"])
    parser.add_argument("--tokens", nargs="*", type=int, default=[4096, 16384])
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("\n| shape | T | GEMM | us | TFLOP/s | tiles |\n|---|---|---|---|---|---|", flush=True)
    for name in args.shapes:
        problem = shape(name).problem(device="cuda")
        plan, packed = sorted_plan(problem, 1024.0), None
        for tokens in args.tokens:
            case = make_case(problem, tokens, 2, packed)
            packed = case.packed
            pairs = tokens * problem.top_k
            found = {
                gemm: [(label, case.calls(gemm, c, order="copied")) for label, c in tiles(best)]
                for gemm, best in (("first", plan.first), ("second", plan.second))
            }
            found["both"] = list(orders(case, plan))
            for gemm, ways in found.items():
                timer, names = Timer(), [label for label, _ in ways]
                for _, calls in ways:
                    timer.add(calls)
                end = time.monotonic() + 1
                while time.monotonic() < end:
                    timer.microseconds(0.0, 1)
                flop = 2 * pairs * problem.hidden_size * problem.local_intermediate_size
                flop *= {"first": 2, "second": 1, "both": 3}[gemm]
                for us, label in sorted(zip(timer.microseconds(10e3, 5), names, strict=True)):
                    each = us / len(case.ids)
                    print(f"| {name} | {tokens} | {gemm} | {each:.0f} | {flop / each / 1e6:.0f} | "
                          f"{label} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
