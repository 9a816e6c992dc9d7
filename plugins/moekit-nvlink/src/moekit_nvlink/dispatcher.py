"""`nvlink_ht`: ranks write tokens into the memory of the ranks that need them, and read back.

    dispatch  x, ids, weights and scales of a token -> [source rank, slot] on every rank that holds
              one of its experts, once for each rank
    experts   R = ranks * max_num_tokens rows; rows without a token have no expert
    combine   each rank reads one row from every rank that it sent to, and sums in fp32

The host waits for nothing, so that a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import triton
from moekit_kernels.launch import Launcher
from torch import Tensor

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

from . import kernels
from .buffers import Buffer, Buffers
from .footprint import Layout, transient_bytes

if TYPE_CHECKING:
    from moekit.plugin import DispatcherSpec

# Ranks that speak different versions must not write into each other's memory.
_PROTOCOL = "moekit-nvlink 1"
# A rank is given up after so many looks at its flag, each about a microsecond.
_SPINS = 100_000_000

# Up to so many tokens, more programs run than the budget says: each of them ends within
# microseconds.
_FEW, _FEW_PROGRAMS = 512, 128

_dispatch = Launcher(kernels.dispatch_rows)
_receive = Launcher(kernels.receive_rows)
_combine = Launcher(kernels.combine_rows)

_shared: SharedBuffers[Buffers] = SharedBuffers(Buffers.free)


@dataclass(frozen=True)
class _Call:
    buffer: Buffer
    slots_TE: Tensor


@dataclass(frozen=True)
class Ranks:
    """Who this rank is, and how experts lie on the ranks; what the kernels are compiled for."""

    rank: int
    size: int
    tp: int
    share: int
    larger: int

    @classmethod
    def of(cls, problem: MoEProblem) -> Ranks:
        p, parallel = problem, problem.parallel
        share, larger = divmod(p.num_physical_experts, parallel.ep_size)
        rank = parallel.ep_rank * parallel.tp_size + parallel.tp_rank
        return cls(rank, parallel.ep_size, parallel.tp_size, share, larger)


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work: programs, and tokens and columns of a step of a program.

    A step has tens of kilobytes in flight, which hide the latency of other ranks' memory. Few
    tokens take a program each, which ends at once; more share ``most`` programs.
    """

    programs: int
    tokens: int
    columns: int
    warps: int

    @classmethod
    def of_dispatch(cls, tokens: int, words: int, most: int) -> Tile:
        return cls._of(tokens, triton.next_power_of_2(words), most, 4096, 1024)

    @classmethod
    def of_combine(cls, tokens: int, columns: int, most: int) -> Tile:
        return cls._of(tokens, triton.next_power_of_2(columns), most, 2048, 1024)

    @classmethod
    def _of(cls, tokens: int, columns: int, most: int, few: int, many: int) -> Tile:
        if tokens <= _FEW:
            return cls(max(1, min(tokens, _FEW_PROGRAMS)), 1, min(few, columns), 8)
        return cls(most, 8, min(many, columns), 16)


class NvlinkDispatcher(PrepareAndFinalize):
    """STANDARD, over torch's symmetric memory.

    Every rank has its own tokens; experts may be sliced over ``tp_size`` consecutive ranks.
    R = ranks * max_num_tokens for every T. Buffers are shared by all layers of the same group and
    sizes, and a second one is made when two calls are in flight: construction and that growth are
    collective. All calls on shared buffers belong on one stream.

    Where a rank does not come to a call for about 100 seconds, the output is NaN, and the next call
    raises PeerFailed, which names that rank; checked kernels find out before.
    """

    num_sms = 64

    def __init__(
        self, spec: DispatcherSpec, problem: MoEProblem, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(spec, problem, resolve(problem, group, _PROTOCOL))
        made_in = self.group
        assert made_in is not None
        self._layout, self._ranks = Layout.of(problem), Ranks.of(problem)
        device = torch.device("cuda", torch.cuda.current_device())
        self._key = (tuple(dist.get_process_group_ranks(made_in)), self._layout, device.index)
        self._held: Buffers | None = _shared.acquire(
            self._key, lambda: Buffers(made_in, self._layout, device)
        )

    # -- calls ------------------------------------------------------------------------------

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        x, scale = x_TH, None
        if quantize is not None:
            activation = self.problem.quant.activation
            assert activation is not None
            shared = activation.per_tensor and not activation.static
            x, scale = quantize(x_TH, (routing.topk_ids >= 0).any(dim=1) if shared else None)
            # A scale of the whole tensor differs between ranks: it travels with every token.
            scale = scale.float().expand(len(x_TH), scale.shape[-1]).contiguous()
        assert self._held is not None, "called after destroy()"
        buffer = self._held.take()
        try:
            return Pending.ready(send(self.problem, self._ranks, self._layout, buffer, x, scale,
                                      routing, self.num_sms))  # fmt: skip
        except BaseException:
            buffer.busy = False
            raise

    def output(self, dispatched: Dispatched) -> Tensor:
        """Return (R, H) in the buffer that other ranks read."""
        return output_of(self.problem, self._layout, dispatched.handle.buffer)

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        mine = self.output(dispatched)
        if y.data_ptr() != mine.data_ptr():
            mine.copy_(y)
        call: _Call = dispatched.handle
        gather(self._ranks, self._layout, call.buffer, call.slots_TE, out_TH, self.num_sms)
        call.buffer.busy = False
        return Pending.ready(out_TH)

    def abandon(self, dispatched: Dispatched) -> None:
        """Tell the other ranks that this rank is done: they wait for it before their next call."""
        if self._held is None:
            return
        call: _Call = dispatched.handle
        self.output(dispatched).fill_(float("nan"))
        nothing = torch.empty((0, self.problem.hidden_size), dtype=self.problem.dtype,
                              device=call.slots_TE.device)  # fmt: skip
        gather(self._ranks, self._layout, call.buffer, call.slots_TE[:0], nothing, self.num_sms)
        call.buffer.busy = False

    # -- memory -----------------------------------------------------------------------------

    def max_rows(self, num_tokens: int) -> int:
        return self._layout.ranks * self._layout.capacity

    def buffer_bytes(self) -> int:
        return 0 if self._held is None else self._held.nbytes

    def transient_bytes(self, num_tokens: int) -> int:
        return transient_bytes(self.problem, num_tokens)

    def destroy(self) -> None:
        if self._held is not None:
            self._held = None
            _shared.release(self._key)


def send(
    problem: MoEProblem,
    ranks: Ranks,
    layout: Layout,
    buffer: Buffer,
    x: Tensor,
    scale: Tensor | None,
    routing: Routing,
    programs: int,
) -> Dispatched:
    """Launch the transfer of x (T, ...) and of what belongs to it. Returns what arrives."""
    T, K = routing.topk_ids.shape
    row_words = x.shape[1] * x.itemsize // 4
    slots_TE = torch.empty((T, ranks.size), dtype=torch.int32, device=x.device)
    words = x.view(torch.uint8).view(torch.int32) if T else slots_TE
    tile = Tile.of_dispatch(T, row_words, programs)
    groups = 0 if scale is None else scale.shape[1]
    _dispatch(
        (tile.programs,),
        words, slots_TE if scale is None else scale, routing.topk_ids, routing.topk_weights,
        buffer.peers, slots_TE, buffer.counters, buffer.epoch, T, ranks.rank, layout.capacity,
        layout.x, layout.scale, layout.ids, layout.weights, layout.flags,
        RANKS=ranks.size, RANKS_2=triton.next_power_of_2(ranks.size), TP=ranks.tp,
        SHARE=ranks.share, LARGER=ranks.larger, K=K, K_2=triton.next_power_of_2(K),
        WORDS=row_words, GROUPS=groups, GROUPS_2=triton.next_power_of_2(max(1, groups)),
        TOKENS=tile.tokens, WORDS_TILE=tile.columns, SCAN=512, num_warps=tile.warps,
    )  # fmt: skip
    total = layout.ranks
    _receive(
        (total,), buffer.bytes.data_ptr(), buffer.used, buffer.epoch, buffer.error,
        layout.capacity, _SPINS, layout.ids, layout.flags,
        K=K, K_2=triton.next_power_of_2(K), ROWS=256, num_warps=4,
    )  # fmt: skip
    rows = total * layout.capacity
    return Dispatched(
        x=buffer.region(layout.x, (rows, x.shape[1]), x.dtype),
        x_scale=None
        if scale is None
        else buffer.region(layout.scale, (rows, groups), torch.float32),
        topk_ids=buffer.region(layout.ids, (rows, K), torch.int32),
        topk_weights=buffer.region(layout.weights, (rows, K), torch.float32),
        handle=_Call(buffer, slots_TE),
    )


def output_of(problem: MoEProblem, layout: Layout, buffer: Buffer) -> Tensor:
    """Return (R, H), the experts' output as other ranks read it."""
    return buffer.region(
        layout.y, (layout.ranks * layout.capacity, problem.hidden_size), problem.dtype
    )


def gather(
    ranks: Ranks, layout: Layout, buffer: Buffer, slots_TE: Tensor, out_TH: Tensor, programs: int
) -> None:
    """Tell the other ranks that the experts are done, and launch the sum of their outputs."""
    T, H = out_TH.shape
    tile = Tile.of_combine(T, H, programs)
    out = out_TH if out_TH.stride(1) == 1 or T == 0 else torch.empty_like(out_TH).contiguous()
    _combine(
        (tile.programs,),
        out, buffer.peers, slots_TE, buffer.counters, buffer.epoch, buffer.error,
        T, out.stride(0), ranks.rank, layout.capacity, _SPINS, layout.y, layout.flags,
        RANKS=ranks.size, TP=ranks.tp, H=H, TOKENS=tile.tokens, COLUMNS=tile.columns,
        num_warps=tile.warps,
    )  # fmt: skip
    if out is not out_TH:
        out_TH.copy_(out)
