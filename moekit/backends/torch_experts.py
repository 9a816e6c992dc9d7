"""The `torch` experts: fast everywhere torch runs, with nothing else installed.

Shape suffixes beyond the kernel's: S expert-sorted assignments, W rows of w13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moekit.backends import cpu_costs, cpu_experts, row_blocks
from moekit.backends.adapted_rows import AdaptedRows
from moekit.backends.cpu_experts import Experts, activate
from moekit.backends.sorted_rows import SortedRows
from moekit.contract import BufferSpec, Dispatched, PackedWeights
from moekit.contract.adapters import AdapterExperts
from moekit.problem.quantize import dequantize
from moekit.problem.weights import ExpertWeights


class TorchExperts(AdapterExperts):
    """STANDARD, reducing: rows sorted by expert, one pair of matrix products per expert.

    Quantized weights are dequantized one expert at a time, and activations stay unquantized:
    products are in the problem's dtype. In float16 an intermediate value above 65504 becomes
    infinite, although its router weight or the sum over K may bring it back into range. So rows
    whose result is not finite are computed again in float32. Batch-invariant problems run in
    `row_blocks`.
    """

    _chosen: tuple[object, cpu_experts.Choice] | None = None

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        if self.problem.batch_invariant:
            with cpu_costs.onednn_kept():
                row_blocks.sizes_for(self.problem, weights.w13.device)
        elif self._on_cpu:
            self._choice()  # methods are timed here, before the first call
        return PackedWeights(self.spec.name, *weights.by_expert())

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        if not self._on_cpu or self.problem.batch_invariant:
            return ()
        return (cpu_experts.workspace(self.problem, rows * self.problem.top_k),)

    def transient_bytes(self, rows: int) -> int:
        p = self.problem
        half = p.dtype == torch.float16  # perhaps all rows are computed again in fp32
        size = 4 if half else p.dtype.itemsize
        assignments = rows * p.top_k
        activations = assignments * (p.hidden_size * (3 * size + 4) + p.w13_rows * (size + 8))
        weights = p.hidden_size * max(p.w13_rows, p.local_intermediate_size)
        dequantized = 4 * weights if half else 0
        if p.quant.weight is not None:
            dequantized = weights * (12 + 2 * size)
        if p.quant.weight is not None and p.quant.weight.packed:
            dequantized += weights * 14  # unpacked, zero points, g_idx's indices
        if p.batch_invariant:
            return row_blocks.transient_bytes(p, rows) + dequantized + 8 * weights
        activations += 12 * 8 * (assignments + p.num_local_experts)  # the sort's indices
        if self._on_cpu:
            activations = max(activations, cpu_experts.transient_bytes(p, assignments))
        if p.adapters is not None:  # the rows of both products, between A and B, and the deltas
            wide = 2 * p.hidden_size + p.w13_rows + p.local_intermediate_size
            activations += assignments * (wide + 4 * p.adapters.rank) * (size + 4)
            dequantized += 4 * p.adapters.rank * (wide + p.hidden_size)
        return activations + 2 * 4 * rows * p.hidden_size + dequantized

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        device = tokens.x.device.type
        if torch.is_autocast_enabled(device):  # the problem names the dtype
            # Not self.apply, which a subclass may extend.
            with torch.autocast(device, enabled=False):
                return TorchExperts.apply(self, y, tokens, weights, workspace)
        x, ids, topk_weights = tokens.x, tokens.topk_ids, tokens.topk_weights
        assert ids is not None and topk_weights is not None
        if tokens.x_scale is not None:
            assert self.problem.quant.activation is not None
            x = dequantize(x, tokens.x_scale, self.problem.quant.activation, self.problem.dtype)
        experts = Experts(self.problem, weights)
        slots = None if weights.adapters is None else tokens.adapter_ids
        if self.problem.batch_invariant:
            with cpu_costs.onednn_kept():
                sizes = row_blocks.sizes_for(self.problem, x.device)
                return row_blocks.run(experts, sizes, y, x, ids)
        if self._on_cpu:
            cpu_experts.run(experts, self._choice(), y, x, ids, topk_weights, workspace[0])
        else:
            _on_any_device(experts, y, x, ids, topk_weights, slots)
        if y.dtype == torch.float16 and not math.isfinite(y.sum(dtype=torch.float32).item()):
            row = (~y.isfinite().all(dim=1)).nonzero()[:, 0]
            again = y[row]
            some = ids[row], topk_weights[row], None if slots is None else slots[row]
            _on_any_device(experts.in_fp32(), again, x[row].float(), *some)
            y[row] = again

    @property
    def _on_cpu(self) -> bool:
        """Return whether `cpu_experts` runs; it takes no adapters."""
        return self.problem.device.type == "cpu" and self.problem.adapters is None

    def _choice(self) -> cpu_experts.Choice:
        now = torch.get_num_threads(), cpu_costs.onednn_enabled()
        if self._chosen is None or self._chosen[0] != now:
            chosen = cpu_experts.choice(self.problem)
            assert chosen is not None
            self._chosen = now, chosen
        return self._chosen[1]


def _on_any_device(
    experts: Experts,
    y_RH: Tensor,
    x_RH: Tensor,
    ids_RK: Tensor,
    topk_weights_RK: Tensor,
    slots_R: Tensor | None = None,
) -> None:
    """Write the weighted sum of each token's experts to y, summed in fp32.

    Where there is a grouped GEMM, the host does not wait for the device.
    """
    rows = SortedRows.of(ids_RK, experts.problem)
    tokens = Dispatched(x_RH, topk_ids=ids_RK, adapter_ids=slots_R)
    x_SH = x_RH[rows.token_S]
    adapted = AdaptedRows.of(tokens, experts.weights, rows, experts.problem)
    h_SW = adapted.add("w13", rows.linear(x_SH, experts, "w13"), x_SH)
    a_SI = activate(h_SW, experts.problem.activation)
    z_SH = adapted.add("w2", rows.linear(a_SI, experts, "w2"), a_SI)
    weighted_SH = rows.real(z_SH.float() * topk_weights_RK.reshape(-1)[rows.order_S, None])
    each = weighted_SH.new_zeros(ids_RK.numel(), x_RH.shape[1])
    each[rows.order_S] = weighted_SH
    y_RH.copy_(each.view(*ids_RK.shape, -1).sum(dim=1))
