"""`acme`: experts in a few lines of torch, one padded batched matrix product per GEMM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moekit.plugin import (
    BufferSpec,
    Dispatched,
    ExpertWeights,
    PackedWeights,
    PermuteExpertsUnpermute,
    apply_activation,
)


class AcmeExperts(PermuteExpertsUnpermute):
    """BATCHED: x (L, C, H) -> y (L, C, H), C rows per expert. Padding rows are computed too."""

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        weights = weights.dequantize(self.problem.quant, self.problem.dtype)
        packed = {
            "w13_LH2I": weights.w13.mT.contiguous(),
            "w2_LIH": weights.w2.mT.contiguous(),
        }
        return PackedWeights(self.spec.name, packed)

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        p = self.problem
        L, H, I = p.num_local_experts, p.hidden_size, p.local_intermediate_size
        return (BufferSpec((L, rows, H), p.dtype), BufferSpec((L, rows, 2 * I), p.dtype))

    def transient_bytes(self, rows: int) -> int:
        # apply_activation allocates in fp32: gate, up, act(gate), and their product
        p = self.problem
        return p.num_local_experts * rows * 4 * p.local_intermediate_size * 4

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        assert tokens.expert_num_tokens is not None
        x_LCH, h_LC2I = workspace
        row_C = torch.arange(tokens.x.shape[1], device=tokens.x.device)
        padding_LC = row_C >= tokens.expert_num_tokens[:, None]
        # Padding rows may hold NaN, and in some libraries' products a NaN row spoils its neighbour.
        x_LCH.copy_(tokens.x).masked_fill_(padding_LC[..., None], 0)
        torch.bmm(x_LCH, weights["w13_LH2I"], out=h_LC2I)
        a_LCI = apply_activation(h_LC2I, self.problem.activation)
        torch.bmm(a_LCI, weights["w2_LIH"], out=y)
