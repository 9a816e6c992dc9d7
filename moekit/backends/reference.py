"""Plain fp32 arithmetic, written to be read, not to be fast.

`oracle` defines the result that every backend is compared with. `ReferenceExperts` and
`BatchedReference` offer the same arithmetic through the two interfaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moekit.backends.local import LocalBatchedDispatcher, local_ids
from moekit.contract import Adapters, BufferSpec, Dispatched, PackedWeights, Routing
from moekit.contract.adapters import AdapterExperts, TrainableAdapterExperts
from moekit.contract.interfaces import ADAPTER_NAMES
from moekit.contract.training import InputGradients, Wanted
from moekit.problem import MoEProblem
from moekit.problem.activation import apply_activation
from moekit.problem.quantize import dequantize
from moekit.problem.weights import ExpertWeights

# Multiplies rows (N, K) by the matrix (M, K) of that name, and adds the bias (M): (N, M).
Product = Callable[[str, Tensor, Tensor, Tensor | None], Tensor]


def _product(name: str, rows_NK: Tensor, w_MK: Tensor, bias_M: Tensor | None) -> Tensor:
    made_NM = rows_NK @ w_MK.T
    return made_NM if bias_M is None else made_NM + bias_M.to(made_NM.dtype)


def expert_mlp(
    x_NH: Tensor,
    weights: ExpertWeights,
    expert: int,
    problem: MoEProblem,
    product: Product = _product,
) -> Tensor:
    """Run one expert on its rows: (N, H) fp32 -> (N, H) fp32. ``weights`` are fp32.

    All may be float64 instead. product: makes the products with w13 and w2.
    """
    w = weights
    b13, b2 = (b if b is None else b[expert] for b in (w.w13_bias, w.w2_bias))
    with torch.autocast(x_NH.device.type, enabled=False):
        h = product("w13", x_NH, w.w13[expert], b13)
        return product("w2", apply_activation(h, problem.activation), w.w2[expert], b2)


def oracle(
    x_TH: Tensor,
    weights: ExpertWeights,
    routing: Routing,
    problem: MoEProblem,
    adapters: Adapters | None = None,
    around: Callable[[Product], Product] = lambda product: product,
) -> Tensor:
    """Compute the layer in fp32 on dequantized weights and unquantized activations.

    The result defines what is right: every backend is compared with it. The public name is
    `moekit.testing.oracle`. One expert at a time is dequantized, so a large layer fits.

    Args:
        x_TH: tokens (T, H) of any float dtype.
        weights: the experts ``problem.local_experts`` in the problem's scheme, before `pack`.
        routing: weights (T, K) fp32 and physical ids (T, K). Ids of other ranks' experts and -1 add
            nothing, so the sum of all ranks' results is the whole layer.
        problem: sizes, scheme, activation and biases of the layer.
        adapters: deltas of the experts, by ``routing.adapter_ids``.
        around: changes the products of experts, so that the kit can draw rounding errors.

    Returns:
        (T, H) fp32, or float64 if x is, so that autograd's gradients of it can be proven.
    """
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    held = replace(weights.canonical(problem), w13_input_scale=None, w2_input_scale=None)
    x, topk_weights, ids = x_TH.to(wide), routing.topk_weights, routing.topk_ids
    if problem.apply_router_weight_on_input:
        x = x * torch.where(ids < 0, 0, topk_weights)  # NaN may stand there
        topk_weights = torch.ones_like(topk_weights)
    slots = routing.adapter_ids
    if adapters is not None and slots is None:
        slots = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    adapted = adapters, slots
    return _weighted_sum(x, topk_weights, local_ids(ids, problem), held, problem, adapted, around)


def _weighted_sum(
    x_RH: Tensor,
    weights_RK: Tensor,
    ids_RK: Tensor,
    held: ExpertWeights,
    problem: MoEProblem,
    adapted: tuple[Adapters | None, Tensor | None],
    around: Callable[[Product], Product] = lambda product: product,
) -> Tensor:
    """Return each row's weighted sum over its local experts, (R, H) in x's dtype, through which
    autograd flows. One expert at a time is dequantized to that dtype."""
    out = torch.zeros_like(x_RH)
    for expert in torch.unique(ids_RK[ids_RK >= 0]).tolist():
        row, slot = (ids_RK == expert).nonzero(as_tuple=True)
        dense = held.select([expert]).dequantize(problem.quant, x_RH.dtype)
        product = _adapted(*adapted, expert, row, around(_product))
        made = expert_mlp(x_RH[row], dense, 0, problem, product)
        out.index_add_(0, row, weights_RK[row, slot, None] * made)
    return out


def _adapted(
    adapters: Adapters | None,
    slots_R: Tensor | None,
    expert: int,
    row_N: Tensor,
    plain: Product = _product,
) -> Product:
    """Return the product of an expert's rows, to which it adds the deltas of adapters.

    plain: makes the product, and both products of a delta.
    """
    if adapters is None or slots_R is None:
        return plain
    slots_N = slots_R[row_N]
    present = torch.unique(slots_N[slots_N >= 0]).tolist()

    def product(name: str, rows_NK: Tensor, w_MK: Tensor, bias_M: Tensor | None) -> Tensor:
        made_NM = plain(name, rows_NK, w_MK, bias_M)
        if (pair := adapters.pair(name)) is None:
            return made_NM
        for slot in present:
            mine = (slots_N == slot).nonzero()[:, 0]
            a_GrK, b_Mr = (t[slot, expert].to(rows_NK.dtype) for t in pair)
            b_Gmr = b_Mr.view(len(a_GrK), -1, b_Mr.shape[1])
            low_Gnr = [plain("a", rows_NK[mine], a, None) * adapters.scaling[slot] for a in a_GrK]
            pairs = zip(low_Gnr, b_Gmr, strict=True)
            delta_nM = torch.cat([plain("b", low, b, None) for low, b in pairs], dim=1)
            made_NM = made_NM.index_add(0, mine, delta_nM)
        return made_NM

    return product


class ReferenceExperts(AdapterExperts):
    """STANDARD, not reducing: each assignment by itself, in fp32, one expert after another."""

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
        held, x_RH = ExpertWeights(**named), dequantized_input(tokens, self.problem)
        for expert in range(self.problem.num_local_experts):
            row, slot = (tokens.topk_ids == expert).nonzero(as_tuple=True)
            if len(row):
                fp32 = held.select([expert]).dequantize(self.problem.quant)
                if self.problem.batch_invariant:
                    made = self._one_by_one(x_RH[row], fp32, 0, self.problem)
                else:
                    product = _adapted(weights.adapters, tokens.adapter_ids, expert, row)
                    made = expert_mlp(x_RH[row], fp32, 0, self.problem, product)
                y[row, slot] = made.to(y.dtype)

    @staticmethod
    def _one_by_one(
        x_NH: Tensor, weights: ExpertWeights, expert: int, problem: MoEProblem
    ) -> Tensor:
        """Run one expert on aligned copies of each row by itself: only values differ."""
        rows = x_NH[:, None].unbind()
        return torch.cat([expert_mlp(x_1H.clone(), weights, expert, problem) for x_1H in rows])

    def transient_bytes(self, rows: int) -> int:
        p = self.problem
        weights = p.hidden_size * (p.w13_rows + p.local_intermediate_size)
        activations = rows * p.top_k * (4 * p.hidden_size + 4 * p.w13_rows)
        return 4 * (4 * weights + activations)


class TrainableReference(ReferenceExperts, TrainableAdapterExperts):
    """Saves nothing: the backward computes everything again, by autograd in fp32."""

    def forward(self, y_RH: Tensor, tokens: Dispatched, weights: PackedWeights) -> list[Tensor]:
        assert tokens.topk_weights is not None
        held = dict(weights.experts)
        y_RH.copy_(self._sum(tokens.x.float(), tokens.topk_weights, tokens, held, weights.adapters))
        return []

    def backward_input(
        self,
        grad_RH: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        saved: list[Tensor],
        wanted: Wanted,
    ) -> InputGradients:
        assert tokens.topk_weights is not None
        names = sorted(wanted.weights)
        held = {name: t.detach() for name, t in weights.experts.items()}
        adapters = weights.adapters
        if adapters is not None:
            held |= {name: t.detach() for name, t in adapters.tensors().items()}
        held |= {name: held[name].requires_grad_() for name in names}
        with torch.enable_grad():
            x, topk_weights = (
                t.detach().float().requires_grad_() for t in (tokens.x, tokens.topk_weights)
            )
            y_RH = self._sum(x, topk_weights, tokens, held, adapters)
            inputs = x, topk_weights, *(held[name] for name in names)
            if y_RH.requires_grad:
                made = torch.autograd.grad(y_RH, inputs, grad_RH.float(), materialize_grads=True)
            else:  # no row has a local expert
                made = tuple(map(torch.zeros_like, inputs))
        return InputGradients(made[0].to(tokens.x.dtype), made[1], made[2:])

    def backward_weight(
        self,
        grad_RH: Tensor,
        tokens: Dispatched,
        saved: list[Tensor],
        kept: tuple[Tensor, ...],
        into: Mapping[str, Tensor],
        add: bool,
    ) -> None:
        for name, made in zip(sorted(into), kept, strict=True):
            into[name].copy_(into[name] + made if add else made)

    def saved_bytes(self, rows: int) -> int:
        return 0

    def transient_bytes(self, rows: int) -> int:
        """Add what autograd keeps: activations, every expert's fp32 weights, and gradients."""
        p = self.problem
        weights = p.num_local_experts * p.hidden_size * (p.w13_rows + p.local_intermediate_size)
        return 2 * super().transient_bytes(rows) + weights * (4 + 3 * p.dtype.itemsize)

    def _sum(
        self,
        x_RH: Tensor,
        weights_RK: Tensor,
        tokens: Dispatched,
        held: dict[str, Any],
        adapters: Adapters | None,
    ) -> Tensor:
        """Return the sums, with the weights and the adapters' matrices of ``held``."""
        assert tokens.topk_ids is not None
        weights = ExpertWeights(**{n: t for n, t in held.items() if n not in ADAPTER_NAMES})
        if adapters is not None:
            adapters = replace(adapters, **{n: t for n, t in held.items() if n in ADAPTER_NAMES})
        adapted = adapters, tokens.adapter_ids
        return _weighted_sum(x_RH, weights_RK, tokens.topk_ids, weights, self.problem, adapted)


def dequantized_input(tokens: Dispatched, problem: MoEProblem) -> Tensor:
    """Return ``tokens.x`` as fp32, dequantized if needed."""
    if tokens.x_scale is None:
        return tokens.x.float()
    assert problem.quant.activation is not None
    return dequantize(tokens.x, tokens.x_scale, problem.quant.activation)


class BatchedReference(LocalBatchedDispatcher):
    """BATCHED, for tokens that stay on their rank. Padding is NaN, so experts that read it show."""

    def _empty(self, count: int, rows: Tensor) -> Tensor:
        return rows.new_full((count, rows.shape[1]), float("nan"))
