"""The yardstick: plain fp32 arithmetic, written to be read, not to be fast.

`oracle` is the definition every backend is compared with. `ReferenceExperts` and
`BatchedReference` put the same arithmetic behind the two interfaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moekit.contract import (
    BufferSpec,
    Dispatched,
    PackedWeights,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    Quantizer,
    Routing,
)
from moekit.errors import CapacityExceeded
from moekit.problem import MoEProblem, quant
from moekit.problem.activation import apply_activation
from moekit.problem.weights import ExpertWeights
from moekit.runtime.overlap import Pending


def expert_mlp(x_NH: Tensor, weights: ExpertWeights, expert: int, problem: MoEProblem) -> Tensor:
    """One expert on its rows: (N, H) fp32 -> (N, H) fp32. ``weights`` are fp32."""
    h = x_NH @ weights.w13[expert].T
    if weights.w13_bias is not None:
        h = h + weights.w13_bias[expert].float()
    y = apply_activation(h, problem.activation) @ weights.w2[expert].T
    if weights.w2_bias is not None:
        y = y + weights.w2_bias[expert].float()
    return y


def oracle(x_TH: Tensor, weights: ExpertWeights, routing: Routing, problem: MoEProblem) -> Tensor:
    """The MoE block in fp32 on dequantized weights and unquantized activations: (T, H) fp32.

    ``weights`` hold the physical experts ``problem.local_experts``; ids outside them contribute
    nothing, so the sum of all ranks' results is the whole layer.
    """
    fp32 = weights.canonical(problem).dequantize(problem.quant)
    out = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for expert, physical in enumerate(problem.local_experts):
        token, slot = (routing.topk_ids == physical).nonzero(as_tuple=True)
        x, weight = x_TH[token].float(), routing.topk_weights[token, slot, None]
        if problem.apply_router_weight_on_input:
            x, weight = x * weight, torch.ones_like(weight)
        out.index_add_(0, token, weight * expert_mlp(x, fp32, expert, problem))
    return out


class ReferenceExperts(PermuteExpertsUnpermute):
    """STANDARD, not reducing: every (row, slot) pair on its own, in fp32."""

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return PackedWeights(self.spec.name, *weights.by_expert())

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        return ()

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        assert tokens.topk_ids is not None
        named: dict[str, Any] = dict(weights.experts)
        fp32 = ExpertWeights(**named).dequantize(self.problem.quant)
        x_RH = dequantized_input(tokens, self.problem)
        for expert in range(self.problem.num_local_experts):
            row, slot = (tokens.topk_ids == expert).nonzero(as_tuple=True)
            result = expert_mlp(x_RH[row], fp32, expert, self.problem)
            y[row, slot] = result.to(y.dtype)

    def transient_bytes(self, rows: int) -> int:
        p = self.problem
        weights = p.num_local_experts * p.hidden_size * (p.w13_rows + p.local_intermediate_size)
        activations = rows * p.top_k * (4 * p.hidden_size + 4 * p.w13_rows)
        return 4 * (3 * weights + activations)


def dequantized_input(tokens: Dispatched, problem: MoEProblem) -> Tensor:
    """``tokens.x`` as fp32, whichever way it came."""
    if tokens.x_scale is None:
        return tokens.x.float()
    assert problem.quant.activation is not None
    return quant.dequantize(tokens.x, tokens.x_scale, problem.quant.activation)


class BatchedReference(PrepareAndFinalize):
    """BATCHED tokens of this rank alone: the oracle of the batched format. Padding is NaN."""

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        p, T = self.problem, x_TH.shape[0]
        capacity = self.max_rows(T)
        slab = x_TH.new_full((p.num_local_experts, capacity, p.hidden_size), float("nan"))
        counts = torch.zeros(p.num_local_experts, dtype=torch.int32, device=x_TH.device)
        sent = []  # per expert: the tokens of its slab's rows, and their weights
        for expert, physical in enumerate(p.local_experts):
            token, slot = (routing.topk_ids == physical).nonzero(as_tuple=True)
            if len(token) > capacity:
                raise CapacityExceeded(
                    f"expert {physical} got {len(token)} rows, the slab holds {capacity}: a token "
                    "names the same expert twice"
                )
            counts[expert] = len(token)
            slab[expert, : len(token)] = x_TH[token]
            sent.append((token, routing.topk_weights[token, slot, None]))
        return Pending.ready(Dispatched(slab, expert_num_tokens=counts, handle=sent))

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        total = torch.zeros(out_TH.shape, dtype=torch.float32, device=out_TH.device)
        # Expert by expert: within one, no token comes twice, so the sum has one order.
        for expert, (token, weight) in enumerate(dispatched.handle):
            total.index_add_(0, token, y[expert, : len(token)].float() * weight)
        return Pending.ready(out_TH.copy_(total))

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens

    def transient_bytes(self, num_tokens: int) -> int:
        p = self.problem
        slab = p.num_local_experts * num_tokens * p.hidden_size * p.dtype.itemsize
        return 2 * slab + num_tokens * p.hidden_size * 4 * (2 + p.top_k)
