"""`acme_all_to_all`: each token travels once to every rank that holds one of its experts.

    count     every rank tells every other rank how many rows it will send
    dispatch  rows, expert ids and router weights, ordered by destination
    experts   every rank runs its local experts over the rows that it received
    combine   rows return to the rank they came from, which sums them in rank order

It runs over `torch.distributed.all_to_all_single`: gloo on the CPU, NCCL on GPUs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.plugin import (
    Dispatched,
    DispatcherSpec,
    MoEProblem,
    Pending,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    Transfers,
    local_ids,
    partition,
    resolve,
)


class AcmeAllToAll(PrepareAndFinalize):
    """STANDARD, for ranks that each hold tokens of their own (``dp_size = ep_size * tp_size``).

    Construction is collective, and so is every call: all ranks make the same calls in one order.
    """

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        # Ranks whose versions exchange different messages must not start: hence the protocol.
        super().__init__(spec, problem, resolve(problem, group, protocol="acme-moe 1"))
        assert self.group is not None
        self._transfers = Transfers(self.group)  # names the rank that a failure is due to

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        assert quantize is None, "the spec declares no wire_schemes"
        wanted_NT = self._wanted(routing.topk_ids)
        token_S = wanted_NT.nonzero()[:, 1]  # the token of each row to send, by destination rank
        sent_N = wanted_NT.sum(dim=1)
        received_N = torch.empty_like(sent_N)
        with self._transfers:
            dist.all_to_all_single(received_N, sent_N, group=self.group)
        # The sizes of the messages are needed on the host, so this dispatcher is not graph_safe.
        sent, received = sent_N.tolist(), received_N.tolist()
        x_RH, ids_RK, weights_RK = (
            self._exchange(rows[token_S], sent, received)
            for rows in (x_TH, routing.topk_ids, routing.topk_weights)
        )
        ids_RK = local_ids(ids_RK, self.problem)  # -1 for experts that other ranks hold
        handle = (token_S, sent, received)
        return Pending.ready(Dispatched(x_RH, None, ids_RK, weights_RK, handle=handle))

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        token_S, sent, received = dispatched.handle
        y_SH = self._exchange(y, received, sent)
        total_TH = torch.zeros(out_TH.shape, dtype=torch.float32, device=out_TH.device)
        # A rank returns a token at most once, and ranks are added in order: equal bits every time.
        for tokens, rows in zip(token_S.split(sent), y_SH.split(sent), strict=True):
            total_TH.index_add_(0, tokens, rows.float())
        return Pending.ready(out_TH.copy_(total_TH))

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens * self.problem.parallel.dp_size

    def transient_bytes(self, num_tokens: int) -> int:
        p, rows = self.problem, self.max_rows(num_tokens)
        row = p.hidden_size * p.dtype.itemsize + p.top_k * (8 + 4)
        # Rows as sent and as received, ids shifted, indices; the sum and one rank's rows in fp32.
        exchanged = rows * (2 * row + p.top_k * 18 + 32)
        return exchanged + 2 * num_tokens * p.hidden_size * 4

    def _wanted(self, ids_TK: Tensor) -> Tensor:
        """Return (ranks, T) bool: which ranks hold at least one expert of each token.

        A rank's place in the group is ``ep_rank * tp_size + tp_rank``. With tensor parallelism each
        of the tp_size ranks holds a slice of the expert, so the token goes to all of them, and the
        sum over ranks is complete.
        """
        parallel, experts = self.problem.parallel, self.problem.num_physical_experts
        shares = [partition(experts, parallel.ep_size, rank) for rank in range(parallel.ep_size)]
        wanted = [((ids_TK >= e.start) & (ids_TK < e.stop)).any(dim=1) for e in shares]
        return torch.stack(wanted).repeat_interleave(parallel.tp_size, dim=0)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send ``sent[i]`` rows to rank i and return the rows received, in rank order."""
        arrived = rows.new_empty((sum(received), rows.shape[1]))
        with self._transfers:
            # As bytes: gloo does not send every dtype. Ranks may send and receive no rows at all.
            dist.all_to_all_single(
                arrived.view(torch.uint8),
                rows.contiguous().view(torch.uint8),
                output_split_sizes=received,
                input_split_sizes=sent,
                group=self.group,
            )
        return arrived
