"""The weighted sum over K, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def weight_and_reduce(
    rows_NH: Tensor,
    ids_RK: Tensor,
    weights_RK: Tensor,
    out_RH: Tensor,
    places_RK: Tensor | None = None,
) -> Tensor:
    """Write ``sum_k weights[r, k] * rows[places[r, k]]`` to ``out_RH`` and return it.

    The sum runs over the assignments whose id is not -1, in the order of k. Each product and each
    sum is rounded to fp32, so that every implementation gives the same bits.

    Args:
        rows_NH: (N, H), any float dtype; rows that no id uses may hold anything.
        ids_RK: (R, K) integers.
        weights_RK: (R, K) float32.
        out_RH: (R, H), any float dtype; every element is written.
        places_RK: (R, K) integers, anything where the id is -1. Default: ``r * K + k``.
    """
    top_k = ids_RK.shape[1]
    total = torch.zeros(out_RH.shape, dtype=torch.float32, device=out_RH.device)
    for k in range(top_k if len(rows_NH) else 0):
        if places_RK is None:
            rows = rows_NH[k::top_k]
        else:
            rows = rows_NH[places_RK[:, k].clamp(0, len(rows_NH) - 1)]
        used = ids_RK[:, k, None] >= 0
        total += torch.where(used, rows.float() * weights_RK[:, k, None], 0.0)
    return out_RH.copy_(total)
