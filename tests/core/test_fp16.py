"""fp16: an expert's output above 65504 whose router weight, or the sum over K, makes it finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moekit
from moekit import ExpertWeights, MoEProblem, Routing
from moekit.backends.reference import oracle
from moekit.testing.cases import random_weights


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the draw: it decides which values overflow."""
    monkeypatch.setenv("MOEKIT_TEST_SEED", "2")
    torch.manual_seed(0)


SIZES = dict(num_experts=6, top_k=2, hidden_size=64, intermediate_size=48, device="cpu")


def loud(problem: MoEProblem) -> ExpertWeights:
    """Weights of experts whose output has a root mean square of about 60000."""
    weights = random_weights(problem.replace(quant="none"))
    weights = replace(weights, w13=4 * weights.w13)
    y = _each(torch.randn(64, problem.hidden_size).half(), weights, problem)
    w2 = weights.w2.float() * (6e4 / float(y.square().mean().sqrt()))
    return replace(weights, w2=w2.half()).quantize(problem.quant)


def _each(x: torch.Tensor, weights: ExpertWeights, problem: MoEProblem) -> torch.Tensor:
    """Expert 0's output."""
    first = Routing(torch.ones(len(x), 1), torch.zeros(len(x), 1).long())
    return oracle(x, weights, first, problem.replace(quant="none", top_k=1))


def call(problem: MoEProblem, tokens: int) -> tuple[torch.Tensor, Routing]:
    """Two of three tokens are loud, under small weights; the third is quiet, under large ones."""
    x = torch.randn(tokens, problem.hidden_size)
    ids = torch.rand(tokens, problem.num_experts).topk(problem.top_k, dim=1).indices
    topk_weights = 0.003 + 0.007 * torch.rand(ids.shape)
    x[2::3] *= 0.05
    topk_weights[2::3] = 1.5 + torch.rand(topk_weights[2::3].shape)
    return x.half(), Routing(topk_weights, ids)


def check(out: torch.Tensor, want: torch.Tensor) -> None:
    held = want.abs().amax(dim=1) < 65000  # of the others the result itself is above the range
    assert float(held.float().mean()) > 0.9
    out, want = out[held], want[held]
    error = (out.float() - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-9)
    assert bool(out.isfinite().all()) and float(error.max()) < 4e-3, error.max()


@pytest.mark.parametrize("scheme", ["none", "int8_w8a16"])
@pytest.mark.parametrize(("experts", "tokens"), [
    *(("torch", tokens) for tokens in (1, 2, 9, 300)), ("reference", 1), ("reference", 40)
])  # fmt: skip
def test_above_the_range_under_a_small_weight(experts: str, tokens: int, scheme: str) -> None:
    problem = MoEProblem(**SIZES, dtype=torch.float16, quant=scheme)
    weights, (x, routing) = loud(problem), call(problem, tokens)
    raw = oracle(x, weights, replace(routing, topk_weights=torch.ones(tokens, 2)), problem)
    assert float(raw.abs().max()) > 65504, "nothing overflows: the test tells nothing"
    for dispatcher in ("local",) if experts == "torch" else ("local", "batched_reference"):
        kernel = moekit.compose(problem, dispatcher, experts)
        assert "65504" not in kernel.explanation.note
        check(kernel(x, kernel.pack(weights), routing), oracle(x, weights, routing, problem))


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
    x, routing = call(problem, 30)
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
