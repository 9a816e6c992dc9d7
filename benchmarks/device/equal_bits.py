"""Compare the bits that tiles of moekit-triton give a row, which batch-invariant mode relies on.

    python benchmarks/device/equal_bits.py [--quants none fp8_block] [--sizes 16:4:2048:768]

A layer in batch-invariant mode runs by one pinned plan after another (MOEKIT_TRITON_PLAN). Rows of
calls of 1, 2, 17, 65 and 512 tokens are compared with the first plan's rows in the call of 512, and
the largest share of values with other bits is printed: 0 is equal. Inputs are random; in 16 bits
also with sums over columns that cancel in GEMM 1.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from itertools import product

import torch
from common import DEVICE, part, problem_of, say
from moekit_bench import random_weights

import moekit

TOKENS = (1, 2, 17, 65, 512)
# The first plan of a scheme is the reference.
PLANS = {
    "none": (
        "64x64x64 w4 s4 tma | 64x128x64 w4 s4 tma",
        "64x64x128 w4 s3 tma | 64x128x128 w4 s3 tma",
        "64x64x64 w4 s4 tma | 64x256x64 w8 s4 tma",
        "16x64x128 w4 s4 tma swapped | 16x128x128 w4 s3 tma swapped",
        "16x64x64 w4 s5 tma swapped | 16x64x64 w4 s5 tma swapped",
        "16x128x128 w4 s3 tma swapped | 16x256x128 w4 s3 tma swapped",
        "16x128x64 w8 s4 tma swapped | 16x256x64 w4 s4 tma swapped",
        "16x32x128 w4 s5 | 16x64x64 w4 s5 tma",
        "32x64x128 w4 s3 tma swapped | 32x128x64 w4 s5 tma swapped",
        "32x128x64 w4 s4 tma swapped | 32x256x64 w4 s4 tma swapped",
        "128x64x128 g1 w4 s3 halves | 128x128x64 g1 w4 s3 tma halves",
        "128x128x64 w8 s4 tma halves | 128x256x64 w8 s4 tma halves",
    ),
    "fp8_block": (
        "64x128x128 w8 s4 tma | 64x128x128 w4 s4 tma",
        "64x128x128 w4 s3 tma | 64x128x128 w4 s3 tma wide",
        "64x128x128 w4 s3 tma | 64x256x128 w8 s3 tma",
        "16x128x128 w4 s3 tma swapped | 16x128x128 w4 s4 tma swapped",
        "16x128x128 w4 s5 tma swapped | 16x64x128 w4 s5 tma swapped",
        "16x128x128 w4 s4 tma swapped | 16x256x128 w4 s3 tma swapped",
        "16x128x128 w4 s4 tma | 16x128x128 w4 s4 tma",
        "16x128x64 w4 s5 tma swapped | 16x128x64 w4 s5 tma swapped",
        "32x128x128 w4 s3 tma swapped | 32x128x128 w4 s4 tma swapped",
        "128x128x128 w8 s4 tma halves | 128x128x128 w8 s3 halves wide",
    ),
}


def outputs(problem: moekit.MoEProblem, plan: str, *given: object) -> list[torch.Tensor]:
    """Return the outputs of calls of TOKENS, by the plan."""
    os.environ["MOEKIT_TRITON_PLAN"] = f"gathered: {plan}, fused"
    weights, x, routing = given
    kernel = moekit.compose(problem, "local", "triton")
    packed = kernel.pack(weights)
    return [kernel(x[:n], packed, routing.part(slice(n), n)).clone() for n in TOKENS]


def main() -> None:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--quants", nargs="+", default=list(PLANS), choices=PLANS)
    parser.add_argument("--sizes", nargs="+", default=["16:4:2048:768"], help="E:K:H:I")
    args = parser.parse_args()
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for sizes, quant in product(args.sizes, args.quants):
        problem = problem_of(sizes, quant, batch_invariant=True)
        weights = random_weights(problem, DEVICE)
        x = torch.randn(TOKENS[-1], problem.hidden_size, device=DEVICE).to(problem.dtype)
        routed = TOKENS[-1], problem.num_experts, problem.top_k
        routing = moekit.simulate_routing("uniform", *routed, device=DEVICE)
        cases = {"random": (weights, x, routing)}
        if quant == "none":  # columns of opposite signs
            half = problem.hidden_size // 2
            w13 = weights.w13 + 0
            w13[..., half:] = -w13[..., :half]
            cases["cancelling"] = replace(weights, w13=w13), x[:, :half].repeat(1, 2), routing
        for name, given in cases.items():
            want = outputs(problem, PLANS[quant][0], *given)[-1]
            for plan in PLANS[quant]:
                with part(f"{sizes} {quant} {name} {plan}"):
                    found = outputs(problem, plan, *given)
                    apart = max(float((y != want[: len(y)]).float().mean()) for y in found)
                    say(f"| {sizes} | {quant} | {name} | {plan} | {apart:.1e} |")


if __name__ == "__main__":
    main()
