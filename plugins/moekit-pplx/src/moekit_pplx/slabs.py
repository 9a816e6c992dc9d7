"""Where no token moves: the rows of this rank's tokens, copied to slabs and gathered back."""

from __future__ import annotations

import torch
from torch import Tensor

from moekit.bridge import slab_slots
from moekit.kernel import Dispatched, Pending, PrepareAndFinalize, Quantizer, Routing
from moekit.local import local_ids


class OneRankSlabs(PrepareAndFinalize):
    """BATCHED, for ranks that all hold the same tokens. Nothing waits for the host."""

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
