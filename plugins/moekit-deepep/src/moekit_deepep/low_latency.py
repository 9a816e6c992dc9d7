"""`deepep_ll`: DeepEP's low-latency kernels, for few tokens.

    dispatch  a row per assignment into the batched layout; the library quantizes fp8 blocks
    experts   return rows that are neither weighted nor summed
    combine   weight each token's rows from all its experts and add them in fp32

Each step is one kernel that sends and receives. The library's hooks, which delay receiving, are not
used: over NVLink the sender stores into the receiver's memory, so a hook hides no transfer, and a
second call could not start before the first one's tokens were received.
"""

from __future__ import annotations

from contextlib import suppress

import deep_ep
import torch
import torch.distributed as dist
from torch import Tensor

from moekit.plugin import Dispatched, Lease, Pending, Quantizer, Routing

from . import buffers, footprint
from .dispatcher import DeepEPDispatcher, Transfer, capturing, combined


class LowLatencyDispatcher(DeepEPDispatcher):
    """BATCHED, C = ranks * max_num_tokens (rounded up to be even), for every call.

    All dispatchers of one shape share a buffer, but several shapes may be in use at a time.
    """

    def _protocol(self) -> str:
        return f"{super()._protocol()}, NVSHMEM between ranks {buffers.connected()}"

    def _acquire(self, group: dist.ProcessGroup) -> Lease[buffers.Held]:
        p = self.problem
        assert p.max_num_tokens is not None
        self._capacity = footprint.even(p.max_num_tokens)
        return buffers.low_latency(group, self._capacity, p.hidden_size, p.num_physical_experts)

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids = routing.topk_ids.to(deep_ep.topk_idx_t)
        received, counts_L, handle, event, _ = self._buffer.low_latency_dispatch(
            x_TH,
            ids,
            self._capacity,
            self.problem.num_physical_experts,
            use_fp8=quantize is not None,
            async_finish=True,
        )
        x_LCH, scale = (received, None) if quantize is None else received
        transfer = Transfer(event)

        def arrive() -> Dispatched:
            transfer.wait()
            return Dispatched(
                x_LCH,
                scale,
                expert_num_tokens=counts_L,
                handle=(handle, ids, routing.topk_weights),
            )

        return Pending(arrive)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor | None) -> Pending[Tensor]:
        handle, ids, topk_weights = dispatched.handle
        combined_TH, event, _ = self._buffer.low_latency_combine(
            y,
            ids,
            topk_weights,
            handle,
            async_finish=True,
            out=out_TH if out_TH is not None and out_TH.is_contiguous() else None,
        )
        return combined(event, combined_TH, out_TH)

    def abandon(self, dispatched: Dispatched) -> None:
        """Count the combine of a capture that failed.

        The library uses two sets of flags in turn, and counts launches on the host, also those that
        a graph captures. With one launch left out, the next dispatch would find flags of an earlier
        transfer. It counts before it launches, so a broken capture makes no difference.
        """
        if self.lease.held and capturing(dispatched.x):
            x = dispatched.x
            with suppress(RuntimeError):  # the fault of the experts matters
                self.finalize(torch.empty_like(x, dtype=self.problem.dtype), dispatched, None)

    def max_rows(self, num_tokens: int) -> int:
        return self.group.size() * self._capacity

    def transient_bytes(self, num_tokens: int) -> int:
        return footprint.ll_transient(self.problem, num_tokens, self.max_rows(num_tokens))
