"""Assignments sorted by expert, and products of their rows with the experts' matrices.

Shape suffixes beyond the kernel's: S assignments sorted by expert, W rows of w13.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.backends.cpu_experts import Experts
from moekit.problem import MoEProblem


@dataclass(frozen=True)
class SortedRows:
    """The assignments in the order of their experts.

    order_S: the place of each in ids (R, K'). ends_L: where each expert's run ends; behind the last
    one, on devices with a grouped GEMM, are assignments without an expert.
    """

    order_S: Tensor
    ends_L: Tensor
    top_k: int
    grouped: bool

    @classmethod
    def of(cls, ids_RK: Tensor, problem: MoEProblem) -> SortedRows:
        return cls.by(ids_RK, problem.num_local_experts, has_grouped_mm(problem))

    @classmethod
    def by(cls, ids_RK: Tensor, L: int, grouped: bool) -> SortedRows:
        """Return the assignments sorted by ids of 0 to L - 1, -1 for none."""
        ids_S, order_S = torch.sort(torch.where(ids_RK < 0, L, ids_RK).view(-1), stable=True)
        experts = torch.arange(L, device=ids_S.device, dtype=ids_S.dtype)
        ends_L = torch.searchsorted(ids_S, experts, right=True).int()
        if not grouped:
            order_S = order_S[: int(ends_L[-1])]
        return cls(order_S, ends_L, ids_RK.shape[1], grouped)

    @property
    def token_S(self) -> Tensor:
        return self.order_S // self.top_k

    def runs(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert that has rows, and where they are. Waits for the device."""
        start = 0
        for expert, end in enumerate(self.ends_L.tolist()):
            if end > start:
                yield expert, slice(start, end)
            start = end

    def expert_S(self) -> Tensor:
        """Return the expert of each row, and any expert for rows without one."""
        places = torch.arange(len(self.order_S), device=self.ends_L.device)
        found = torch.searchsorted(self.ends_L, places, right=True)
        return found.clamp(max=len(self.ends_L) - 1)

    def real(self, rows_SN: Tensor) -> Tensor:
        """Return the rows, with zeros where there is no expert: those were never written."""
        if not self.grouped:
            return rows_SN
        places = torch.arange(len(rows_SN), device=rows_SN.device)
        return torch.where((places < self.ends_L[-1])[:, None], rows_SN, 0)

    def product(self, rows_SK: Tensor, experts: Experts, name: str, back: bool = False) -> Tensor:
        """Return the rows times each expert's matrix: ``W @ row``, or ``W' @ row`` for ``back``.

        Rows without an expert hold anything; see `real`.
        """
        if self.grouped:
            w_LNK = experts.weights[name]
            return F.grouped_mm(rows_SK, w_LNK if back else w_LNK.mT, offs=self.ends_L)
        p = experts.problem
        out, inner = {
            "w13": (p.w13_rows, p.hidden_size),
            "w2": (p.hidden_size, p.local_intermediate_size),
        }[name]
        made = rows_SK.new_empty((len(rows_SK), inner if back else out))
        for expert, run in self.runs():
            w_NK = experts.matrix(name, expert, rows_SK.dtype)
            made[run] = rows_SK[run] @ (w_NK if back else w_NK.T)
        return made

    def linear(self, rows_SK: Tensor, experts: Experts, name: str) -> Tensor:
        """Return `product` plus each expert's bias, if there is one."""
        made = self.product(rows_SK, experts, name)
        if (bias := experts.bias(name)) is not None:
            made += bias[self.expert_S()]
        return made

    def outer(self, a_SM: Tensor, b_SN: Tensor, into_LMN: Tensor, add: bool) -> None:
        """Write the sum of each expert's outer products, accumulated in fp32."""
        if self.grouped and not add and into_LMN.dtype is a_SM.dtype:
            into_LMN.copy_(F.grouped_mm(a_SM.mT, b_SN, offs=self.ends_L))
            counts_L = torch.diff(self.ends_L, prepend=self.ends_L.new_zeros(1))
            # torch leaves experts without rows unwritten.
            into_LMN.masked_fill_(counts_L[:, None, None] == 0, 0)
            return
        if not add:
            into_LMN.zero_()
        for expert, run in self.runs():
            into_LMN[expert] += a_SM[run].float().T @ b_SN[run].float()

    def sums(self, rows_SN: Tensor, into_LN: Tensor, add: bool) -> None:
        """Write the sum of each expert's rows, in fp32 and in the order of the rows."""
        if not add:
            into_LN.zero_()
        for expert, run in self.runs():
            into_LN[expert] += rows_SN[run].sum(dim=0, dtype=torch.float32)


def has_grouped_mm(problem: MoEProblem) -> bool:
    """Return whether torch's grouped GEMM runs: bf16, 16-byte rows, capability 8.0 or later, fewer
    than 1024 experts (its CUDA kernels' limit)."""
    sizes = (problem.hidden_size, problem.local_intermediate_size)
    return (
        problem.device.type == "cuda"
        and (problem.device.capability or (0, 0)) >= (8, 0)
        and problem.dtype == torch.bfloat16
        and problem.quant.weight is None
        and problem.num_local_experts < 1024
        and all(size % 8 == 0 for size in sizes)
    )
