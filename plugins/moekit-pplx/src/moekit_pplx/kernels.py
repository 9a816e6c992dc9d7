"""Translate routing for the library, which needs an expert and a finite weight everywhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512


def translate(
    ids: Tensor, weights: Tensor, destinations: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Return library experts (T, K) uint32 and weights (T, K) fp32, from physical ids or -1.

    An id of -1 gets weight 0. An id beyond the last expert, which checked calls refuse, is treated
    like -1 but gets weight NaN: nothing is written out of bounds, and the token shows the mistake.
    destinations: `Layout.destinations`.
    """
    sent = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    sent_weights = torch.empty_like(weights)
    if n := ids.numel():
        _translate[(triton.cdiv(n, _BLOCK),)](
            ids, weights, destinations, sent, sent_weights, n, num_experts, ids.shape[1], _BLOCK
        )
    return sent.view(torch.uint32), sent_weights


@triton.jit
def _translate(
    ids, weights, destinations, sent, sent_weights, n, num_experts, K: tl.constexpr, B: tl.constexpr
):
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < n
    id = tl.load(ids + at, mask=inside, other=-1)
    weight = tl.load(weights + at, mask=inside, other=0.0)
    known = (id >= 0) & (id < num_experts)
    entry = tl.where(known, id, num_experts + at % K)
    tl.store(sent + at, tl.load(destinations + entry), mask=inside)
    lost = tl.where(id < 0, 0.0, float("nan"))
    tl.store(sent_weights + at, tl.where(known, weight, lost), mask=inside)
