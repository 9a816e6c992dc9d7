"""Weights padded to larger sizes.

Zeros make up the difference: rows of gate and of up, columns of both and of w2, rows of w2, and
biases. They add nothing to any output, so results are exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moekit.problem import MoEProblem
from moekit.problem.quant import OperandQuant
from moekit.problem.quantize import pack, unpack
from moekit.problem.weights import ExpertWeights


def pad_weights(weights: ExpertWeights, problem: MoEProblem, made: MoEProblem) -> ExpertWeights:
    """Return canonical weights of ``problem`` padded to the larger sizes of ``made``."""
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
"""A matrix of every expert: "" (L, N, K or fewer), and of `_FIELDS` those that it has."""


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
            # All rows may share one scale.
            split = halves if shape[0] > 1 else 1
            made[field] = _grow(_grow_rows(part[field], shape[0], split), 2, shape[1])
    if "g_idx" in part:
        old = part["g_idx"]
        added = torch.arange(old.shape[1], columns, device=old.device) // operand.group[1]
        made["g_idx"] = torch.cat([old, added.to(old.dtype).expand(len(old), -1)], dim=1)
    if "zero_points" in part:
        made[""] = _pad_around_zeros(part[""], made, operand, columns, halves)
        return made
    byte, stored = operand.codes.zero_byte, columns // operand.codes.per_byte
    q = part[""].view(torch.uint8)
    grown = _grow(_grow_rows(q, rows, halves, byte), 2, stored, byte)
    return {**made, "": grown.view(part[""].dtype)}


def _pad_around_zeros(
    packed: Tensor, made: Part, operand: OperandQuant, columns: int, halves: int
) -> Tensor:
    """Return packed codes whose added elements are their groups' zero points, expert by expert."""
    position = torch.arange(columns, device=packed.device)
    run = position // operand.group[1] if operand.group[1] > 0 else position * 0
    grown = []
    for expert, stored in enumerate(packed):
        groups = made["g_idx"][expert].long() if "g_idx" in made else run
        q = made["zero_points"][expert][:, groups]
        old = torch.unflatten(unpack(stored, operand.codes.bits), 0, (halves, -1))
        torch.unflatten(q, 0, (halves, -1))[:, : old.shape[1], : old.shape[2]] = old
        grown.append(pack(q, operand.codes.bits))
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
