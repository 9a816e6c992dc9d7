"""The `local` dispatcher: nothing moves. One rank, or ranks that all hold the same tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from moekit.kernel import Dispatched, Pending, PrepareAndFinalize, Quantizer, Routing
from moekit.problem import MoEProblem


def local_ids(topk_ids: Tensor, problem: MoEProblem) -> Tensor:
    """Global physical ids -> local ids, -1 for experts of other ranks. Same dtype."""
    experts = problem.local_experts
    if len(experts) == problem.num_physical_experts:
        return topk_ids
    mine = (topk_ids >= experts.start) & (topk_ids < experts.stop)
    return torch.where(mine, topk_ids - experts.start, -1)


class LocalDispatcher(PrepareAndFinalize):
    """STANDARD. The experts write the caller's output; `finalize` has nothing left to do."""

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids = local_ids(routing.topk_ids, self.problem)
        x, scale = x_TH, None
        if quantize is not None:
            x, scale = quantize(x_TH, (ids >= 0).any(dim=1))
        return Pending.ready(Dispatched(x, scale, ids, routing.topk_weights))

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        if y.data_ptr() != out_TH.data_ptr():
            out_TH.copy_(y)
        return Pending.ready(out_TH)

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens
