"""Experts presented in another activation format, or as experts of other sizes.

Bridges only rearrange rows, and padding adds zeros, so results are exact. They cost copies, and the
memory that `workspace` and `transient_bytes` report.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from moekit.backends.padding import pad_weights
from moekit.contract import (
    BufferSpec,
    Dispatched,
    PackedWeights,
    PermuteExpertsUnpermute,
    Unreduced,
)
from moekit.contract.specs import ExpertsSpec
from moekit.contract.sums import output_dtype
from moekit.problem import ActivationFormat, MoEProblem
from moekit.problem.weights import ExpertWeights
from moekit.runtime.rows import batched_places, to_batched


class _Wrapped(PermuteExpertsUnpermute):
    """Experts that prepare the calls of others, ``inner``."""

    def __init__(
        self, inner: PermuteExpertsUnpermute, spec: ExpertsSpec, problem: MoEProblem
    ) -> None:
        super().__init__(spec, problem)
        self.inner, self.weight_and_reduce = inner, inner.weight_and_reduce

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return self.inner.pack(weights)

    def quantize(
        self, x_RH: Tensor, weights: PackedWeights, valid_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self.inner.quantize(x_RH, weights, valid_rows)

    def transient_bytes(self, rows: int) -> int:
        return self.inner.transient_bytes(rows)

    def largest_calls(self, num_tokens: int) -> Sequence[int]:
        return self.inner.largest_calls(num_tokens)

    def tuning(self) -> AbstractContextManager[object]:
        return self.inner.tuning()


class StandardAsBatched(_Wrapped):
    """STANDARD experts over the batched layout: each row names the expert that it lies under."""

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        return self.inner.workspace(self.problem.num_local_experts * rows)

    def largest_calls(self, num_tokens: int) -> Sequence[int]:
        """Return the token counts whose L * T rows are the experts' own largest calls."""
        L = self.problem.num_local_experts
        calls = {n // L for n in self.inner.largest_calls(L * num_tokens) if n >= L}
        return sorted(calls, reverse=True)

    def transient_bytes(self, rows: int) -> int:
        all_rows = self.problem.num_local_experts * rows
        return self.inner.transient_bytes(all_rows) + all_rows * (8 + 8 + 4 + 1)

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        assert tokens.expert_num_tokens is not None
        L, C, columns = tokens.x.shape
        device, H = tokens.x.device, self.problem.hidden_size
        expert = torch.arange(L, device=device)[:, None].expand(L, C)
        real = torch.arange(C, device=device) < tokens.expert_num_tokens[:, None]
        ids = torch.where(real, expert, -1).view(L * C, 1)
        scale = tokens.x_scale
        if scale is not None:
            scale = scale.view(1, 1) if scale.numel() == 1 else scale.reshape(L * C, -1)
        rows = Dispatched(
            x=tokens.x.view(L * C, columns),
            x_scale=scale,
            topk_ids=ids,
            topk_weights=torch.ones((L * C, 1), dtype=torch.float32, device=device),
        )
        shape = (L * C, H) if self.inner.spec.reduces else (L * C, 1, H)
        self.inner.apply(y.view(shape), rows, weights, workspace)


class BatchedAsStandard(_Wrapped):
    """BATCHED experts over rows, which are copied to the batched layout and gathered back.

    Its capacity is the number of rows that arrive, since all of them may name one expert.
    """

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        p = self.problem
        batched_rows = p.num_local_experts * rows + 1  # the last one is for ids of -1
        activation = p.quant.activation
        dtypes = [p.dtype] if activation is None else [p.dtype, activation.torch_dtype]
        widest = max(dtypes, key=lambda d: d.itemsize)
        return (
            BufferSpec((batched_rows, p.hidden_size), widest),
            BufferSpec((batched_rows, max(1, p.scales_per_row)), torch.float32),
            BufferSpec(
                (p.num_local_experts, rows, p.hidden_size), output_dtype(p, self.inner.spec)
            ),
            *self.inner.workspace(rows),
        )

    def transient_bytes(self, rows: int) -> int:
        p = self.problem
        index = rows * p.top_k * 8 * 8
        reduce = 4 * rows * p.hidden_size * 4
        return self.inner.transient_bytes(rows) + index + reduce

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        ids, topk_weights, x = tokens.topk_ids, tokens.topk_weights, tokens.x
        assert ids is not None and topk_weights is not None
        x_memory, scale_memory, y_LCH, *inner_workspace = workspace
        L, C = y_LCH.shape[:2]
        places_RK, counts_L = batched_places(ids, L, C)

        x_memory = x_memory.view(-1).view(x.dtype)[: (L * C + 1) * x.shape[1]]
        x_LCH = to_batched(x, places_RK, (L, C), x_memory.view(-1, x.shape[1]))
        scale = tokens.x_scale
        activation = self.problem.quant.activation
        per_tensor = activation is not None and activation.per_tensor
        if scale is not None and per_tensor and scale.shape[0] == 1:
            scale = scale.view(1, 1, -1)
        elif scale is not None:
            scale = to_batched(scale, places_RK, (L, C), scale_memory)
        batched = Dispatched(x=x_LCH, x_scale=scale, expert_num_tokens=counts_L)
        self.inner.apply(y_LCH, batched, weights, inner_workspace)
        y_SH = y_LCH.view(-1, y_LCH.shape[2])
        if self.spec.reduces:
            self.weight_and_reduce(y_SH, ids, topk_weights, y, places_RK)
        else:  # rows of assignments without an expert may hold anything
            for k in range(y.shape[1]):
                y[:, k] = y_SH[places_RK[:, k].clamp(max=len(y_SH) - 1)]


class PaddedExperts(_Wrapped):
    """Experts whose kernels compute larger sizes than the problem's."""

    def __init__(self, inner: PermuteExpertsUnpermute, problem: MoEProblem) -> None:
        super().__init__(inner, inner.spec, problem)
        self._columns = inner.problem.hidden_size
        self._pads_tokens = self._columns != problem.hidden_size

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return self.inner.pack(pad_weights(weights, self.problem, self.inner.problem))

    def quantize(
        self, x_RH: Tensor, weights: PackedWeights, valid_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Quantize rows before they are padded: their format depends only on the scheme."""
        return PermuteExpertsUnpermute.quantize(self.inner, x_RH, weights, valid_rows)

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        return (*self._copies(rows), *self.inner.workspace(rows))

    def _copies(self, rows: int) -> tuple[BufferSpec, ...]:
        """Return the memory of padded tokens, their scales, and the padded output."""
        if not self._pads_tokens:
            return ()
        p = self.problem
        batched = self.spec.format is ActivationFormat.BATCHED
        rows *= p.num_local_experts if batched else 1
        outputs = rows if batched or self.spec.reduces else rows * p.top_k
        return (
            BufferSpec((rows, self._columns), p.dtype),
            BufferSpec((rows, self.inner.problem.scales_per_row), torch.float32),
            BufferSpec((outputs, self._columns), output_dtype(p, self.spec)),
        )

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        if not self._pads_tokens:
            return self.inner.apply(y, tokens, weights, workspace)
        padded, y_memory, rest = self._padded(tokens, workspace)
        out = y_memory.view(-1)[: y.numel() // y.shape[-1] * self._columns]
        out = out.view(y.dtype).view(*y.shape[:-1], self._columns)
        self.inner.apply(out, padded, weights, rest)
        y.copy_(out[..., : y.shape[-1]])

    def apply_unreduced(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Unreduced | None:
        if not self._pads_tokens:
            return self.inner.apply_unreduced(tokens, weights, workspace)
        padded, _, rest = self._padded(tokens, workspace)
        given = self.inner.apply_unreduced(padded, weights, rest)
        if given is None:
            return None
        return Unreduced(given.rows_NH[:, : self.problem.hidden_size], given.places_RK)

    def _padded(
        self, tokens: Dispatched, workspace: Sequence[Tensor]
    ) -> tuple[Dispatched, Tensor, Sequence[Tensor]]:
        """Return the tokens with more columns, memory for the output, and the inner workspace."""
        x_memory, scale_memory, y_memory, *rest = workspace
        x, scale = tokens.x, tokens.x_scale
        held = self._columns * x.shape[-1] // self.problem.hidden_size  # two in a byte, or one
        padded = _wider(x, held, x_memory, 0)
        if scale is not None and (groups := self.inner.problem.scales_per_row) > scale.shape[-1]:
            scale = _wider(scale, groups, scale_memory, 1)
        return replace(tokens, x=padded, x_scale=scale), y_memory, rest


def _wider(x: Tensor, columns: int, memory: Tensor, value: float) -> Tensor:
    """Return a copy of ``x`` (..., n) with more columns, which hold ``value``, in ``memory``."""
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    flat = memory.view(-1).view(x.dtype)[: rows * columns].view(*x.shape[:-1], columns)
    flat[..., : x.shape[-1]].copy_(x)
    rest = flat[..., x.shape[-1] :]
    if x.element_size() == 1:  # fill_ does not know every 8-bit dtype; these hold zeros
        rest = rest.view(torch.uint8)
    rest.fill_(value)
    return flat
