"""The two dispatchers over `nccl.ep`, whose ranks may be on several hosts.

`nccl_ht`: high throughput, for many tokens.

    update    find which tokens go to which ranks, with an all-gather of a bit for each expert
    dispatch  one row per (token, rank), ordered by source rank and token, written by the senders
              into memory that the experts read
    combine   read each token's weighted rows from all ranks and add them in fp32

`nccl_ll`: low latency, for few tokens.

    dispatch  a row per assignment into the batched layout, in any order
    combine   weight each token's rows from all its experts and add them in fp32

All shapes are fixed by max_num_tokens, the host waits for nothing, and CUDA graphs can capture
calls. No rank can receive more rows than its memory holds.
"""

from __future__ import annotations

from abc import abstractmethod
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
)

from . import buffers

_FORWARDED = ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.FWD)
_LOCAL_IDS = ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.LOCAL)


@dataclass(frozen=True)
class Call:
    """A call in flight. memory: its rows and handle.

    ids, weights: (T', slots) of the tokens that this rank sends. tokens: T. rows: R.
    """

    memory: Any
    ids: Tensor
    weights: Tensor
    tokens: int
    rows: int


class NcclDispatcher(PrepareAndFinalize):
    """Each of the ep_size * tp_size ranks sends its share of the tokens that it holds.

    Every slice of an expert is an expert to the library: a token goes to all tp_size slices, and
    the combine adds them up. Of ranks that hold the same tokens, each sends an equal part, and
    gathers what the others combined. Calls run in the order of their launches, on any streams, and
    any number may be in flight. Construction is collective, and so is a call beyond the most that
    were in flight before.

    If a rank does not come, kernels of the other ranks end with an error of CUDA after
    ``peer_timeout`` and half a minute: CUDA then serves these processes no longer. Checked kernels
    name the rank before they launch anything.
    """

    group: dist.ProcessGroup  # this dispatcher is made only where tokens move
    lease: Lease[buffers.Held]
    low_latency: ClassVar[bool]

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, resolve(problem, group, buffers.protocol(spec.name)))
        assert self.group is not None and problem.max_num_tokens is not None
        p = problem.parallel
        self._slices, self._share = p.tp_size, p.num_ranks // p.dp_size
        self._part, self._capacity = p.rank % self._share, problem.max_num_tokens
        activation, wire = problem.quant.activation, None
        if activation is not None and problem.quant.name in spec.wire_schemes:
            columns = problem.hidden_size // (2 if activation.packed else 1)
            wire = buffers.Wire(activation.torch_dtype, columns, problem.scales_per_row)
        sizes = buffers.Sizes(
            low_latency=self.low_latency,
            experts=problem.num_physical_experts * p.tp_size,
            slots=problem.top_k * p.tp_size,
            capacity=self._of_share(problem.max_num_tokens),
            hidden_size=problem.hidden_size,
            dtype=problem.dtype,
            wire=wire,
            share=self._share,
            timeout=peer_timeout(self.group),
        )
        self.lease = buffers.lease(self.group, sizes, problem.device.type)

    # -- what this rank sends, of what it holds -----------------------------------------------

    def _of_share(self, tokens: int) -> int:
        """Return the tokens that each of the ranks that hold the same ``tokens`` sends, at most."""
        return -(-tokens // self._share)

    def _mine(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of the tokens that it shares, aligned as the library needs."""
        if self._share > 1:
            each = self._of_share(len(tokens))
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
        tokens, each = len(out), self._of_share(len(out))
        whole = out
        if tokens < each * self._share or not out.is_contiguous() or out.data_ptr() % 16:
            whole = out.new_empty((each * self._share, out.shape[1]))
        mine = whole[self._part * each :][:each]
        combine(mine[: max(0, min(each, tokens - self._part * each))])
        if self._share > 1 and tokens:
            held = self.lease.value
            held.sharers.allgather(
                mine.view(torch.uint8), whole.view(torch.uint8), stream=held.stream()
            )
        return out if whole is out else out.copy_(whole[:tokens])

    # -- calls ------------------------------------------------------------------------------

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        x, scale = x_TH, None
        if quantize is not None:
            x, scale = quantize_for_transfer(x_TH, routing.topk_ids, quantize, self.problem)
            scale = self._mine(scale)
        ids, weights = self._sliced(routing)
        held = self.lease.value
        memory = held.calls.take()
        rows = held.connection.ranks * self._of_share(routing.most(self._capacity))
        call = Call(memory, ids, weights, len(x_TH), rows)
        try:
            return Pending.ready(self._send(call, self._mine(x), scale))
        except BaseException:
            held.calls.give_back(memory)
            raise

    @abstractmethod
    def _send(self, call: Call, x: Tensor, scale: Tensor | None) -> Dispatched:
        """Dispatch this rank's part of the tokens."""

    def _inputs(self, x: Tensor, scale: Tensor | None, weights: Any = None) -> tuple[Any, Any]:
        """Return the library's inputs, and how it treats them."""
        if scale is None:
            return ep.DispatchInputs(tokens=ep.Tensor(x), topk_weights=weights), None
        wire = self.lease.value.sizes.wire
        assert wire is not None
        scales = ep.Tensor(F.pad(scale, (0, wire.padded_scales - scale.shape[1])))
        tokens = ep.Tensor(buffers.as_bytes(x))
        return ep.DispatchInputs(tokens=tokens, topk_weights=weights, scales=scales), _FORWARDED

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        call: Call = dispatched.handle
        held = self.lease.value
        held.calls.keep_order()
        out = self._gathered(out_TH, lambda mine: self._combine(call, y, mine))
        held.calls.give_back(call.memory)
        return Pending.ready(out)

    @abstractmethod
    def _combine(self, call: Call, y: Tensor, out: Tensor) -> None:
        """Combine rows into ``out``, which holds this rank's part of the tokens."""

    def abandon(self, dispatched: Dispatched) -> None:
        """Take part in the combine with NaN rows, as the other ranks wait for every rank there."""
        if self.lease.held:
            call: Call = dispatched.handle
            p, x = self.problem, dispatched.x
            y = x.new_full((*x.shape[:-1], p.hidden_size), float("nan"), dtype=p.dtype)
            self.finalize(y, dispatched, y.new_empty((call.tokens, p.hidden_size)))


class HighThroughputDispatcher(NcclDispatcher):
    """STANDARD, R = ranks * `max_tokens` (without it: max_num_tokens), many unused."""

    low_latency = False

    def _send(self, call: Call, x: Tensor, scale: Tensor | None) -> Dispatched:
        memory: buffers.Rows = call.memory
        stream = self.lease.value.stream()
        inputs, config = self._inputs(x, scale, ep.Tensor(call.weights))
        outputs = memory.got if scale is None else memory.got_quantized
        memory.handle.update(ep.Tensor(call.ids), stream=stream)
        memory.handle.dispatch(
            inputs, outputs, layout_info=_LOCAL_IDS, config=config, stream=stream
        )
        rows, k = call.rows, self.problem.top_k
        scales = None
        if scale is not None:
            scales = memory.scales[:rows, : scale.shape[1]].contiguous()
        return Dispatched(
            x=(memory.x if scale is None else memory.quantized)[:rows],
            x_scale=scales,
            # Of the slices of a token's experts, at most top_k are here, and come first.
            topk_ids=memory.ids[:rows, :k],
            topk_weights=memory.weights[:rows, :k],
            handle=call,
        )

    def output(self, dispatched: Dispatched) -> Tensor:
        """Return (R, H) in the memory that other ranks read."""
        call: Call = dispatched.handle
        y: Tensor = call.memory.y
        return y[: call.rows]

    def _combine(self, call: Call, y: Tensor, out: Tensor) -> None:
        memory: buffers.Rows = call.memory
        if y.data_ptr() != memory.y.data_ptr():
            memory.y[: len(y)].copy_(y)
        memory.handle.combine(
            ep.CombineInputs(tokens=memory.y_tensor),
            ep.CombineOutputs(tokens=ep.Tensor(out)),
            stream=self.lease.value.stream(),
        )

    def max_rows(self, num_tokens: int) -> int:
        return self.lease.value.connection.ranks * self._of_share(self._capacity)

    def transient_bytes(self, num_tokens: int) -> int:
        """Return the bytes of scales, of this rank's padded ones, and of gathered tokens."""
        p = self.problem
        row = p.hidden_size * p.dtype.itemsize
        scales = 4 * p.scales_per_row * self.max_rows(num_tokens) + num_tokens * (row + 16)
        shared = num_tokens * (row + 12 * p.top_k * self._slices)
        return scales + shared + self._share * row


class LowLatencyDispatcher(NcclDispatcher):
    """BATCHED, C = ranks * max_num_tokens for every call: the library has one layout for a group.

    `max_tokens` changes nothing.
    """

    low_latency = True

    def _send(self, call: Call, x: Tensor, scale: Tensor | None) -> Dispatched:
        memory: buffers.Slabs = call.memory
        stream = self.lease.value.stream()
        inputs, config = self._inputs(x, scale)
        outputs = memory.got if scale is None else memory.got_quantized
        memory.handle.update(ep.Tensor(call.ids), stream=stream)
        memory.handle.dispatch(
            inputs, outputs, layout_info=memory.info, config=config, stream=stream
        )
        scales = None
        if scale is not None:
            scales = memory.scales[..., : scale.shape[1]].contiguous()
        return Dispatched(
            x=memory.x if scale is None else memory.quantized,
            x_scale=scales,
            expert_num_tokens=memory.counts,
            handle=call,
        )

    def _combine(self, call: Call, y: Tensor, out: Tensor) -> None:
        call.memory.handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(y)),
            ep.CombineOutputs(tokens=ep.Tensor(out), topk_weights=ep.Tensor(call.weights)),
            stream=self.lease.value.stream(),
        )

    def max_rows(self, num_tokens: int) -> int:
        return self.lease.value.rows

    def transient_bytes(self, num_tokens: int) -> int:
        """Return the bytes of unpadded scales, and of gathered tokens."""
        p = self.problem
        row = p.hidden_size * p.dtype.itemsize
        scales = 4 * p.scales_per_row * self.max_rows(num_tokens) * p.num_local_experts
        shared = num_tokens * (2 * row + 16 + 12 * p.top_k * self._slices)
        return scales + shared + self._share * row
