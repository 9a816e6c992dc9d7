"""The two experts backends: their buffers, and the order of their steps.

Shape suffixes: R rows, K experts of a row, S = R * K assignments, L local experts, M rows of the
padded layout, C capacity, H hidden size, I intermediate size, N = 2I (I without gate), G groups of
128 columns that share a scale.
"""

from __future__ import annotations

import math
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
    round_up,
)

from .gemms import Gemms
from .kernels import GROUP, activate, finish_slabs, stage_slabs
from .plan import SLAB_MULTIPLE, Plan, expected_slab_rows, make_plan

_Kind = tuple[int, ...]
"""The part of a call's sizes that decides which kernels it needs."""


class _DeepGemmExperts(PermuteExpertsUnpermute):
    """The base class of both formats.

    The library compiles a GEMM with nvcc at the first use of its sizes (N, K, L) and tiles, in some
    10 s; DG_JIT_CACHE_DIR keeps it on disk. It chooses tiles by the expected rows per expert, which
    this class rounds to a power of two: `ModularKernel.warmup` compiles the few kernels that calls
    of all sizes need. While a CUDA graph is captured, a size that was never run is an error.

    Attributes:
        block_m: Overrides the rows of a block that plan.py chooses (STANDARD only), for tuning.
    """

    quantizer = staticmethod(quantize_activations)

    _ran: set[tuple[object, ...]] = set()  # in this process

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

    def _views(
        self, name: str, lead: tuple[int, ...], buffers: Sequence[Tensor], out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the input, its scales and the output of the GEMM with the weight ``name``.

        lead: The rows, (M,) or (L, C).
        """
        p, rows, (a, scale, results) = self.problem, math.prod(lead), buffers
        k, n = p.hidden_size, p.w13_rows
        if name == "w2":
            k, n = p.local_intermediate_size, p.hidden_size
        scales = None
        if self._quantized:
            groups = k // GROUP
            scales = scale[: groups * rows].view(*lead[:-1], groups, lead[-1])
        out = results[: rows * n].view(*lead, n) if out is None else out
        return a[: rows * k].view(*lead, k), scales, out

    def _begin(self, kind: _Kind, device: torch.device) -> None:
        """Note that calls of this kind run.

        Raises InvalidInput while a graph is captured, if none has run before.
        """
        p = self.problem
        sizes = (p.quant.name, p.num_local_experts, p.w13_rows, p.hidden_size)
        key = (self.spec.format, *sizes, p.local_intermediate_size, device.index, kind)
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing and key not in self._ran:
            raise InvalidInput(
                f"{self.spec.name} has to compile for this number of tokens while a graph is being "
                "captured; run it once (kernel.warmup(weights, num_tokens)) before capturing"
            )
        self._ran.add(key)


class DeepGemmExperts(_DeepGemmExperts):
    """STANDARD, reducing: align, scatter (and quantize), GEMM 1, activation, GEMM 2, weighted sum.

    The GEMMs are the contiguous ones with group ends ("psum"), which skip the unused rows of the
    static worst case.
    """

    def largest_calls(self, num_tokens: int) -> Sequence[int]:
        """Return ``num_tokens``, and below it a call of each kind: its kernels compile."""
        p, calls = self.problem, dict[_Kind, int]()
        while num_tokens:
            plan = self._plan(num_tokens * p.parallel.dp_size * p.top_k)
            calls.setdefault(plan.kind, num_tokens)
            num_tokens -= max(1, num_tokens // 64)
        return tuple(calls.values())

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
        self, y: Tensor, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> None:
        assert tokens.topk_ids is not None and tokens.topk_weights is not None
        ids_RK, topk_weights_RK = tokens.topk_ids.contiguous(), tokens.topk_weights.contiguous()
        given, bias = self._unreduced(tokens, ids_RK, weights, workspace), weights.get("w2_bias")
        weighted_sum(
            given.rows_NH, topk_weights_RK, ids_RK, y, given.places_RK, bias, live_R=tokens.num_rows
        )

    def apply_unreduced(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Unreduced | None:
        if weights.get("w2_bias") is not None:
            return None
        assert tokens.topk_ids is not None
        return self._unreduced(tokens, tokens.topk_ids.contiguous(), weights, workspace)

    def _unreduced(
        self, tokens: Dispatched, ids_RK: Tensor, weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> Unreduced:  # fmt: skip
        """Return GEMM 2's rows, without w2's bias."""
        x_RH = tokens.x if tokens.x.stride(1) == 1 else tokens.x.contiguous()
        pairs = ids_RK.numel()
        plan = self._plan(pairs)
        rows, ends_L, scratch, *buffers = workspace
        rows_S = rows[:pairs]
        self._begin(plan.kind, x_RH.device)
        layout = SortedAssignments(
            None, None, None, plan.block_m, rows_S, ends_L, live_R=tokens.num_rows
        )
        align(ids_RK, ends_L.numel(), layout, scratch)
        a_MH, scale_GM, h_MN = self._views("w13", (plan.rows,), buffers)
        if scale_GM is None:
            copy_rows(x_RH, layout, a_MH)
        else:
            copy_rows_quantized(x_RH, tokens.x_scale, layout, a_MH, scale_GM)
        how = ends_L, plan.block_m, plan.expected_m
        self._gemms.contiguous(a_MH, scale_GM, weights, "w13", h_MN, *how)
        a_MI, scale_GM, y_MH = self._views("w2", (plan.rows,), buffers)
        bias_LN = weights.get("w13_bias")
        activate(
            h_MN, bias_LN, self._activation, a_MI, scale_GM, rows_S=rows_S, ids_S=ids_RK.view(-1)
        )
        self._gemms.contiguous(a_MI, scale_GM, weights, "w2", y_MH, *how)
        return Unreduced(y_MH, rows_S.view_as(ids_RK))

    def _plan(self, pairs: int) -> Plan:
        p = self.problem
        return make_plan(pairs, p.num_local_experts, p.num_physical_experts, self.block_m)


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
        )

    def apply(
        self, y: Tensor, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> None:
        p, counts_L = self.problem, tokens.expert_num_tokens
        assert counts_L is not None and y.is_contiguous()
        counts_L = counts_L.to(torch.int32).contiguous()
        L, capacity, _ = y.shape
        lead = L, round_up(capacity, SLAB_MULTIPLE)
        direct_out = y if lead[1] == capacity else None
        expected_m = expected_slab_rows(capacity, p.top_k, p.num_physical_experts)
        a_LCH, scale_LGC, h_LCN = self._views("w13", lead, workspace)
        a_LCI, scale2_LGC, y_LCH = self._views("w2", lead, workspace, direct_out)
        self._begin((expected_m,), y.device)
        x_LCH, x_scale_LGC = self._stage(tokens, counts_L, a_LCH, scale_LGC)
        self._gemms.masked(x_LCH, x_scale_LGC, weights, "w13", h_LCN, counts_L, expected_m)
        bias_LN, bias_LH = weights.get("w13_bias"), weights.get("w2_bias")
        activate(h_LCN, bias_LN, self._activation, a_LCI, scale2_LGC, counts_L=counts_L)
        self._gemms.masked(a_LCI, scale2_LGC, weights, "w2", y_LCH, counts_L, expected_m)
        if direct_out is None or bias_LH is not None:
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
