"""The three dispatchers, over `deep_ep.Buffer` in two modes and `deep_ep.ElasticBuffer`.

`deepep_ht`: normal kernels, for many tokens. The buffer is a set of queues, so its size does not
grow with the number of tokens.

    layout    find on the device which tokens go to which ranks
    dispatch  one row per (token, rank), ordered by source rank and token; ids arrive local
    combine   add each token's weighted rows from all ranks, in rank order and in fp32

`deepep_elastic`: kernels over NCCL's device interface, compiled at first use. Rows come in no
particular order, shapes are fixed, and the host waits for nothing.

`deepep_ll`: low-latency kernels, for few tokens.

    dispatch  a row per assignment into the batched layout; the library quantizes fp8 blocks
    combine   weight each token's rows from all its experts and add them in fp32

Each step of `deepep_ll` is one kernel that sends and receives. The library's hooks, which delay
receiving, are not used: over NVLink the sender stores into the receiver's memory, so a hook hides
no transfer, and a second call could not start before the first one's tokens were received.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import deep_ep
import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import InvalidInput
from moekit.plugin import (
    Dispatched,
    DispatcherSpec,
    Lease,
    MoEProblem,
    Pending,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    quantize_for_transfer,
    resolve,
    round_up,
)

from . import buffers, library
from .kernels import clear_unused

T = TypeVar("T")

# Up to here, padding rows cost the experts less than waiting for their number costs the host.
_FEW_ROWS = 4096


class DeepEPDispatcher(PrepareAndFinalize):
    """A group of ``ep_size`` ranks on one host, each with its own tokens and share of the experts.

    Transfers run on the library's stream, in the order in which they were started: any number of
    calls may be in flight. Construction is collective, and so are calls and, with the last kernel
    that uses a buffer, `destroy`.
    """

    group: dist.ProcessGroup  # this dispatcher is made only where tokens move
    lease: Lease[buffers.Held]
    makes_output = True
    _combine_options: dict[str, Any]
    _calls: ClassVar[dict[str, str]]  # what calls pass, as in `VendorLibrary.check`

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        library().check(deep_ep, {"topk_idx_t": "", **self._calls})
        super().__init__(spec, problem, resolve(problem, group, self._protocol()))
        assert self.group is not None
        self._capacity = problem.max_num_tokens or 0
        self.lease = self._acquire()

    def _protocol(self) -> str:
        return buffers.protocol()

    @abstractmethod
    def _acquire(self) -> Lease[buffers.Held]:
        """Take the buffer for this problem."""

    @property
    def _buffer(self) -> Any:
        return self.lease.value.buffer

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor | None) -> Pending[Tensor]:
        combined_TH, _, event = self._buffer.combine(y, dispatched.handle, **self._combine_options)
        return after(event, lambda: placed(combined_TH, out_TH))

    def max_rows(self, num_tokens: int) -> int:
        """Return the most rows outside of CUDA graphs."""
        return self.group.size() * self._capacity

    def transient_bytes(self, num_tokens: int) -> int:
        """Return the bytes of received rows, and of quantized and combined tokens.

        With each of them the library allocates ids, router weights, and where it goes.
        """
        p = self.problem
        row = 2 * p.hidden_size + 4 * p.scales_per_row
        received = self.max_rows(num_tokens) * (row + 24 * p.top_k + 12)
        sent = row + 2 * p.hidden_size + 12 * p.top_k + 5 * self.group.size()
        return received + num_tokens * sent


class NormalDispatcher(DeepEPDispatcher):
    """STANDARD. R is the number of rows that arrive, and the host waits for that number.

    In a CUDA graph, and where ``ranks * max_tokens`` (without it: max_num_tokens) is small, R is
    that product instead and the host does not wait.
    """

    _calls = {
        "Buffer": "1 num_nvl_bytes explicitly_destroy", "Buffer.set_num_sms": "1",
        "Buffer.get_dispatch_config": "1", "Buffer.get_combine_config": "1",
        "Buffer.get_dispatch_layout": "3 async_finish", "Buffer.combine": "3 config async_finish",
        "Buffer.dispatch": "2 num_tokens_per_rank is_token_in_rank num_tokens_per_expert topk_idx "
        "topk_weights num_worst_tokens config async_finish",
    }  # fmt: skip

    def _acquire(self) -> Lease[buffers.Held]:
        ranks = self.group.size()
        self._dispatch_config, combine_config = buffers.normal_configs(ranks)
        self._combine_options = {"config": combine_config, "async_finish": True}
        self._most_rows = ranks * self._capacity
        return buffers.normal(self.group, self.problem.hidden_size)

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids = routing.topk_ids.to(deep_ep.topk_idx_t)
        x = x_TH if quantize is None else quantize_for_transfer(x_TH, ids, quantize, self.problem)
        held, rows = self.lease.value, self._fixed_rows(x_TH, routing)
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
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=routing.topk_weights,
            num_worst_tokens=rows, config=self._dispatch_config, async_finish=True,
        )  # fmt: skip
        x_RH, scale = (received, None) if quantize is None else received
        return after(event, lambda: Dispatched(x_RH, scale, ids_RK, weights_RK, handle=handle))

    def max_rows(self, num_tokens: int) -> int:
        few = 0 < self._most_rows <= _FEW_ROWS
        return self._most_rows if few else self.group.size() * num_tokens

    def _fixed_rows(self, x_TH: Tensor, routing: Routing) -> int:
        """Return R if the host does not wait for it, else 0."""
        captured, most = capturing(x_TH), self.group.size() * routing.most(self._capacity)
        if captured and not most:
            raise InvalidInput(
                "deepep_ht in a CUDA graph needs room for all tokens of the other ranks: set "
                "max_num_tokens in the problem"
            )
        return most if captured or most <= _FEW_ROWS else 0


class ElasticDispatcher(DeepEPDispatcher):
    """STANDARD, R = ranks * max_num_tokens, or twice a call's ranks * `max_tokens` at most.

    The library compiles its kernels for each R.
    """

    _combine_options = {"async_with_compute_stream": True}
    _calls = {
        "ElasticBuffer": "1 num_max_tokens_per_rank hidden num_topk allow_hybrid_mode "
        "explicitly_destroy",
        "ElasticBuffer.dispatch": "2 topk_idx topk_weights num_experts num_max_tokens_per_rank "
        "num_sms do_cpu_sync async_with_compute_stream",
        "ElasticBuffer.combine": "3 async_with_compute_stream",
    }

    def _acquire(self) -> Lease[buffers.Held]:
        p = self.problem
        return buffers.elastic(self.group, self._capacity, p.hidden_size, p.top_k, p.device.type)

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids = routing.topk_ids.to(deep_ep.topk_idx_t)
        most = 1 << (routing.most(self._capacity) - 1).bit_length()
        received, ids_RK, weights_RK, handle, event = self._buffer.dispatch(
            x_TH if quantize is None else quantize_for_transfer(x_TH, ids, quantize, self.problem),
            topk_idx=ids, topk_weights=routing.topk_weights,
            num_experts=self.problem.num_physical_experts,
            num_max_tokens_per_rank=min(most, self._capacity), num_sms=buffers.NUM_SMS,
            do_cpu_sync=False, async_with_compute_stream=True,
        )  # fmt: skip
        x_RH, scale = (received, None) if quantize is None else received

        def arrived() -> Dispatched:
            # The library does not write rows that no token was sent to, nor their ids.
            ends_G = handle.psum_num_recv_tokens_per_scaleup_rank
            clear_unused(ids_RK, ends_G)
            return Dispatched(x_RH, scale, ids_RK, weights_RK, handle=handle, num_rows=ends_G[-1:])

        return after(event, arrived)


class LowLatencyDispatcher(DeepEPDispatcher):
    """BATCHED, C = ranks * max_num_tokens (rounded up to be even), for every call.

    `max_tokens` changes nothing: the library's two sets of buffers lie where C says, so transfers
    of two calls with different C could overlap.

    All dispatchers of one shape share a buffer, but several shapes may be in use at a time.
    """

    _calls = {
        "Buffer": "1 num_rdma_bytes low_latency_mode num_qps_per_rank explicitly_destroy",
        "Buffer.get_low_latency_rdma_size_hint": "4",
        "Buffer.low_latency_dispatch": "5 use_fp8 async_finish",
        "Buffer.low_latency_combine": "5 async_finish out",
    }

    def _protocol(self) -> str:
        return f"{super()._protocol()}, NVSHMEM between ranks {buffers.connected()}"

    def _acquire(self) -> Lease[buffers.Held]:
        p, self._capacity = self.problem, round_up(self._capacity, 2)
        return buffers.low_latency(
            self.group, self._capacity, p.hidden_size, p.num_physical_experts
        )

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids = routing.topk_ids.to(deep_ep.topk_idx_t)
        received, counts_L, handle, event, _ = self._buffer.low_latency_dispatch(
            x_TH, ids, self._capacity, self.problem.num_physical_experts,
            use_fp8=quantize is not None, async_finish=True,
        )  # fmt: skip
        x_LCH, scale = (received, None) if quantize is None else received
        call = handle, ids, routing.topk_weights
        return after(
            event, lambda: Dispatched(x_LCH, scale, expert_num_tokens=counts_L, handle=call)
        )

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor | None) -> Pending[Tensor]:
        handle, ids, topk_weights = dispatched.handle
        out = out_TH if out_TH is not None and out_TH.is_contiguous() else None
        combined_TH, event, _ = self._buffer.low_latency_combine(
            y, ids, topk_weights, handle, async_finish=True, out=out
        )
        return after(event, lambda: placed(combined_TH, out_TH))

    def transient_bytes(self, num_tokens: int) -> int:
        """Return the bytes of received rows with their sources, and of combined tokens."""
        p = self.problem
        row = 2 * p.hidden_size + 4 * p.scales_per_row + 4
        received = self.max_rows(num_tokens) * row + 8 * self.group.size()
        return p.num_local_experts * received + num_tokens * 2 * p.hidden_size

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


def capturing(x: Tensor) -> bool:
    """Return whether the current stream's calls go into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class Transfer:
    """A transfer on the library's stream, whose tensors must live until it is finished.

    `wait` makes the current stream wait for the transfer. Deleting an object that nobody waited for
    does the same, before the memory of its tensors can be reused.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            event.current_stream_wait()

    __del__ = wait


def after(event: Any, result: Callable[[], T]) -> Pending[T]:
    """Return ``result()`` once ``event`` has happened."""
    transfer = Transfer(event)

    def arrive() -> T:
        transfer.wait()
        return result()

    return Pending(arrive)


def placed(combined_TH: Tensor, out_TH: Tensor | None) -> Tensor:
    """Return the library's output, in ``out_TH`` if that is given."""
    if out_TH is None or combined_TH.data_ptr() == out_TH.data_ptr():
        return combined_TH if out_TH is None else out_TH
    return out_TH.copy_(combined_TH)
