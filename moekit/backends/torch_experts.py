"""The `torch` experts: fast everywhere torch runs, with nothing else installed.

Shape suffix beyond the kernel's: S expert-sorted assignments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.backends import cpu_costs, cpu_experts, row_blocks
from moekit.backends.cpu_experts import Experts, activate
from moekit.contract import BufferSpec, Dispatched, PackedWeights, PermuteExpertsUnpermute
from moekit.problem import MoEProblem, quant
from moekit.problem.weights import ExpertWeights


class TorchExperts(PermuteExpertsUnpermute):
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
        elif self.problem.device.type == "cpu":
            self._choice()  # methods are timed here, before the first call
        return PackedWeights(self.spec.name, *weights.by_expert())

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        if self.problem.device.type != "cpu" or self.problem.batch_invariant:
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
        if p.device.type == "cpu":
            activations = max(activations, cpu_experts.transient_bytes(p, assignments))
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
            x = quant.dequantize(
                x, tokens.x_scale, self.problem.quant.activation, self.problem.dtype
            )
        experts = Experts(self.problem, weights)
        if self.problem.batch_invariant:
            with cpu_costs.onednn_kept():
                sizes = row_blocks.sizes_for(self.problem, x.device)
                return row_blocks.run(experts, sizes, y, x, ids)
        if x.device.type == "cpu":
            cpu_experts.run(experts, self._choice(), y, x, ids, topk_weights, workspace[0])
        else:
            _on_any_device(experts, y, x, ids, topk_weights)
        if y.dtype == torch.float16 and not math.isfinite(y.sum(dtype=torch.float32).item()):
            row = (~y.isfinite().all(dim=1)).nonzero()[:, 0]
            again = y[row]
            _on_any_device(experts.in_fp32(), again, x[row].float(), ids[row], topk_weights[row])
            y[row] = again

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
) -> None:
    """Sort, run two grouped GEMMs (no host synchronization), permute back and sum in fp32."""
    problem, weights = experts.problem, experts.weights
    (R, H), K, L = x_RH.shape, ids_RK.shape[1], problem.num_local_experts
    ids_S, order_S = torch.sort(torch.where(ids_RK < 0, L, ids_RK).view(-1), stable=True)
    ends_L = torch.searchsorted(
        ids_S, torch.arange(L, device=ids_S.device, dtype=ids_S.dtype), right=True
    ).int()
    x_SH = x_RH[order_S // K]
    if _has_grouped_mm(problem):
        bias_row = ids_S.clamp(max=L - 1)
        h = F.grouped_mm(x_SH, weights["w13"].mT, offs=ends_L)
        if (bias := experts.bias("w13")) is not None:
            h = h + bias[bias_row]
        act = activate(h, problem.activation)
        z_SH = F.grouped_mm(act, weights["w2"].mT, offs=ends_L)
        if (bias := experts.bias("w2")) is not None:
            z_SH = z_SH + bias[bias_row]
    else:
        z_SH = _expert_loop(experts, x_SH, ends_L.tolist())
    # Rows past ends_L[-1] were never written: select, never multiply by zero.
    weighted = torch.where(
        ids_S[:, None] < L, z_SH.float() * topk_weights_RK.reshape(-1)[order_S, None], 0.0
    )
    back_S = torch.empty_like(order_S)
    back_S[order_S] = torch.arange(R * K, device=order_S.device)
    y_RH.copy_(weighted[back_S].view(R, K, H).sum(dim=1))


def _has_grouped_mm(problem: MoEProblem) -> bool:
    """Return whether torch's grouped GEMM runs: bf16, 16-byte rows, capability 8.0 or later, fewer
    than 1024 experts (its CUDA kernels' limit)."""
    sizes = (problem.hidden_size, problem.local_intermediate_size)
    return (
        problem.device.type == "cuda"
        and (problem.device.capability or (0, 0)) >= (8, 0)
        and problem.dtype == torch.bfloat16
        and problem.quant.weight is None
        and problem.num_local_experts < 1024
        and all(size % 8 == 0 for size in sizes)
    )


def _expert_loop(experts: Experts, x_SH: Tensor, ends: Sequence[int]) -> Tensor:
    """Return the experts' outputs in fp32."""
    z_SH, start = torch.empty_like(x_SH, dtype=torch.float32), 0
    for expert, end in enumerate(ends):
        if end > start:
            cpu_experts.run_expert("right", experts, expert, x_SH[start:end], z_SH[start:end])
            start = end
    return z_SH
