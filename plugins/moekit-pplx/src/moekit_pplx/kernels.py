"""Translate routing for the library, which needs an expert and a finite weight everywhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moekit.plugin import Routing

_BLOCK = 512


def translate(routing: Routing, destinations: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return library experts (T, K) uint32 and weights (T, K) fp32.

    An id of -1 gets weight 0. An id beyond the last expert, which checked calls refuse, is treated
    like -1 but gets weight NaN: nothing is written out of bounds, and the token shows the mistake.

    Args:
        routing: ids (T, K), physical or -1.
        destinations: `Layout.destinations`.
    """
    ids, weights = routing.topk_ids, routing.topk_weights
    if ids.is_cuda:
        return launch(ids, weights, destinations, num_experts)
    known = (ids >= 0) & (ids < num_experts)
    spare = num_experts + torch.arange(ids.shape[1], device=ids.device)
    sent = destinations[torch.where(known, ids.long(), spare)]
    missing = torch.full_like(weights, float("nan")).masked_fill(ids < 0, 0.0)
    sent_weights = torch.where(known, weights, missing)
    return sent.view(torch.uint32), sent_weights


def launch(
    ids: Tensor, weights: Tensor, destinations: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Run `translate` as one kernel."""
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
