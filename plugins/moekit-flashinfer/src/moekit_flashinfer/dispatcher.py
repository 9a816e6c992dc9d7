"""The two all-to-alls. R = ranks * `max_tokens` rows (max_num_tokens without it), many unused.

`flashinfer_alltoall`: ranks write their tokens into the memory of the ranks that need them.

    dispatch  write x, ids, weights and scales of each token to [source rank, row] of every rank
              that holds one of its experts; counts tell how many rows of a source are used
    combine   read back one row from each rank that a token was sent to, and add them

The library assigns rows in any order, so a token's row differs between calls.

`flashinfer_alltoall_two_sided`: tokens go through FIFOs between the ranks.

    prepare   exchange counts and ids, so that every rank knows what it receives from which rank
    alltoall  send x and scales; rows arrive in source order, without gaps
    combine   send rows back and add each token's rows from different ranks

A finished call leaves nothing in the FIFOs, so any number of calls may be in flight.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

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
    quantize_for_transfer,
    resolve,
)

from . import buffers
from .kernels import local_ids, reroute

# The FIFOs carry words of 16 bytes, so the scales of a row are padded to 4.
_SCALES = 4
# The library sends an assignment with id -1 to rank 0, which is cheaper than a kernel up to here.
REROUTED_FROM = 256


class AllToAll(PrepareAndFinalize):
    """STANDARD. Each of the ep_size ranks has its own tokens; construction is collective."""

    group: dist.ProcessGroup  # this dispatcher is made only where tokens move
    lease: Lease[Any]

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, resolve(problem, group, buffers.protocol(spec.name)))
        assert self.group is not None and problem.max_num_tokens is not None
        self._capacity = problem.max_num_tokens
        self.lease = self._acquire(self.group)

    @abstractmethod
    def _acquire(self, group: dist.ProcessGroup) -> Lease[Any]: ...

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        payloads = {"x": x_TH}
        if quantize is not None:
            payloads["x"], payloads["scale"] = quantize_for_transfer(
                x_TH, routing.topk_ids, quantize, self.problem
            )
        return Pending.ready(self._dispatch(payloads, routing))

    @abstractmethod
    def _dispatch(self, payloads: dict[str, Tensor], routing: Routing) -> Dispatched: ...

    def max_rows(self, num_tokens: int) -> int:
        return self.group.size() * self._capacity


class OneSidedDispatcher(AllToAll):
    """Over FlashInfer's MoeAlltoAll kernels.

    All layers of the same group and sizes share buffers, and a second in-flight call allocates a
    second one, which is collective. Calls run in the order of their launches, on any streams.

    If a rank never calls, the library's kernels trap after minutes; the collective check of
    ``checked`` kernels reports it earlier.
    """

    lease: Lease[buffers.OneSidedBuffers]
    makes_output = True

    def _acquire(self, group: dist.ProcessGroup) -> Lease[buffers.OneSidedBuffers]:
        p, activation = self.problem, self.problem.quant.activation
        there = back = p.hidden_size * p.dtype.itemsize
        if activation is not None:
            quantized = p.hidden_size * activation.torch_dtype.itemsize + 4 * p.scales_per_row
            there = max(back, quantized)
        key = group, self._capacity, (there + 8 * p.top_k, back)
        return buffers.one_sided.lease(key, lambda: buffers.OneSidedBuffers(*key))

    def _dispatch(self, payloads: dict[str, Tensor], routing: Routing) -> Dispatched:
        ids, p, held = routing.topk_ids, self.problem, self.lease.value
        ranks, targets, most = held.ranks, ids, routing.most(held.capacity)
        first = {"x": payloads["x"], "weights": routing.topk_weights, "ids": ids}
        payloads = {**first, **payloads}
        if len(ids) >= REROUTED_FROM or p.num_local_experts == 1:
            targets = reroute(ids, nowhere=p.local_experts.start)
        # The library packs payloads without gaps: the widest alignment first keeps all aligned.
        names = sorted(payloads, key=lambda name: -_alignment(payloads[name]))
        buffer = held.calls.take()
        try:
            # FlashInfer 0.7 returns a third value, statistics that nobody asked for.
            received, end, *_ = held.library.moe_a2a_dispatch(
                targets, [payloads[name] for name in names], buffer.memory.tensor, buffer.metainfo,
                most, ranks.rank, ranks.size, p.top_k, p.num_physical_experts,
            )  # fmt: skip
        except Exception:
            held.calls.give_back(buffer)
            raise
        assert end <= held.output_at, f"{end} bytes of tokens before {held.output_at}"
        got = {name: t.flatten(0, 1) for name, t in zip(names, received, strict=True)}
        return Dispatched(
            x=got["x"],
            x_scale=got.get("scale"),
            topk_ids=local_ids(
                got["ids"], p.local_experts.start, p.num_local_experts, buffer.counts_G
            ),
            topk_weights=got["weights"],
            handle=(buffer, len(ids), most),
        )

    def output(self, dispatched: Dispatched) -> Tensor:
        """Return (R, H) in the buffer that other ranks read."""
        p, held = self.problem, self.lease.value
        nbytes = len(dispatched.x) * p.hidden_size * p.dtype.itemsize
        buffer = dispatched.handle[0]
        mine = buffer.memory.tensor[held.ranks.rank]
        rows: Tensor = mine[held.output_at :][:nbytes].view(p.dtype)
        return rows.view(-1, p.hidden_size)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor | None) -> Pending[Tensor]:
        combined = self._combine(y, *dispatched.handle)
        return Pending.ready(combined if out_TH is None else out_TH.copy_(combined))

    def _combine(self, y_RH: Tensor, buffer: buffers.CallBuffer, tokens: int, most: int) -> Tensor:
        p, held, ranks = self.problem, self.lease.value, self.lease.value.ranks
        held.calls.keep_order()
        mine = buffer.memory.tensor[ranks.rank]
        in_place = y_RH.data_ptr() == mine.data_ptr() + held.output_at
        combined: Tensor = held.library.moe_a2a_combine(
            y_RH.contiguous().view(ranks.size, most, p.hidden_size), tokens,
            buffer.memory.tensor, buffer.metainfo, most, ranks.rank, ranks.size,
            p.top_k, held.output_at, in_place,
        )  # fmt: skip
        held.calls.give_back(buffer)
        return combined

    def abandon(self, dispatched: Dispatched) -> None:
        """Take part in combine with NaN rows, as the other ranks wait for every rank there.

        A rank that does not fail itself then sees that something is missing.
        """
        if self.lease.held:
            self._combine(self.output(dispatched).fill_(float("nan")), *dispatched.handle)

    def transient_bytes(self, num_tokens: int) -> int:
        """Return the bytes of local ids, of ids and scales to send, and of combined rows."""
        p = self.problem
        ids = 4 * p.top_k * (self.max_rows(num_tokens) + num_tokens)
        return ids + num_tokens * (4 + p.hidden_size * p.dtype.itemsize)


def _alignment(rows: Tensor) -> int:
    """Return the largest power of two that divides a row's bytes."""
    nbytes = rows.shape[1] * rows.itemsize
    return nbytes & -nbytes


class TwoSidedDispatcher(AllToAll):
    """Over FlashInfer's MnnvlMoe kernels.

    All layers of the same group share the FIFOs. All calls belong on one stream.
    """

    lease: Lease[buffers.Fifos]

    def _acquire(self, group: dist.ProcessGroup) -> Lease[buffers.Fifos]:
        return buffers.fifos.lease(group, lambda: buffers.Fifos(group))

    def _dispatch(self, payloads: dict[str, Tensor], routing: Routing) -> Dispatched:
        p, fifos, ids = self.problem, self.lease.value, routing.topk_ids
        rank, ranks, experts = fifos.ranks.rank, fifos.ranks.size, p.num_physical_experts
        most = routing.most(self._capacity)
        # The library takes id -1 for rank 0, and sends an id beyond the last expert nowhere.
        sent_ids = ids if len(ids) < REROUTED_FROM else torch.where(ids < 0, experts, ids)
        # FlashInfer 0.7 deprecates the class MnnvlMoe, but not the functions that it calls.
        received_ids, weights, sent_ends, sent, received_ends, received, returned, _ = (
            fifos.library.moe_prepare(
                sent_ids, routing.topk_weights, None, fifos.counts.tensor, most,
                rank, ranks, experts, experts, p.top_k,
            )
        )  # fmt: skip
        got = {}
        for name, rows in payloads.items():
            columns = rows.shape[1]
            if name == "scale":
                rows = F.pad(rows, (0, -columns % _SCALES))
            arrived = rows.new_empty((ranks * most, rows.shape[1]))
            self._exchange(rows, sent_ends, sent, arrived, received_ends, received)
            got[name] = arrived[:, :columns].contiguous()
        return Dispatched(
            x=got["x"],
            x_scale=got.get("scale"),
            topk_ids=local_ids(received_ids, p.local_experts.start, p.num_local_experts),
            topk_weights=weights,
            handle=(received_ends, received, sent_ends, returned, len(ids)),
            num_rows=received_ends[-1:],
        )

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        rows_TKH = self._combine(y, *dispatched.handle)
        if out_TH.is_contiguous():
            return Pending.ready(torch.sum(rows_TKH, dim=1, out=out_TH))
        return Pending.ready(out_TH.copy_(rows_TKH.sum(dim=1)))

    def _combine(
        self, y_RH: Tensor, ends: Tensor, rows: Tensor, out_ends: Tensor, out_rows: Tensor, T: int
    ) -> Tensor:
        """Return (T, K, H): one row for each rank that had the token, and zeros."""
        out = y_RH.new_zeros((T, self.problem.top_k, y_RH.shape[1]))
        self._exchange(y_RH.contiguous(), ends, rows, out.flatten(0, 1), out_ends, out_rows)
        return out

    def _exchange(
        self, rows: Tensor, ends: Tensor, indices: Tensor,
        out: Tensor, out_ends: Tensor, out_indices: Tensor,
    ) -> None:  # fmt: skip
        """Send ``rows`` at ``indices`` to the other ranks, and write theirs into ``out``."""
        fifos = self.lease.value
        fifos.library.moe_comm(
            rows, ends, indices, out, out_ends, out_indices,
            fifos.data.tensor, fifos.ranks.rank, fifos.ranks.size,
        )  # fmt: skip

    def abandon(self, dispatched: Dispatched) -> None:
        """Send NaN rows, as other ranks may wait for this rank's rows."""
        if self.lease.held:
            y_RH = dispatched.x.new_full(
                (len(dispatched.x), self.problem.hidden_size), float("nan"),
                dtype=self.problem.dtype,
            )  # fmt: skip
            self._combine(y_RH, *dispatched.handle)

    def transient_bytes(self, num_tokens: int) -> int:
        """Return the bytes of received rows, their sources, and a returned row per assignment."""
        p, ranks = self.problem, self.group.size()
        row = p.hidden_size * p.dtype.itemsize
        scales = 0 if p.quant.activation is None else p.scales_per_row + _SCALES
        received = self.max_rows(num_tokens) * (row + 8 * scales + 4 * (3 * p.top_k + 2))
        indices = self._capacity * max(ranks, p.top_k) * 4 * 4
        return received + indices + num_tokens * (p.top_k * (row + 4) + row)
