"""`flashinfer_alltoall`: ranks write their tokens into the memory of the ranks that need them.

    dispatch  x, ids, weights (scales) of token t -> [source rank, slot] of every rank that holds
              one of its experts, once per rank; counts say how many slots of a source are used
    experts   R = ranks * max_num_tokens rows, unused ones without expert
    combine   each rank reads back one row per rank it sent to, and adds

Slots are handed out in any order, so which row a token gets differs between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import InvalidInput
from moekit.plugin import (
    Dispatched,
    MoEProblem,
    Pending,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    SharedBuffers,
    resolve,
)

from . import footprint, library
from .kernels import local_ids, reroute
from .shared_memory import Peers, SharedMemory, protocol

if TYPE_CHECKING:
    from moekit.plugin import DispatcherSpec

# The library sends a slot with id -1 to rank 0. Up to here that is cheaper than a kernel.
REROUTED_FROM = 256

_IN_FLIGHT = 2
_COUNTS = "MOE_A2A_RECV_COUNTERS_OFFSET_INDEX"


@dataclass
class Slot:
    """Memory for one call: from its dispatch to its combine nobody else may use it."""

    memory: SharedMemory
    metainfo: Tensor
    counts_G: Tensor
    busy: bool = False


class Slots:
    """As many slots as calls were in flight at once. All ranks take and give back in one order."""

    def __init__(self, group: dist.ProcessGroup, capacity: int, row_bytes: tuple[int, int]) -> None:
        """row_bytes: most bytes of one token on its way to the experts, and back."""
        self.library = library.one_sided()
        self.peers, self.capacity = Peers(group), capacity
        self._nbytes = self.library.moe_a2a_get_workspace_size_per_rank(
            self.peers.size, capacity, *row_bytes
        )
        names, values = self.library.get_moe_alltoall_module().moe_a2a_get_metainfo_index_pairs()
        self._index = dict(zip(map(str, names), map(int, values), strict=True))
        self._slots = [self._open()]

    def _open(self) -> Slot:
        """Collective."""
        memory = SharedMemory(self.peers, self._nbytes, torch.uint8)
        metainfo = self.library.moe_a2a_initialize(
            memory.tensor, self.peers.rank, self.peers.size, self.capacity
        )
        self.peers.barrier()  # initializing cleared this rank's own memory
        start = int(torch.utils.dlpack.from_dlpack(metainfo)[self._index[_COUNTS]])
        mine = memory.tensor[self.peers.rank]
        counts_G = mine[start : start + 4 * self.peers.size].view(torch.int32)
        return Slot(memory, metainfo, counts_G)

    @property
    def nbytes(self) -> int:
        return sum(slot.memory.nbytes for slot in self._slots)

    def take(self) -> Slot:
        slot = next((s for s in self._slots if not s.busy), None)
        if slot is None:
            if len(self._slots) == _IN_FLIGHT:
                raise InvalidInput(
                    f"{_IN_FLIGHT} calls are in flight, and this would be one more: take the "
                    "result of one first"
                )
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise InvalidInput(
                    "a second call in flight needs a second buffer, which cannot be made while a "
                    "graph is captured: have two calls in flight once before capturing"
                )
            slot = self._open()
            self._slots.append(slot)
        slot.busy = True
        return slot

    def free(self) -> None:
        for slot in self._slots:
            del slot.counts_G
            slot.memory.free()


_shared: SharedBuffers[Slots] = SharedBuffers(Slots.free)


@dataclass(frozen=True)
class _Call:
    slot: Slot
    tokens: int
    offset: int  # of the combine payload in the slot's memory


class OneSidedDispatcher(PrepareAndFinalize):
    """STANDARD, over FlashInfer's MoeAlltoAll kernels.

    Ranks = ep_size, each with its own tokens; R = ranks * max_num_tokens whatever T is. Buffers are
    shared by all layers of the same group and sizes, and grow when a second call is in flight.
    Construction and that growth are collective. All calls on shared buffers belong on one stream.

    A peer that never comes makes the library's kernels trap after minutes; ``checked`` kernels
    find out before.
    """

    makes_output = True

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, resolve(problem, group, protocol(spec.name)))
        capacity, sizes, made_in = problem.max_num_tokens, self._row_bytes(), self.group
        assert capacity is not None and made_in is not None
        self._key = (tuple(dist.get_process_group_ranks(made_in)), capacity, sizes)
        self._held: Slots | None = _shared.acquire(
            self._key, lambda: Slots(made_in, capacity, sizes)
        )

    @property
    def _slots(self) -> Slots:
        assert self._held is not None, "called after destroy()"
        return self._held

    def _row_bytes(self) -> tuple[int, int]:
        return footprint.one_sided_row_bytes(self.problem)

    # -- calls ------------------------------------------------------------------------------

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        ids, p, peers = routing.topk_ids, self.problem, self._slots.peers
        payloads = {"x": x_TH, "weights": routing.topk_weights, "ids": ids}
        if quantize is not None:
            payloads |= quantized_payloads(x_TH, ids, quantize, p)
        targets = ids
        if len(ids) >= REROUTED_FROM or p.num_local_experts == 1:
            targets = reroute(ids, nowhere=p.local_experts.start)
        # The library packs payloads without gaps: widest alignment first keeps all aligned.
        names = sorted(payloads, key=lambda name: -_alignment(payloads[name]))
        slot = self._slots.take()
        try:
            received, offset = self._slots.library.moe_a2a_dispatch(
                targets, [payloads[name] for name in names], slot.memory.tensor, slot.metainfo,
                self._slots.capacity, peers.rank, peers.size, p.top_k, p.num_physical_experts,
            )  # fmt: skip
        except Exception:
            slot.busy = False
            raise
        got = {name: t.flatten(0, 1) for name, t in zip(names, received, strict=True)}
        tokens = Dispatched(
            x=got["x"],
            x_scale=got.get("scale"),
            topk_ids=local_ids(
                got["ids"], p.local_experts.start, p.num_local_experts, slot.counts_G
            ),
            topk_weights=got["weights"],
            handle=_Call(slot, len(ids), offset),
        )
        return Pending.ready(tokens)

    def output(self, dispatched: Dispatched) -> Tensor:
        """Return (R, H) in the buffer that other ranks read."""
        p, call, peers = self.problem, dispatched.handle, self._slots.peers
        nbytes = self.max_rows(0) * p.hidden_size * p.dtype.itemsize
        mine = call.slot.memory.tensor[peers.rank]
        rows: Tensor = mine[call.offset : call.offset + nbytes].view(p.dtype)
        return rows.view(-1, p.hidden_size)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor | None) -> Pending[Tensor]:
        combined = self._combine(y, dispatched.handle)
        return Pending.ready(combined if out_TH is None else out_TH.copy_(combined))

    def _combine(self, y_RH: Tensor, call: _Call) -> Tensor:
        p, slots, slot = self.problem, self._slots, call.slot
        peers = slots.peers
        mine = slot.memory.tensor[peers.rank]
        in_place = y_RH.data_ptr() == mine.data_ptr() + call.offset
        combined: Tensor = slots.library.moe_a2a_combine(
            y_RH.contiguous().view(peers.size, slots.capacity, p.hidden_size), call.tokens,
            slot.memory.tensor, slot.metainfo, slots.capacity, peers.rank, peers.size, p.top_k,
            call.offset, in_place,
        )  # fmt: skip
        slot.busy = False
        return combined

    def abandon(self, dispatched: Dispatched) -> None:
        """Peers wait in combine for every rank that dispatched, so this one takes part, with NaN:
        where they are not about to fail too, they shall see that something is missing."""
        if self._held is not None:
            self._combine(self.output(dispatched).fill_(float("nan")), dispatched.handle)

    # -- memory -----------------------------------------------------------------------------

    def max_rows(self, num_tokens: int) -> int:
        return self._slots.peers.size * self._slots.capacity

    def buffer_bytes(self) -> int:
        return 0 if self._held is None else self._held.nbytes

    def transient_bytes(self, num_tokens: int) -> int:
        rows = self.max_rows(num_tokens)
        return footprint.one_sided_transient(self.problem, num_tokens, rows)

    def destroy(self) -> None:
        if self._held is not None:
            self._held = None
            _shared.release(self._key)


def quantized_payloads(
    x_TH: Tensor, ids_TK: Tensor, quantize: Quantizer, problem: MoEProblem
) -> dict[str, Tensor]:
    """x as it travels, and its scales, a row per token (T, groups) fp32."""
    activation = problem.quant.activation
    assert activation is not None
    shared = activation.per_tensor and not activation.static
    x, scale = quantize(x_TH, (ids_TK >= 0).any(dim=1) if shared else None)
    # A scale for the whole tensor differs between ranks: it travels with every token.
    scale = scale.float().expand(len(x_TH), scale.shape[-1])
    return {"x": x.contiguous(), "scale": scale.contiguous()}


def _alignment(rows: Tensor) -> int:
    """Largest power of two that divides a row's bytes."""
    nbytes = rows.shape[1] * rows.itemsize
    return nbytes & -nbytes
