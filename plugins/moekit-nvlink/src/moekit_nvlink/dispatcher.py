"""`nvlink_ht` and `nvlink_ll`: ranks write tokens into the memory of the ranks that need them.

    nvlink_ht   x, ids, weights and scales of a token go to [batch, slot] on every rank that holds
                one of its experts, once for each rank
    nvlink_ll   x and scales of a token go to [expert, slot] of each of its experts
    combine     each rank reads its tokens' rows from the experts' ranks, and sums them in fp32.
                In large calls of nvlink_ht it also sums over K (`reduce_rows`)

The host waits for nothing, so that a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from moekit_kernels.launch import launches_of
from torch import Tensor

from moekit.errors import MoekitError
from moekit.plugin import (
    Dispatched,
    DispatcherSpec,
    Lease,
    MoEProblem,
    Pending,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    SharedBuffers,
    Unreduced,
    quantize_for_transfer,
    resolve,
)

from .buffers import Buffers
from .layout import REDUCED_FROM
from .settings import Settings
from .transfer import AssignmentTransfer, Call, RowTransfer, Step, Transfer

# Ranks that speak different versions must not write into each other's memory.
_PROTOCOL = "moekit-nvlink 4"

_shared: SharedBuffers[Buffers] = SharedBuffers(Buffers.free)


class _Dispatcher(PrepareAndFinalize):
    """Over torch's symmetric memory.

    Experts may be sliced over ``tp_size`` consecutive ranks, and consecutive ranks may hold the
    same tokens. Buffers are shared by all layers of the same group and sizes, and a second one is
    made when two calls are in flight: construction and that growth are collective. Calls run in the
    order of their launches, on whichever streams. Replay no CUDA graph between the dispatch and the
    combine of another call.

    Where a rank does not come to a call for about 100 seconds, the output is NaN, and the next call
    raises PeerFailed, which names that rank. Where a rank refuses its input, the output is NaN on
    all ranks, and the next call is right; so it is where ranks differ in ``max_tokens`` and one
    of them has no room for the tokens of another. Checked kernels raise before.
    """

    lease: Lease[Buffers]
    _transfers: ClassVar[type[Transfer]]

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        settings = Settings.read()
        self._transfer = self._transfers.of(problem, settings)
        self._launches = launches_of(self._transfer)
        super().__init__(spec, problem, resolve(problem, group, _PROTOCOL))
        made_in, layout = self.group, self._transfer.layout
        assert made_in is not None
        device = torch.device(problem.device.type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.num_sms = settings.most_multiprocessors or 2 * settings.programs
        self.lease = _shared.lease(
            (made_in, layout, device.index), lambda: Buffers(made_in, layout, device)
        )

    # -- calls ------------------------------------------------------------------------------

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        x, scale = x_TH, None
        if quantize is not None:
            x, scale = quantize_for_transfer(x_TH, routing.topk_ids, quantize, self.problem)
        buffer = self.lease.value.take()
        try:
            steps, arrived = self._transfer.send(buffer, x, scale, routing)
            self._launch(arrived.handle, (x, scale, routing.topk_ids, routing.topk_weights), steps)
        except BaseException:
            self.lease.value.calls.give_back(buffer)
            raise
        return Pending.ready(arrived)

    def output(self, dispatched: Dispatched) -> Tensor:
        """Return memory for y that other ranks read."""
        call: Call = dispatched.handle
        call.y = self._transfer.output(call)
        return call.y

    def finalize(
        self, y: Tensor | Unreduced, dispatched: Dispatched, out_TH: Tensor
    ) -> Pending[Tensor]:
        call: Call = dispatched.handle
        if isinstance(y, Unreduced):
            reduce = partial(self._transfer.reduce, call, y)
            self._gather(call, out_TH, reduce, y.rows_NH, y.places_RK)
        else:
            if y is not call.y and y.data_ptr() != self.output(dispatched).data_ptr():
                self.output(dispatched).copy_(y)
            self._gather(call, out_TH, partial(self._transfer.gather, call), call.weights)
        return Pending.ready(out_TH)

    def abandon(self, dispatched: Dispatched) -> None:
        """Tell the other ranks that this rank is done: they wait for it before their next call."""
        if not self.lease.held:
            return
        call: Call = dispatched.handle
        self.output(dispatched).fill_(float("nan"))
        nothing = torch.empty((0, self.problem.hidden_size), dtype=self.problem.dtype,
                              device=call.places.device)  # fmt: skip
        self._gather(call, nothing, partial(self._transfer.gather, call), call.weights)

    def abort(self, reason: str) -> None:
        """Take part in the call without tokens, and make it NaN on all ranks: none waits."""
        if not self.lease.held:
            return
        p, device = self.problem, self.lease.value.lost.flags.device
        ids = torch.empty((0, p.top_k), dtype=torch.int32, device=device)
        x = torch.empty((0, p.hidden_size), dtype=p.dtype, device=device)
        with suppress(MoekitError):  # the caller's own error matters
            tokens = self.prepare(x, Routing(ids.float(), ids), None).result()
            tokens.handle.buffer.refused.fill_(1)  # the combine tells all ranks
            self.abandon(tokens)

    def _gather(
        self, call: Call, out_TH: Tensor, steps: Callable[[Tensor], list[Step]],
        *given: Tensor | None,
    ) -> None:  # fmt: skip
        """given: the tensors of ``steps``, apart from the output."""
        out = out_TH if out_TH.stride(1) == 1 else torch.empty_like(out_TH).contiguous()
        calls = self.lease.value.calls
        calls.keep_order()
        self._launch(call, (out, *given), partial(steps, out))
        calls.give_back(call.buffer)
        if out is not out_TH:
            out_TH.copy_(out)

    def _launch(
        self, call: Call, given: Sequence[Tensor | None], steps: Callable[[], list[Step]]
    ) -> None:
        def launch() -> None:
            for step in steps():
                step()

        self._launches((call.layout.slots,), given, call.buffer.memory, launch)

    # -- memory -----------------------------------------------------------------------------

    def max_rows(self, num_tokens: int) -> int:
        layout = self._transfer.layout
        return layout.slots if layout.batched else layout.rows

    def transient_bytes(self, num_tokens: int) -> int:
        """Return the bytes of quantized rows with their scales."""
        p = self.problem
        quantized = 0 if p.quant.activation is None else p.hidden_size * 10 + 8 * p.scales_per_row
        return num_tokens * quantized


class HighThroughputDispatcher(_Dispatcher):
    """STANDARD: R = batches * max_num_tokens for every T."""

    _transfers = RowTransfer

    def takes_unreduced(self, dispatched: Dispatched) -> bool:
        """Return whether there are enough tokens to sum over K while others' sums travel."""
        call: Call = dispatched.handle
        return self._transfer.layout.chunks > 1 and call.places.shape[0] >= REDUCED_FROM


class LowLatencyDispatcher(_Dispatcher):
    """BATCHED: C = batches * max_num_tokens for every T."""

    _transfers = AssignmentTransfer
