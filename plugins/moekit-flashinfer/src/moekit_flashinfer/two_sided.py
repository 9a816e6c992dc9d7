"""`flashinfer_alltoall_two_sided`: tokens go through FIFOs between the ranks.

    prepare   exchange counts and ids, so that every rank knows what it receives from which rank
    alltoall  send x and scales; rows arrive in source order, without gaps
    combine   send rows back and add those of a token from different ranks

A finished call leaves nothing in the FIFOs, so any number of calls may be in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    SharedBuffers,
    quantize_for_transfer,
    resolve,
)

from . import footprint, library
from .kernels import local_ids
from .one_sided import REROUTED_FROM
from .shared_memory import Ranks, SharedMemory, protocol


class Fifos:
    """The FIFOs of one group, for data and for counts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.library = library.two_sided()
        self.ranks = Ranks(group)
        ranks = self.ranks.size
        nbytes = self.library.get_moe_commworkspace_size_per_rank(ranks)
        self.data = SharedMemory(self.ranks, nbytes, torch.uint64)
        nbytes = self.library.get_moe_prepare_workspace_size_per_rank(ranks)
        self.counts = SharedMemory(self.ranks, nbytes, torch.uint64)
        self.ranks.barrier()

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.counts.nbytes

    def free(self) -> None:
        self.data.free()
        self.counts.free()


_shared: SharedBuffers[Fifos] = SharedBuffers(Fifos.free)


@dataclass(frozen=True)
class _Call:
    """The row indices of a call, rank by rank. ``ends`` (ranks,) says where each rank's end."""

    sent_ends: Tensor
    received_ends: Tensor
    received_rows: Tensor
    returned_rows: Tensor
    tokens: int


class TwoSidedDispatcher(PrepareAndFinalize):
    """STANDARD, over FlashInfer's MnnvlMoe kernels.

    Each of the ep_size ranks has its own tokens; R = ranks * max_num_tokens for every T. All layers
    of the same group share the FIFOs; construction is collective. All calls belong on one stream.
    """

    lease: Lease[Fifos]

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, resolve(problem, group, protocol(spec.name)))
        made_in = self.group
        assert made_in is not None and problem.max_num_tokens is not None
        self.lease = _shared.lease(made_in, lambda: Fifos(made_in))
        self._capacity = problem.max_num_tokens

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        p, fifos, ids = self.problem, self.lease.value, routing.topk_ids
        rank, ranks, experts = fifos.ranks.rank, fifos.ranks.size, p.num_physical_experts
        payloads = {"x": x_TH}
        if quantize is not None:
            payloads["x"], payloads["scale"] = quantize_for_transfer(x_TH, ids, quantize, p)
        # The library takes id -1 for rank 0, and sends an id beyond the last expert nowhere.
        sent_ids = ids if len(ids) < REROUTED_FROM else torch.where(ids < 0, experts, ids)
        # FlashInfer 0.7 deprecates the class MnnvlMoe, but not the functions that it calls.
        received_ids, weights, sent_ends, sent, received_ends, received, returned, _ = (
            fifos.library.moe_prepare(
                sent_ids, routing.topk_weights, None, fifos.counts.tensor, self._capacity,
                rank, ranks, experts, experts, p.top_k,
            )
        )  # fmt: skip
        got = {}
        for name, rows in payloads.items():
            columns = rows.shape[1]
            if name == "scale":
                rows = F.pad(rows, (0, -columns % footprint.SCALES))
            arrived = rows.new_empty((self.max_rows(0), rows.shape[1]))
            self._exchange(rows, sent_ends, sent, arrived, received_ends, received)
            got[name] = arrived[:, :columns].contiguous()
        tokens = Dispatched(
            x=got["x"],
            x_scale=got.get("scale"),
            topk_ids=local_ids(received_ids, p.local_experts.start, p.num_local_experts),
            topk_weights=weights,
            handle=_Call(sent_ends, received_ends, received, returned, len(ids)),
        )
        return Pending.ready(tokens)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        rows_TKH = self._combine(y, dispatched.handle)
        if out_TH.is_contiguous():
            return Pending.ready(torch.sum(rows_TKH, dim=1, out=out_TH))
        return Pending.ready(out_TH.copy_(rows_TKH.sum(dim=1)))

    def _combine(self, y_RH: Tensor, call: _Call) -> Tensor:
        """Return (T, K, H): one row for each rank that had the token, and zeros."""
        shape = (call.tokens, self.problem.top_k, y_RH.shape[1])
        rows = y_RH.new_zeros((shape[0] * shape[1], shape[2]))
        self._exchange(
            y_RH.contiguous(), call.received_ends, call.received_rows,
            rows, call.sent_ends, call.returned_rows,
        )  # fmt: skip
        return rows.view(shape)

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
                (self.max_rows(0), self.problem.hidden_size), float("nan"), dtype=self.problem.dtype
            )
            self._combine(y_RH, dispatched.handle)

    # -- memory -----------------------------------------------------------------------------

    def max_rows(self, num_tokens: int) -> int:
        return self.lease.value.ranks.size * self._capacity

    def transient_bytes(self, num_tokens: int) -> int:
        rows = self.max_rows(num_tokens)
        return footprint.two_sided_transient(self.problem, num_tokens, rows, self._capacity)
