"""The `pplx` dispatcher: each token goes straight into the batched layout of its experts.

    prepare   translate ids to library experts; send every round and return
    arrive    receive every round: x_LCH and the rows of each expert
    experts   write their output to `output`
    finalize  combine every round: send rows back, weight and sum them

Rounds, library experts and spare ones: layout.py. Buffers: buffers.py.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import GroupMismatch
from moekit.plugin import (
    Dispatched,
    DispatcherSpec,
    Lease,
    MoEProblem,
    Pending,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    has_backend,
    quantize_for_transfer,
    resolve,
    round_up,
)

from .buffers import Lane, Lanes, lane_bytes, shared
from .kernels import translate
from .layout import TOKENS_PER_ROUND, Layout, Wire
from .library import all_to_all


@dataclass(frozen=True)
class _Call:
    """An in-flight call: its lane, and the routing in the library's terms."""

    lanes: Lanes
    lane: Lane
    layout: Layout
    ids_TK: Tensor
    weights_TK: Tensor


class PplxDispatcher(PrepareAndFinalize):
    """BATCHED, over `pplx_kernels.AllToAll.intranode`, on the GPUs of one host.

    C is ``ep_size * max_tokens`` (without it: max_num_tokens), and T may differ between ranks and
    be 0.
    Construction is collective, and so are every call (on any stream) and `destroy`. The first call
    allocates buffers; a second set is allocated by the first call that is started while another is
    in flight.
    """

    group: dist.ProcessGroup  # this dispatcher is made only where tokens move
    lease: Lease[Lanes] | None = None  # from the first call on
    library = staticmethod(all_to_all)
    translate = staticmethod(translate)

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        self._library = self.library()
        self._device = torch.device(problem.device.type)
        self.num_sms = TOKENS_PER_ROUND  # the library's kernels occupy all of them
        if self._device.type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
            properties = torch.cuda.get_device_properties(self._device)
            self.num_sms = properties.multi_processor_count
        self._layout = Layout.of(problem, self.num_sms)
        self._capacity = problem.max_num_tokens or 0
        common = f"{self._layout.rounds} rounds of pplx-kernels on host {socket.gethostname()}"
        super().__init__(spec, problem, resolve(problem, group, common))
        assert self.group is not None
        if not has_backend(self.group, "cpu"):
            raise GroupMismatch(
                f"the process group's backends are {dist.get_backend_config(self.group)}, but the "
                "library exchanges addresses over the host; initialize the group with "
                "backend='cpu:gloo,cuda:nccl'"
            )
        self._destinations = self._layout.destinations(problem).to(self._device)

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        p, at = self.problem, self._layout.of_call(routing.most(self._capacity))
        x, scale_TS, groups = x_TH, None, 0
        if quantize is not None:
            x, scale = quantize_for_transfer(x_TH, routing.topk_ids, quantize, p)
            groups = scale.shape[1]
            scale_TS = _for_library(scale)
        wire = Wire(at.hidden_size * x.itemsize, 0 if scale_TS is None else scale_TS.shape[1])
        ids, weights = self.translate(
            routing.topk_ids, routing.topk_weights, self._destinations, p.num_physical_experts
        )
        lanes = self._lanes_for(wire)
        counts = torch.empty(at.slabs, dtype=torch.int32, device=x.device)
        x_SCH = x.new_empty((at.slabs, at.slab_rows, at.hidden_size))
        scale_SCG = None
        if scale_TS is not None:
            scale_SCG = x.new_empty((*x_SCH.shape[:2], _scale_columns(groups)), dtype=torch.float32)
        # Behind the allocations: without memory for them, the lane would stay taken.
        call = _Call(lanes, lanes.calls.take(), at, ids, weights)

        def dispatch(send: bool) -> None:
            lanes.calls.keep_order()
            for part, each in zip(at.parts(x.shape[0]), call.lane.objects, strict=False):
                each.dispatch(
                    counts, x_SCH,
                    None if scale_SCG is None else scale_SCG.expand(-1, -1, wire.scales), x[part],
                    None if scale_TS is None else scale_TS[part], ids[part], None,
                    do_send=send, do_recv=not send,
                )  # fmt: skip

        # Sending clears the counts, receiving adds to them: all rounds send before any receives.
        dispatch(send=True)

        def arrive() -> Dispatched:
            dispatch(send=False)
            L = p.num_local_experts
            return Dispatched(
                x=x_SCH[:L],
                x_scale=None if scale_SCG is None else scale_SCG[:L, :, :groups].contiguous(),
                expert_num_tokens=counts[:L],
                handle=call,
            )

        return Pending(arrive)

    def output(self, dispatched: Dispatched) -> Tensor:
        """Return (L, C, H) in the memory that the library sends from."""
        call: _Call = dispatched.handle
        return call.layout.output(call.lane.y_SCH)[: self.problem.num_local_experts]

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        wanted = self.output(dispatched)
        if y.data_ptr() != wanted.data_ptr():
            wanted.copy_(y)
        out = out_TH if out_TH.is_contiguous() else torch.empty_like(out_TH).contiguous()
        self._combine(dispatched.handle, out)
        return Pending.ready(out_TH if out is out_TH else out_TH.copy_(out))

    def abandon(self, dispatched: Dispatched) -> None:
        """End the call with NaN rows, as the library needs a combine after every dispatch."""
        y, tokens = self.output(dispatched).fill_(float("nan")), len(dispatched.handle.ids_TK)
        self._combine(dispatched.handle, y.new_empty((tokens, self._layout.hidden_size)))

    def max_rows(self, num_tokens: int) -> int:
        return self._layout.slab_rows

    def buffer_bytes(self) -> int:
        """Return the bytes it holds; before the first call, those that it will hold after it."""
        if self.lease is not None:
            return super().buffer_bytes()
        row = self._layout.hidden_size * self.problem.dtype.itemsize
        return lane_bytes(self._layout, Wire(row, 0), self.problem.dtype)

    def transient_bytes(self, num_tokens: int) -> int:
        at, p = self._layout, self.problem
        rows, scales = at.slabs * at.slab_rows, _scale_columns(p.scales_per_row)
        slabs = rows * (at.hidden_size * p.dtype.itemsize + 2 * 4 * scales)
        token = at.top_k * (4 + 4 + 8) + 4 * scales + 2 * at.hidden_size
        return slabs + num_tokens * token + 4 * at.slabs

    # -- the library's terms ------------------------------------------------------------------

    def _combine(self, call: _Call, out: Tensor) -> None:
        # Rounds overlap if all send before any waits; a single round takes one launch.
        at, y_SCH = call.layout, call.layout.output(call.lane.y_SCH)
        steps = ((True, True),) if at.rounds == 1 else ((True, False), (False, True))
        parts = at.parts(out.shape[0])
        call.lanes.calls.keep_order()
        for send, receive in steps:
            for part, each in zip(parts, call.lane.objects, strict=False):
                each.combine(
                    out[part], call.ids_TK[part], call.weights_TK[part], y_SCH, None,
                    do_send=send, do_recv=receive,
                )  # fmt: skip
        call.lanes.calls.give_back(call.lane)

    def _lanes_for(self, wire: Wire) -> Lanes:
        """Return the lanes for what travels, which is the same in all calls of a kernel."""
        if self.lease is None:
            key = (self._library, self.group, self._layout, wire, self.problem.dtype)
            self.lease = shared.lease(key, partial(Lanes, *key, self._device))
        return self.lease.value


def _for_library(scale_TG: Tensor) -> Tensor:
    """Return scales (T, S) fp32 with S a multiple of 4; repeated values are not copied."""
    if scale_TG.shape[1] == 1:
        return scale_TG.expand(-1, 4)
    return torch.nn.functional.pad(scale_TG, (0, -scale_TG.shape[1] % 4))


def _scale_columns(groups: int) -> int:
    """Return the fp32 scales of a stored row: one, or a multiple of 16 bytes."""
    return groups if groups < 2 else round_up(groups, 4)
