"""The `naive` dispatcher: every rank of the group gets every token, and outputs are summed back.

    header   (rows or -1, wire dtype, scale columns) of every rank, so that all know all sizes and
             a rank that cannot go on says so instead of leaving the others waiting; on one host
             through shared memory, so that the host waits for no device
    gather   x_TH -> x_RH, and one row of int32 per token for its ids, weights and scales
    experts  each rank runs its own: a share of the experts, or a slice of all
    reduce   y_RH -> out_TH: rank q's rows go to rank q, which sums what it got in rank order

In batch-invariant problems the experts' rows return unweighted, K for each token, and their owner
weights and sums them in the order of K: so the number of ranks changes no bits.

Both ways, 16- and 32-bit values travel as they are (quantized activations as 8 bits); the sum is
in fp32 and rounded once, so a result has at most one rounding per rank more than one rank's. The
order of the sum is fixed, so equal inputs give equal bits.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import GroupMismatch, PeerFailed
from moekit.plugin import (
    Dispatched,
    DispatcherSpec,
    MoEProblem,
    Pending,
    PrepareAndFinalize,
    Quantizer,
    Routing,
    Transfers,
    exchange,
    has_backend,
    local_ids,
    quantize_for_transfer,
    reason_of,
    resolve,
)

from .board import board_of

logger = logging.getLogger("moekit")

# Ranks that speak different versions of this exchange must not start talking.
_PROTOCOL = "moekit-naive 2"

# The step at which ranks say why a call ends early.
_REASONS = "end a call"
# The step at which ranks say their sizes while a CUDA graph is captured.
_SIZES = "capture a call"

# Newer releases of torch renamed it, and warn about the old name.
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_coalescing = getattr(dist.distributed_c10d, "_coalescing_manager", None)


@dataclass(frozen=True)
class _Handle:
    """A call as `finalize` needs it: its sizes, and this rank's routing with global ids."""

    sizes: _Sizes
    routing: Routing


@dataclass(frozen=True)
class _Sizes:
    """One call's sizes, the same on every rank.

    sent: rows each rank contributes to the gather. out: rows each rank gets back (more than it
    sent where several ranks hold the same tokens and one of them sends for all).
    """

    sent: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.sent)


class NaiveDispatcher(PrepareAndFinalize):
    """STANDARD, over torch.distributed (gloo on the CPU, NCCL on CUDA).

    The group holds ``ep_size * tp_size`` ranks, group rank = ep_rank * tp_size + tp_rank, and
    ``dp_size`` batches of tokens, consecutive ranks sharing one. Every rank's result is complete:
    summed over expert shares and over slices of the intermediate size.

    Construction and every call are collective: all ranks must start calls in one order and take
    results in that order. T may differ between ranks and be 0. x must stay unchanged until the
    call's result is taken.
    """

    group: dist.ProcessGroup  # this dispatcher is made only where tokens move

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, resolve(problem, group, _PROTOCOL))
        assert self.group is not None
        self._transfers = Transfers(self.group)
        self._board = board_of(self.group, _timeout(self.group))
        # Without a board, sizes go over a CPU backend if there is one: the GPU need not drain.
        on_cpu = has_backend(self.group, "cpu")
        self._header_device = "cpu" if on_cpu else problem.device.type

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        try:
            x, meta = self._to_send(x_TH, routing, quantize)
        except BaseException as error:  # the others are on their way into this exchange
            self.abort(reason_of(error))
            raise
        with self._transfers:
            sizes = self._agree(x.shape[0], x.dtype, meta.shape[1] - 2 * self.problem.top_k)
            # Before the launch, which torch would never end after an error within it.
            x_RH, meta_RM = (t.new_empty((sizes.rows, t.shape[1])) for t in (x, meta))
            with self._one_launch(sizes) as works:
                self._gather(x, x_RH, sizes, works)
                self._gather(meta, meta_RM, sizes, works)

        def arrive(sent: object = (x, meta)) -> Dispatched:  # held until they are sent
            with self._transfers:
                for work in works:
                    work.wait()
            return self._arrived(x_RH, meta_RM, _Handle(sizes, routing))

        return Pending(arrive)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        handle: _Handle = dispatched.handle
        sizes = handle.sizes
        if not sizes.rows:
            return Pending.ready(out_TH)
        by_assignment = self.problem.batch_invariant
        y = y.flatten(1)  # (R, H), or (R, K * H)
        if sizes.out != sizes.sent:
            y = torch.cat(self._shares(y, sizes))
        ranks, tokens, hidden = self.group.size(), len(out_TH), y.shape[1]
        partial_GTH = torch.empty((ranks, tokens, hidden), dtype=y.dtype, device=y.device)
        with self._transfers:
            work = dist.all_to_all_single(
                _bytes(partial_GTH.view(ranks * tokens, hidden)),
                _bytes(y.contiguous()),
                output_split_sizes=[tokens] * ranks,
                input_split_sizes=list(sizes.out),
                group=self.group,
                async_op=True,
            )

        def combine() -> Tensor:
            with self._transfers:
                work.wait()
            if by_assignment:
                return self._in_order_of_k(partial_GTH, handle.routing, out_TH)
            first, *others = partial_GTH.unbind()
            if ranks == 2:  # computed in fp32 and rounded once
                return torch.add(first, *others, out=out_TH)
            total = out_TH.copy_(first) if out_TH.dtype is torch.float32 else first.float()
            for partial_TH in others:
                total += partial_TH
            return total if total is out_TH else out_TH.copy_(total)

        return Pending(combine)

    def _in_order_of_k(self, rows_GTN: Tensor, routing: Routing, out_TH: Tensor) -> Tensor:
        """Weight and sum the rows (ranks, T, K * H) that the ranks of the experts sent."""
        ids_TK = routing.topk_ids
        T, K = ids_TK.shape
        rows_SH = rows_GTN.view(-1, out_TH.shape[1])
        places_TK = torch.arange(T * K, device=ids_TK.device).view(T, K)
        places_TK += self._rank_of(ids_TK) * (T * K)
        return self.weight_and_reduce(rows_SH, ids_TK, routing.topk_weights, out_TH, places_TK)

    def _rank_of(self, ids: Tensor) -> Tensor:
        """Return the ranks of these physical experts, by arithmetic that a CUDA graph can hold.

        The first ranks hold one expert more than the others, see `partition`. -1 gives -1.
        """
        p = self.problem
        share, larger = divmod(p.num_physical_experts, p.parallel.ep_size)
        first = larger * (share + 1)
        others = larger + (ids - first).div(share, rounding_mode="floor")
        return torch.where(ids < first, ids.div(share + 1, rounding_mode="floor"), others)

    def max_rows(self, num_tokens: int) -> int:
        return num_tokens * self.problem.parallel.dp_size

    def transient_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a call in which every rank passes ``num_tokens``."""
        p, parallel = self.problem, self.problem.parallel
        rows = num_tokens * parallel.dp_size
        row_bytes = p.hidden_size * p.dtype.itemsize
        scales = p.scales_per_row
        meta_bytes = 4 * (2 * p.top_k + scales)
        # Ids as shifted and as clamped, and a mask; experts may copy weights; scales are copied.
        unpacked_bytes = p.top_k * (2 * 4 + 1 + 4) + 4 * scales
        gathered = rows * (row_bytes + meta_bytes + unpacked_bytes) + num_tokens * meta_bytes
        ranks = parallel.num_ranks
        if p.batch_invariant:  # rows by assignment, as sent, received and summed
            wide = 4 if p.dtype_name == "float16" else p.dtype.itemsize
            shared = ranks if ranks != parallel.dp_size else 0
            returned = (ranks + shared) * num_tokens * p.top_k * p.hidden_size * wide
            return gathered + returned + num_tokens * (4 * 4 * p.hidden_size + 2 * 8 * p.top_k)
        returned = ranks * num_tokens * row_bytes * (2 if ranks != parallel.dp_size else 1)
        summed = num_tokens * p.hidden_size * 4 if ranks > 2 else 0  # two are added at once
        return gathered + returned + summed

    def abort(self, reason: str) -> None:
        """Take this rank's place in the header exchange: every other rank raises PeerFailed."""
        try:
            self._exchange_headers([-1, 0, 0])
            exchange(_REASONS, reason, self.group)
        except RuntimeError as error:  # the group itself is broken; the caller's error matters
            logger.warning("could not tell the other ranks about %r: %s", reason, error)

    # -- what is sent, and what arrives ------------------------------------------------------

    def _to_send(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> tuple[Tensor, Tensor]:
        """Return x (T, H) as it travels, and ids, weights and scales (T, 2K + S) int32."""
        ids = routing.topk_ids
        x = x_TH
        columns = [ids.int(), routing.topk_weights.view(torch.int32)]
        if quantize is not None:
            x, scale = quantize_for_transfer(x_TH, ids, quantize, self.problem)
            columns.append(scale.view(torch.int32))
        return x.contiguous(), torch.cat(columns, dim=1)

    def _arrived(self, x_RH: Tensor, meta_RM: Tensor, handle: _Handle) -> Dispatched:
        k, scale, floats = self.problem.top_k, None, meta_RM.view(torch.float32)
        if meta_RM.shape[1] > 2 * k:
            scale = floats[:, 2 * k :].contiguous()
        ids, weights = local_ids(meta_RM[:, :k], self.problem), floats[:, k : 2 * k]
        return Dispatched(x_RH, scale, ids, weights, handle=handle)

    # -- sizes and failures ------------------------------------------------------------------

    def _agree(self, tokens: int, dtype: torch.dtype, scales: int) -> _Sizes:
        """Exchange sizes. Raise, on every rank, if a rank reports a failure or they disagree."""
        wire = zlib.crc32(str(dtype).encode())
        headers = self._exchange_headers([tokens, wire, scales])
        failed = [rank for rank, header in enumerate(headers) if header[0] < 0]
        if failed:
            reasons = exchange(_REASONS, "", self.group)
            text = "; ".join(f"rank {rank} failed: {reasons[rank]}" for rank in failed)
            raise PeerFailed(
                f"{text}. No rank ran this call; correct it there, and all ranks can call again"
            )
        if len({tuple(header[1:]) for header in headers}) > 1:
            forms = exchange(_REASONS, f"{dtype} with {scales} scales per token", self.group)
            raise GroupMismatch(
                f"ranks send tokens in different forms: {dict(enumerate(forms))}; "
                "choose the same experts backend on all ranks"
            )
        counts = [header[0] for header in headers]
        copies = len(counts) // self.problem.parallel.dp_size
        leaders = [rank - rank % copies for rank in range(len(counts))]
        if any(counts[rank] != counts[leader] for rank, leader in enumerate(leaders)):
            raise GroupMismatch(
                f"ranks passed {counts} tokens, but with dp_size="
                f"{self.problem.parallel.dp_size} each {copies} consecutive ranks hold the same "
                "tokens; pass them the same, or set dp_size to the number of ranks"
            )
        sent = tuple(n if rank == leaders[rank] else 0 for rank, n in enumerate(counts))
        return _Sizes(sent, tuple(counts))

    def _exchange_headers(self, header: list[int]) -> list[list[int]]:
        if self._board is not None:
            return self._board.exchange(header, self.peer_timeout)
        if self._header_device != "cpu" and torch.cuda.is_current_stream_capturing():
            return [json.loads(said) for said in exchange(_SIZES, json.dumps(header), self.group)]
        mine = torch.tensor(header, dtype=torch.int64, device=self._header_device)
        everyone = mine.new_empty(self.group.size() * len(header))
        work = _all_gather(everyone, mine, group=self.group, async_op=True)
        if self.peer_timeout is None or self._header_device != "cpu":
            work.wait()
        else:
            work.wait(timedelta(seconds=self.peer_timeout))
        return everyone.view(-1, len(header)).tolist()

    # -- transfers ---------------------------------------------------------------------------

    @contextmanager
    def _one_launch(self, sizes: _Sizes) -> Iterator[list[Any]]:
        """Yield a list for the collectives' handles; NCCL launches all of them as one kernel."""
        works: list[Any] = []
        if not sizes.rows or _coalescing is None or self.problem.device.type != "cuda":
            yield works
            return
        with _coalescing(self.group, device=torch.device("cuda"), async_ops=True) as together:
            yield works
        works[:] = [together]

    def _gather(self, mine: Tensor, everyone: Tensor, sizes: _Sizes, works: list[Any]) -> None:
        """Start (T, N) -> (R, N) in rank order; ``works`` get the handles to wait for."""
        if sizes.rows and len(set(sizes.sent)) == 1:
            works.append(
                _all_gather(_bytes(everyone), _bytes(mine), group=self.group, async_op=True)
            )
        elif sizes.rows:
            for rank, part in enumerate(torch.split(everyone, list(sizes.sent))):
                if not part.shape[0]:
                    continue
                if rank == self.group.rank():
                    part.copy_(mine)
                works.append(
                    dist.broadcast(_bytes(part), group=self.group, group_src=rank, async_op=True)
                )

    def _shares(self, y_RH: Tensor, sizes: _Sizes) -> list[Tensor]:
        """Return, for every rank, the rows of the tokens that it holds."""
        parts = torch.split(y_RH, list(sizes.sent))
        copies = len(parts) // self.problem.parallel.dp_size
        return [parts[rank - rank % copies] for rank in range(len(parts))]


def _timeout(group: dist.ProcessGroup) -> float:
    """Return the seconds after which the group's own collectives give up."""
    device = torch.device("cuda" if has_backend(group, "cuda") else "cpu")
    options = getattr(group._get_backend(device), "options", None)
    found = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return float(found.total_seconds())


def _bytes(rows: Tensor) -> Tensor:
    """View contiguous rows as a dtype that travels: gloo and NCCL do not know fp8, and gloo does
    not know every dtype of 16 bits."""
    return rows if rows.is_cuda and rows.dtype.itemsize > 1 else rows.view(torch.uint8)
