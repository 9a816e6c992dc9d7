"""The launches of a call: dispatch in one of two formats, and the combine that they share.

A call is a list of steps, each one kernel. A step waits only for what earlier steps of other ranks
have done, so it makes no difference in which order ranks take the same step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import torch
from moekit_kernels.launch import Launcher, next_power_of_2
from moekit_kernels.numerics import INTERPRETED
from torch import Tensor

from moekit.plugin import Dispatched, MoEProblem, Routing, Unreduced

from .buffers import Buffer
from .kernels.assignments import count_assignments, dispatch_assignments, receive_assignments
from .kernels.combine import combine_rows
from .kernels.reduce import reduce_rows
from .kernels.rows import dispatch_rows, receive_rows
from .layout import Layout, Ranks
from .settings import Settings

Step = Callable[[], None]

# A wait for a rank ends after this many looks at its flag, each about a microsecond.
_SPINS = 100_000_000
_MAX_LAYOUTS = 1024

_dispatch_rows, _receive_rows = Launcher(dispatch_rows), Launcher(receive_rows)
_count, _dispatch_assignments = Launcher(count_assignments), Launcher(dispatch_assignments)
_receive_assignments = Launcher(receive_assignments)
_combine, _reduce = Launcher(combine_rows), Launcher(reduce_rows)


@dataclass(frozen=True)
class Tile:
    """The division of a kernel's work: programs; tokens (or rows) and columns of a program's step.

    A program has the bytes of ``stages`` steps in flight, tens of kilobytes, which hide the latency
    of memory. Few tokens take all programs that they can use, which end within microseconds; more
    tokens share the programs of `Settings`. Unless a user sets these, a dispatch has twice as many
    programs of half the warps, and `reduce_rows` takes all of the GPU.
    """

    programs: int
    tokens: int
    columns: int
    warps: int
    stages: int = 1

    few, few_programs, medium = 512, 128, 2048
    # For `reduce_rows`: programs of a multiprocessor, and the registers that let it hold them.
    reduce_each, reduce_registers = 8, 64
    # Triton keeps one step less in shared memory, of which a block has 99 KB at least (8.6, 8.9).
    step_bytes, shared_bytes = 32768, 147456

    @classmethod
    def of_dispatch(cls, tokens: int, words: int, settings: Settings) -> Tile:
        """Return the tile for rows of ``words`` 4-byte words, once for each rank."""
        columns = min(4096, next_power_of_2(words))
        if tokens <= cls.few:
            return cls(max(1, min(tokens, cls.few_programs)), 1, columns, 8)
        if settings.most_multiprocessors is not None:
            return cls(settings.programs, min(16, 16384 // columns), columns, 16)
        step = 4096 if tokens <= cls.medium else 8192
        return cls(2 * settings.programs, min(16, step // columns), columns, 8)

    @classmethod
    def of_assignments(cls, tokens: int, words: int, most: int) -> Tile:
        """Return the tile for rows of ``words`` 4-byte words, once for each assignment."""
        columns = min(1024, next_power_of_2(words))
        steps = max(1, tokens * -(-words // columns))
        return cls(min(steps, cls.few_programs if tokens <= cls.few else most), 1, columns, 8)

    @classmethod
    def of_combine(cls, tokens: int, columns: int, size: int, entries: int, most: int) -> Tile:
        """Return the tile for ``entries`` rows a token: ``columns`` values of ``size`` bytes."""
        widest = next_power_of_2(columns)
        if tokens <= cls.few:
            share = next_power_of_2(max(1, tokens * columns // cls.few_programs))
            # More rows in wider steps take more registers than 16 warps have.
            tile = min(max(share, 1024), 8192 if entries <= 16 else 4096, widest)
            steps = max(1, tokens * -(-columns // tile))
            return cls(min(steps, cls.few_programs), 1, tile, 8 if tile <= 4096 else 16)
        tile = min(1024, widest)
        fit = max(1, cls.step_bytes // (tile * size * entries))
        rows = min(8, 1 << fit.bit_length() - 1)
        stages = min(3, max(1, cls.shared_bytes // (rows * tile * size * entries)))
        return cls(most, rows, tile, 16, stages)

    @classmethod
    def of_reduce(cls, columns: int, size: int, most: int) -> Tile:
        """Return the tile for rows of ``columns`` values of ``size`` bytes: 16 bytes a thread."""
        tile = min(2048 // size, next_power_of_2(columns))
        return cls(most, 2048 // (tile * size), tile, 4)


@dataclass(eq=False)
class Call:
    """The results of a dispatch that its combine needs.

    layout: the layout of this call. places: the rows of each token, int32 (T, entries); batched:
    (2, T, entries), positions and then rows. y: where the experts were told to write, if they were.
    """

    buffer: Buffer
    layout: Layout
    places: Tensor
    weights: Tensor
    y: Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Transfer(ABC):
    """The calls of one rank of a layer."""

    problem: MoEProblem
    ranks: Ranks
    layout: Layout
    settings: Settings

    batched: ClassVar[bool] = False

    @classmethod
    def of(cls, problem: MoEProblem, settings: Settings) -> Transfer:
        layout = Layout.of(problem, cls.batched)
        return cls(problem, Ranks.of(problem), layout, settings)

    @abstractmethod
    def send(
        self, buffer: Buffer, x: Tensor, scale: Tensor | None, routing: Routing
    ) -> tuple[Callable[[], list[Step]], Dispatched]:
        """Return a function that makes the steps of the transfer, and the rows that arrive."""

    def of_call(self, routing: Routing) -> Layout:
        """Return the layout of a call."""
        return self._of_tokens(routing.most(self.layout.capacity))

    @cached_property
    def _of_tokens(self) -> Callable[[int], Layout]:
        return lru_cache(_MAX_LAYOUTS)(self.layout.of_call)

    def output(self, call: Call) -> Tensor:
        """Return (R, H) or (experts, slots, H), where `gather` takes the experts' output."""
        p, at = self.problem, call.layout
        return call.buffer.region(at.y, self._rows(at, p.hidden_size), p.dtype)

    def router_gradients(self, call: Call) -> Tensor:
        """Return fp32 (R, K), where `gather` takes the rows' router gradients."""
        return call.buffer.region(call.layout.grads, (call.layout.rows, self.problem.top_k),
                                  torch.float32)  # fmt: skip

    def gather(self, call: Call, out_TH: Tensor, grads_TK: Tensor | None = None) -> list[Step]:
        """Return the steps that write the sum of each token's outputs; out_TH has unit strides.

        grads_TK: contiguous, gets the sums of router gradients.
        """
        r, at, buffer, (T, H) = self.ranks, call.layout, call.buffer, out_TH.shape
        K = 0 if grads_TK is None else grads_TK.shape[1]
        tile = Tile.of_combine(T, H, out_TH.itemsize, at.entries * r.tp, self.settings.programs)
        return [partial(
            _combine, (tile.programs,),
            out_TH, out_TH if grads_TK is None else grads_TK, buffer.peers,
            call.places[-1] if self.batched else call.places, call.weights, buffer.counters,
            buffer.epoch, buffer.refused, buffer.lost.ranks, buffer.lost.flags, T,
            out_TH.stride(0), r.rank, at.rows, _SPINS, at.y, at.grads, at.flags,
            RANKS=r.count, RANKS_2=r.count_2, TP=r.tp, LISTED=self.batched, ROWS_EACH=at.entries,
            CHUNKS=at.chunks, H=H, K=K, K_2=next_power_of_2(max(1, K)), TOKENS=tile.tokens,
            COLUMNS=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
        )]  # fmt: skip

    def reduce(self, call: Call, given: Unreduced, out_TH: Tensor) -> list[Step]:
        """Do as `gather` for experts that leave the sum over K to it; out_TH has unit strides."""
        r, at, p, buffer, (T, H) = self.ranks, call.layout, self.problem, call.buffer, out_TH.shape
        ids = buffer.region(at.ids, (at.rows, p.top_k), torch.int32)
        weights = buffer.region(at.weights, (at.rows, p.top_k), torch.float32)
        rows, places = given.rows_NH, given.places_RK
        tile = Tile.of_reduce(H, out_TH.itemsize, self._most_programs(out_TH.device))
        summing = round(tile.programs * summing_share(r.count, p.top_k))
        # Programs of an interpreter run one after another, and must not wait for other ranks'.
        one_by_one = ((summing, summing), (tile.programs - summing, 0))
        return [
            partial(
                _reduce, (programs,),
                out_TH, buffer.peers, rows, ids if places is None else places, ids, weights,
                buffer.used, call.places, buffer.counters, buffer.epoch, buffer.refused,
                buffer.lost.ranks, buffer.lost.flags, T, out_TH.stride(0), rows.stride(0), r.rank,
                at.chunk, _SPINS, summing, at.y, at.flags,
                RANKS=r.count, RANKS_2=r.count_2, SHARES=r.shares, TP=r.tp, K=p.top_k,
                SORTED=places is not None, CHUNKS=at.chunks, H=H, TOKENS=tile.tokens,
                COLUMNS=tile.columns, num_warps=tile.warps, maxnreg=Tile.reduce_registers,
                enable_fp_fusion=False,  # sums have the bits of the experts'
            )
            for programs, summing in (one_by_one if INTERPRETED else ((tile.programs, summing),))
        ]  # fmt: skip

    def _most_programs(self, device: torch.device) -> int:
        """Return the programs of `reduce_rows`: as many as a GPU runs at the same time."""
        if device.type != "cuda":
            return 2 * self.settings.programs
        count = torch.cuda.get_device_properties(device).multi_processor_count
        return Tile.reduce_each * min(count, self.settings.most_multiprocessors or count)

    def _rows(self, at: Layout, columns: int) -> tuple[int, ...]:
        """Return the shape of this rank's rows: (R, columns), or (experts, slots, columns)."""
        return (self.ranks.experts, at.slots, columns) if self.batched else (at.rows, columns)

    def _arrived(self, call: Call, x: Tensor, scale: Tensor | None, **more: Any) -> Dispatched:
        buffer, at = call.buffer, call.layout
        if scale is not None:
            rows = self._rows(at, scale.shape[1])
            more["x_scale"] = buffer.region(at.scale, rows, torch.float32)
        x = buffer.region(at.x, self._rows(at, x.shape[1]), x.dtype)
        return Dispatched(x=x, handle=call, **more)


class RowTransfer(Transfer):
    """STANDARD: a row for each token and rank."""

    def send(
        self, buffer: Buffer, x: Tensor, scale: Tensor | None, routing: Routing
    ) -> tuple[Callable[[], list[Step]], Dispatched]:
        r, at, (T, K) = self.ranks, self.of_call(routing), routing.topk_ids.shape
        places = buffer.region(at.places, (T, r.shares), torch.int32)

        def steps() -> list[Step]:
            words, row_words = _words(x, places)
            groups = 0 if scale is None else scale.shape[1]
            tile = Tile.of_dispatch(T, row_words, self.settings)
            scan = 128 if T <= 128 else 512  # the tokens whose ids a program reads at once
            return [
                partial(
                    _dispatch_rows, (tile.programs,),
                    words, routing.topk_weights if scale is None else scale, routing.topk_ids,
                    routing.topk_weights, buffer.peers, places, buffer.counters, buffer.epoch,
                    T, r.rank, at.x, at.scale, at.ids, at.weights, at.flags,
                    SHARES=r.shares, SHARES_2=next_power_of_2(r.shares), RANKS_2=r.count_2,
                    TP=r.tp, COPIES=r.copies, SHARE=r.share, LARGER=r.larger, K=K,
                    K_2=next_power_of_2(K), WORDS=row_words, GROUPS=groups,
                    GROUPS_2=next_power_of_2(max(1, groups)), SPREAD=r.count > 2,
                    TOKENS=tile.tokens, WORDS_TILE=tile.columns, STAGES=tile.stages, SCAN=scan,
                    num_warps=tile.warps,
                ),
                partial(
                    _receive_rows, (r.batches,),
                    buffer.peers, buffer.used, buffer.rows, buffer.refused, buffer.epoch,
                    buffer.lost.ranks, buffer.lost.flags, r.rank, at.slots // r.batches, _SPINS,
                    at.ids, at.flags, RANKS=r.count, RANKS_2=r.count_2, COPIES=r.copies, K=K,
                    K_2=next_power_of_2(K), SCAN=256, num_warps=4,
                ),
            ]  # fmt: skip

        return steps, self._arrived(
            Call(buffer, at, places, routing.topk_weights), x, scale,
            topk_ids=buffer.region(at.ids, (at.rows, K), torch.int32),
            topk_weights=buffer.region(at.weights, (at.rows, K), torch.float32),
            # A backward reads the lists of all rows, and later calls change the number.
            num_rows=None if self.problem.training else buffer.rows,
        )  # fmt: skip


class AssignmentTransfer(Transfer):
    """BATCHED: a row for each assignment, at the place of its expert."""

    batched: ClassVar[bool] = True

    def send(
        self, buffer: Buffer, x: Tensor, scale: Tensor | None, routing: Routing
    ) -> tuple[Callable[[], list[Step]], Dispatched]:
        p, r, at, (T, K) = self.problem, self.ranks, self.of_call(routing), routing.topk_ids.shape
        both = buffer.region(at.places, (2, T, K), torch.int32)
        counts = buffer.region(at.received, (r.experts,), torch.int32)

        def steps() -> list[Step]:
            positions, places = both
            words, row_words = _words(x, places)
            groups = 0 if scale is None else scale.shape[1]
            tile = Tile.of_assignments(T, row_words, self.settings.programs)
            lost, experts, mine = buffer.lost, p.num_physical_experts, p.local_experts
            return [
                partial(
                    _count, (-(-experts // 8),),
                    routing.topk_ids, positions, buffer.peers, buffer.counters, buffer.epoch,
                    T * K, r.rank, at.slots, at.counts, at.flags,
                    RANKS=r.count, RANKS_2=r.count_2, COPIES=r.copies, EXPERTS=experts, TILE=8,
                    SCAN=512, num_warps=4,
                ),
                partial(
                    _dispatch_assignments, (tile.programs,),
                    words, routing.topk_weights if scale is None else scale, routing.topk_ids,
                    positions, buffer.peers, places, buffer.counters, buffer.epoch, buffer.refused,
                    lost.ranks, lost.flags, T, r.rank, at.slots, at.rows, _SPINS, at.x, at.scale,
                    at.counts, at.flags,
                    RANKS=r.count, RANKS_2=r.count_2, TP=r.tp, COPIES=r.copies,
                    BATCHES_2=next_power_of_2(r.batches), EXPERTS=experts, SHARE=r.share,
                    LARGER=r.larger, K=K, K_2=next_power_of_2(K), WORDS=row_words, GROUPS=groups,
                    GROUPS_2=next_power_of_2(max(1, groups)), WORDS_TILE=tile.columns,
                    num_warps=tile.warps,
                ),
                partial(
                    _receive_assignments, (1,),
                    buffer.peers, counts, buffer.epoch, buffer.refused, lost.ranks, lost.flags,
                    r.rank, mine.start, len(mine), _SPINS, at.counts, at.flags,
                    RANKS=r.count, RANKS_2=r.count_2, BATCHES=r.batches, EXPERTS=experts,
                    LOCAL_2=next_power_of_2(len(mine)), num_warps=1,
                ),
            ]  # fmt: skip

        call = Call(buffer, at, both, routing.topk_weights)
        return steps, self._arrived(call, x, scale, expert_num_tokens=counts)


def summing_share(ranks: int, top_k: int) -> float:
    """Return the share of `reduce_rows`' programs that sum for other ranks.

    They have that share of the rows that are read and written, if a token has experts on all ranks.
    """
    here = top_k / ranks
    summing, combining = (ranks - 1) * (here + 1), here + (ranks - 1) + 1
    return summing / (summing + combining)


def _words(x: Tensor, otherwise: Tensor) -> tuple[Tensor, int]:
    """Return x as 4-byte words, or a tensor that nothing reads where x is empty; words of a row."""
    x = x.clone() if x.data_ptr() % 4 else x
    return (x.view(torch.uint8).view(torch.int32) if len(x) else otherwise,
            x.shape[1] * x.itemsize // 4)  # fmt: skip
