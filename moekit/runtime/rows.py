"""Rows of tokens in plain torch: quantization, and the batched layout.

Shape suffixes: R rows, K assignments of a row, L local experts, C capacity of the batched layout,
H hidden size, N columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from moekit.contract import Dispatched, PackedWeights, PermuteExpertsUnpermute, Quantizer
from moekit.contract.specs import DispatcherSpec, ExpertsSpec
from moekit.problem import MoEProblem

ALIGNMENT = 16  # bytes, the most that kernels load at once


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where it does not begin at a multiple of 16 bytes."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def quantized_by(
    problem: MoEProblem, dispatcher: DispatcherSpec, experts: ExpertsSpec
) -> Literal["nobody", "sender", "receiver", "experts"]:
    """Return who quantizes the activations of a scheme that quantizes them.

    The sender does, before the transfer, if both sides can; else the receiver, if the experts take
    quantized rows only; else the experts, unless they emulate the scheme. Nobody does in training.
    """
    if problem.quant.activation is None or problem.training:
        return "nobody"
    sent = experts.takes_quantized and problem.quant.name in dispatcher.wire_schemes
    # Batch-invariant experts get tokens in one form, however many ranks there are.
    if sent and not (problem.batch_invariant and experts.takes_unquantized):
        return "sender"
    return "experts" if experts.takes_unquantized else "receiver"


def quantize_for_transfer(
    x_TH: Tensor, ids_TK: Tensor, quantize: Quantizer, problem: MoEProblem
) -> tuple[Tensor, Tensor]:
    """Quantize the tokens of `PrepareAndFinalize.prepare`; return contiguous rows and scales.

    The scales are (T, groups) fp32, also where a rank's tokens share one: it differs between
    ranks, so it travels with every row. Tokens without an expert do not influence it.
    """
    x, scale = quantize(x_TH, (ids_TK >= 0).any(dim=1) if problem.quant.shared_scale else None)
    scale = scale if scale.shape[0] == x.shape[0] else scale.expand(x.shape[0], -1)
    return x.contiguous(), scale.float().contiguous()


def quantize_dispatched(
    experts: PermuteExpertsUnpermute, tokens: Dispatched, weights: PackedWeights
) -> Dispatched:
    """Quantize tokens that were dispatched unquantized, for experts that take quantized ones."""
    if tokens.topk_ids is not None:
        valid = (tokens.topk_ids >= 0).any(dim=1)
        x, scale = experts.quantize(tokens.x, weights, valid)
        return replace(tokens, x=x, x_scale=scale)
    assert tokens.expert_num_tokens is not None
    L, C, H = tokens.x.shape
    valid = torch.arange(C, device=tokens.x.device) < tokens.expert_num_tokens[:, None]
    x, scale = experts.quantize(tokens.x.view(L * C, H), weights, valid.view(-1))
    scale = scale.view(1, 1, 1) if scale.shape[0] == 1 else scale.view(L, C, scale.shape[1])
    return replace(tokens, x=x.view(L, C, x.shape[1]), x_scale=scale)


def batched_places(ids_RK: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Give every assignment a row of the batched layout, ``expert * capacity + position``.

    Positions within an expert follow the order of the rows. Index arithmetic stays on the device.

    Returns:
        The places (R, K) int64, ``num_experts * capacity`` where the id is -1, and the number of
        rows of each expert (L,) int32.
    """
    flat = ids_RK.reshape(-1).long()
    flat = torch.where(flat < 0, num_experts, flat)
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    starts = counts.cumsum(0) - counts
    position = torch.empty_like(flat)
    position[order] = torch.arange(len(flat), device=flat.device) - starts[flat[order]]
    places = torch.where(flat == num_experts, num_experts * capacity, flat * capacity + position)
    return places.view(ids_RK.shape), counts[:num_experts].int()


def to_batched(
    rows_RN: Tensor, places_RK: Tensor, shape_LC: tuple[int, int], into: Tensor
) -> Tensor:
    """Copy rows to their places in the batched layout, and return it as (L, C, N).

    Args:
        places_RK: from `batched_places`.
        into: (L * C + 1, at least N) memory; its last row takes the assignments without an expert,
            and rows that no assignment names stay as they are.
    """
    into = into[:, : rows_RN.shape[1]]
    for k in range(places_RK.shape[1]):
        into[places_RK[:, k]] = rows_RN
    return into[:-1].view(*shape_LC, rows_RN.shape[1])
