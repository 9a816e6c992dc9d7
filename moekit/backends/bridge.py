"""Bridges: experts of one activation format, presented as experts of the other.

Bridges only rearrange rows, so results are exact. They cost copies, and the memory that `workspace`
and `transient_bytes` report.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from moekit.contract import (
    BufferSpec,
    Dispatched,
    PackedWeights,
    PermuteExpertsUnpermute,
)
from moekit.contract.specs import ExpertsSpec
from moekit.contract.sums import output_dtype
from moekit.discovery.answers import create
from moekit.problem import ActivationFormat, MoEProblem
from moekit.problem.weights import ExpertWeights
from moekit.runtime.rows import batched_places, to_batched


def bridge(
    experts: type[PermuteExpertsUnpermute],
    spec: ExpertsSpec,
    problem: MoEProblem,
    to: ActivationFormat,
) -> PermuteExpertsUnpermute:
    """Create ``experts`` for ``problem``, behind a bridge if their format is not ``to``."""
    spec = spec.native_to(to)
    if spec.format is to:
        return _created(experts, spec, problem)
    if to is ActivationFormat.STANDARD:
        return BatchedAsStandard(_created(experts, spec, problem), problem)
    # Every row of the batched layout has one expert, so buffers for top_k=1 are enough.
    return StandardAsBatched(_created(experts, spec, problem.replace(top_k=1)), problem)


def _created(
    experts: type[PermuteExpertsUnpermute], spec: ExpertsSpec, problem: MoEProblem
) -> PermuteExpertsUnpermute:
    """Create ``experts`` for ``problem``, padded if the spec needs other sizes."""
    made = spec.padded(problem)
    inner = create(experts, spec, made)
    if made == problem:
        return inner
    from moekit.backends.padding import PaddedExperts

    return PaddedExperts(inner, problem)


class _Bridge(PermuteExpertsUnpermute):
    def __init__(self, inner: PermuteExpertsUnpermute, problem: MoEProblem) -> None:
        standard = inner.spec.format is ActivationFormat.BATCHED
        to = ActivationFormat.STANDARD if standard else ActivationFormat.BATCHED
        super().__init__(inner.spec.bridged_to(to).made_for(problem), problem)
        self.inner, self.weight_and_reduce = inner, inner.weight_and_reduce

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return self.inner.pack(weights)

    def quantize(
        self, x_RH: Tensor, weights: PackedWeights, valid_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self.inner.quantize(x_RH, weights, valid_rows)

    def largest_calls(self, num_tokens: int) -> Sequence[int]:
        return self.inner.largest_calls(num_tokens)

    def tuning(self) -> AbstractContextManager[object]:
        return self.inner.tuning()


class StandardAsBatched(_Bridge):
    """STANDARD experts over the batched layout: each row names the expert that it lies under."""

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        return self.inner.workspace(self.problem.num_local_experts * rows)

    def largest_calls(self, num_tokens: int) -> Sequence[int]:
        """Return calls with as many rows for the experts: T tokens give them those of L * T."""
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


class BatchedAsStandard(_Bridge):
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
