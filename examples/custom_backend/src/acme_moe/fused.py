"""`acme_fused`: a layer in one kernel, which may also choose the experts itself.

Every rank sends its tokens to all ranks. Each runs its experts, or its slices of experts, on all of
them, and the ranks add up what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.plugin import (
    ExpertWeights,
    FusedKernel,
    FusedSpec,
    MoEProblem,
    PackedWeights,
    RouterLogits,
    Routing,
    Transfers,
    apply_activation,
    local_ids,
    resolve,
)


class AcmeFused(FusedKernel):
    def __init__(
        self, spec: FusedSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, resolve(problem, group, protocol="acme-moe fused 1"))
        self._transfers = Transfers(self.group) if self.group is not None else None

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return PackedWeights(self.spec.name, {"w13": weights.w13, "w2": weights.w2})

    def run(
        self, out_TH: Tensor, x_TH: Tensor, weights: PackedWeights, routing: Routing,
        workspace: Sequence[Tensor],
    ) -> None:  # fmt: skip
        ids, p = routing.topk_ids, routing.topk_weights
        if isinstance(routing, RouterLogits):
            p, ids = routing.logits.float().softmax(dim=1).topk(self.problem.top_k)
            p = p / p.sum(dim=1, keepdim=True) if routing.how.renormalize else p
        if self.group is None:
            out_TH.copy_(self._experts(x_TH, ids.long(), p, weights))
            return
        T, N = len(x_TH), self.group.size()
        counts = self._exchange(torch.full((N, 1), T, device=x_TH.device), [1] * N, [1] * N)
        sent, arrived = [T] * N, counts.flatten().tolist()
        rows = (self._exchange(t.repeat(N, 1), sent, arrived) for t in (x_TH, ids.long(), p))
        back = self._exchange(self._experts(*rows, weights), arrived, sent)
        out_TH.copy_(back.view(N, *x_TH.shape).sum(dim=0))

    def transient_bytes(self, num_tokens: int) -> int:
        p, N = self.problem, self.problem.parallel.num_ranks
        row = p.hidden_size * (4 * p.dtype.itemsize + 16) + p.w13_rows * 24 + p.top_k * 64
        return num_tokens * N * row

    def _experts(self, x: Tensor, ids: Tensor, p: Tensor, weights: PackedWeights) -> Tensor:
        ids, total = local_ids(ids, self.problem), torch.zeros(x.shape, device=x.device).float()
        with torch.autocast(x.device.type, enabled=False):
            for expert in range(self.problem.num_local_experts):
                row, k = (ids == expert).nonzero(as_tuple=True)
                h = apply_activation(x[row] @ weights["w13"][expert].T, self.problem.activation)
                y = h.to(x.dtype) @ weights["w2"][expert].T
                total.index_add_(0, row, y.float() * p[row, k, None])
        return total

    def _exchange(self, rows: Tensor, sent: list[int], arrived: list[int]) -> Tensor:
        made = rows.new_empty((sum(arrived), rows.shape[1]))
        views = made.view(torch.uint8), rows.contiguous().view(torch.uint8)
        with self._transfers:
            dist.all_to_all_single(*views, arrived, sent, group=self.group)
        return made
