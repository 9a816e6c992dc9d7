"""`acme_sorted`: the experts receive one row per (token, expert) assignment, sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moekit.plugin import (
    Dispatched,
    Pending,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    local_ids,
)


class AcmeSorted(PrepareAndFinalize):
    """STANDARD, for tokens that stay on their rank: R = T * K rows, ordered by expert."""

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        assert quantize is None, "the spec declares no wire_schemes"
        ids_TK = local_ids(routing.topk_ids, self.problem)
        order_R = ids_TK.flatten().argsort(stable=True)
        token_R, names = order_R // self.problem.top_k, routing.adapter_ids
        return Pending.ready(
            Dispatched(
                x_TH[token_R],
                topk_ids=ids_TK.view(-1, 1)[order_R],
                topk_weights=routing.topk_weights.view(-1, 1)[order_R],
                handle=order_R,
                adapter_ids=None if names is None else names[token_R],
            )
        )

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        # y may be out_TH itself (when K is 1), so the rows return to token order in a copy.
        rows_RH = torch.empty_like(y)
        rows_RH[dispatched.handle] = y
        T, H = out_TH.shape
        total_TH = rows_RH.view(T, self.problem.top_k, H).sum(dim=1, dtype=torch.float32)
        return Pending.ready(out_TH.copy_(total_TH))

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens * self.problem.top_k

    def transient_bytes(self, num_tokens: int) -> int:
        p, rows = self.problem, self.max_rows(num_tokens)
        copies = 2 * rows * p.hidden_size * p.dtype.itemsize  # the rows of prepare and finalize
        total = num_tokens * p.hidden_size * 4
        return copies + total + rows * 8 * 6  # ids, their order, and temporaries of the sort
