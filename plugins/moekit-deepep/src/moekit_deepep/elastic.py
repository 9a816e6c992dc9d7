"""`deepep_elastic`: DeepEP's kernels over NCCL's device interface, compiled at first use.

    dispatch  one row per (token, rank), in no particular order; ids come local
    experts   return weighted and summed rows
    combine   add each token's rows from all ranks

Shapes are fixed and the host waits for nothing. The library does not write rows that no token was
sent to, nor their ids, so this module sets those ids to -1.
"""

from __future__ import annotations

import deep_ep
import torch.distributed as dist
from torch import Tensor

from moekit.plugin import Dispatched, Lease, Pending, Quantizer, Routing, quantize_for_transfer

from . import buffers, footprint
from .dispatcher import DeepEPDispatcher, Transfer, combined
from .kernels import clear_unused


class ElasticDispatcher(DeepEPDispatcher):
    """STANDARD, R = ranks * max_num_tokens for every call."""

    def _acquire(self, group: dist.ProcessGroup) -> Lease[buffers.Held]:
        p = self.problem
        assert p.max_num_tokens is not None
        self._capacity = p.max_num_tokens
        return buffers.elastic(group, self._capacity, p.hidden_size, p.top_k, p.device.type)

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids = routing.topk_ids.to(deep_ep.topk_idx_t)
        received, ids_RK, weights_RK, handle, event = self._buffer.dispatch(
            x_TH if quantize is None else quantize_for_transfer(x_TH, ids, quantize, self.problem),
            topk_idx=ids,
            topk_weights=routing.topk_weights,
            num_experts=self.problem.num_physical_experts,
            num_max_tokens_per_rank=self._capacity,
            num_sms=footprint.NUM_SMS,
            do_cpu_sync=False,
            async_with_compute_stream=True,
        )
        x_RH, scale = (received, None) if quantize is None else received
        transfer = Transfer(event)

        def arrive() -> Dispatched:
            transfer.wait()
            clear_unused(ids_RK, handle.psum_num_recv_tokens_per_scaleup_rank)
            return Dispatched(x_RH, scale, ids_RK, weights_RK, handle=handle)

        return Pending(arrive)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor | None) -> Pending[Tensor]:
        combined_TH, _, event = self._buffer.combine(
            y, dispatched.handle, async_with_compute_stream=True
        )
        return combined(event, combined_TH, out_TH)

    def max_rows(self, num_tokens: int) -> int:
        return self.group.size() * self._capacity

    def transient_bytes(self, num_tokens: int) -> int:
        return footprint.elastic_transient(self.problem, num_tokens, self.max_rows(num_tokens))
