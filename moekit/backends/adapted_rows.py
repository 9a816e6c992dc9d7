"""Assignments with an adapter (LoRA), sorted by slot and expert, and products of their rows.

Shape suffixes beyond the kernel's: S assignments sorted by expert; P assignments with an adapter; Q
slots times local experts; U columns between A and B, r or 2r; n rows of one expert; N columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.backends.sorted_rows import SortedRows, has_grouped_mm
from moekit.contract import Adapters, Dispatched, PackedWeights
from moekit.problem import MoEProblem


@dataclass(frozen=True)
class AdaptedRows:
    """The assignments with an adapter, sorted by ``slot * L + expert``.

    rows: these assignments, as runs of Q "experts". place_P: the index of each among the base's
    rows.
    """

    adapters: Adapters | None
    rows: SortedRows
    place_P: Tensor
    experts: int

    @classmethod
    def of(
        cls,
        tokens: Dispatched,
        weights: PackedWeights | None,
        base: SortedRows,
        problem: MoEProblem,
    ) -> AdaptedRows:
        """Return the assignments of a call; without adapters, all methods add nothing.

        weights: None if the caller only calls `outer`.
        """
        ids_RK, slots_R, L = tokens.topk_ids, tokens.adapter_ids, problem.num_local_experts
        assert ids_RK is not None
        adapters = None if weights is None else weights.adapters
        if slots_R is None or problem.adapters is None or (weights and adapters is None):
            return cls(None, base, base.order_S, L)
        slots_R1, count = slots_R[:, None], problem.adapters.count * L
        named_RK = torch.where((ids_RK < 0) | (slots_R1 < 0), -1, slots_R1 * L + ids_RK)
        dense = problem.replace(quant="none", adapters=None)
        grouped = has_grouped_mm(dense) and count < 1024 and problem.adapters.rank % 8 == 0
        rows = SortedRows.by(named_RK, count, grouped)
        place = torch.zeros(ids_RK.numel(), dtype=torch.int64, device=ids_RK.device)
        place[base.order_S] = torch.arange(len(base.order_S), device=ids_RK.device)
        return cls(adapters, rows, place[rows.order_S], L)

    def add(self, name: str, into_SN: Tensor, rows_SK: Tensor) -> Tensor:
        """Add the deltas of w13 or w2 to the base's product, in place, and return it."""
        if (pair := self._pair(name)) is not None:
            a, b = pair
            lows = self._shrink(a, rows_SK).chunk(a.shape[2], 1)
            parts = zip(lows, b.chunk(a.shape[2], 2), strict=True)
            delta_PN = torch.cat([self._product(low, b_SLnr.mT) for low, b_SLnr in parts], dim=1)
            self._put(into_SN, delta_PN)
        return into_SN

    def back(self, name: str, grad_SN: Tensor, into_SK: Tensor | None) -> Tensor | None:
        """Return ``scaling B' grad`` (P, U), and add ``A'`` times it to ``into`` unless None."""
        if (pair := self._pair(name)) is None:
            return None
        a, b = pair
        parts = zip(grad_SN[self.place_P].chunk(a.shape[2], 1), b.chunk(a.shape[2], 2), strict=True)
        low_PU = torch.cat([self._product(grad, b_SLnr) for grad, b_SLnr in parts], dim=1)
        low_PU = self._scaled(low_PU)
        if into_SK is not None:
            self._put(into_SK, self._product(low_PU, a.flatten(2, 3)))
        return low_PU

    def kept(self, name: str, rows_SK: Tensor, back_PU: Tensor | None) -> list[Tensor]:
        """Return the tensors of w13 or w2 that `outer` takes: ``scaling A row``, and `back`'s."""
        pair = self._pair(name)
        return [] if pair is None or back_PU is None else [self._shrink(pair[0], rows_SK), back_PU]

    def outer(
        self,
        name: str,
        into: Mapping[str, Tensor],
        add: bool,
        rows_SK: Tensor,
        grad_SN: Tensor,
        kept: Iterator[Tensor],
    ) -> None:
        """Write the wanted gradients of A and B. rows: for w2, weighted by the router."""
        a, b = into.get(f"{name}_a"), into.get(f"{name}_b")
        if a is None and b is None:
            return
        low_PU, back_PU = (self.rows.real(next(kept)) for _ in range(2))
        rows_PK, grad_PN = (self.rows.real(t[self.place_P]) for t in (rows_SK, grad_SN))
        if a is not None:
            self.rows.outer(back_PU, rows_PK, a.view(-1, back_PU.shape[1], a.shape[-1]), add)
        if b is not None:
            groups = low_PU.shape[1] // b.shape[-1]
            parts = (t.chunk(groups, dim=1) for t in (grad_PN, low_PU, b.flatten(0, 1)))
            for grad_Pn, low_Pr, b_Qnr in zip(*parts, strict=True):
                self.rows.outer(grad_Pn, low_Pr, b_Qnr, add)

    def _pair(self, name: str) -> tuple[Tensor, Tensor] | None:
        return None if self.adapters is None else self.adapters.pair(name)

    def _put(self, into_SN: Tensor, rows_PN: Tensor) -> None:
        into_SN[self.place_P] += self.rows.real(rows_PN).to(into_SN.dtype)

    def _shrink(self, a_SLGrK: Tensor, rows_SK: Tensor) -> Tensor:
        rows_PK = rows_SK[self.place_P]
        return self._scaled(self._product(rows_PK, a_SLGrK.flatten(2, 3).mT))

    def _scaled(self, low_PU: Tensor) -> Tensor:
        assert self.adapters is not None
        slot_P = self.rows.expert_S() // self.experts
        return (low_PU * self.adapters.scaling[slot_P, None]).to(low_PU.dtype)

    def _product(self, rows_PK: Tensor, matrices_SLKN: Tensor) -> Tensor:
        if self.rows.grouped:
            return F.grouped_mm(rows_PK, matrices_SLKN.flatten(0, 1), offs=self.rows.ends_L)
        made = rows_PK.new_empty(len(rows_PK), matrices_SLKN.shape[-1])
        for named, run in self.rows.runs():
            matrix_KN = matrices_SLKN[divmod(named, self.experts)].to(rows_PK.dtype)
            made[run] = rows_PK[run] @ matrix_KN
        return made
