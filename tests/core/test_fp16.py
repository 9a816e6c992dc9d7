"""fp16: an expert's output above 65504 whose router weight, or the sum over K, makes it finite."""

from __future__ import annotations

import pytest
import torch
from loud_experts import loud, loud_call

import moekit
from moekit import MoEProblem, Routing
from moekit.backends.reference import oracle


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the draw: it decides which values overflow."""
    monkeypatch.setenv("MOEKIT_TEST_SEED", "2")
    torch.manual_seed(0)


SIZES = dict(num_experts=6, top_k=2, hidden_size=64, intermediate_size=48, device="cpu")


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("experts", ["torch", "reference"])
def test_addends_above_the_range_cancel(experts: str, tokens: int) -> None:
    """Expert 1 is expert 0 with the opposite sign and nearly its weight."""
    problem = MoEProblem(**SIZES, dtype=torch.float16)
    weights = loud(problem)
    weights.w13[1], weights.w2[1] = weights.w13[0], -weights.w2[0]
    x = torch.randn(tokens, problem.hidden_size).half()
    routing = Routing(torch.tensor([[1.0, 0.9]] * tokens), torch.tensor([[0, 1]] * tokens))
    kernel, want = moekit.compose(problem, "local", experts), oracle(x, weights, routing, problem)
    assert float(10 * want.abs().max()) > 65504
    out = kernel(x, kernel.pack(weights), routing).float()
    # Ten times what cancels is rounded at other places than in the oracle.
    assert bool(out.isfinite().all()) and float((out - want).norm() / want.norm()) < 2e-2


def test_only_rows_that_overflow_are_computed_again() -> None:
    """A token keeps its bits, whoever overflows beside it, and what is infinite stays so."""
    problem = MoEProblem(**SIZES, dtype=torch.float16)
    kernel, weights = moekit.compose(problem, "local", "torch"), loud(problem)
    x, routing = loud_call(problem, 30)
    x[0], x[1] = 60000, 0.01
    routing.topk_ids[7:9] = -1
    packed = kernel.pack(weights)
    out = kernel(x, packed, routing)
    assert not out[0].isfinite().all() and bool(out[2::3].isfinite().all())
    assert bool((out[7:9] == 0).all())
    calm = x.clone()
    calm[torch.arange(30) % 3 != 2] *= 0.01
    same = [t for t in range(30) if t % 3 == 2]
    assert torch.equal(out[same], kernel(calm, packed, routing)[same])


@pytest.mark.parametrize(
    ("dispatcher", "experts", "dtype", "says"),
    [
        ("local", "torch", torch.float16, False),
        ("local", "reference", torch.float16, False),
        ("batched_reference", "reference", torch.float16, False),
        ("batched_reference", "torch", torch.float16, True),  # sums behind a bridge, weights of 1
        ("batched_reference", "torch", torch.bfloat16, False),
    ],
)
def test_explain_says_what_overflows(dispatcher, experts, dtype, says) -> None:
    problem = MoEProblem(**SIZES, dtype=dtype)
    explained = moekit.explain(problem, dispatcher, experts)
    assert ("above 65504" in explained.note) == says
    kernel = moekit.compose(problem, dispatcher, experts)
    assert kernel.experts.spec.weights_in_fp32 != (says or dtype == torch.bfloat16)


def test_memory_counts_the_wider_output() -> None:
    sizes = dict(SIZES, hidden_size=4096, intermediate_size=8)
    half, bfloat = (
        moekit.compose(MoEProblem(**sizes, dtype=dtype), "batched_reference", "reference").memory(
            64
        )
        for dtype in (torch.float16, torch.bfloat16)
    )
    assert half.intermediate - bfloat.intermediate == 6 * 64 * 4096 * 2
