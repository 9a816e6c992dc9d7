"""`max_tokens` must be true, and equal on all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from rank_pools import rank_pool

import moekit
from moekit.backends.reference import oracle
from moekit.errors import InvalidInput, PeerFailed

PROBLEM = moekit.MoEProblem(
    num_experts=4, top_k=2, hidden_size=32, intermediate_size=16, dtype=torch.float32, device="cpu",
    max_num_tokens=64,
)  # fmt: skip


pool = rank_pool(2)


def inputs(tokens: int, seed: int) -> tuple[torch.Tensor, moekit.Routing]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, PROBLEM.hidden_size, generator=draw)
    ids = torch.rand(tokens, PROBLEM.num_experts, generator=draw).argsort(1)[:, : PROBLEM.top_k]
    return x, moekit.Routing(torch.rand(ids.shape, generator=draw), ids)


def weights() -> moekit.ExpertWeights:
    p, draw = PROBLEM, torch.Generator().manual_seed(0)
    return moekit.ExpertWeights(
        torch.randn(p.num_experts, 2 * p.intermediate_size, p.hidden_size, generator=draw) / 6,
        torch.randn(p.num_experts, p.hidden_size, p.intermediate_size, generator=draw) / 4,
    )


def calls(rank: int, world: int, most: list[tuple[int | None, ...]]) -> list[str]:
    """Make a checked call with each of the numbers; return "right", "wrong" or the error."""
    parallel = moekit.ParallelConfig(ep_size=world, ep_rank=rank, dp_size=world)
    kernel = moekit.compose(
        PROBLEM.replace(parallel=parallel), "naive", "reference", group=dist.group.WORLD
    )
    whole, found = weights(), []
    packed = kernel.pack(whole.select(range(2 * rank, 2 * rank + 2)))
    for step, numbers in enumerate(most):
        x, routing = inputs(2 + 3 * rank, 7 * step + rank)
        want = oracle(x, whole, routing, PROBLEM)
        try:
            out = kernel(x, packed, replace(routing, max_tokens=numbers[rank]))
            found.append("right" if torch.allclose(out, want, atol=1e-5) else "wrong")
        except (PeerFailed, InvalidInput) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_ranks_that_differ_are_named_with_their_numbers(pool) -> None:
    told = pool.run(calls, [(5, 5), (5, 8), (64, 64)])
    assert all(each[0] == each[2] == "right" for each in told)
    for own, (_, error, _) in enumerate(told):
        assert error.startswith(f"PeerFailed: rank {own} is at 'start a call of kernel ")
        assert "max_tokens=5'" in error and "max_tokens=8'" in error


def test_fewer_tokens_than_a_rank_passes_end_the_call_on_all_ranks(pool) -> None:
    told = pool.run(calls, [(4, 4), (None, None), (65, 65), (5, 5)])
    assert all(each[1] == each[3] == "right" for each in told)
    assert "PeerFailed: rank 1 failed: " in told[0][0] and "this rank passes 5" in told[0][0]
    assert told[1][0].startswith("InvalidInput: max_tokens=4, expected the most tokens")
    assert all("max_num_tokens=64" in each[2] for each in told)
