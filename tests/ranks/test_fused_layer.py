"""A layer whose kernel is fused and chooses the experts, on two ranks with different tokens."""

from __future__ import annotations

import torch
from rank_pools import rank_pool
from right_fused import acme_moe

import moekit
from moekit.plugin import RouterLogits

SIZES = (8, 2, 64, 48)
SPEC = acme_moe.moekit_fused()[0]
pool = rank_pool(2)


def layer_on_rank(rank: int, world_size: int, most: int | None) -> list[str]:
    """Return what differs from a layer of one rank, and what the kernel got in place of logits."""
    known, found = moekit.registry(), []
    if SPEC not in known.experts.values():
        known.register(SPEC)
    draw = torch.Generator().manual_seed(1)
    w13, w2, x, logits = (
        torch.randn(shape, generator=draw) / 8
        for shape in ((8, 96, 64), (8, 64, 48), (2, 10, 64), (2, 10, 8))
    )
    weights = moekit.ExpertWeights(w13, w2)
    common = {"params_dtype": torch.float32, "device": "cpu"}
    whole = moekit.FusedMoE(
        *SIZES, **common, experts="torch", parallel=moekit.ParallelConfig()
    )  # fmt: skip
    whole.load_weights(weights)
    layer = moekit.FusedMoE(
        *SIZES, **common, experts=SPEC.name, dp_size=2, enable_expert_parallel=True,
        max_num_tokens=most,
    )  # fmt: skip
    layer.load_weights(weights.select(layer.local_experts))
    run = layer.kernel.experts.run

    def noted(out, x, weights, routing, workspace):
        found.extend([] if isinstance(routing, RouterLogits) else ["ids in place of logits"])
        run(out, x, weights, routing, workspace)

    layer.kernel.experts.run = noted
    for counts in ((10, 3), (0, 5), (0, 0)):
        mine, scores = x[rank, : counts[rank]], logits[rank, : counts[rank]]
        out, right = layer(mine, scores), whole(mine, scores)
        if not torch.allclose(out, right, rtol=1e-4, atol=1e-4):
            found.append(f"{counts} tokens: off by {(out - right).abs().max():g}")
    layer.destroy()
    return found


def test_the_kernel_routes_on_every_rank(pool) -> None:
    assert pool.run(layer_on_rank, None) == [[], []]


def test_calls_in_chunks(pool) -> None:
    assert pool.run(layer_on_rank, 4) == [[], []]
