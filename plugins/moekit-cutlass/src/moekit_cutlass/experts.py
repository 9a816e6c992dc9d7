"""The two experts backends: their buffers, and the order of their steps.

    sort assignments by expert -> expert-sorted rows (quantized) -> GEMM 1 -> activation (quantized)
    -> GEMM 2 -> weighted sum (STANDARD) or rows back to the batched layout (BATCHED)

moekit's kernels add biases. Shape suffixes: R rows, K experts of a row, S = R * K assignments, L
local experts, C capacity, H hidden size, I intermediate size, N = 2I (I without gate).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from moekit_kernels.align import align_scratch
from moekit_kernels.numerics import Activation
from moekit_kernels.rows import ValidRows, activate_rows, quantize_activations, weighted_sum
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

from . import w4a8
from .kernels import Groups, add_bias, group_batched, return_rows, sort_assignments, spread_rows
from .library import W4A8
from .providers import Band, Provider, Scales, bands


class _CutlassExperts(PermuteExpertsUnpermute):
    """The base class of both formats.

    In quantized schemes the GEMMs scale by row and by output channel, and a per-tensor scale is
    repeated. Where this class quantizes activations with dynamic per-tensor scales, it uses a scale
    per row, which is more exact and needs no second pass.
    """

    quantizer = staticmethod(quantize_activations)

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        super().__init__(spec, problem)
        operand = problem.quant.activation
        self._activation = Activation.of(problem.activation)
        self._a_dtype = problem.dtype if operand is None else operand.torch_dtype
        self._quantized = operand is not None
        self._static = operand is not None and operand.static
        self.bands: tuple[Band, ...] = bands(problem)

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        """Return the canonical weights with scales (L, N) fp32; `w4a8.pack` packs int4 weights."""
        if self.problem.quant.name == W4A8:
            return w4a8.pack(weights, self.problem, self.spec.name)
        experts, shared = weights.by_expert()
        if self._quantized:
            for name in ("w13", "w2"):
                scale = experts[f"{name}_scale"].expand(-1, experts[name].shape[1], 1)
                experts[f"{name}_scale"] = scale.squeeze(2).contiguous()
        return PackedWeights(self.spec.name, experts, shared)

    @abstractmethod
    def _pairs(self, rows: int) -> int:
        """Return S for ``rows`` rows (STANDARD: R, BATCHED: C)."""

    def _rows_per_expert(self, rows: int, slots: int) -> float:
        """Return the expected rows of a local expert: assignments / physical experts."""
        return rows * slots / self.problem.num_physical_experts

    def _provider(self, rows: int, slots: int) -> Provider:
        expected = self._rows_per_expert(rows, slots)
        return next(b.provider for b in reversed(self.bands) if b.low <= expected)

    def _reachable(self, rows: int) -> list[tuple[Provider, int]]:
        """Return the providers that calls of at most ``rows`` rows may use, and their most rows."""
        per_row = self._rows_per_expert(1, self.problem.top_k)
        return [
            (band.provider, math.ceil(min(rows, band.high / per_row)))
            for band in self.bands
            if band.low <= rows * per_row
        ]

    def _regions(self, provider: Provider, pairs: int) -> tuple[int, int]:
        """Return the bytes of the two buffers that the steps write alternately.

        Expert-sorted rows -> first; GEMM 1 -> second; activation -> first; GEMM 2 -> second. With a
        fused activation GEMM 1 writes the first, and expert-sorted rows go to the second.
        """
        p = self.problem
        size = self._a_dtype.itemsize
        x = 0 if provider.gathers else p.hidden_size * size
        a = p.local_intermediate_size * size
        h = 0 if provider.activates else p.w13_rows * provider.dtype.itemsize
        z = p.hidden_size * provider.dtype.itemsize
        if provider.allocates:
            h = z = 0
        first, second = (a, max(x, z)) if provider.activates else (max(x, a), max(h, z))
        return pairs * first, pairs * second

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        L, pairs = self.problem.num_local_experts, self._pairs(rows)
        regions = [self._regions(p, self._pairs(r)) for p, r in self._reachable(rows)] or [(0, 0)]
        return (
            BufferSpec((pairs,), torch.int32),
            BufferSpec((pairs,), torch.int32),
            BufferSpec((L + 1,), torch.int32),
            BufferSpec((max(pairs, align_scratch(pairs, L)),), torch.int32),  # BATCHED: ids
            BufferSpec((pairs if self._quantized else 0,), torch.float32),
            *(BufferSpec((max(column),), torch.uint8) for column in zip(*regions, strict=True)),
        )

    def transient_bytes(self, rows: int) -> int:
        """Return the bytes that a library allocates; GEMM 1's result is freed before GEMM 2's."""
        most = 0
        for provider, provider_rows in self._reachable(rows):
            widest = max(self.problem.w13_rows, self.problem.hidden_size)
            result = self._pairs(provider_rows) * widest * provider.dtype.itemsize
            most = max(most, provider.scratch + (result if provider.allocates else 0))
        return most

    def _run(
        self, provider: Provider, tokens: Dispatched, weights: PackedWeights, groups: Groups,
        workspace: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        """Return GEMM 2's rows (S, H), expert-sorted and without w2's bias, for x (R, H)."""
        p, S = self.problem, groups.slots_RK.numel()
        H, inner, N = p.hidden_size, p.local_intermediate_size, p.w13_rows
        scale_S, first, second = workspace[4][: S if self._quantized else 0], *workspace[5:7]

        def rows(buffer: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
            return buffer[: S * columns * dtype.itemsize].view(dtype).view(S, columns)

        def result(buffer: Tensor, columns: int) -> Tensor | None:
            return None if provider.allocates else rows(buffer, columns, provider.dtype)

        def scales(name: str) -> Scales | None:
            if not self._quantized:
                return None
            each = weights.get(f"{name}_table"), weights.get(f"{name}_layout")
            return Scales(scale_S.view(S, 1), weights[f"{name}_scale"], *each)

        x, x_scale = tokens.x, tokens.x_scale
        if not provider.gathers:
            x = rows(second if provider.activates else first, H, self._a_dtype)
            static = self._static and x_scale is None
            spread_rows(
                tokens.x, groups.slots_RK, x,
                x_scale=weights.shared["a1_scale"] if static else x_scale,
                out_scale_S=scale_S if self._quantized else None, static=static,
            )  # fmt: skip
        a = rows(first, inner, self._a_dtype)
        if provider.activates:
            provider.gemm(x, weights["w13"], groups, a, None, first=True)
        else:
            out = result(second, N)
            h = provider.gemm(x, weights["w13"], groups, out, scales("w13"), first=True)
            if (bias := weights.get("w13_bias")) is not None:
                add_bias(h, bias, groups)
            self._activate(h, a, scale_S, weights, groups)
            del h, out
        return provider.gemm(a, weights["w2"], groups, result(second, H), scales("w2"))

    def _activate(
        self, h_SN: Tensor, a_SI: Tensor, scale_S: Tensor, weights: PackedWeights, groups: Groups
    ) -> None:
        S = h_SN.shape[0]
        scale = None if not self._quantized else scale_S.view(S, 1)
        if self._static:
            scale = weights.shared["a2_scale"]
            scale_S.copy_(scale.view(1).expand(S))
        valid = ValidRows(counts_L=groups.total, capacity=S)
        activate_rows(h_SN, a_SI, self._activation, valid, scale=scale, static_scale=self._static)

    def _groups(self, provider: Provider, ids_RK: Tensor, workspace: Sequence[Tensor]) -> Groups:
        """Return the lists for a call's assignments, to be filled."""
        n = ids_RK.numel()
        rows, slots, offsets = workspace[:3]
        rows_S = rows[:n] if provider.gathers else None
        return Groups(ids_RK, slots[:n].view(ids_RK.shape), offsets, rows_S)


class CutlassExperts(_CutlassExperts):
    """STANDARD, reducing."""

    def _pairs(self, rows: int) -> int:
        return rows * self.problem.top_k

    def apply(
        self, y: Tensor, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> None:
        assert tokens.topk_ids is not None and tokens.topk_weights is not None
        ids_RK, topk_weights_RK = tokens.topk_ids.contiguous(), tokens.topk_weights.contiguous()
        given = self._unreduced(self._provider(*ids_RK.shape), tokens, ids_RK, weights, workspace)
        bias = weights.get("w2_bias")
        weighted_sum(
            given.rows_NH, topk_weights_RK, ids_RK, y, given.places_RK, bias, live_R=tokens.num_rows
        )

    def apply_unreduced(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Unreduced | None:
        assert tokens.topk_ids is not None
        ids_RK = tokens.topk_ids.contiguous()
        provider = self._provider(*ids_RK.shape)
        if weights.get("w2_bias") is not None or provider.dtype != self.problem.dtype:
            return None
        return self._unreduced(provider, tokens, ids_RK, weights, workspace)

    def _unreduced(
        self, provider: Provider, tokens: Dispatched, ids_RK: Tensor, weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> Unreduced:  # fmt: skip
        """Return GEMM 2's rows, without w2's bias."""
        groups = self._groups(provider, ids_RK, workspace)
        sort_assignments(groups, workspace[3])
        return Unreduced(self._run(provider, tokens, weights, groups, workspace), groups.slots_RK)


class BatchedCutlassExperts(_CutlassExperts):
    """BATCHED: the used rows of all experts form one sorted list, so padding is not computed."""

    def _pairs(self, rows: int) -> int:
        return self.problem.num_local_experts * rows

    def apply(
        self, y: Tensor, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> None:
        assert tokens.expert_num_tokens is not None
        (L, C, H), x_scale = tokens.x.shape, tokens.x_scale
        provider = self._provider(C, self.problem.top_k)
        groups = self._groups(provider, workspace[3][: L * C].view(L * C, 1), workspace)
        group_batched(tokens.expert_num_tokens, C, groups)
        if x_scale is not None and x_scale.numel() > 1:
            x_scale = x_scale.expand(L, C, 1).reshape(L * C, 1)
        rows = Dispatched(tokens.x.view(L * C, H), x_scale)
        z = self._run(provider, rows, weights, groups, workspace)
        return_rows(z, weights.get("w2_bias"), groups, y.view(L * C, H))
