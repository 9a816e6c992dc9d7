"""The two experts backends: which buffers they need, and which kernels they launch in which order.

Shape suffixes: R rows, K slots of a row, S = R * K pairs, L local experts, C rows of a slab, H
hidden size, I intermediate size, N = 2I (I without gate).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moekit.kernel import BufferSpec, Dispatched, PackedWeights, PermuteExpertsUnpermute
from moekit.plugins import ExpertsSpec
from moekit.problem import MoEProblem
from moekit.weights import ExpertWeights

from .align import AlignedPairs, align, align_capacity, align_scratch
from .config import choose_block_m, choose_config
from .gemm import GemmConfig, batched_gemm, grouped_gemm
from .rows import (
    AMAX_PARTIALS,
    Activation,
    ValidRows,
    activate_rows,
    quantize_rows,
    quantize_rows_per_tensor,
    weighted_sum,
)


class _TritonExperts(PermuteExpertsUnpermute):
    """What both formats share.

    Quantized schemes: x arrives quantized. The activation kernel quantizes the input of GEMM 2:
    with the static scale, per group, or per row (also for fp8_tensor with dynamic activations: one
    scale per row is finer than one for all, needs no second pass, and keeps rows independent).
    """

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        super().__init__(spec, problem)
        activation = problem.activation
        self._activation = Activation(
            name=activation.name.removesuffix("_no_mul"),
            gated=activation.gated,
            alpha=activation.alpha or 0.0,
            limit=activation.limit,
        )
        operand = problem.quant.activation
        self._a_dtype = problem.dtype if operand is None else operand.torch_dtype
        weight = problem.quant.weight
        w_dtype = problem.dtype if weight is None else weight.torch_dtype
        self._bits = 8 * self._a_dtype.itemsize, 8 * w_dtype.itemsize
        self._static = operand is not None and operand.static

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        """Weights as they are; scales (L,) per tensor, (L, N) per channel, (L, N/128, K/128)."""
        experts, shared = weights.by_expert()
        operand = self.problem.quant.weight
        if operand is not None:
            dims = 1 if operand.per_tensor else 2 if operand.group[1] < 0 else 3
            for name in ("w13_scale", "w2_scale"):
                experts[name] = experts[name].view(experts[name].shape[:dims])
        return PackedWeights(self.spec.name, experts, shared)

    def quantize(
        self, x_RH: Tensor, weights: PackedWeights, valid_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rows outside ``valid_rows`` come out undefined, except that they never decide a scale."""
        operand = self.problem.quant.activation
        assert operand is not None
        if x_RH.dim() != 2 or x_RH.numel() == 0:
            return super().quantize(x_RH, weights, valid_rows)
        q = torch.empty(x_RH.shape, dtype=operand.torch_dtype, device=x_RH.device)
        valid = ValidRows() if valid_rows is None else ValidRows(mask=valid_rows)
        if not operand.per_tensor:
            shape = (x_RH.shape[0], operand.scale_shape(*x_RH.shape)[1])
            scale = torch.empty(shape, dtype=torch.float32, device=x_RH.device)
            quantize_rows(x_RH, q, scale, valid)
            return q, scale
        static = weights.get("a1_scale") if operand.static else None
        if static is not None:
            quantize_rows_per_tensor(x_RH, q, static, valid, scratch=None)
            return q, static
        scratch = torch.empty(AMAX_PARTIALS + 1, dtype=torch.float32, device=x_RH.device)
        scale = scratch[AMAX_PARTIALS:].view(1, 1)
        quantize_rows_per_tensor(x_RH, q, scale, valid, scratch=scratch[:AMAX_PARTIALS])
        return q, scale

    def _activated(self, rows: int) -> tuple[BufferSpec, BufferSpec]:
        """The input of GEMM 2 and its scale."""
        inner, operand = self.problem.local_intermediate_size, self.problem.quant.activation
        groups = 0 if operand is None or self._static else operand.scale_shape(1, inner)[1]
        return (
            BufferSpec((rows, inner), self._a_dtype),
            BufferSpec((rows, groups), torch.float32),
        )

    def _activate(
        self, h_SN: Tensor, a_SI: Tensor, scale: Tensor, weights: PackedWeights, valid: ValidRows
    ) -> Tensor | None:
        """h -> a. Returns a's scale: in `scale`, the static one, or None."""
        if self.problem.quant.activation is None:
            activate_rows(h_SN, a_SI, self._activation, valid)
            return None
        a_scale = weights.shared["a2_scale"] if self._static else scale
        activate_rows(h_SN, a_SI, self._activation, valid, scale=a_scale, static_scale=self._static)
        return a_scale

    def _block_m(self, rows: int, slots: int) -> int:
        """Tokens spread over all physical experts, so a local one expects rows * slots / P."""
        return choose_block_m(rows * slots / self.problem.num_physical_experts, self._bits[0])

    def _configs(self, block_m: int, row_blocks: int) -> tuple[GemmConfig, GemmConfig]:
        """For GEMM 1 and GEMM 2."""
        p = self.problem
        shapes = (p.w13_rows, p.hidden_size), (p.hidden_size, p.local_intermediate_size)
        first, second = (
            choose_config(block_m, row_blocks, n, k, *self._bits, p.device.capability)
            for n, k in shapes
        )
        return first, second


class TritonExperts(_TritonExperts):
    """STANDARD, reducing: align, GEMM 1, activation, GEMM 2, weighted sum."""

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        p = self.problem
        pairs, block_m = rows * p.top_k, self._block_m(rows, p.top_k)
        capacity = align_capacity(pairs, p.num_local_experts, block_m)
        # Smaller calls use smaller blocks: fewer entries, but maybe more blocks.
        blocks = max(capacity // block_m, align_capacity(pairs, p.num_local_experts, 16) // 16)
        return (
            BufferSpec((capacity,), torch.int32),
            BufferSpec((blocks,), torch.int32),
            BufferSpec((1,), torch.int32),
            BufferSpec((align_scratch(pairs, p.num_local_experts),), torch.int32),
            # GEMM 1's output, and after the activation has read it, GEMM 2's
            BufferSpec((pairs * max(p.w13_rows, p.hidden_size),), p.dtype),
            *self._activated(pairs),
        )

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        p = self.problem
        assert tokens.topk_ids is not None and tokens.topk_weights is not None
        ids_RK, topk_weights_RK = tokens.topk_ids.contiguous(), tokens.topk_weights.contiguous()
        rows, slots = ids_RK.shape
        pairs = rows * slots
        entries, experts, num_rows, scratch, gemm_out, activated, scale = workspace

        block_m = self._block_m(rows, slots)
        capacity = align_capacity(pairs, p.num_local_experts, block_m)
        aligned = AlignedPairs(
            entries[:capacity], experts[: capacity // block_m], num_rows, block_m
        )
        align(ids_RK, p.num_local_experts, aligned, scratch)

        h_SN = gemm_out[: pairs * p.w13_rows].view(pairs, p.w13_rows)
        y_SH = gemm_out[: pairs * p.hidden_size].view(pairs, p.hidden_size)
        a_SI = activated[:pairs]
        busy = min(capacity // block_m, max(p.num_local_experts, pairs // block_m))
        config1, config2 = self._configs(block_m, busy)
        grouped_gemm(
            tokens.x, weights["w13"], h_SN, aligned, config1, pairs_per_row=slots,
            a_scale=tokens.x_scale, w_scale=weights.get("w13_scale"),
            bias_LN=weights.get("w13_bias"),
        )  # fmt: skip
        valid = ValidRows(ids=ids_RK)
        a_scale = self._activate(h_SN, a_SI, scale[:pairs], weights, valid)
        grouped_gemm(
            a_SI, weights["w2"], y_SH, aligned, config2,
            a_scale=a_scale, w_scale=weights.get("w2_scale"), bias_LN=weights.get("w2_bias"),
        )  # fmt: skip
        weighted_sum(y_SH, topk_weights_RK, ids_RK, y)


class BatchedTritonExperts(_TritonExperts):
    """BATCHED: GEMM 1, activation, GEMM 2 over every expert's used rows."""

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        slots = self.problem.num_local_experts * rows
        return (
            BufferSpec((slots, self.problem.w13_rows), self.problem.dtype),
            *self._activated(slots),
        )

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        counts_L = tokens.expert_num_tokens
        assert counts_L is not None
        num_experts, slab = tokens.x.shape[:2]
        slots = num_experts * slab
        h_SN, a_SI, scale = (buffer[:slots] for buffer in workspace)

        block_m = self._block_m(slab, self.problem.top_k)
        config1, config2 = self._configs(block_m, num_experts)
        batched_gemm(
            tokens.x, weights["w13"], h_SN.view(num_experts, slab, -1), counts_L, config1,
            a_scale=tokens.x_scale, w_scale=weights.get("w13_scale"),
            bias_LN=weights.get("w13_bias"),
        )  # fmt: skip
        valid = ValidRows(counts_L=counts_L, slab=slab)
        a_scale = self._activate(h_SN, a_SI, scale, weights, valid)
        if a_scale is scale:
            a_scale = scale.view(num_experts, slab, -1)
        batched_gemm(
            a_SI.view(num_experts, slab, -1), weights["w2"], y, counts_L, config2,
            a_scale=a_scale, w_scale=weights.get("w2_scale"), bias_LN=weights.get("w2_bias"),
        )  # fmt: skip
