"""The operands of the GEMMs: the rows of a launch, scales, and the epilogue of GEMM 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from moekit_kernels.align import SortedAssignments
from moekit_kernels.numerics import SCALE_GROUP, Activation

from .tiles import OrderedTile, SortedTile


@dataclass(frozen=True)
class Epilogue:
    """The steps that GEMM 1 applies to its fp32 sums before it stores them.

    quantize: "none", "group" (one fp32 scale per row and 128 columns, written to ``scale``) or
    "tensor" (by the one value in ``scale``).
    """

    activation: Activation
    quantize: str = "none"
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """The rows that a launch multiplies, in row blocks of the tile's block_m.

    kind: "aligned": `SortedAssignments` lists them; "direct": ``experts`` are the ids (R, K), and
    each assignment is a block; "batched": ``experts`` are the used rows of each expert, of
    ``capacity`` rows; "compact": ``experts`` is `list_blocks`'s list, and ``assignments`` are the
    rows, which end at ``ends_L``. top_k: assignments that share a row of the input. in_order: the
    output, or of compact rows the input, is expert-sorted, not by assignment.
    """

    kind: str
    experts: torch.Tensor
    blocks: int
    assignments: torch.Tensor | None = None
    top_k: int = 1
    capacity: int = 0
    in_order: bool = False
    ends_L: torch.Tensor | None = None

    @classmethod
    def aligned(cls, aligned: SortedAssignments, top_k: int = 1, *, in_order: bool = False) -> Rows:
        experts, assignments = aligned.experts_B, aligned.assignments_S
        assert experts is not None
        return cls("aligned", experts, experts.numel(), assignments, top_k, in_order=in_order)

    @classmethod
    def direct(cls, ids_RK: torch.Tensor, top_k: int = 1) -> Rows:
        return cls("direct", ids_RK, ids_RK.numel(), None, top_k)

    @classmethod
    def batched(cls, counts_L: torch.Tensor, capacity: int, block_m: int) -> Rows:
        blocks = counts_L.numel() * triton.cdiv(capacity, block_m)
        return cls("batched", counts_L, blocks, capacity=capacity)


@dataclass(frozen=True)
class Scales:
    """fp32 scales of fp8 blocks: of blocks of 128 x 128 weights, of groups of 128 columns of a
    (ceil(K / 128), capacity), and of the activation's result (N / 128, capacity), written."""

    w: torch.Tensor
    a_GS: torch.Tensor
    out_GS: torch.Tensor | None = None


class SortedLaunch(NamedTuple):
    """The arguments of `sorted_gemm`.

    a_SK: (capacity, K), 16 bits with rows of whole 16 bytes; e4m3 with ``scales``.
    w_LNK: (L, rows of w, K), a's dtype; N is half of its rows with a gate.
    out: (capacity, N) expert-sorted, or (assignments, N); any float dtype.
    aligned: with counters for halves, token tiles and ``x_RK``.
    num_assignments: the entry of padding rows in ``aligned.assignments_S``.
    num_sms: programs of a persistent or specialized tile.
    weights_RK: fp32 router weights, contiguous; each row is multiplied by `weight_before` of its
        weight. Without activation.
    x_RK: (R, K): copied to ``a_SK`` on the way, as `copy_rows` does; specialized 16 bits only.
    token_tiles: the list of `list_token_tiles` for a token tile.
    """

    a_SK: torch.Tensor
    w_LNK: torch.Tensor
    out: torch.Tensor
    aligned: SortedAssignments
    tile: OrderedTile
    num_assignments: int
    num_sms: int
    bias_LN: torch.Tensor | None = None
    weights_RK: torch.Tensor | None = None
    activation: Activation | None = None
    scales: Scales | None = None
    x_RK: torch.Tensor | None = None
    token_tiles: torch.Tensor | None = None

    @property
    def gated(self) -> bool:
        """Return whether w holds gate and up, and the result is activation(gate) * up."""
        return self.activation is not None and self.activation.gated

    @property
    def by_assignment(self) -> bool:
        """Return whether rows of the output are assignments: of GEMM 2 without specialized
        warps. There are none for padding."""
        return self.activation is None and isinstance(self.tile, SortedTile)

    def sizes(self) -> tuple[int, int, int, int]:
        """Check shapes and layouts, and return L, the rows of w, N and K."""
        num_experts, w_rows, k = self.w_LNK.shape
        n, capacity = w_rows // 2 if self.gated else w_rows, self.aligned.capacity
        rows = self.num_assignments if self.by_assignment else capacity
        assert self.a_SK.shape == (capacity, k) and self.out.shape == (rows, n)
        assert self.w_LNK.is_contiguous() and (self.weights_RK is None or not self.gated)
        if self.scales is not None:
            w, a_GS, out_GS = self.scales.w, self.scales.a_GS, self.scales.out_GS
            groups = triton.cdiv(k, SCALE_GROUP)
            assert a_GS.shape == (groups, capacity) and a_GS.is_contiguous() and k % 16 == 0
            assert w.shape == (num_experts, triton.cdiv(w_rows, SCALE_GROUP), groups)
            assert w.is_contiguous() and groups * capacity < 2**31 and w.numel() < 2**31
            if self.gated:
                assert n % SCALE_GROUP == 0 and out_GS is not None and out_GS.is_contiguous()
                assert out_GS.shape == (n // SCALE_GROUP, capacity)
        return num_experts, w_rows, n, k
