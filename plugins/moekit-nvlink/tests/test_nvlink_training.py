"""The backward on CPU ranks that share memory, against autograd of dense experts.

The gradient kit runs in test_nvlink_standin.py; here calls overwrite what others have in buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.testing.distributed import RankPool

if torch.cuda.is_available():
    pytest.skip("for the stand-in", allow_module_level=True)

import nvlink_standin  # noqa: E402
from nvlink_host import problems  # noqa: E402

import moekit  # noqa: E402
from moekit.errors import InvalidInput, PeerFailed  # noqa: E402
from moekit.plugin import Routing  # noqa: E402

EXPERTS, TOP_K, HIDDEN, CAPACITY, INNER = 5, 3, 16, 6, 32
COUNTS = ((3, 0, 5), (0, 4, 1), (6, 6, 6))  # of each micro-batch and rank


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[RankPool]:
    with RankPool(3, "cpu", timeout=120) as pool:
        yield pool


def kernel_of(rank: int, ranks: int) -> Any:
    problem = problems(ranks, 1, EXPERTS, TOP_K, HIDDEN, CAPACITY, dtype=torch.float32,
                       training=True)[rank]  # fmt: skip
    return moekit.compose(problem, "nvlink_ht_standin", "torch", backends=nvlink_standin.registry())


def weights_of(layer: int) -> moekit.ExpertWeights:
    draw = torch.Generator().manual_seed(layer)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=draw) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=draw) / INNER**0.5
    return moekit.ExpertWeights(w13, w2)


@dataclass
class Tokens:
    """A rank's micro-batch. Routings of two layers, and the gradient of the output."""

    x: Tensor
    routings: list[Routing]
    grad: Tensor

    @classmethod
    def of(cls, rank: int, batch: int, count: int) -> Tokens:
        draw = torch.Generator().manual_seed(1000 * rank + batch)

        def routing() -> Routing:
            ids = torch.rand(count, EXPERTS, generator=draw).argsort(1)[:, :TOP_K].contiguous()
            ids[torch.rand(ids.shape, generator=draw) < 0.3] = -1
            return Routing(torch.rand(count, TOP_K, generator=draw).requires_grad_(), ids)

        x, grad = torch.randn(2, count, HIDDEN, generator=draw)
        return cls(x.requires_grad_(), [routing(), routing()], grad)

    def gradients(self) -> list[Tensor | None]:
        return [self.x.grad, *(r.topk_weights.grad for r in self.routings)]


def dense(x: Tensor, weights: moekit.ExpertWeights, routing: Routing) -> Tensor:
    out = torch.zeros_like(x)
    for expert, (w13, w2) in enumerate(zip(weights.w13, weights.w2, strict=True)):
        scale = torch.where(routing.topk_ids == expert, routing.topk_weights, 0.0).sum(1)
        gate, up = (x @ w13.T).chunk(2, 1)
        out = out + scale[:, None] * ((F.silu(gate) * up) @ w2.T)
    return out


Layers = list[Callable[[Tensor, Routing], Tensor]]


def model(layers: Layers, tokens: Tokens) -> Tensor:
    x = tokens.x
    for layer, routing in zip(layers, tokens.routings, strict=False):
        x = x + layer(x, routing)
    return x


def right(ranks: int, counts: Any, layers: int) -> tuple[list[list[Tokens]], list[Any]]:
    """Return all ranks' micro-batches and all weights, with the gradients that are right."""
    weights = [weights_of(n)._map(lambda t: t.requires_grad_()) for n in range(layers)]
    batches = [[Tokens.of(r, b, n[r]) for b, n in enumerate(counts)] for r in range(ranks)]
    experts: Layers = [lambda x, routing, w=w: dense(x, w, routing) for w in weights]  # type: ignore
    for mine in batches:
        for tokens in mine:
            model(experts, tokens).backward(tokens.grad)
    return batches, weights


def expect(found: list[Tensor | None], want: list[Tensor | None], what: str) -> None:
    for index, (mine, other) in enumerate(zip(found, want, strict=True)):
        assert mine is not None and other is not None, f"{what}: gradient {index} is missing"
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=lambda m: f"{what}: {m}")


def failing_experts(rank: int, ranks: int) -> None:
    """Let parts of one rank's experts fail, more often than there are buffers."""
    kernel = kernel_of(rank, ranks)
    mine = weights_of(0).select(list(kernel.problem.local_experts))
    mine = mine._map(lambda t: t.requires_grad_())
    experts: Layers = [lambda x, routing: kernel(x, mine, routing)]

    def broken(*_: object) -> None:
        raise InvalidInput("fails on purpose")

    def step(counts: tuple[int, ...]) -> None:
        batches, _ = right(ranks, [counts], 1)
        given = Tokens.of(rank, 0, counts[rank])
        model(experts, given).backward(given.grad)
        expect(given.gradients()[:2], batches[rank][0].gradients()[:2], f"rank {rank}")

    try:
        for turn in range(6):
            part = ("forward", "backward_input", "backward_weight")[turn % 3]
            fails, whole = rank == turn % ranks, getattr(kernel.experts, part)
            if fails:
                setattr(kernel.experts, part, broken)
            if fails:
                with pytest.raises(InvalidInput, match="on purpose"):
                    step((4, 2, 3))
            elif part == "backward_weight":  # this rank's gradients are right
                step((4, 2, 3))
            else:
                with pytest.raises(PeerFailed, match=f"rank {turn % ranks} failed"):
                    step((4, 2, 3))
            setattr(kernel.experts, part, whole)
            assert kernel.dispatcher.lease.value.calls.in_flight == 0, part
            step((1, 6, 0))
    finally:
        kernel.destroy()


def test_experts_that_fail(three_ranks: RankPool) -> None:
    three_ranks.run(failing_experts)
