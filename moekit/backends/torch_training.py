"""The backward of the `torch` experts: rows sorted by expert; x and h are saved.

    forward          h = W13 x + b13, saved; a = act(h); y = sum over k of p (W2 a + b2)
    backward_input   q = W2' g; the gradient of p is <q, a> + <g, b2>; dh = act'(h) p q;
                     the gradient of x is the sum over k of W13' dh
    backward_weight  of W2: g (p a)'; of W13: dh x'; of the biases: p g and dh

p is the router weight and g the gradient of the output row. a is computed again from the saved h,
which is rounded to the problem's dtype.

Shape suffixes beyond the contract's: S assignments sorted by expert, W rows of w13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moekit.backends.adapted_rows import AdaptedRows
from moekit.backends.cpu_experts import Experts
from moekit.backends.sorted_rows import SortedRows, has_grouped_mm
from moekit.backends.torch_experts import TorchExperts
from moekit.contract import Dispatched, PackedWeights
from moekit.contract.adapters import TrainableAdapterExperts
from moekit.contract.training import InputGradients, Wanted
from moekit.problem import MoEProblem
from moekit.problem.activation import apply_activation
from moekit.problem.weights import ExpertWeights


class TrainableTorch(TorchExperts, TrainableAdapterExperts):
    """Every activation, bias and scheme: quantized experts pass gradients to x."""

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        held = weights.tensors()  # with any strides: contiguous copies would be made in each call
        views = {name: t for name, t in held.items() if not name.endswith("input_scale")}
        return PackedWeights(self.spec.name, views)

    def forward(self, y_RH: Tensor, tokens: Dispatched, weights: PackedWeights) -> list[Tensor]:
        ids, topk_weights = tokens.topk_ids, tokens.topk_weights
        assert ids is not None and topk_weights is not None
        experts, rows = Experts(self.problem, weights), SortedRows.of(ids, self.problem)
        x_SH, adapted = tokens.x[rows.token_S], AdaptedRows.of(tokens, weights, rows, self.problem)
        h_SW = adapted.add("w13", rows.linear(x_SH, experts, "w13"), x_SH)
        a_SI = apply_activation(h_SW, self.problem.activation)
        y_SH = adapted.add("w2", rows.linear(a_SI, experts, "w2"), a_SI)
        self._to_tokens(y_SH, rows, ids, topk_weights, y_RH)
        return [rows.real(h_SW), rows.order_S, rows.ends_L]

    def backward_input(
        self,
        grad_RH: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        saved: list[Tensor],
        wanted: Wanted,
    ) -> InputGradients:
        ids, topk_weights = tokens.topk_ids, tokens.topk_weights
        assert ids is not None and topk_weights is not None
        h_SW, rows = saved[0], self._rows(saved, ids)
        experts = Experts(self.problem, weights)
        g_SH = rows.real(grad_RH[rows.token_S])
        adapted = AdaptedRows.of(tokens, weights, rows, self.problem)
        q_SI = rows.real(rows.product(g_SH, experts, "w2", back=True)).float()
        low = {"w2": adapted.back("w2", g_SH, q_SI)}
        p_S1 = rows.real(topk_weights.reshape(-1)[rows.order_S, None])
        a_SI, pull = _activated(h_SW, self.problem)
        dh_SW = pull(p_S1 * q_SI).to(h_SW.dtype)
        dx_RH = dp_RK = dx_SH = None
        if wanted.topk_weights:
            dp_S = (q_SI * a_SI).sum(dim=1)
            if (bias := experts.bias("w2")) is not None:
                dp_S += (g_SH.float() * bias[rows.expert_S()].float()).sum(dim=1)
            dp_RK = torch.zeros_like(topk_weights).view(-1)
            dp_RK[rows.order_S] = dp_S
            dp_RK = dp_RK.view(ids.shape)
        if wanted.x:
            dx_SH = rows.product(dh_SW, experts, "w13", back=True)
        low["w13"] = adapted.back("w13", dh_SW, dx_SH)
        if dx_SH is not None:
            dx_RH = torch.empty_like(tokens.x)
            self._to_tokens(dx_SH, rows, ids, torch.ones_like(topk_weights), dx_RH)
        if not wanted.weights:
            return InputGradients(dx_RH, dp_RK)
        kept = [dh_SW, (p_S1 * a_SI).to(h_SW.dtype)]
        for name, rows_SK in (("w13", tokens.x[rows.token_S]), ("w2", kept[1])):
            if wanted.weights & {f"{name}_a", f"{name}_b"}:
                kept += adapted.kept(name, rows_SK, low[name])
        return InputGradients(dx_RH, dp_RK, tuple(kept))

    def backward_weight(
        self,
        grad_RH: Tensor,
        tokens: Dispatched,
        saved: list[Tensor],
        kept: tuple[Tensor, ...],
        into: Mapping[str, Tensor],
        add: bool,
    ) -> None:
        ids, topk_weights = tokens.topk_ids, tokens.topk_weights
        assert ids is not None and topk_weights is not None
        rows, (dh_SW, pa_SI, *low) = self._rows(saved, ids), kept
        token_S = rows.token_S
        if "w13" in into:
            rows.outer(dh_SW, rows.real(tokens.x[token_S]), into["w13"], add)
        if "w13_bias" in into:
            rows.sums(dh_SW, into["w13_bias"], add)
        g_SH = rows.real(grad_RH[token_S])
        if "w2" in into:
            rows.outer(g_SH, pa_SI, into["w2"], add)
        if "w2_bias" in into:
            p_S1 = topk_weights.reshape(-1)[rows.order_S, None]
            rows.sums(rows.real(p_S1 * g_SH), into["w2_bias"], add)
        if low:
            adapted, left = AdaptedRows.of(tokens, None, rows, self.problem), iter(low)
            x_SH = rows.real(tokens.x[token_S])
            for name, rows_SK, grad_SN in (("w13", x_SH, dh_SW), ("w2", pa_SI, g_SH)):
                adapted.outer(name, into, add, rows_SK, grad_SN, left)

    def _to_tokens(
        self, rows_SH: Tensor, rows: SortedRows, ids_RK: Tensor, weights_RK: Tensor, y_RH: Tensor
    ) -> None:
        """Weight the rows, and sum each token's in the order of k."""
        places = torch.zeros(ids_RK.numel(), dtype=torch.int64, device=ids_RK.device)
        places[rows.order_S] = torch.arange(len(rows.order_S), device=ids_RK.device)
        self.weight_and_reduce(rows_SH, ids_RK, weights_RK, y_RH, places.view(ids_RK.shape))

    def _rows(self, saved: list[Tensor], ids: Tensor) -> SortedRows:
        return SortedRows(saved[1], saved[2], ids.shape[1], has_grouped_mm(self.problem))

    def saved_bytes(self, rows: int) -> int:
        p, assignments = self.problem, rows * self.problem.top_k
        return assignments * (p.w13_rows * p.dtype.itemsize + 8) + 4 * p.num_local_experts

    def transient_bytes(self, rows: int) -> int:
        """Return the most of the forward's and the backward's bytes."""
        p, assignments = self.problem, rows * self.problem.top_k
        W, inner, H, size = p.w13_rows, p.local_intermediate_size, p.hidden_size, p.dtype.itemsize
        # of each assignment: g and dx; q, a and the activation's own in fp32; dh and p a
        each = 2 * H * (size + 4) + 4 * (6 * W + 4 * inner) + size * (W + inner) + 8 * 8
        if p.adapters is not None:  # rows with an adapter and gradients, also between A and B
            each += (2 * (H + W + inner) + 8 * p.adapters.rank) * (size + 4)
        return max(super().transient_bytes(rows), assignments * each + 4 * rows * H * 4)


def _activated(h_SW: Tensor, problem: MoEProblem) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the activation in fp32, and what pulls its gradient back to h."""
    with torch.enable_grad():
        h = h_SW.detach().float().requires_grad_()
        a = apply_activation(h, problem.activation)
    return a.detach(), lambda grad: torch.autograd.grad(a, h, grad)[0]
