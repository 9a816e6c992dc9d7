"""The backward of adapters (LoRA) over frozen `triton` experts.

Products of rows add the deltas of their tiles, as in a forward without gradients: the product for
q adds A2' times ``s B2' g``, and the product for the gradient of x adds A13' times ``s B13' dh``.
The vectors between two matrices are kept for the outer products, in which the columns of all slots
are one matrix.

Shape suffixes: see `training` and `kernels.low_rank`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from moekit_kernels.launch import next_power_of_2
from torch import Tensor

from moekit.plugin import (
    Adapters,
    Dispatched,
    InputGradients,
    PackedWeights,
    TrainableAdapterExperts,
    Wanted,
)

from .calls import low_rank_columns, low_rank_entries, low_rank_sizes
from .experts import AdapterTriton
from .kernels.low_rank import LowRank, shrink, spread_low
from .kernels.operands import Rows
from .kernels.tiles import GemmTile
from .kernels.training_gemm import CompactRows, Epilogue, outer_gemm
from .training import Tiles, TrainableTriton, rows_of


@dataclass
class _Deltas:
    """The deltas of one pass, forward or ``back``. made: `LowRank.low_PAU` of w13 and w2."""

    stack: Adapters
    slots_R: Tensor
    ids_RK: Tensor
    back: bool
    made: dict[str, Tensor] = field(default_factory=dict)

    def of(self, name: str, x: Tensor, compact: CompactRows, gather: bool) -> LowRank | None:
        """Return the deltas for a product of rows ``x``. gather: x has a row for each token."""
        pair = self.stack.pair(name)
        if pair is None:
            return None
        a_SLGrK, b_SLNr = pair
        groups, rank = a_SLGrK.shape[2:4]
        first, second = [a_SLGrK], b_SLNr
        if self.back:
            first = [b.mT[:, :, None] for b in b_SLNr.chunk(groups, dim=2)]
            second = a_SLGrK.flatten(2, 3).mT
        top_k = self.ids_RK.shape[1]
        sizes = low_rank_sizes(self.ids_RK.numel(), groups * rank)
        low_PAU = x.new_empty(sizes, dtype=torch.float32)
        self.made[name] = low_PAU
        rows = Rows("compact", compact.blocks, compact.most_blocks, compact.order_S, top_k,
                    in_order=not gather, ends_L=compact.ends_L)  # fmt: skip
        for i, (matrix, x_part) in enumerate(zip(first, x.chunk(len(first), 1), strict=True)):
            columns = low_PAU[:, :, i * rank :][..., : matrix.shape[2] * rank]
            low = LowRank(columns, second, self.slots_R, top_k)
            shrink(x_part, None, matrix, self.stack.scaling, low, rows, compact.block_m)
        return LowRank(low_PAU, second, self.slots_R, top_k)


class TrainableAdapterTriton(TrainableTriton, AdapterTriton, TrainableAdapterExperts):
    """Adapters over frozen weights; `kernels.training_gemm` computes all products of rows."""

    _deltas: _Deltas | None = None  # a copy of this object for one pass has them

    def forward(self, y_RH: Tensor, tokens: Dispatched, weights: PackedWeights) -> list[Tensor]:
        one = self._pass(tokens, weights)
        return [*TrainableTriton.forward(one, y_RH, tokens, weights), *one._made()]

    def backward_input(
        self, grad_RH: Tensor, tokens: Dispatched, weights: PackedWeights, saved: list[Tensor],
        wanted: Wanted,
    ) -> InputGradients:  # fmt: skip
        one, names = self._pass(tokens, weights, back=True), wanted.weights
        base = replace(wanted, weights=frozenset({"w2"} if names else ()))
        given = TrainableTriton.backward_input(one, grad_RH, tokens, weights, saved[:5], base)
        if "w13_a" in names and not wanted.x and one._deltas is not None:
            assert tokens.topk_ids is not None
            rows = self._compact_rows(saved, tokens.topk_ids)
            one._deltas.of("w13", given.kept[0], rows, gather=False)
        return replace(given, kept=(*given.kept, *one._made()) if names else ())

    def backward_weight(
        self, grad_RH: Tensor, tokens: Dispatched, saved: list[Tensor], kept: tuple[Tensor, ...],
        into: Mapping[str, Tensor], add: bool,
    ) -> None:  # fmt: skip
        ids_RK, slots_R, topk_weights = tokens.topk_ids, tokens.adapter_ids, tokens.topk_weights
        assert ids_RK is not None and slots_R is not None and topk_weights is not None
        assert self.problem.adapters is not None
        rows, slots = self._compact_rows(saved, ids_RK), self.problem.adapters.count
        (dh_SW, pa_SI), x = kept[:2], tokens.x
        names = ("ax", "aa", "bdh", "bg")
        low = dict(zip(names, (*saved[5:], *kept[2:]), strict=True))

        def spread(name: str, weights_RK: Tensor | None = None) -> Tensor:
            made = x.new_empty((ids_RK.numel(), slots * low[name].shape[2]))
            spread_low(low[name], slots_R, rows.order_S, rows.ends_L, rows.top_k, made, weights_RK)
            return made

        def outer(a: Tensor, b: Tensor, out: Tensor, dim: int, gather: str = "") -> None:
            """Write the gradient ``out`` (slots, L, M, N), whose dimension dim + 1 is r."""
            by_expert = out.movedim(0, dim)
            out_LMN = by_expert.flatten(dim, dim + 1)  # a view of one slot's, else a copy
            m, n = (min(128, max(16, next_power_of_2(size))) for size in out_LMN.shape[1:])
            tile = GemmTile(m, n, 32, num_warps=8 if m * n > 128 * 64 else 4)
            outer_gemm(a, b, out_LMN, rows, tile, gather=gather, add=add)
            if slots > 1:
                by_expert.copy_(out_LMN.view_as(by_expert))

        if (out := into.get("w2_a")) is not None:
            outer(spread("bg"), pa_SI, out, 1)
        if (out := into.get("w2_b")) is not None:
            outer(grad_RH, spread("aa", topk_weights.contiguous()), out, 2, "a")
        if (out := into.get("w13_a")) is not None:
            x = x if x.stride(1) == 1 else x.contiguous()
            outer(spread("bdh"), x, out.flatten(2, -2), 1, "b")
        if (out := into.get("w13_b")) is not None:
            ax, groups = spread("ax"), low["ax"].shape[2] // out.shape[3]
            parts = ax.view(len(ax), slots, groups, out.shape[3]).unbind(2)
            each = dh_SW.chunk(groups, 1), parts, out.chunk(groups, 2)
            for dh, part, into_part in zip(*each, strict=True):
                outer(dh, part.flatten(1), into_part, 2)

    def saved_bytes(self, rows: int) -> int:
        return super().saved_bytes(rows) + 8 * low_rank_entries(self.problem, rows)

    def transient_bytes(self, rows: int) -> int:
        """Add the vectors between two matrices, and a gradient that several slots share."""
        p = self.problem
        assert p.adapters is not None
        slots = p.adapters.count
        columns = slots * low_rank_columns(p)
        spread = 2 * rows * p.top_k * columns * p.dtype.itemsize
        shared = 4 * p.num_local_experts * columns * max(p.hidden_size, p.w13_rows)
        between = 8 * low_rank_entries(p, rows) + spread + (shared if slots > 1 else 0)
        return super().transient_bytes(rows) + between

    def _pass(
        self, tokens: Dispatched, weights: PackedWeights, back: bool = False
    ) -> TrainableAdapterTriton:
        """Return a copy of this object whose products add the call's deltas."""
        made, stack = copy.copy(self), weights.adapters
        if stack is not None:
            assert tokens.topk_ids is not None and tokens.adapter_ids is not None
            ids_RK = tokens.topk_ids.contiguous()
            made._deltas = _Deltas(stack, tokens.adapter_ids, ids_RK, back)
        return made

    def _made(self) -> list[Tensor]:
        """Return low of w13 and of w2, empty tensors where there is no delta."""
        deltas = self._deltas
        if deltas is None:
            return []
        empty = deltas.stack.scaling[:0]
        return [deltas.made.get(name, empty) for name in ("w13", "w2")]

    def _epilogue(self, epilogue: Epilogue, a: Tensor, rows: CompactRows, gather: bool) -> Epilogue:
        if self._deltas is None:
            return epilogue
        first = epilogue.kind == ("pull" if self._deltas.back else "activation")
        name = "w2" if first == self._deltas.back else "w13"
        return epilogue._replace(low_rank=self._deltas.of(name, a, rows, gather))

    def _tiles(self, ids_RK: Tensor, weights: PackedWeights) -> Tiles:
        return self._choose(ids_RK.numel(), False)  # not specialized

    def _compact_rows(self, saved: list[Tensor], ids_RK: Tensor) -> CompactRows:
        return rows_of(saved[:5], self._choose(ids_RK.numel(), False), ids_RK)
