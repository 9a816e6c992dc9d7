"""The two dispatchers over `nccl.ep`, whose ranks may be on several hosts.

    nccl_ht   a row per (token, rank), ordered by source rank and token, written by the senders into
              memory that the experts read; the combine adds a token's weighted rows from all ranks
    nccl_ll   a row per assignment in the batched layout, in any order; the combine weights them

Shapes are fixed, the host waits for nothing, and no rank gets more rows than its memory holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import nccl.ep as ep
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moekit.plugin import (
    Dispatched,
    DispatcherSpec,
    Lease,
    MoEProblem,
    Pending,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    peer_timeout,
    quantize_for_transfer,
    resolve,
    round_up,
)

from . import buffers, library
from .buffers import described, record

_FORWARDED = ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.FWD)


@dataclass(frozen=True)
class Call:
    """A call in flight: ids and weights (T', slots) of the tokens that this rank sends, T and R."""

    memory: buffers.Memory
    ids: Tensor
    weights: Tensor
    tokens: int
    rows: int


class NcclDispatcher(PrepareAndFinalize):
    """A dispatcher in which each of the ep_size * tp_size ranks sends its share of its tokens.

    Every slice of an expert is an expert for the library: a token goes to all tp_size slices, and
    the combine adds them up. If ranks hold the same tokens, each sends an equal part, and
    gathers the other ranks' results. Calls run in the order of their launches, on any streams, and
    any number may be in flight. Construction is collective. So is the first call with more calls in
    flight than before.

    Checked kernels name a missing rank before they launch anything. Without the check,
    `nccl_ll` ends with an error of CUDA after ``peer_timeout`` and half a minute, and `nccl_ht`
    waits without end.
    """

    group: dist.ProcessGroup  # this dispatcher is made only where tokens move
    lease: Lease[buffers.Held]
    low_latency: ClassVar[bool]

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        protocol = f"{spec.name} 1 of nccl.ep {ep.get_lib_version()}, NCCL {library.loaded_nccl()}"
        super().__init__(spec, problem, resolve(problem, group, protocol))
        assert self.group is not None and problem.max_num_tokens is not None
        p, activation, wire = problem.parallel, problem.quant.activation, None
        self._slices, self._share = p.tp_size, p.num_ranks // p.dp_size
        self._part, self._capacity = p.rank % self._share, problem.max_num_tokens
        if activation is not None and problem.quant.name in spec.wire_schemes:
            columns = problem.hidden_size // (2 if activation.packed else 1)
            wire = activation.torch_dtype, columns, round_up(problem.scales_per_row, 4)
        sizes = buffers.Sizes(
            self.low_latency, problem.num_physical_experts * self._slices,
            problem.top_k * self._slices, self._each(self._capacity), problem.hidden_size,
            problem.dtype, wire, self._share, peer_timeout(self.group),
        )  # fmt: skip
        self.lease = buffers.lease(self.group, sizes, problem.device.type)

    def _each(self, tokens: int) -> int:
        """Return the most tokens that a rank sends of ``tokens``, which it shares with others."""
        return -(-tokens // self._share)

    def _mine(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of the tokens that it shares, aligned as the library needs."""
        if self._share > 1:
            each = self._each(len(tokens))
            tokens = tokens[self._part * each :][:each]
        return tokens if tokens.data_ptr() % 16 == 0 else tokens.clone()

    def _sliced(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return ids and weights of the slices of each token's experts."""
        ids, weights = self._mine(routing.topk_ids), self._mine(routing.topk_weights)
        if self._slices == 1:
            return ids, weights
        local = self.problem.num_local_experts
        first = ids // local * (self._slices * local) + ids % local
        each = torch.arange(0, self._slices * local, local, device=ids.device)
        sliced = torch.where(ids[..., None] < 0, -1, first[..., None] + each)
        return sliced.flatten(1), weights.repeat_interleave(self._slices, dim=1)

    def _gathered(self, out: Tensor, combine: Callable[[Tensor], None]) -> Tensor:
        """Let ``combine`` write this rank's part of ``out`` (T, N), and gather the other parts."""
        tokens, each, whole = len(out), self._each(len(out)), out
        if tokens < each * self._share or not out.is_contiguous() or out.data_ptr() % 16:
            whole = out.new_empty((each * self._share, out.shape[1]))
        mine = whole[self._part * each :][:each]
        combine(mine[: max(0, tokens - self._part * each)])
        if self._share > 1 and tokens:
            held, byte = self.lease.value, torch.uint8
            held.sharers.allgather(mine.view(byte), whole.view(byte), stream=held.stream())
        return out if whole is out else out.copy_(whole[:tokens])

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        x, scale, held = x_TH, None, self.lease.value
        if quantize is not None:
            x, scale = quantize_for_transfer(x_TH, routing.topk_ids, quantize, self.problem)
            scale = self._mine(F.pad(scale, (0, odd)) if (odd := -scale.shape[1] % 4) else scale)
        x, (ids, weights) = self._mine(x), self._sliced(routing)
        rows = held.connection.ranks * self._each(routing.most(self._capacity))
        call = Call(held.calls.take(), ids, weights, len(x_TH), rows)
        try:
            return Pending.ready(self._send(call, x, scale))
        except BaseException:
            held.calls.give_back(call.memory)
            raise

    def _send(self, call: Call, x: Tensor, scale: Tensor | None) -> Dispatched:
        held, memory, p = self.lease.value, call.memory, self.problem
        got, scales, outputs = memory.got[scale is not None]
        memory.handle.update(described(call.ids), stream=held.stream())
        memory.handle.dispatch(
            self.inputs(call.weights, x, scale), outputs, layout_info=memory.info,
            config=None if scale is None else _FORWARDED, stream=held.stream(),
        )  # fmt: skip
        used = slice(None if self.low_latency else call.rows)
        if scales is not None:
            scales = scales[used][..., : p.scales_per_row].contiguous()
        if self.low_latency:
            return Dispatched(got, scales, expert_num_tokens=memory.counts, handle=call)
        # At most top_k slices of a token's experts are on this rank, and they come first.
        ids, weights = memory.ids[used, : p.top_k], memory.weights[used, : p.top_k]
        return Dispatched(got[used], scales, ids, weights, handle=call)

    def inputs(self, weights: Tensor, x: Tensor, scale: Tensor | None) -> Any:
        """Return the library's record of tokens, which must live until the dispatch."""
        given = {} if self.low_latency else {"topk_weights": described(weights)}
        if scale is not None:
            x, given["scales"] = x.view(buffers.BYTE), described(scale)
        return record(ep.DispatchInputs, tokens=described(x), **given)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        call: Call = dispatched.handle
        held, memory = self.lease.value, call.memory
        held.calls.keep_order()
        if self.low_latency:
            inputs = record(ep.CombineInputs, tokens=described(y))
            given = {"topk_weights": described(call.weights)}
        else:
            inputs, given = memory.combined, {}
            if y.data_ptr() != memory.y.data_ptr():
                memory.y[: len(y)].copy_(y)

        def combine(mine: Tensor) -> None:
            outputs = record(ep.CombineOutputs, tokens=described(mine), **given)
            memory.handle.combine(inputs, outputs, stream=held.stream())

        out = self._gathered(out_TH, combine)
        held.calls.give_back(memory)
        return Pending.ready(out)

    def abandon(self, dispatched: Dispatched) -> None:
        """Take part in the combine with NaN rows, because the other ranks wait there."""
        if self.lease.held:
            p, x = self.problem, dispatched.x
            y = x.new_full((*x.shape[:-1], p.hidden_size), float("nan"), dtype=p.dtype)
            self.finalize(y, dispatched, y.new_empty((dispatched.handle.tokens, p.hidden_size)))

    def max_rows(self, num_tokens: int) -> int:
        held = self.lease.value
        return held.rows if self.low_latency else held.connection.ranks * self._each(self._capacity)

    def transient_bytes(self, num_tokens: int) -> int:
        """Return the bytes of unpadded scales, of this rank's tokens, and of gathered tokens."""
        p = self.problem
        rows = self.max_rows(num_tokens) * (p.num_local_experts if self.low_latency else 1)
        row = 2 * p.hidden_size * p.dtype.itemsize + 16 + 12 * self.lease.value.sizes.slots
        return 4 * p.scales_per_row * rows + (num_tokens + self._share) * row


class HighThroughputDispatcher(NcclDispatcher):
    """STANDARD with R = ranks * `max_tokens` rows (without it: max_num_tokens), many unused."""

    low_latency = False

    def output(self, dispatched: Dispatched) -> Tensor:
        """Return (R, H) in the memory that other ranks read."""
        call: Call = dispatched.handle
        return call.memory.y[: call.rows]


class LowLatencyDispatcher(NcclDispatcher):
    """BATCHED with C = ranks * max_num_tokens for any `max_tokens`: a group has one layout."""

    low_latency = True
