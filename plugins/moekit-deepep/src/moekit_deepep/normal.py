"""`deepep_ht`: DeepEP's normal kernels, for many tokens.

    layout    find on the device which tokens go to which ranks
    dispatch  one row per (token, rank), ordered by source rank and token; ids arrive local
    experts   return weighted and summed rows
    combine   add each token's rows from all ranks, in rank order and in fp32

The buffer is a set of queues, so its size does not grow with the number of tokens.
"""

from __future__ import annotations

import deep_ep
import torch.distributed as dist
from torch import Tensor

from moekit.errors import InvalidInput
from moekit.plugin import Dispatched, Lease, Pending, Quantizer, Routing, quantize_for_transfer

from . import buffers, footprint
from .dispatcher import DeepEPDispatcher, Transfer, capturing, combined


class NormalDispatcher(DeepEPDispatcher):
    """STANDARD. R is the number of rows that arrive, and the host waits for that number.

    In a CUDA graph, and where ``ranks * max_num_tokens`` is small, R is that product instead and
    the host does not wait.
    """

    def _acquire(self, group: dist.ProcessGroup) -> Lease[buffers.Held]:
        self._dispatch_config, self._combine_config = buffers.normal_configs(group.size())
        self._most_rows = group.size() * (self.problem.max_num_tokens or 0)
        return buffers.normal(group, self.problem.hidden_size)

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids = routing.topk_ids.to(deep_ep.topk_idx_t)
        x = x_TH if quantize is None else quantize_for_transfer(x_TH, ids, quantize, self.problem)
        held, rows = self.lease.value, self._fixed_rows(x_TH)
        per_rank, _, per_expert, in_rank, _ = held.buffer.get_dispatch_layout(
            ids, self.problem.num_physical_experts, async_finish=True
        )
        if rows:
            held.uncounted.add("replays" if capturing(x_TH) else "calls")
        elif held.uncounted:
            # Every dispatch writes its number of rows to one word of the host, also when a graph is
            # replayed. An earlier call's number must not arrive while the host waits for this
            # one's. The library's stream is behind the current one, and so behind its replays.
            held.buffer.get_comm_stream().synchronize()
            held.uncounted.discard("calls")
        received, ids_RK, weights_RK, _, handle, event = held.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=routing.topk_weights,
            num_worst_tokens=rows,
            config=self._dispatch_config,
            async_finish=True,
        )
        x_RH, scale = (received, None) if quantize is None else received
        transfer = Transfer(event)

        def arrive() -> Dispatched:
            transfer.wait()
            return Dispatched(x_RH, scale, ids_RK, weights_RK, handle=handle)

        return Pending(arrive)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor | None) -> Pending[Tensor]:
        combined_TH, _, event = self._buffer.combine(
            y, dispatched.handle, config=self._combine_config, async_finish=True
        )
        return combined(event, combined_TH, out_TH)

    def _fixed_rows(self, x_TH: Tensor) -> int:
        """Return R if it is the same for every call, else 0."""
        captured = capturing(x_TH)
        if captured and not self._most_rows:
            raise InvalidInput(
                "deepep_ht in a CUDA graph needs room for all tokens of the other ranks: set "
                "max_num_tokens in the problem"
            )
        return self._most_rows if captured or self._most_rows <= footprint.FEW_ROWS else 0

    def max_rows(self, num_tokens: int) -> int:
        """Return the most rows outside of CUDA graphs."""
        return self.group.size() * footprint.ht_tokens(self.problem, num_tokens)

    def transient_bytes(self, num_tokens: int) -> int:
        return footprint.ht_transient(self.problem, num_tokens, self.max_rows(num_tokens))
