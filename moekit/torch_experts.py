"""The `torch` experts: fast everywhere torch runs, with nothing else installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moekit import quant
from moekit.activation import apply_activation
from moekit.kernel import BufferSpec, Dispatched, PackedWeights, PermuteExpertsUnpermute
from moekit.weights import ExpertWeights


class TorchExperts(PermuteExpertsUnpermute):
    """STANDARD, reducing: rows sorted by expert, one pair of matrix products per expert.

    Quantized weights are dequantized one expert at a time, and activations stay unquantized: the
    arithmetic is that of the problem's dtype.
    """

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        named = weights.tensors()
        shared = {
            short: named.pop(name)
            for name, short in (("w13_input_scale", "a1_scale"), ("w2_input_scale", "a2_scale"))
            if name in named
        }
        return PackedWeights(self.spec.name, named, shared)

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        p = self.problem
        return (BufferSpec((rows, p.hidden_size), torch.float32),)

    def transient_bytes(self, rows: int) -> int:
        p, size = self.problem, self.problem.dtype.itemsize
        pairs = rows * p.top_k
        widest = 2 * p.hidden_size + 3 * p.w13_rows
        weights = p.hidden_size * (p.w13_rows + p.local_intermediate_size)
        dequantized = 0 if p.quant.weight is None else weights * (8 + size)
        return pairs * (widest * 4 + 64) + rows * p.hidden_size * 4 + dequantized

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        assert tokens.topk_ids is not None and tokens.topk_weights is not None
        p = self.problem
        (total,) = workspace
        total = total[: y.shape[0]].zero_()
        flat = tokens.topk_ids.reshape(-1)
        order = flat.argsort(stable=True)
        bounds = torch.arange(p.num_local_experts + 1, device=flat.device, dtype=flat.dtype)
        edges = torch.searchsorted(flat[order], bounds).tolist()
        row = order // tokens.topk_ids.shape[1]
        weight = tokens.topk_weights.reshape(-1)[order]
        x = tokens.x
        if tokens.x_scale is not None:
            assert p.quant.activation is not None
            x = quant.dequantize(x, tokens.x_scale, p.quant.activation, p.dtype)
        for expert, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
            if start == stop:
                continue
            rows = row[start:stop]
            h = x[rows] @ self._matrix(weights, "w13", expert).T
            if (bias := weights.get("w13_bias")) is not None:
                h += bias[expert]
            result = apply_activation(h, p.activation) @ self._matrix(weights, "w2", expert).T
            if (bias := weights.get("w2_bias")) is not None:
                result += bias[expert]
            total.index_add_(0, rows, result.float() * weight[start:stop, None])
        y.copy_(total)

    def _matrix(self, weights: PackedWeights, name: str, expert: int) -> Tensor:
        matrix, operand = weights[name][expert], self.problem.quant.weight
        if operand is None:
            return matrix
        scale = weights[f"{name}_scale"][expert]
        return quant.dequantize(matrix, scale, operand, self.problem.dtype)
