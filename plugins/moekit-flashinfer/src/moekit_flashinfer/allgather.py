"""`flashinfer_allgather`: the exchange that inference engines call FlashInfer's all-gather.

    gather   send every rank's tokens to every rank, quantized where the experts allow it
    experts  each rank computes its share over R = ranks * `max_tokens` rows (without it:
             max_num_tokens)
    reduce   add every token's rows from all ranks, in rank order and in fp32

All collectives have sizes fixed by that number. No host needs to know how many tokens the other
ranks have, so nothing waits for a host, and CUDA graphs can capture calls. FlashInfer itself is not
needed, and gloo works as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.plugin import (
    Dispatched,
    DispatcherSpec,
    MoEProblem,
    Pending,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    Transfers,
    local_ids,
    quantize_for_transfer,
    resolve,
)

# Newer releases of torch renamed this function, and warn about the old name.
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


class AllGatherDispatcher(PrepareAndFinalize):
    """STANDARD, over torch.distributed. Each of the ep_size * tp_size ranks has its own tokens.

    Construction and calls are collective; x must stay unchanged until the result is taken.
    """

    group: dist.ProcessGroup  # this dispatcher is made only where tokens move

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, resolve(problem, group, "moekit-flashinfer allgather 1"))
        assert self.group is not None and problem.max_num_tokens is not None
        self._capacity = problem.max_num_tokens
        self._transfers = Transfers(self.group)

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        p, ids, x, most = self.problem, routing.topk_ids, x_TH, routing.most(self._capacity)
        columns = [ids, routing.topk_weights.view(torch.int32)]
        if quantize is not None:
            x, scale = quantize_for_transfer(x_TH, ids, quantize, p)
            columns.append(scale.view(torch.int32))
        with self._transfers:
            x_RH, wait_x = self._gather(x, most)
            meta_RM, wait_meta = self._gather(torch.cat(columns, dim=1), most)

        def arrive() -> Dispatched:
            with self._transfers:
                wait_x()
                wait_meta()
            k = p.top_k
            scale = meta_RM[:, 2 * k :].contiguous().view(torch.float32)
            return Dispatched(
                x=x_RH,
                x_scale=scale if scale.shape[1] else None,
                topk_ids=local_ids(meta_RM[:, :k].contiguous(), p),
                topk_weights=meta_RM[:, k : 2 * k].contiguous().view(torch.float32),
                handle=len(ids),
            )

        return Pending(arrive)

    def _gather(self, mine: Tensor, most: int) -> tuple[Tensor, Callable[[], None]]:
        """Start (T, N) -> (R, N) in rank order; rows beyond T hold -1, which is NaN as a float."""
        (tokens, columns), dtype = mine.shape, mine.dtype
        if tokens < most:
            padded = mine.new_empty((most, columns))
            padded[tokens:].view(torch.uint8).fill_(0xFF)
            padded[:tokens] = mine
            mine = padded
        mine = mine.view(torch.uint8)  # gloo supports neither fp8 nor every 16-bit type
        everyone = mine.new_empty((self.group.size() * most, mine.shape[1]))
        work = _all_gather(everyone, mine, group=self.group, async_op=True)

        def wait(mine: Tensor = mine) -> None:  # keeps the source alive until it is sent
            work.wait()

        return everyone.view(dtype), wait

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        partial_RH = torch.empty_like(y)
        with self._transfers:
            work = dist.all_to_all_single(
                partial_RH.view(torch.uint8),
                y.contiguous().view(torch.uint8),
                group=self.group,
                async_op=True,
            )

        def combine() -> Tensor:
            with self._transfers:
                work.wait()
            partial_GTH = partial_RH.view(self.group.size(), -1, y.shape[1])
            partial_GTH = partial_GTH[:, : dispatched.handle]
            return out_TH.copy_(torch.sum(partial_GTH, dim=0, dtype=torch.float32))

        return Pending(combine)

    def max_rows(self, num_tokens: int) -> int:
        return self.group.size() * self._capacity

    def transient_bytes(self, num_tokens: int) -> int:
        """Return the bytes of gathered and returned rows, this rank's padded ones, and sums."""
        p = self.problem
        row, meta = p.hidden_size * p.dtype.itemsize, 4 * (2 * p.top_k + p.scales_per_row)
        # Ids, weights and scales apart; ids shifted and selected, with two masks.
        arriving = 2 * row + 2 * meta + p.top_k * (3 * 4 + 2)
        sent = self._capacity * (row + 2 * meta) + num_tokens * p.hidden_size * 4
        return self.max_rows(num_tokens) * arriving + sent
