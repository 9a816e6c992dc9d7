"""Bridges: experts of one activation format, presented as experts of the other.

Exact rearrangements; only memory and the copying cost something, and `workspace` says how much.
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
    output_dtype,
)
from moekit.discovery.answers import create
from moekit.discovery.specs import ExpertsSpec
from moekit.problem import ActivationFormat, MoEProblem
from moekit.problem.weights import ExpertWeights


def bridge(
    experts: type[PermuteExpertsUnpermute],
    spec: ExpertsSpec,
    problem: MoEProblem,
    to: ActivationFormat,
) -> PermuteExpertsUnpermute:
    """Create ``experts`` for ``problem``, behind a bridge if their format is not ``to``."""
    spec = spec.native_to(to)
    if spec.format is to:
        return create(experts, spec, problem)
    if to is ActivationFormat.STANDARD:
        return BatchedAsStandard(create(experts, spec, problem), problem)
    # Every slab row names one expert, so the experts' buffers need one slot per row.
    return StandardAsBatched(create(experts, spec, problem.replace(top_k=1)), problem)


class _Bridge(PermuteExpertsUnpermute):
    def __init__(self, inner: PermuteExpertsUnpermute, problem: MoEProblem) -> None:
        standard = inner.spec.format is ActivationFormat.BATCHED
        to = ActivationFormat.STANDARD if standard else ActivationFormat.BATCHED
        super().__init__(inner.spec.bridged_to(to), problem)
        self.inner = inner

    @property
    def slabs(self) -> bool:
        return True

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return self.inner.pack(weights)

    def quantize(
        self, x_RH: Tensor, weights: PackedWeights, valid_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self.inner.quantize(x_RH, weights, valid_rows)

    def tuning(self) -> AbstractContextManager[object]:
        return self.inner.tuning()


class StandardAsBatched(_Bridge):
    """STANDARD experts fed from slabs: every slab row becomes a row with its expert as only id."""

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        return self.inner.workspace(self.problem.num_local_experts * rows)

    def transient_bytes(self, rows: int) -> int:
        slots = self.problem.num_local_experts * rows
        return self.inner.transient_bytes(slots) + slots * (8 + 8 + 4 + 1)

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
    """BATCHED experts fed from rows: rows are copied to their experts' slabs and gathered back.

    A slab holds as many rows as arrive, since all of them may name one expert. Index arithmetic
    stays on the device.
    """

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        p = self.problem
        slots = p.num_local_experts * rows + 1  # the last row swallows pairs without an expert
        activation = p.quant.activation
        dtypes = [p.dtype] if activation is None else [p.dtype, activation.torch_dtype]
        widest = max(dtypes, key=lambda d: d.itemsize)
        groups = 1 if activation is None else activation.scale_shape(1, p.hidden_size)[1]
        return (
            BufferSpec((slots, p.hidden_size), widest),
            BufferSpec((slots, groups), torch.float32),
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
        x_slab, scale_slab, y_slab, *inner_workspace = workspace
        L, C = y_slab.shape[:2]
        slot_RK, counts_L = slab_slots(ids, L, C)

        x_slab = x_slab.view(-1).view(x.dtype)[: x_slab.shape[0] * x.shape[1]]
        x_slab = x_slab.view(-1, x.shape[1])
        scale = tokens.x_scale
        for k in range(ids.shape[1]):
            x_slab[slot_RK[:, k]] = x
        activation = self.problem.quant.activation
        per_tensor = activation is not None and activation.per_tensor
        if scale is not None and not (per_tensor and scale.shape[0] == 1):
            for k in range(ids.shape[1]):
                scale_slab[slot_RK[:, k], : scale.shape[1]] = scale
            batched_scale: Tensor | None = scale_slab[: L * C, : scale.shape[1]].view(L, C, -1)
        else:
            batched_scale = None if scale is None else scale.view(1, 1, -1)
        batched = Dispatched(
            x=x_slab[: L * C].view(L, C, -1), x_scale=batched_scale, expert_num_tokens=counts_L
        )
        self.inner.apply(y_slab, batched, weights, inner_workspace)

        total = torch.zeros(y.shape, dtype=torch.float32, device=y.device)
        y_rows = y_slab.view(L * C, -1)
        for k in range(ids.shape[1]):
            used = ids[:, k, None] >= 0
            rows = y_rows[slot_RK[:, k].clamp(max=L * C - 1)].float()
            total += torch.where(used, rows * topk_weights[:, k, None], 0.0)
        y.copy_(total)


def slab_slots(ids_RK: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Assigns every pair (r, k) a slab row: ``expert * capacity + position``, in row order.

    Returns slots (R, K) int64, with ``num_experts * capacity`` for pairs without an expert, and
    the rows per expert (L,) int32.
    """
    flat = ids_RK.reshape(-1).long()
    flat = torch.where(flat < 0, num_experts, flat)
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    starts = counts.cumsum(0) - counts
    position = torch.empty_like(flat)
    position[order] = torch.arange(len(flat), device=flat.device) - starts[flat[order]]
    slots = torch.where(flat == num_experts, num_experts * capacity, flat * capacity + position)
    return slots.view(ids_RK.shape), counts[:num_experts].int()
