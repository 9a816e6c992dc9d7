"""Measure how much rounding activations, to a scheme or to 16 bits, changes each token's output.

Some tokens are many times as sensitive as the usual one: a neuron or two decide their output, and
the activation function makes the errors of these larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moekit.problem import quant
from moekit.problem.activation import apply_activation
from moekit.testing.cases import Case, generator
from moekit.testing.compare import Rounding, errors

_DRAWS = 32


def rounding_errors(case: Case) -> Rounding:
    """Return the largest errors in random draws; tokens without an expert get 0.

    A draw adds the rounding errors of the problem's scheme, or of its dtype if the scheme has
    unquantized activations, with random signs, to the inputs of both GEMMs. Other arithmetic is
    exact.
    """
    p, ids = case.problem, case.routing.topk_ids
    local = (ids >= p.local_experts.start) & (ids < p.local_experts.stop)
    weights_TK = torch.where(local, case.routing.topk_weights, 0.0)
    x_TH = torch.where(local.any(dim=1, keepdim=True), case.x.float(), 0.0)
    if p.apply_router_weight_on_input:
        x_TH, weights_TK = x_TH * weights_TK, local.float()
    w = case.weights.canonical(p).dequantize(p.quant)
    draw = generator("rounding", device=x_TH.device)

    def output(rounds: bool) -> Tensor:
        x, out = x_TH, torch.zeros_like(x_TH)
        if rounds:
            x = _rounded(x, case, w.w13_input_scale, draw)
        for expert, physical in enumerate(p.local_experts):
            token, k = (ids == physical).nonzero(as_tuple=True)
            h = x[token] @ w.w13[expert].T
            if w.w13_bias is not None:
                h = h + w.w13_bias[expert].float()
            if rounds and p.quant.activation is None:  # a kernel may write h in the dtype
                h = _rounded(h, case, None, draw)
            inner = apply_activation(h, p.activation)
            if rounds:
                inner = _rounded(inner, case, w.w2_input_scale, draw)
            y = inner @ w.w2[expert].T
            if w.w2_bias is not None:
                y = y + w.w2_bias[expert].float()
            out.index_add_(0, token, weights_TK[token, k, None] * y)
        return out

    exact, row_T = output(rounds=False), torch.zeros(len(x_TH), device=x_TH.device)
    scale = offset = 0.0
    for _ in range(_DRAWS):
        out = output(rounds=True)
        row_T = torch.maximum(row_T, (out - exact).square().mean(dim=1).sqrt())
        found = errors(out, exact)
        scale = max(scale, abs(found.scale.value))
        offset = max(offset, abs(found.offset.value))
    return Rounding(row_T, scale, offset)


def _rounded(x: Tensor, case: Case, static: Tensor | None, draw: torch.Generator) -> Tensor:
    """Return x (rows, columns) fp32 with the scheme's rounding errors, of random signs."""
    operand = case.problem.quant.activation
    if operand is None:
        near = x.to(case.problem.dtype).float()
    else:
        given = static.max() if operand.static and static is not None else None
        near = quant.dequantize(*quant.quantize(x, operand, given), operand)
    signs = 2 * torch.randint(0, 2, x.shape, generator=draw, device=x.device) - 1
    return x + signs * (near - x)
