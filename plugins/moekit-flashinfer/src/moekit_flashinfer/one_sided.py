"""`flashinfer_alltoall`: ranks write their tokens into the memory of the ranks that need them.

    dispatch  write x, ids, weights and scales of each token to [source rank, row] of every rank
              that holds one of its experts; counts tell how many rows of a source are used
    experts   run over R = ranks * max_num_tokens rows; unused rows have no expert
    combine   read back one row from each rank that a token was sent to, and add them

The library assigns rows in any order, so a token's row differs between calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.plugin import (
    CallBuffers,
    Dispatched,
    DispatcherSpec,
    Lease,
    MoEProblem,
    Pending,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    SharedBuffers,
    quantize_for_transfer,
    resolve,
)

from . import footprint, library
from .kernels import local_ids, reroute
from .shared_memory import Ranks, SharedMemory, protocol

# The library sends an assignment with id -1 to rank 0, which is cheaper than a kernel up to here.
REROUTED_FROM = 256

_COUNTS = "MOE_A2A_RECV_COUNTERS_OFFSET_INDEX"


@dataclass
class CallBuffer:
    """Memory for one call."""

    memory: SharedMemory
    metainfo: Tensor
    counts_G: Tensor


class Buffers:
    """The buffers of a group's in-flight calls."""

    def __init__(self, group: dist.ProcessGroup, capacity: int, row_bytes: tuple[int, int]) -> None:
        """Allocate the first buffer; collective.

        Args:
            row_bytes: The most bytes of one token on its way to the experts, and back.
        """
        self.library = library.one_sided()
        self.ranks, self.capacity = Ranks(group), capacity
        self._nbytes = self.library.moe_a2a_get_workspace_size_per_rank(
            self.ranks.size, capacity, *row_bytes
        )
        # Layers of several schemes take turns here, and the library puts the experts' output right
        # behind what a dispatch sends. So a fast rank's tokens of the next layer could replace rows
        # that a slow rank still reads: the output lies behind the most that any dispatch sends.
        self.output_at = self._nbytes - footprint.one_sided_output(
            self.ranks.size, capacity, row_bytes
        )
        names, values = self.library.get_moe_alltoall_module().moe_a2a_get_metainfo_index_pairs()
        self._index = dict(zip(map(str, names), map(int, values), strict=True))
        self.calls = CallBuffers(self._open, group)

    def _open(self) -> CallBuffer:
        """Allocate another buffer; collective."""
        memory = SharedMemory(self.ranks, self._nbytes, torch.uint8)
        metainfo = self.library.moe_a2a_initialize(
            memory.tensor, self.ranks.rank, self.ranks.size, self.capacity
        )
        self.ranks.barrier()  # initializing cleared this rank's own memory
        start = int(torch.utils.dlpack.from_dlpack(metainfo)[self._index[_COUNTS]])
        mine = memory.tensor[self.ranks.rank]
        counts_G = mine[start : start + 4 * self.ranks.size].view(torch.int32)
        return CallBuffer(memory, metainfo, counts_G)

    @property
    def nbytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self.calls.all)

    def free(self) -> None:
        for buffer in self.calls.all:
            del buffer.counts_G
            buffer.memory.free()


_shared: SharedBuffers[Buffers] = SharedBuffers(Buffers.free)


@dataclass(frozen=True)
class _Call:
    buffer: CallBuffer
    tokens: int


class OneSidedDispatcher(PrepareAndFinalize):
    """STANDARD, over FlashInfer's MoeAlltoAll kernels.

    Each of the ep_size ranks has its own tokens; R = ranks * max_num_tokens for every T. All layers
    of the same group and sizes share buffers, and a second in-flight call allocates a second one.
    Construction and that allocation are collective. Calls run in the order of their launches, on
    whichever streams.

    If a rank never calls, the library's kernels trap after minutes; the collective check of
    ``checked`` kernels reports it earlier.
    """

    lease: Lease[Buffers]
    makes_output = True

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, resolve(problem, group, protocol(spec.name)))
        capacity, made_in = problem.max_num_tokens, self.group
        sizes = footprint.one_sided_row_bytes(problem)
        assert capacity is not None and made_in is not None
        self.lease = _shared.lease(
            (made_in, capacity, sizes), lambda: Buffers(made_in, capacity, sizes)
        )

    # -- calls ------------------------------------------------------------------------------

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids, p, buffers = routing.topk_ids, self.problem, self.lease.value
        ranks = buffers.ranks
        payloads = {"x": x_TH, "weights": routing.topk_weights, "ids": ids}
        if quantize is not None:
            payloads["x"], payloads["scale"] = quantize_for_transfer(x_TH, ids, quantize, p)
        targets = ids
        if len(ids) >= REROUTED_FROM or p.num_local_experts == 1:
            targets = reroute(ids, nowhere=p.local_experts.start)
        # The library packs payloads without gaps: the widest alignment first keeps all aligned.
        names = sorted(payloads, key=lambda name: -_alignment(payloads[name]))
        buffer = buffers.calls.take()
        try:
            # FlashInfer 0.7 returns a third value, statistics that nobody asked for.
            received, end, *_ = buffers.library.moe_a2a_dispatch(
                targets, [payloads[name] for name in names], buffer.memory.tensor, buffer.metainfo,
                buffers.capacity, ranks.rank, ranks.size, p.top_k, p.num_physical_experts,
            )  # fmt: skip
        except Exception:
            buffers.calls.give_back(buffer)
            raise
        assert end <= buffers.output_at, f"{end} bytes of tokens before {buffers.output_at}"
        got = {name: t.flatten(0, 1) for name, t in zip(names, received, strict=True)}
        tokens = Dispatched(
            x=got["x"],
            x_scale=got.get("scale"),
            topk_ids=local_ids(
                got["ids"], p.local_experts.start, p.num_local_experts, buffer.counts_G
            ),
            topk_weights=got["weights"],
            handle=_Call(buffer, len(ids)),
        )
        return Pending.ready(tokens)

    def output(self, dispatched: Dispatched) -> Tensor:
        """Return (R, H) in the buffer that other ranks read."""
        p, buffers = self.problem, self.lease.value
        nbytes = self.max_rows(0) * p.hidden_size * p.dtype.itemsize
        mine = dispatched.handle.buffer.memory.tensor[buffers.ranks.rank]
        rows: Tensor = mine[buffers.output_at :][:nbytes].view(p.dtype)
        return rows.view(-1, p.hidden_size)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor | None) -> Pending[Tensor]:
        combined = self._combine(y, dispatched.handle)
        return Pending.ready(combined if out_TH is None else out_TH.copy_(combined))

    def _combine(self, y_RH: Tensor, call: _Call) -> Tensor:
        p, buffers, buffer = self.problem, self.lease.value, call.buffer
        ranks = buffers.ranks
        buffers.calls.keep_order()
        mine = buffer.memory.tensor[ranks.rank]
        in_place = y_RH.data_ptr() == mine.data_ptr() + buffers.output_at
        combined: Tensor = buffers.library.moe_a2a_combine(
            y_RH.contiguous().view(ranks.size, buffers.capacity, p.hidden_size), call.tokens,
            buffer.memory.tensor, buffer.metainfo, buffers.capacity, ranks.rank, ranks.size,
            p.top_k, buffers.output_at, in_place,
        )  # fmt: skip
        buffers.calls.give_back(buffer)
        return combined

    def abandon(self, dispatched: Dispatched) -> None:
        """Take part in combine with NaN rows, as the other ranks wait for every rank there.

        A rank that does not fail itself then sees that something is missing.
        """
        if self.lease.held:
            self._combine(self.output(dispatched).fill_(float("nan")), dispatched.handle)

    # -- memory -----------------------------------------------------------------------------

    def max_rows(self, num_tokens: int) -> int:
        buffers = self.lease.value
        return buffers.ranks.size * buffers.capacity

    def transient_bytes(self, num_tokens: int) -> int:
        rows = self.max_rows(num_tokens)
        return footprint.one_sided_transient(self.problem, num_tokens, rows)


def _alignment(rows: Tensor) -> int:
    """Return the largest power of two that divides a row's bytes."""
    nbytes = rows.shape[1] * rows.itemsize
    return nbytes & -nbytes
