"""LoRA on experts as PEFT 0.21.2 computes it for `target_parameters`, over torch's grouped_mm.

Every call adds the product of A and B to the matrices of all experts, by one baddbmm for each
parameter. In training, autograd computes the gradient of all matrices behind it. All tokens have
one adapter. A test compares the numbers with PEFT's own layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch_grouped_mm
from moekit_bench import Unavailable

name, trains, adapts = "peft", True, True
version = torch_grouped_mm.version


def make(problem, weights, device, adapters=None):
    if adapters is None:
        raise Unavailable("it is for --adapters")
    if len(adapters.scaling) > 1:
        raise Unavailable("all tokens have one adapter")
    if problem.quant.name != "none":
        raise Unavailable(f"unquantized experts only, not {problem.quant.name}")
    torch_grouped_mm.make(problem, weights, device)  # raises what it cannot do
    scaling = float(adapters.scaling[0])
    a13, b13, a2, b2 = (
        adapters.w13_a[0, :, 0],
        adapters.w13_b[0],
        adapters.w2_a[0],
        adapters.w2_b[0],
    )

    def call(x, routing):
        w13 = torch.baddbmm(weights.w13, b13, a13, alpha=scaling)
        w2 = torch.baddbmm(weights.w2, b2, a2, alpha=scaling)
        return torch_grouped_mm.make(problem, replace(weights, w13=w13, w2=w2), device)(x, routing)

    return call
