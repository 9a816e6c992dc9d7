"""Experts of padded sizes, presented as experts of the problem's own sizes.

Zeros make up the difference: rows of gate and of up, columns of both and of w2, rows of w2, and
biases. They add nothing to any output, so results are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moekit.contract import (
    BufferSpec,
    Dispatched,
    PackedWeights,
    PermuteExpertsUnpermute,
    Unreduced,
)
from moekit.contract.sums import output_dtype
from moekit.problem import ActivationFormat, MoEProblem
from moekit.problem.quant import INT4_ZERO, OperandQuant, pack_int4, unpack_int4
from moekit.problem.weights import ExpertWeights


class PaddedExperts(PermuteExpertsUnpermute):
    """Experts whose kernels compute larger sizes than the problem's."""

    def __init__(self, inner: PermuteExpertsUnpermute, problem: MoEProblem) -> None:
        super().__init__(inner.spec, problem)
        self.inner, self.weight_and_reduce = inner, inner.weight_and_reduce
        self._columns = inner.problem.hidden_size
        self._pads_tokens = self._columns != problem.hidden_size

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return self.inner.pack(pad_weights(weights, self.problem, self.inner.problem))

    def quantize(
        self, x_RH: Tensor, weights: PackedWeights, valid_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Quantize rows before they are padded: their format depends only on the scheme."""
        return PermuteExpertsUnpermute.quantize(self.inner, x_RH, weights, valid_rows)

    def transient_bytes(self, rows: int) -> int:
        return self.inner.transient_bytes(rows)

    def largest_calls(self, num_tokens: int) -> Sequence[int]:
        return self.inner.largest_calls(num_tokens)

    def tuning(self) -> AbstractContextManager[object]:
        return self.inner.tuning()

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


# -- weights -------------------------------------------------------------------------------------


def pad_weights(weights: ExpertWeights, problem: MoEProblem, made: MoEProblem) -> ExpertWeights:
    """Return canonical weights of ``problem`` as those of ``made``, which has larger sizes."""
    operand, gated = problem.quant.weight, problem.activation.gated
    hidden, inner = made.hidden_size, made.local_intermediate_size
    halves = 2 if gated and inner != problem.local_intermediate_size else 1
    w13 = _pad(_part(weights, "w13"), operand, made.w13_rows, hidden, halves)
    w2 = _pad(_part(weights, "w2"), operand, hidden, inner)
    changes: dict[str, Any] = {**_named("w13", w13), **_named("w2", w2)}
    if weights.w13_bias is not None and weights.w2_bias is not None:
        changes["w13_bias"] = _grow_rows(weights.w13_bias, made.w13_rows, halves, 0.0)
        changes["w2_bias"] = _grow(weights.w2_bias, 1, hidden, 0.0)
    return replace(weights, **changes)


_FIELDS = ("scale", "zero_points", "g_idx")
Part = dict[str, Tensor]
"""A matrix of every expert: "" (L, N, K or K / 2), and of `_FIELDS` those that it has."""


def _part(weights: ExpertWeights, name: str) -> Part:
    found = {field: getattr(weights, f"{name}_{field}") for field in _FIELDS}
    return {"": getattr(weights, name), **{f: t for f, t in found.items() if t is not None}}


def _named(name: str, part: Part) -> Part:
    return {f"{name}_{field}" if field else name: tensor for field, tensor in part.items()}


def _pad(
    part: Part, operand: OperandQuant | None, rows: int, columns: int, halves: int = 1
) -> Part:
    """Return a matrix of (rows, columns); added scales repeat the last ones.

    halves: 2 adds equally many rows to gate and to up.
    """
    if operand is None:
        return {"": _grow(_grow_rows(part[""], rows, halves, 0.0), 2, columns, 0.0)}
    made = dict(part)
    shape = operand.scale_shape(rows, columns)
    for field in ("scale", "zero_points"):
        if field in part:
            # One scale may be that of all rows.
            split = halves if shape[0] > 1 else 1
            made[field] = _grow(_grow_rows(part[field], shape[0], split), 2, shape[1])
    if "g_idx" in part:
        old = part["g_idx"]
        added = torch.arange(old.shape[1], columns, device=old.device) // operand.group[1]
        made["g_idx"] = torch.cat([old, added.to(old.dtype).expand(len(old), -1)], dim=1)
    if "zero_points" in part:
        made[""] = _pad_around_zeros(part[""], made, operand, columns, halves)
        return made
    byte = INT4_ZERO * 0x11 if operand.dtype == "int4" else 0
    stored = columns // 2 if operand.packed else columns
    q = part[""].view(torch.uint8)
    grown = _grow(_grow_rows(q, rows, halves, byte), 2, stored, byte)
    return {**made, "": grown.view(part[""].dtype)}


def _pad_around_zeros(
    packed: Tensor, made: Part, operand: OperandQuant, columns: int, halves: int
) -> Tensor:
    """Return packed int4 whose added elements are their groups' zero points, expert by expert."""
    position = torch.arange(columns, device=packed.device)
    run = position // operand.group[1] if operand.group[1] > 0 else position * 0
    grown = []
    for expert, stored in enumerate(packed):
        groups = made["g_idx"][expert].long() if "g_idx" in made else run
        q = made["zero_points"][expert][:, groups]
        old = torch.unflatten(unpack_int4(stored), 0, (halves, -1))
        torch.unflatten(q, 0, (halves, -1))[:, : old.shape[1], : old.shape[2]] = old
        grown.append(pack_int4(q))
    return torch.stack(grown)


def _grow_rows(tensor: Tensor, rows: int, halves: int, value: float | None = None) -> Tensor:
    """Return ``tensor`` with ``rows`` entries along dim 1, as many in each half; see `_grow`."""
    if halves == 1:
        return _grow(tensor, 1, rows, value)
    parts = [_grow(half, 1, rows // halves, value) for half in tensor.chunk(halves, dim=1)]
    return torch.cat(parts, dim=1)


def _grow(tensor: Tensor, dim: int, size: int, value: float | None = None) -> Tensor:
    """Return ``tensor`` with ``size`` entries along ``dim``; added ones hold ``value``.

    value: None repeats the last entry.
    """
    if (more := size - tensor.shape[dim]) <= 0:
        return tensor
    last = (
        tensor.narrow(dim, -1, 1) if value is None else tensor.new_full((1,) * tensor.dim(), value)
    )
    shape = list(tensor.shape)
    shape[dim] = more
    return torch.cat([tensor, last.expand(shape)], dim)
