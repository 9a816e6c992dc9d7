"""Times the products of large calls tile by tile, in turns, on a GPU.

    python plugins/moekit-triton/tests/tiles_device.py [--shapes mixtral] [--tokens 4096 16384]

bf16, uniform routing, two routings in a CUDA graph each; turns of 10 ms, medians of 5, after a
second of work: clocks fall under load, for all alike. Rows in the order of their experts; GEMM 1's
time includes copying them there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

_PLUGIN = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_PLUGIN.parents[1]), str(_PLUGIN / "src")]

import torch  # noqa: E402
from moekit_triton.config import sorted_plan  # noqa: E402
from moekit_triton.gemm import GemmConfig  # noqa: E402
from moekit_triton.tune import Timer, make_case  # noqa: E402

from moekit.bench.shapes import shape  # noqa: E402


def tiles(best: GemmConfig) -> Iterator[tuple[str, GemmConfig]]:
    """best: by specialized warps, as `sorted_plan` has it."""
    plain = replace(best, specialized=False)
    for halves in (True, False):
        named = " halves" if halves else ""
        yield f"specialized{named}", replace(best, halves=halves)
        yield f"tile for tile{named}", replace(plain, halves=halves)
    if best.block_n == 256:  # with a gate, registers are too few
        yield "persistent", replace(plain, halves=False, persistent=True)


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
            for gemm, best in (("first", plan.first), ("second", plan.second)):
                timer, names = Timer(), []
                for label, config in tiles(best):
                    timer.add(case.calls(gemm, config, order="copied"))
                    names.append(label)
                end = time.monotonic() + 1
                while time.monotonic() < end:
                    timer.microseconds(0.0, 1)
                flop = 2 * pairs * problem.hidden_size * problem.local_intermediate_size
                flop *= 2 if gemm == "first" else 1
                for us, label in sorted(zip(timer.microseconds(10e3, 5), names, strict=True)):
                    each = us / len(case.ids)
                    print(f"| {name} | {tokens} | {gemm} | {each:.0f} | {flop / each / 1e6:.0f} | "
                          f"{label} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
