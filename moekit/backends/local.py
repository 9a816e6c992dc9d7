"""Where nothing moves: one rank, or ranks that all hold the same tokens. `local` is the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moekit.backends.bridge import slab_slots
from moekit.contract import Dispatched, PrepareAndFinalize, Quantizer, Routing
from moekit.problem import MoEProblem
from moekit.runtime.overlap import Pending

if TYPE_CHECKING:
    import torch.distributed as dist

    from moekit.discovery.specs import DispatcherSpec


def local_ids(topk_ids: Tensor, problem: MoEProblem) -> Tensor:
    """Global physical ids -> local ids, -1 for experts of other ranks. Same dtype."""
    experts = problem.local_experts
    if len(experts) == problem.num_physical_experts:
        return topk_ids
    mine = (topk_ids >= experts.start) & (topk_ids < experts.stop)
    return torch.where(mine, topk_ids - experts.start, -1)


class LocalDispatcher(PrepareAndFinalize):
    """STANDARD. The experts write the caller's output; `finalize` has nothing left to do."""

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, group)
        self._holds_all = problem.num_local_experts == problem.num_physical_experts

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids = routing.topk_ids if self._holds_all else local_ids(routing.topk_ids, self.problem)
        x, scale = x_TH, None
        if quantize is not None:
            x, scale = quantize(x_TH, (ids >= 0).any(dim=1))
        return Pending.ready(Dispatched(x, scale, ids, routing.topk_weights))

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        if y is not out_TH and y.data_ptr() != out_TH.data_ptr():
            out_TH.copy_(y)
        return Pending.ready(out_TH)

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens


class LocalSlabs(PrepareAndFinalize):
    """BATCHED: rows are copied to their experts' slabs and gathered back, on the device alone.

    What dispatchers of that format do where nothing moves.
    """

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids, tokens = local_ids(routing.topk_ids, self.problem), x_TH.shape[0]
        x, scale, L = x_TH, None, self.problem.num_local_experts
        if quantize is not None:
            x, scale = quantize(x_TH, (ids >= 0).any(dim=1))
            scale = scale.expand(tokens, -1)
        slot_TK, counts_L = slab_slots(ids, L, tokens)

        def slab(rows: Tensor) -> Tensor:
            # One row more swallows what has no expert here.
            made = rows.new_empty((L * tokens + 1, rows.shape[1]))
            for k in range(ids.shape[1]):
                made[slot_TK[:, k]] = rows
            return made[:-1].view(L, tokens, -1 if rows.numel() else rows.shape[1])

        dispatched = Dispatched(
            x=slab(x),
            x_scale=None if scale is None else slab(scale),
            expert_num_tokens=counts_L,
            handle=(ids, slot_TK, routing.topk_weights),
        )
        return Pending.ready(dispatched)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        ids, slot_TK, weights = dispatched.handle
        total = torch.zeros(out_TH.shape, dtype=torch.float32, device=out_TH.device)
        rows = y.view(-1, y.shape[2])
        for k in range(ids.shape[1] if rows.shape[0] else 0):
            row = rows[slot_TK[:, k].clamp(max=rows.shape[0] - 1)].float()
            total += torch.where(ids[:, k, None] >= 0, row * weights[:, k, None], 0.0)
        return Pending.ready(out_TH.copy_(total))

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens

    def transient_bytes(self, num_tokens: int) -> int:
        p = self.problem
        slab = (p.num_local_experts * num_tokens + 1) * p.hidden_size * p.dtype.itemsize
        indices = num_tokens * p.top_k * 8 * 8
        return slab + num_tokens * p.hidden_size * 4 * 4 + indices
