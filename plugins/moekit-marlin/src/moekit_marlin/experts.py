"""The two experts backends: blocks, GEMM 1, activation, GEMM 2 and, for STANDARD, the weighted sum.

Shape suffixes: R rows, K experts of a row, S = R * K assignments, L local experts, C capacity, H
hidden size, I intermediate size (padded), N = 2I (I without gate).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from moekit_kernels.align import SortedAssignments, align, align_capacity, align_scratch
from moekit_kernels.numerics import Activation
from moekit_kernels.rows import ValidRows, activate_rows, weighted_sum
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
from .kernels import gather_columns, list_slabs, slab_capacity
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
        top_k = self.problem.top_k
        block = self._block(rows, top_k)
        per_sm = BLOCKS_PER_SM * block * MAX_TILE_N
        widest = max(self._w13_rows, self.problem.hidden_size)
        floats = min(widest * self._capacity(rows, top_k, block), _num_sms() * per_sm)
        return 4 * floats * (2 if block == 8 else 1)

    @abstractmethod
    def _capacity(self, rows: int, slots: int, block: int) -> int:
        """Return the most entries of the lists of blocks, for rows with ``slots`` assignments."""

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
        blocks = max(self._capacity(rows, p.top_k, b) // b for b in BLOCKS if b <= block)
        gathered = activated if self._may_sort_columns else 0
        return (
            BufferSpec((self._capacity(rows, p.top_k, block),), torch.int32),
            BufferSpec((blocks,), torch.int32),
            BufferSpec((1,), torch.int32),
            BufferSpec((LOCKS,), torch.int32),
            BufferSpec((1,), torch.float32),
            BufferSpec((outputs,), p.dtype),
            BufferSpec((activated, self._inner), p.dtype),
            BufferSpec((gathered, p.hidden_size), p.dtype),
        )

    def _lists(self, rows: int, slots: int, workspace: Sequence[Tensor]) -> SortedAssignments:
        """Return the lists of blocks for a call, to be filled."""
        entries, experts, num_rows = workspace[:3]
        block = self._block(rows, slots)
        capacity = self._capacity(rows, slots, block)
        return SortedAssignments(entries[:capacity], experts[: capacity // block], num_rows, block)

    def _run(
        self, x: Tensor, y_SH: Tensor, weights: PackedWeights, lists: SortedAssignments,
        valid: ValidRows, workspace: Sequence[Tensor], top_k: int,
    ) -> None:  # fmt: skip
        """Write GEMM 2's rows, one per assignment, to y; they may overwrite GEMM 1's."""
        outputs, a_SI, gathered = workspace[5:8]
        rows = y_SH.shape[0]
        h_SN, a_SI = outputs[: rows * self._w13_rows].view(rows, self._w13_rows), a_SI[:rows]
        columns_LH = weights.get("w13_columns")
        if columns_LH is not None:
            gather_columns(x, columns_LH, gathered[:rows], lists, top_k)
            x, top_k = gathered[:rows], 1
        self._gemm(x, h_SN, weights, "w13", lists, workspace, top_k)
        activate_rows(h_SN, a_SI, self._activation, valid)
        self._gemm(a_SI, y_SH, weights, "w2", lists, workspace, 1)

    def _gemm(
        self, a: Tensor, out: Tensor, weights: PackedWeights, name: str, lists: SortedAssignments,
        workspace: Sequence[Tensor], top_k: int,
    ) -> None:  # fmt: skip
        """Compute ``out[s] = a[s // top_k] @ w[expert of s].T (+ bias)`` for assignments s."""
        locks, unused = workspace[3:5]
        library.operator()(
            a, out, weights[name], weights.get(f"{name}_bias"),
            weights[f"{name}_scale"].view(self._scale_dtype), None, weights.get(f"{name}_global"),
            weights.get(f"{name}_zeros"),
            locks, lists.assignments_S, lists.experts_B, lists.num_rows, unused,
            lists.block_m, top_k, False, self._type_id, a.shape[0], out.shape[1], a.shape[1],
            False, True, False,  # no atomics, sums in fp32, integer zero points
            -1, -1, -1,  # the operator chooses its tile
        )  # fmt: skip


class MarlinExperts(_MarlinExperts):
    """STANDARD, reducing."""

    def _capacity(self, rows: int, slots: int, block: int) -> int:
        return align_capacity(rows * slots, self.problem.num_local_experts, block)

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        p = self.problem
        pairs = rows * p.top_k
        # GEMM 1's output and, after the activation has read it, GEMM 2's share one buffer.
        return (
            *self._buffers(rows, pairs * max(self._w13_rows, p.hidden_size), pairs),
            BufferSpec((align_scratch(pairs, p.num_local_experts),), torch.int32),
        )

    def apply(
        self, y: Tensor, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> None:
        assert tokens.topk_ids is not None and tokens.topk_weights is not None
        ids_RK, topk_weights_RK = tokens.topk_ids.contiguous(), tokens.topk_weights.contiguous()
        rows = self.apply_unreduced(tokens, weights, workspace).rows_NH
        weighted_sum(rows, topk_weights_RK, ids_RK, y, live_R=tokens.num_rows)

    def apply_unreduced(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Unreduced:
        assert tokens.topk_ids is not None
        p, ids_RK = self.problem, tokens.topk_ids.contiguous()
        (rows, slots), pairs = ids_RK.shape, ids_RK.numel()
        lists = replace(self._lists(rows, slots, workspace), live_R=tokens.num_rows)
        align(ids_RK, p.num_local_experts, lists, scratch=workspace[8], zeros=workspace[3])
        y_SH = workspace[5][: pairs * p.hidden_size].view(pairs, p.hidden_size)
        valid = ValidRows(ids=ids_RK)
        self._run(tokens.x.contiguous(), y_SH, weights, lists, valid, workspace, slots)
        return Unreduced(y_SH)


class BatchedMarlinExperts(_MarlinExperts):
    """BATCHED: blocks hold the used rows of each expert; GEMM 2 writes y."""

    def _capacity(self, rows: int, slots: int, block: int) -> int:
        return slab_capacity(self.problem.num_local_experts, rows, block)

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        slots = self.problem.num_local_experts * rows
        return self._buffers(rows, slots * self._w13_rows, slots)

    def apply(
        self, y: Tensor, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> None:
        counts_L, (num_experts, slab, hidden) = tokens.expert_num_tokens, tokens.x.shape
        assert counts_L is not None
        lists = self._lists(slab, self.problem.top_k, workspace)
        list_slabs(counts_L, slab, lists, locks=workspace[3])
        x_SH = tokens.x.contiguous().view(num_experts * slab, hidden)
        valid = ValidRows(counts_L=counts_L, capacity=slab)
        self._run(x_SH, y.view(x_SH.shape), weights, lists, valid, workspace, 1)


def _num_sms() -> int:
    """Return the multiprocessors of this GPU; without a GPU, more than any has."""
    if not torch.cuda.is_available():
        return LOCKS // BLOCKS_PER_SM
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
