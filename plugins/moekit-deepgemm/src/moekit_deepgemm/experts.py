"""The two experts backends: their buffers, and the order of their steps.

Shape suffixes: R rows, K experts of a row, S = R * K assignments, L local experts, M rows of the
padded layout, C capacity, H hidden size, I intermediate size, N = 2I (I without gate), G groups of
128 columns that share a scale.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from moekit_kernels.align import SortedAssignments, align, align_scratch
from moekit_kernels.numerics import Activation
from moekit_kernels.rows import quantize_activations, weighted_sum
from moekit_kernels.sorted_rows import copy_rows, copy_rows_quantized
from torch import Tensor

from moekit.errors import InvalidInput
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

from .gemms import Gemms
from .kernels import GROUP, activate_pairs, activate_slabs, finish_slabs, stage_slabs
from .plan import SLAB_MULTIPLE, Plan, expected_slab_rows, make_plan, plans_up_to, round_up

logger = logging.getLogger("moekit")

# input, its scales, the weight's name, output
_Gemm = tuple[Tensor, "Tensor | None", str, Tensor]


class _DeepGemmExperts(PermuteExpertsUnpermute):
    """The base class of both formats.

    The library compiles a GEMM with nvcc at the first use of its sizes (N, K, L) and tiles. It
    chooses tiles by the expected rows per expert, which this class rounds to a power of two. So the
    first call of a size, for example in `ModularKernel.warmup`, compiles what that size and all
    smaller ones need: a few kernels, some 10 s each, which DG_JIT_CACHE_DIR keeps on disk. While a
    CUDA graph is captured, a size that was never run is an error.

    Attributes:
        block_m: Overrides the rows of a block that plan.py chooses (STANDARD only), for tuning.
    """

    quantizer = staticmethod(quantize_activations)

    _compiled: set[tuple[object, ...]] = set()  # of this process

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        super().__init__(spec, problem)
        self._activation = Activation.of(problem.activation)
        self._quantized = problem.quant.activation is not None
        operand = problem.quant.activation
        self._a_dtype = problem.dtype if operand is None else operand.torch_dtype
        self._gemms = Gemms()
        self.block_m: int | None = None

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        """Return the canonical weights, with scales (L, N / 128, K / 128) fp32 as Hopper reads."""
        return PackedWeights(self.spec.name, *weights.by_expert())

    def transient_bytes(self, rows: int) -> int:
        """Return what the library keeps from its first call on: 2.6 keeps cuBLASLt's workspace."""
        return 32 << 20

    def _operand(self, rows: int) -> list[BufferSpec]:
        """Reserve room for the input of either GEMM and its scales; they are not used together."""
        p = self.problem
        widest = max(p.hidden_size, p.local_intermediate_size)
        groups = widest // GROUP if self._quantized else 0
        return [
            BufferSpec((rows * widest,), self._a_dtype),
            BufferSpec((rows * groups,), torch.float32),
        ]

    def _first_use(self, key: tuple[object, ...], device: torch.device) -> bool:
        """Return whether no such call ran before; raise InvalidInput while a graph is captured."""
        p = self.problem
        sizes = (p.quant.name, p.num_local_experts, p.w13_rows, p.hidden_size)
        key = (self.spec.format, *sizes, p.local_intermediate_size, device.index, *key)
        if key in self._compiled:
            return False
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidInput(
                f"{self.spec.name} has to compile for this number of tokens while a graph is being "
                "captured; run it once (kernel.warmup(weights, num_tokens)) before capturing"
            )
        self._compiled.add(key)
        return True


class DeepGemmExperts(_DeepGemmExperts):
    """STANDARD, reducing: align, scatter (and quantize), GEMM 1, activation, GEMM 2, weighted sum.

    The GEMMs are the contiguous ones with group ends ("psum"), which skip the unused rows of the
    static worst case.
    """

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        p = self.problem
        pairs = rows * p.top_k
        padded = self._plan(pairs).rows
        return (
            BufferSpec((pairs,), torch.int32),
            BufferSpec((p.num_local_experts,), torch.int32),
            BufferSpec((align_scratch(pairs, p.num_local_experts),), torch.int32),
            *self._operand(padded),
            # GEMM 1's output, and after the activation has read it, GEMM 2's
            BufferSpec((padded * max(p.w13_rows, p.hidden_size),), p.dtype),
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
        given, bias = self._unreduced(tokens, ids_RK, weights, workspace), weights.get("w2_bias")
        weighted_sum(given.rows_NH, topk_weights_RK, ids_RK, y, given.places_RK, bias)

    def apply_unreduced(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Unreduced | None:
        if weights.get("w2_bias") is not None:
            return None
        assert tokens.topk_ids is not None
        return self._unreduced(tokens, tokens.topk_ids.contiguous(), weights, workspace)

    def _unreduced(
        self,
        tokens: Dispatched,
        ids_RK: Tensor,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> Unreduced:
        """Return GEMM 2's rows, without w2's bias."""
        x_RH = tokens.x if tokens.x.stride(1) == 1 else tokens.x.contiguous()
        pairs, ids_S = ids_RK.numel(), ids_RK.view(-1)
        plan = self._plan(pairs)
        rows, ends_L, scratch, *buffers = workspace
        rows_S = rows[:pairs]
        if self._first_use(plan.kind, x_RH.device):
            self._compile(pairs, weights, ends_L, buffers)

        layout = SortedAssignments(None, None, None, plan.block_m, rows_S, ends_L)
        align(ids_RK, ends_L.numel(), layout, scratch)
        a_MH, scale_GM, h_MN = self._operands("w13", plan, buffers)
        if scale_GM is None:
            copy_rows(x_RH, layout, a_MH)
        else:
            copy_rows_quantized(x_RH, tokens.x_scale, layout, a_MH, scale_GM)
        self._gemm(a_MH, scale_GM, weights, "w13", h_MN, ends_L, plan)
        a_MI, scale_GM, y_MH = self._operands("w2", plan, buffers)
        bias_LN = weights.get("w13_bias")
        activate_pairs(h_MN, rows_S, ids_S, bias_LN, self._activation, a_MI, scale_GM)
        self._gemm(a_MI, scale_GM, weights, "w2", y_MH, ends_L, plan)
        return Unreduced(y_MH, rows_S.view_as(ids_RK))

    def _plan(self, pairs: int) -> Plan:
        p = self.problem
        return make_plan(pairs, p.num_local_experts, p.num_physical_experts, self.block_m)

    def _operands(
        self, name: str, plan: Plan, buffers: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the input, its scales and the output of the GEMM with the weight ``name``."""
        p, rows, (a, scale, out) = self.problem, plan.rows, buffers
        k, n = p.hidden_size, p.w13_rows
        if name == "w2":
            k, n = p.local_intermediate_size, p.hidden_size
        groups = k // GROUP
        scale_GM = scale[: groups * rows].view(groups, rows) if self._quantized else None
        return a[: rows * k].view(rows, k), scale_GM, out[: rows * n].view(rows, n)

    def _gemm(
        self, a: Tensor, scale: Tensor | None, weights: PackedWeights, name: str, out: Tensor,
        ends_L: Tensor, plan: Plan,
    ) -> None:  # fmt: skip
        w, w_scale = weights[name], weights.get(f"{name}_scale")
        self._gemms.contiguous(a, scale, w, w_scale, out, ends_L, plan.block_m, plan.expected_m)

    def _compile(
        self, pairs: int, weights: PackedWeights, ends_L: Tensor, buffers: Sequence[Tensor]
    ) -> None:
        """Run both GEMMs without rows, for every kind of plan up to this one."""
        p, start = self.problem, time.monotonic()
        ends_L.zero_()
        plans = plans_up_to(pairs, p.num_local_experts, p.num_physical_experts, self.block_m)
        for done, plan in enumerate(plans):
            logger.info("%s: compiling, %d of %d: %s", self.spec.name, done + 1, len(plans), plan)
            for name in ("w13", "w2"):
                a, scale, out = self._operands(name, plan, buffers)
                self._gemm(a, scale, weights, name, out, ends_L, plan)
            self._first_use(plan.kind, ends_L.device)
        logger.info("%s: compiled in %.1f s", self.spec.name, time.monotonic() - start)


class BatchedDeepGemmExperts(_DeepGemmExperts):
    """BATCHED: (quantize,) GEMM 1, activation, GEMM 2 over every expert's used rows.

    The masked GEMM stores whole blocks of rows, so a capacity that is not a multiple of 128 is
    rounded up, with a copy of the rows in and out.
    """

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        p = self.problem
        L, slab = p.num_local_experts, round_up(rows, SLAB_MULTIPLE)
        columns = p.w13_rows if slab == rows else max(p.w13_rows, p.hidden_size)
        return (
            *self._operand(L * slab),
            BufferSpec((L * slab * columns,), p.dtype),
            BufferSpec((L,), torch.int32),
        )

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        p, counts_L = self.problem, tokens.expert_num_tokens
        assert counts_L is not None
        counts_L = counts_L.to(torch.int32).contiguous()
        *buffers, none_L = workspace
        assert y.is_contiguous()
        slab = round_up(y.shape[1], SLAB_MULTIPLE)
        direct_out = slab == y.shape[1]
        expected_m = expected_slab_rows(y.shape[1], p.top_k, p.num_physical_experts)
        H, inner = p.hidden_size, p.local_intermediate_size
        a_LCH, scale_LGC = self._input(slab, H, buffers)
        a_LCI, scale2_LGC = self._input(slab, inner, buffers)
        h_LCN = self._output(slab, p.w13_rows, buffers)
        y_LCH = y if direct_out else self._output(slab, H, buffers)
        if self._first_use((expected_m,), y.device):
            gemms = (a_LCH, scale_LGC, "w13", h_LCN), (a_LCI, scale2_LGC, "w2", y_LCH)
            self._compile(expected_m, weights, none_L, gemms)

        a_LCH, scale_LGC = self._stage(tokens, counts_L, a_LCH, scale_LGC)
        self._gemm(a_LCH, scale_LGC, weights, "w13", h_LCN, counts_L, expected_m)
        bias_LN, bias_LH = weights.get("w13_bias"), weights.get("w2_bias")
        activate_slabs(h_LCN, counts_L, bias_LN, self._activation, a_LCI, scale2_LGC)
        self._gemm(a_LCI, scale2_LGC, weights, "w2", y_LCH, counts_L, expected_m)
        if not direct_out or bias_LH is not None:
            finish_slabs(y_LCH, counts_L, bias_LH, y)

    def _stage(
        self, tokens: Dispatched, counts_L: Tensor, a_LCH: Tensor, scale_LGC: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return GEMM 1's input: the received rows if the GEMM can read them, else a copy."""
        x = tokens.x if tokens.x.stride(2) == 1 else tokens.x.contiguous()
        usable = x.dtype == a_LCH.dtype and x.shape == a_LCH.shape and x.is_contiguous()
        if not usable:
            stage_slabs(x, tokens.x_scale, counts_L, a_LCH, scale_LGC)
            return a_LCH, scale_LGC
        if scale_LGC is None or tokens.x_scale is None:
            return x, None
        as_wanted = tokens.x_scale.transpose(1, 2)
        if as_wanted.is_contiguous() and as_wanted.data_ptr() % 16 == 0:
            return x, as_wanted
        stage_slabs(x, tokens.x_scale, counts_L, x, scale_LGC, scales_only=True)
        return x, scale_LGC

    def _input(self, slab: int, k: int, buffers: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the views for a GEMM's input and its scales."""
        L, groups = self.problem.num_local_experts, k // GROUP
        a_LCK = buffers[0][: L * slab * k].view(L, slab, k)
        if not self._quantized:
            return a_LCK, None
        return a_LCK, buffers[1][: L * groups * slab].view(L, groups, slab)

    def _output(self, slab: int, n: int, buffers: Sequence[Tensor]) -> Tensor:
        L = self.problem.num_local_experts
        return buffers[2][: L * slab * n].view(L, slab, n)

    def _gemm(
        self, a: Tensor, scale: Tensor | None, weights: PackedWeights, name: str, out: Tensor,
        counts_L: Tensor, expected_m: int,
    ) -> None:  # fmt: skip
        w, w_scale = weights[name], weights.get(f"{name}_scale")
        self._gemms.masked(a, scale, w, w_scale, out, counts_L, expected_m)

    def _compile(
        self, expected_m: int, weights: PackedWeights, none_L: Tensor, gemms: Sequence[_Gemm]
    ) -> None:
        """Run both GEMMs without rows, for every expected_m up to this one."""
        start, smaller = time.monotonic(), 1
        none_L.zero_()
        while True:
            logger.info("%s: compiling for %d rows per expert", self.spec.name, smaller)
            for a, scale, name, out in gemms:
                self._gemm(a, scale, weights, name, out, none_L, smaller)
            self._first_use((smaller,), none_L.device)
            if smaller >= expected_m:
                break
            smaller = min(2 * smaller, expected_m)
        logger.info("%s: compiled in %.1f s", self.spec.name, time.monotonic() - start)
