"""The two experts backends: which buffers they need, and which kernels they launch in which order.

Shape suffixes: R rows, K slots of a row, S = R * K pairs, L local experts, C rows of a slab, H
hidden size, I intermediate size, N = 2I (I without gate).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from moekit_kernels.align import COUNTERS, SortedAssignments, align, align_capacity, align_scratch
from moekit_kernels.numerics import SCALE_GROUP
from moekit_kernels.rows import (
    Activation,
    ValidRows,
    activate_rows,
    quantize_activations,
    quantize_rows,
    quantize_rows_per_tensor,
    weighted_sum,
)
from moekit_kernels.sorted_rows import copy_rows, copy_rows_quantized
from torch import Tensor

from moekit.plugin import (
    ActivationFormat,
    BufferSpec,
    Dispatched,
    ExpertsSpec,
    ExpertWeights,
    MoEProblem,
    PackedWeights,
    PermuteExpertsUnpermute,
)

from .config import (
    BLOCKS_M,
    Plan,
    choose_plan,
    most_addends,
    num_sms,
    sorting_pays,
)
from .gemm import Epilogue, Rows, grouped_gemm
from .gemv import gemv_down, gemv_up
from .packed import pack_weights
from .sorted_gemm import Scales, sorted_gemm

_MAX_PLANS = 1024  # that are kept: a dispatcher may bring another number of rows in every call


class _TritonExperts(PermuteExpertsUnpermute):
    """What both formats share.

    Quantized schemes: x arrives quantized, or (STANDARD) `apply` quantizes it, except for few
    tokens, whose dot products take it as it is. The input of GEMM 2 is quantized in the
    activation's kernel or, fused with it, in GEMM 1. Both: with the static scale, per group, or per
    row (also for fp8_tensor with dynamic activations: one scale per row is finer than one for all,
    needs no second pass, and keeps rows independent). Sums are fp32, except that fp8 tiles of 64
    rows and more leave those under one scale to the tensor cores, which on Hopper keep about 14
    bits, as other libraries do.
    """

    quantizer = staticmethod(quantize_activations)

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        super().__init__(spec, problem)
        self._activation = Activation.of(problem.activation)
        operand = problem.quant.activation
        self._a_dtype = problem.dtype if operand is None else operand.torch_dtype
        self._plans: dict[tuple[int, int], Plan] = {}
        self._static = operand is not None and operand.static
        # fp16 holds no expert's output above 65504, but perhaps what its router weight makes of it.
        self._weights_early = problem.dtype == torch.float16

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        """Weights as they are; scales (L,) per tensor, (L, N) per channel, (L, N/128, K/128).

        Of 4 bits: `moekit_triton.packed`.
        """
        operand = self.problem.quant.weight
        if operand is not None and operand.packed:
            return PackedWeights(self.spec.name, pack_weights(weights, self.problem))
        experts, shared = weights.by_expert()
        if operand is not None:
            dims = 1 if operand.per_tensor else 2 if operand.group[1] < 0 else 3
            for name in ("w13_scale", "w2_scale"):
                experts[name] = experts[name].view(experts[name].shape[:dims])
        return PackedWeights(self.spec.name, experts, shared)

    def _activated(self, rows: int) -> tuple[BufferSpec, BufferSpec]:
        """The input of GEMM 2 and its scale."""
        inner, operand = self.problem.local_intermediate_size, self.problem.quant.activation
        groups = 0 if operand is None or self._static else operand.scale_shape(1, inner)[1]
        return (
            BufferSpec((rows, inner), self._a_dtype),
            BufferSpec((rows, groups), torch.float32),
        )

    @staticmethod
    def tune(argv: Sequence[str]) -> int:
        """`python -m moekit tune triton ...`: searches tiles, see `moekit_triton.tune`."""
        from . import tune

        tune.main(argv)
        return 0

    def _plan(self, rows: int, slots: int) -> Plan:
        plan = self._plans.get((rows, slots))
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            slabs = self.spec.format is ActivationFormat.BATCHED
            plan = self._plans[rows, slots] = choose_plan(self.problem, rows, slots, slabs=slabs)
        return plan

    def _run(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weights: PackedWeights,
        plan: Plan,
        rows: tuple[Rows, Rows],
        valid: ValidRows,
        h: Tensor | None,
        a: Tensor,
        scale: Tensor,
        y: Tensor,
        weights_RK: Tensor | None = None,
    ) -> None:
        """GEMM 1, activation, GEMM 2. h: GEMM 1's output unless the activation is fused with it;
        a: GEMM 2's input, with `scale` for its rows."""
        first, second = rows
        operand = self.problem.quant.activation
        quantized = operand is not None
        if self._static:
            scale = weights.shared["a2_scale"]
        epilogue = None
        if plan.fused:
            kind = "none" if not quantized else "tensor" if self._static else "group"
            epilogue = Epilogue(self._activation, kind, scale if quantized else None)
        out = a if plan.fused else h
        assert out is not None
        grouped_gemm(
            x, weights["w13"], out, first, plan.first, a_scale=x_scale,
            w_scale=weights.get("w13_scale"), w_offset=weights.get("w13_offset"),
            bias_LN=weights.get("w13_bias"), epilogue=epilogue,
        )  # fmt: skip
        if not plan.fused:
            activate_rows(
                out.flatten(0, -2), a.flatten(0, -2), self._activation, valid,
                scale=scale if quantized else None, static_scale=self._static,
            )  # fmt: skip
        a_scale = scale if quantized else None
        if a_scale is not None and a.dim() == 3 and not self._static:
            a_scale = a_scale.view(*a.shape[:2], -1)
        grouped_gemm(
            a, weights["w2"], y, second, plan.second, a_scale=a_scale,
            w_scale=weights.get("w2_scale"), w_offset=weights.get("w2_offset"),
            bias_LN=weights.get("w2_bias"), weights_RK=weights_RK,
        )  # fmt: skip


class TritonExperts(_TritonExperts):
    """STANDARD, reducing: align, GEMM 1, activation, GEMM 2, weighted sum."""

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        p = self.problem
        pairs, L = rows * p.top_k, p.num_local_experts
        # Calls of fewer rows may use other blocks: large ones need more entries, small ones blocks.
        most, least = max(BLOCKS_M), min(BLOCKS_M)
        entries = align_capacity(pairs, L, most)
        sorted_rows = entries if sorting_pays(p, rows, p.top_k) else 0
        gemm_out = max(pairs * max(p.w13_rows, p.hidden_size), sorted_rows * p.hidden_size)
        gemm_out = max(gemm_out, most_addends(p, pairs) * p.hidden_size)
        return (
            BufferSpec((entries,), torch.int32),
            BufferSpec((align_capacity(pairs, L, least) // least,), torch.int32),
            BufferSpec((1,), torch.int32),
            BufferSpec((COUNTERS + sorted_rows // most if sorted_rows else 0,), torch.int32),
            BufferSpec((pairs if sorted_rows else 0,), torch.int32),
            BufferSpec((align_scratch(pairs, L),), torch.int32),
            # GEMM 1's output, or its input in order; and when that has been read, GEMM 2's output
            BufferSpec((gemm_out,), p.dtype),
            *self._activated(max(pairs, sorted_rows)),
            *self._input(rows, sorted_rows),
        )

    def _input(self, rows: int, sorted_rows: int) -> tuple[BufferSpec, BufferSpec]:
        """The quantized input of GEMM 1 and its scale, for x that arrives unquantized; in order,
        the input lies elsewhere."""
        hidden, operand = self.problem.hidden_size, self.problem.quant.activation
        if operand is None:
            return BufferSpec((0,), self._a_dtype), BufferSpec((0,), torch.float32)
        groups = 0 if self._static else operand.scale_shape(1, hidden)[1]
        return (
            BufferSpec((rows, hidden), self._a_dtype),
            BufferSpec((max(rows, sorted_rows), groups), torch.float32),
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
        entries, experts, num_rows, counters, of_pairs, scratch, *buffers = workspace
        gemm_out, activated, scale, q, q_scale = buffers

        plan = self._plan(rows, slots)
        if plan.dots is not None:
            a_SI = gemm_out[: pairs * p.local_intermediate_size].view(pairs, -1)
            gemv_up(
                tokens.x, weights["w13"], a_SI, ids_RK, self._activation, plan.dots[0],
                x_scale=tokens.x_scale, w_scale=weights.get("w13_scale"),
                bias_LN=weights.get("w13_bias"),
            )  # fmt: skip
            gemv_down(
                a_SI, weights["w2"], y, ids_RK, topk_weights_RK, plan.dots[1],
                w_scale=weights.get("w2_scale"), bias_LN=weights.get("w2_bias"),
            )  # fmt: skip
            return
        x, x_scale, in_order = tokens.x, tokens.x_scale, plan.order != "pairs"
        if x_scale is None and p.quant.activation is not None and not in_order:
            x, x_scale = self._quantize_into(q[:rows], q_scale[:rows], x, weights)
        if plan.direct:
            first, second = Rows.direct(ids_RK, slots), Rows.direct(ids_RK)
        else:
            capacity = align_capacity(pairs, p.num_local_experts, plan.block_m)
            blocks = capacity // plan.block_m
            aligned = SortedAssignments(
                entries[:capacity], experts[:blocks], num_rows, plan.block_m,
                of_pairs[:pairs] if in_order else None,
                counters=counters[: COUNTERS + blocks] if plan.specialized else None,
            )  # fmt: skip
            align(ids_RK, p.num_local_experts, aligned, scratch)
            first, second = Rows.aligned(aligned, slots), Rows.aligned(aligned)
        early = topk_weights_RK if self._weights_early else None
        if in_order:
            y_SH = self._run_sorted(
                x, x_scale, weights, plan, aligned, gemm_out, activated[:capacity],
                (q_scale.flatten(), scale.flatten()), pairs, early,
            )  # fmt: skip
            rows_A = aligned.rows_A if plan.second.specialized else None
            weighted_sum(
                y_SH, topk_weights_RK, ids_RK, y, rows_A, weight_before_applied=self._weights_early
            )
            return
        addends = pairs * plan.second.splits
        y_SH = gemm_out[: addends * p.hidden_size].view(addends, p.hidden_size)
        h_SN = None
        if not plan.fused:
            h_SN = gemm_out[: pairs * p.w13_rows].view(pairs, p.w13_rows)
        self._run(
            x, x_scale, weights, plan, (first, second), ValidRows(ids=ids_RK),
            h_SN, activated[:pairs], scale[:pairs], y_SH, early,
        )  # fmt: skip
        weighted_sum(y_SH, topk_weights_RK, ids_RK, y, weight_before_applied=self._weights_early)

    def _run_sorted(
        self, x: Tensor, x_scale: Tensor | None, weights: PackedWeights, plan: Plan,
        aligned: SortedAssignments, gemm_out: Tensor, a_SI: Tensor, scales: tuple[Tensor, Tensor],
        pairs: int, weights_RK: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """GEMM 2's output, in the order of `aligned` if specialized, else by pair. It lies where
        GEMM 1's input was. ``scales``: memory for those of both GEMMs' inputs."""
        entries, hidden, sms = len(a_SI), x.shape[1], num_sms(self.problem)
        slots, bias = pairs // len(x), weights.get("w13_bias")
        x_SH = gemm_out.view(self._a_dtype)[: entries * hidden].view(entries, hidden)
        by_pair = not plan.second.specialized
        rows = pairs if by_pair else entries
        y_SH = gemm_out[: rows * hidden].view(rows, hidden)
        first = second = None
        if self.problem.quant.activation is not None:
            x_scale_GS, a_scale_GS = (
                memory[: triton.cdiv(columns, SCALE_GROUP) * entries].view(-1, entries)
                for memory, columns in zip(scales, (hidden, a_SI.shape[1]), strict=True)
            )
            copy_rows_quantized(x, x_scale, aligned, x_SH, x_scale_GS)
            first = Scales(weights["w13_scale"], x_scale_GS, a_scale_GS)
            second = Scales(weights["w2_scale"], a_scale_GS)
        elif plan.order in ("copied", "joined"):
            copy_rows(x, aligned, x_SH)
        if plan.order == "joined":
            from .specialized_block import specialized_block  # Gluon, so where it is known

            specialized_block(  # y of a block is written when its x has been read
                x_SH, weights["w13"], a_SI, weights["w2"], y_SH, aligned, plan.first, plan.second,
                pairs, sms, weights_RK,
            )  # fmt: skip
            return y_SH
        if plan.order == "sorted":
            grouped_gemm(
                x, weights["w13"], a_SI, Rows.aligned(aligned, slots, in_order=True), plan.first,
                bias_LN=bias, epilogue=Epilogue(self._activation),
            )  # fmt: skip
        else:
            sorted_gemm(
                x_SH, weights["w13"], a_SI, aligned, plan.first, pairs, sms, bias_LN=bias,
                activation=self._activation, scales=first,
                x_RK=x if plan.order == "ahead" else None,
            )  # fmt: skip
        sorted_gemm(
            a_SI, weights["w2"], y_SH, aligned, plan.second, pairs, sms,
            bias_LN=weights.get("w2_bias"), weights_RK=weights_RK, by_pair=by_pair, scales=second,
        )  # fmt: skip
        return y_SH

    def _quantize_into(
        self, q: Tensor, scale: Tensor, x: Tensor, weights: PackedWeights
    ) -> tuple[Tensor, Tensor]:
        """Every row by itself, so that it does not matter what padding rows hold."""
        if self._static:
            static = weights.shared["a1_scale"]
            quantize_rows_per_tensor(x, q, static, scratch=None)
            return q, static
        quantize_rows(x, q, scale)
        return q, scale


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
        L, C = tokens.x.shape[:2]
        h_SN, a_SI, scale = (buffer[: L * C] for buffer in workspace)
        plan = self._plan(C, self.problem.top_k)
        rows = Rows.slabs(counts_L, C, plan.block_m)
        self._run(
            tokens.x, tokens.x_scale, weights, plan, (rows, rows),
            ValidRows(counts_L=counts_L, capacity=C),
            h_SN.view(L, C, -1), a_SI.view(L, C, -1), scale, y,
        )  # fmt: skip
