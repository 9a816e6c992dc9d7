"""The backward of adapters (LoRA) over frozen `triton` experts.

Products of rows add the deltas of their tiles, as in a forward without gradients: the product for
q adds A2' times ``s B2' g``, and the product for the gradient of x adds A13' times ``s B13' dh``.
The vectors between two matrices are kept for the outer products, whose rows are sorted by slot and
expert.

Shape suffixes beyond `training`'s and `kernels.low_rank`'s: Q slots times local experts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from moekit_kernels.align import SortedAssignments, align, align_capacity, align_scratch
from moekit_kernels.launch import next_power_of_2
from torch import Tensor

from moekit.plugin import (
    Adapters,
    Dispatched,
    InputGradients,
    MoEProblem,
    PackedWeights,
    TrainableAdapterExperts,
    Wanted,
)

from .calls import low_rank_entries, low_rank_sizes
from .experts import AdapterTriton
from .kernels.low_rank import LowRank, shrink
from .kernels.operands import Rows
from .kernels.tiles import GemmTile
from .kernels.training_gemm import CompactRows, Epilogue, outer_gemm
from .training import Tiles, TrainableTriton, choose_tiles


@dataclass
class _Deltas:
    """The deltas of one pass, forward or ``back``. made: `LowRank.low_PAU` of w13 and w2."""

    problem: MoEProblem
    stack: Adapters
    slots_R: Tensor
    ids_RK: Tensor
    back: bool
    places_A: Tensor | None = None
    made: dict[str, Tensor] = field(default_factory=dict)
    aligned: SortedAssignments | None = None

    def of(self, name: str, x: Tensor, gather: bool) -> LowRank | None:
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
        aligned = self._sorted()
        rows = Rows.aligned(aligned, top_k)
        for i, (matrix, x_part) in enumerate(zip(first, x.chunk(len(first), 1), strict=True)):
            columns = low_PAU[:, :, i * rank :][..., : matrix.shape[2] * rank]
            low = LowRank(columns, second, self.slots_R, top_k)
            places = None if gather else self.places_A
            shrink(x_part, None, matrix, self.stack.scaling, low, rows, aligned.block_m, places)
        return LowRank(low_PAU, second, self.slots_R, top_k)

    def _sorted(self) -> SortedAssignments:
        """Sort the assignments by expert in whole blocks, once."""
        if self.aligned is None:
            count, L = self.ids_RK.numel(), self.problem.num_local_experts
            block_m = min(64, max(16, next_power_of_2(count // L)))
            capacity = align_capacity(count, L, block_m)
            sizes = capacity, capacity // block_m, 1, align_scratch(count, L)
            of_rows, of_blocks, used, scratch = (self.slots_R.new_empty(size) for size in sizes)
            self.aligned = SortedAssignments(of_rows, of_blocks, used, block_m)
            if count:
                align(self.ids_RK, L, self.aligned, scratch)
        return self.aligned


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
        one, names = self._pass(tokens, weights, saved[2]), wanted.weights
        base = replace(wanted, weights=frozenset({"w2"} if names else ()))
        given = TrainableTriton.backward_input(one, grad_RH, tokens, weights, saved[:5], base)
        if "w13_a" in names and not wanted.x and one._deltas is not None:
            one._deltas.of("w13", given.kept[0], gather=False)
        return replace(given, kept=(*given.kept, *one._made()) if names else ())

    def backward_weight(
        self, grad_RH: Tensor, tokens: Dispatched, saved: list[Tensor], kept: tuple[Tensor, ...],
        into: Mapping[str, Tensor], add: bool,
    ) -> None:  # fmt: skip
        ids_RK, slots_R, topk_weights = tokens.topk_ids, tokens.adapter_ids, tokens.topk_weights
        slots, L = self.problem.adapters, self.problem.num_local_experts
        assert ids_RK is not None and slots_R is not None and topk_weights is not None and slots
        count, slots_R1, x = slots.count * L, slots_R[:, None], tokens.x
        named_RK = torch.where((ids_RK < 0) | (slots_R1 < 0), count, slots_R1 * L + ids_RK)
        named_S, order_S = torch.sort(named_RK.view(-1), stable=True)
        each_Q = torch.arange(count, device=x.device, dtype=named_S.dtype)
        ends_Q = torch.searchsorted(named_S, each_Q, right=True, out_int32=True)
        order = order_S.int()
        place_S = saved[2].index_select(0, order).clamp_(0, len(order) - 1)  # -1: no expert
        rows = CompactRows(order, ends_Q, order, 0, ids_RK.shape[1])
        (dh, pa), p_S1 = kept[:2], topk_weights.reshape(-1, 1).index_select(0, order)
        names = ("ax", "aa", "bdh", "bg")
        low = dict(zip(names, (*saved[5:], *kept[2:]), strict=True))

        def outer(a: Tensor, b: Tensor, out_QMN: Tensor, gather: str = "") -> None:
            m, n = (min(128, max(16, next_power_of_2(size))) for size in out_QMN.shape[1:])
            tile = GemmTile(m, n, 32, num_warps=8 if m * n > 128 * 64 else 4)
            outer_gemm(a, b, out_QMN, rows, tile, gather=gather, add=add)

        def between(name: str, weights_S1: Tensor | float = 1.0) -> Tensor:
            rows_SU = low[name].sum(dim=0).index_select(0, order)
            return (rows_SU * weights_S1).to(dh.dtype)

        if (out := into.get("w2_a")) is not None:
            outer(between("bg"), pa.index_select(0, place_S), out.flatten(0, 1))
        if (out := into.get("w2_b")) is not None:
            outer(grad_RH, between("aa", p_S1), out.flatten(0, 1), "a")
        if (out := into.get("w13_a")) is not None:
            x = x if x.stride(1) == 1 else x.contiguous()
            outer(between("bdh"), x, out.view(count, -1, out.shape[-1]), "b")
        if (out := into.get("w13_b")) is not None:
            groups = low["ax"].shape[2] // out.shape[3]
            dh_S = dh.index_select(0, place_S)
            parts = (dh_S, 1), (between("ax"), 1), (out.flatten(0, 1), 1)
            for part in zip(*(t.chunk(groups, dim) for t, dim in parts), strict=True):
                outer(*part)

    def saved_bytes(self, rows: int) -> int:
        return super().saved_bytes(rows) + 8 * low_rank_entries(self.problem, rows)

    def transient_bytes(self, rows: int) -> int:
        """Add copies of rows in the order of slots, and both sorts."""
        p = self.problem
        wide = p.hidden_size + p.w13_rows + p.local_intermediate_size
        each = wide * p.dtype.itemsize + 8 * 16
        between = 24 * low_rank_entries(p, rows)
        return super().transient_bytes(rows) + between + rows * p.top_k * each

    def _pass(
        self, tokens: Dispatched, weights: PackedWeights, places_A: Tensor | None = None
    ) -> TrainableAdapterTriton:
        """Return a copy of this object whose products add the call's deltas."""
        made, stack = copy.copy(self), weights.adapters
        if stack is not None:
            assert tokens.topk_ids is not None and tokens.adapter_ids is not None
            ids_RK, back = tokens.topk_ids.contiguous(), places_A is not None
            made._deltas = _Deltas(self.problem, stack, tokens.adapter_ids, ids_RK, back, places_A)
        return made

    def _made(self) -> list[Tensor]:
        """Return low of w13 and of w2, empty tensors where there is no delta."""
        deltas = self._deltas
        if deltas is None:
            return []
        empty = deltas.stack.scaling[:0]
        return [deltas.made.get(name, empty) for name in ("w13", "w2")]

    def _epilogue(self, epilogue: Epilogue, a: Tensor, gather: bool) -> Epilogue:
        if self._deltas is None:
            return epilogue
        first = epilogue.kind == ("pull" if self._deltas.back else "activation")
        name = "w2" if first == self._deltas.back else "w13"
        return epilogue._replace(low_rank=self._deltas.of(name, a, gather))

    def _sorted(self, ids_RK: Tensor, block_m: int) -> tuple[CompactRows, Tensor]:
        rows, places_A = super()._sorted(ids_RK, block_m)
        if self._deltas is not None:
            self._deltas.places_A = places_A
        return rows, places_A

    def _tiles(self, ids_RK: Tensor, weights: PackedWeights) -> Tiles:
        return choose_tiles(self.problem, ids_RK.numel(), False)  # not specialized
