"""The two experts backends: blocks, GEMM 1, activation, GEMM 2 and, for STANDARD, the weighted sum.

Shape suffixes: R rows, K experts of a row, S = R * K assignments, L local experts, C capacity, H
hidden size, I intermediate size (padded), N = 2I (I without gate).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from moekit_kernels.align import align_capacity, align_scratch
from moekit_kernels.numerics import Activation
from moekit_kernels.rows import weighted_sum
from torch import Tensor

from moekit.plugin import (
    BufferSpec,
    Dispatched,
    ExpertsSpec,
    ExpertWeights,
    MoEProblem,
    PackedWeights,
    PermuteExpertsUnpermute,
    Unreduced,
)

from . import library
from .kernels import (
    Blocks,
    activate_columns,
    gather_columns,
    list_pairs,
    list_slabs,
    slab_capacity,
)
from .pack import pack, stored
from .sizes import BLOCKS, BLOCKS_PER_SM, LOCKS, MAX_TILE_N, choose_block, padded_intermediate

library.operator()  # a library that does not load makes the backend fail to load


class _MarlinExperts(PermuteExpertsUnpermute):
    """The base class of both formats. The operator never sees a router weight."""

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        super().__init__(spec, problem)
        self._activation = Activation.of(problem.activation)
        operand = problem.quant.weight
        assert operand is not None
        kind = stored(operand, problem.dtype)
        self._type_id = kind.type_id
        self._scale_dtype = torch.float8_e8m0fnu if kind.e8m0 else problem.dtype
        if kind.e5m3:  # the operator's name for it
            self._scale_dtype = torch.float8_e4m3fn
        self._inner = padded_intermediate(problem)
        self._w13_rows = self._inner * (2 if problem.activation.gated else 1)
        # The workspace is reserved before the weights tell whether columns are sorted.
        self._may_sort_columns = operand.act_order

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return pack(weights, self.problem, self.spec.name)

    def transient_bytes(self, rows: int) -> int:
        """Return the operator's fp32 buffer for sums over thread blocks that share a tile."""
        block = self._block(rows, self.problem.top_k)
        per_sm = BLOCKS_PER_SM * block * MAX_TILE_N
        widest = max(self._w13_rows, self.problem.hidden_size)
        floats = min(widest * self._capacity(rows, block), _num_sms() * per_sm)
        return 4 * floats * (2 if block == 8 else 1)

    @abstractmethod
    def _capacity(self, rows: int, block: int) -> int:
        """Return the most entries of the lists of blocks."""

    def _block(self, rows: int, slots: int) -> int:
        """Return the block size for the expected rows of an expert: assignments / experts."""
        return choose_block(rows * slots / self.problem.num_physical_experts)

    def _buffers(self, rows: int, outputs: int, activated: int) -> tuple[BufferSpec, ...]:
        """Reserve entries, experts, num_rows, locks, unused router weights, outputs, activations.

        Args:
            outputs: Elements of GEMM 1's output, and of what may share its memory.
            activated: Rows of GEMM 2's input.
        """
        p, block = self.problem, self._block(rows, self.problem.top_k)
        # Smaller calls use smaller blocks: fewer entries, but maybe more blocks.
        blocks = max(self._capacity(rows, b) // b for b in BLOCKS if b <= block)
        gathered = activated if self._may_sort_columns else 0
        return (
            BufferSpec((self._capacity(rows, block),), torch.int32),
            BufferSpec((blocks,), torch.int32),
            BufferSpec((1,), torch.int32),
            BufferSpec((LOCKS,), torch.int32),
            BufferSpec((1,), torch.float32),
            BufferSpec((outputs,), p.dtype),
            BufferSpec((activated, self._inner), p.dtype),
            BufferSpec((gathered, p.hidden_size), p.dtype),
        )

    def _gemm(
        self,
        a: Tensor,
        out: Tensor,
        weights: PackedWeights,
        name: str,
        blocks: Blocks,
        unused: Tensor,
        top_k: int = 1,
    ) -> None:
        """Compute ``out[s] = a[s // top_k] @ w[expert of s].T (+ bias)`` for assignments s."""
        library.operator()(
            a, out, weights[name], weights.get(f"{name}_bias"),
            weights[f"{name}_scale"].view(self._scale_dtype), None, weights.get(f"{name}_global"),
            weights.get(f"{name}_zeros"),
            blocks.locks, blocks.entries, blocks.experts, blocks.num_rows, unused,
            blocks.block, top_k, False, self._type_id, a.shape[0], out.shape[1], a.shape[1],
            False, True, False,  # no atomics, sums in fp32, integer zero points
            -1, -1, -1,  # the operator chooses its tile
        )  # fmt: skip

    def _gemm1(
        self,
        x: Tensor,
        h_SN: Tensor,
        weights: PackedWeights,
        blocks: Blocks,
        scratch: Sequence[Tensor],
        top_k: int,
    ) -> None:
        """Run GEMM 1; ``scratch`` holds unused router weights and room for sorted columns."""
        unused, gathered = scratch
        columns_LH = weights.get("w13_columns")
        if columns_LH is not None:
            x_SH = gathered[: h_SN.shape[0]]
            gather_columns(x, columns_LH, x_SH, blocks, top_k)
            x, top_k = x_SH, 1
        self._gemm(x, h_SN, weights, "w13", blocks, unused, top_k)


class MarlinExperts(_MarlinExperts):
    """STANDARD, reducing."""

    def _capacity(self, rows: int, block: int) -> int:
        p = self.problem
        return align_capacity(rows * p.top_k, p.num_local_experts, block)

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        p = self.problem
        pairs = rows * p.top_k
        # GEMM 1's output and, after the activation has read it, GEMM 2's share one buffer.
        return (
            *self._buffers(rows, pairs * max(self._w13_rows, p.hidden_size), pairs),
            BufferSpec((align_scratch(pairs, p.num_local_experts),), torch.int32),
        )

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        assert tokens.topk_ids is not None and tokens.topk_weights is not None
        ids_RK, topk_weights_RK = tokens.topk_ids.contiguous(), tokens.topk_weights.contiguous()
        rows = self.apply_unreduced(tokens, weights, workspace).rows_NH
        weighted_sum(rows, topk_weights_RK, ids_RK, y)

    def apply_unreduced(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Unreduced:
        assert tokens.topk_ids is not None
        p, ids_RK = self.problem, tokens.topk_ids.contiguous()
        (rows, slots), pairs = ids_RK.shape, ids_RK.numel()
        entries, experts, num_rows, locks, unused, outputs, a_SI, gathered, scratch = workspace

        block = self._block(rows, slots)
        capacity = align_capacity(pairs, p.num_local_experts, block)
        blocks = Blocks(entries[:capacity], experts[: capacity // block], num_rows, locks, block)
        list_pairs(ids_RK, p.num_local_experts, blocks, scratch)

        h_SN = outputs[: pairs * self._w13_rows].view(pairs, self._w13_rows)
        y_SH = outputs[: pairs * p.hidden_size].view(pairs, p.hidden_size)
        x_RH = tokens.x.contiguous()
        self._gemm1(x_RH, h_SN, weights, blocks, (unused, gathered), slots)
        a_SI = a_SI[:pairs]
        activate_columns(h_SN, a_SI, self._activation, ids=ids_RK)
        self._gemm(a_SI, y_SH, weights, "w2", blocks, unused)
        return Unreduced(y_SH)


class BatchedMarlinExperts(_MarlinExperts):
    """BATCHED: blocks hold the used rows of each expert; GEMM 2 writes y."""

    def _capacity(self, rows: int, block: int) -> int:
        return slab_capacity(self.problem.num_local_experts, rows, block)

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        slots = self.problem.num_local_experts * rows
        return self._buffers(rows, slots * self._w13_rows, slots)

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        counts_L = tokens.expert_num_tokens
        assert counts_L is not None
        num_experts, slab, hidden = tokens.x.shape
        slots = num_experts * slab
        entries, experts, num_rows, locks, unused, outputs, a_SI, gathered = workspace

        block = self._block(slab, self.problem.top_k)
        capacity = slab_capacity(num_experts, slab, block)
        blocks = Blocks(entries[:capacity], experts[: capacity // block], num_rows, locks, block)
        list_slabs(counts_L, slab, blocks)

        h_SN = outputs[: slots * self._w13_rows].view(slots, self._w13_rows)
        x_SH = tokens.x.contiguous().view(slots, hidden)
        self._gemm1(x_SH, h_SN, weights, blocks, (unused, gathered), 1)
        a_SI = a_SI[:slots]
        activate_columns(h_SN, a_SI, self._activation, counts_L=counts_L, slab=slab)
        self._gemm(a_SI, y.view(slots, hidden), weights, "w2", blocks, unused)


def _num_sms() -> int:
    """Return the multiprocessors of this GPU; without a GPU, more than any has."""
    if not torch.cuda.is_available():
        return LOCKS // BLOCKS_PER_SM
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
