"""The backward on CPU ranks that share memory, against autograd of dense experts.

The gradient kit runs in test_nvlink_standin.py; here calls overwrite what others have in buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


def micro_batches(rank: int, ranks: int, way: str) -> None:
    """Run three micro-batches through two layers that share buffers, then their backwards.

    way: checkpointed, or changed: the caller changes its ids before the backwards.
    """
    kernels = [kernel_of(rank, ranks) for _ in range(2)]
    local = list(kernels[0].problem.local_experts)
    mine = [weights_of(n).select(local)._map(lambda t: t.requires_grad_()) for n in range(2)]
    busy: list[int] = []

    def layer(n: int) -> Callable[[Tensor, Routing], Tensor]:
        def call(x: Tensor, topk_weights: Tensor, routing: Routing) -> Tensor:
            return kernels[n](x, mine[n], replace(routing, topk_weights=topk_weights))

        def run(x: Tensor, routing: Routing) -> Tensor:
            if way == "checkpointed":
                return checkpoint(call, x, routing.topk_weights, routing, use_reentrant=False)
            return call(x, routing.topk_weights, routing)

        inner = kernels[n].experts.backward_weight

        def backward_weight(*args: Any) -> None:
            busy.append(kernels[n].dispatcher.lease.value.calls.in_flight)
            inner(*args)

        kernels[n].experts.backward_weight = backward_weight
        return run

    try:
        batches, want = right(ranks, COUNTS, 2)
        given = [Tokens.of(rank, b, n[rank]) for b, n in enumerate(COUNTS)]
        outs = [model([layer(0), layer(1)], tokens) for tokens in given]
        with torch.no_grad():
            expect([model([layer(0), layer(1)], given[2])], [outs[2].detach()], "no gradients")
        if way == "changed":
            for tokens in given:
                for routing in tokens.routings:
                    routing.topk_ids.fill_(0)
        for b in (2, 0, 1):
            outs[b].backward(given[b].grad)
        for b, tokens in enumerate(given):
            what = f"rank {rank}, micro-batch {b}"
            expect(tokens.gradients(), batches[rank][b].gradients(), what)
        for n in range(2):
            got = [t.grad for t in mine[n].tensors().values()]
            whole = [t.grad[local] for t in want[n].tensors().values()]  # type: ignore[index]
            expect(got, whole, f"rank {rank}, layer {n}")  # type: ignore[arg-type]
        # No rank may send the next call's rows while these are read.
        assert busy == [1] * len(busy) and len(busy) >= 6, busy
    finally:
        for kernel in kernels:
            kernel.destroy()


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


def saved_by_a_call(rank: int, ranks: int) -> None:
    kernel = kernel_of(rank, ranks)
    try:
        tokens = Tokens.of(rank, 0, CAPACITY)
        routing = replace(tokens.routings[0], topk_weights=torch.ones(CAPACITY, TOP_K))
        held = kernel.dispatcher
        arrived = held.prepare(tokens.x.detach(), routing, None).result()
        saved = [arrived.topk_ids, arrived.topk_weights, arrived.handle.places,
                 arrived.handle.routing.topk_ids]  # fmt: skip
        assert sum(t.nbytes for t in saved) <= held.transient_bytes(CAPACITY)
        memory = arrived.handle.buffer.bytes
        buffer = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        assert all(t.data_ptr() not in buffer for t in (arrived.x, *saved))
        held.abandon(arrived)
    finally:
        kernel.destroy()


@pytest.mark.parametrize("way", ["changed", pytest.param("checkpointed", marks=pytest.mark.full)])
def test_micro_batches_through_two_layers(three_ranks: RankPool, way: str) -> None:
    three_ranks.run(micro_batches, way)


def test_experts_that_fail(three_ranks: RankPool) -> None:
    three_ranks.run(failing_experts)


def test_what_a_call_saves(three_ranks: RankPool) -> None:
    three_ranks.run(saved_by_a_call)
