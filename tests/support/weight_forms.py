"""Weights in forms that checkpoints have."""

from __future__ import annotations

from dataclasses import replace

import torch


def interleaved(weights):
    """Return the same weights with alternating rows of gate and up."""

    def mix(t):
        if t is None or t.shape[1] != weights.w13.shape[1]:
            return t  # a per-tensor scale has no rows
        return torch.stack(t.chunk(2, dim=1), dim=2).flatten(1, 2)

    changes = {
        name: mix(getattr(weights, name))
        for name in ("w13", "w13_bias", "w13_scale", "w13_zero_points")
    }
    return replace(weights, **changes, interleaved=True)
