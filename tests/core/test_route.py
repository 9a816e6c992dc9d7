"""Routers against loops written from their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from moekit import route
from moekit.errors import InvalidInput, InvalidProblem


def by_hand(
    logits: torch.Tensor,
    k: int,
    scoring: str,
    renormalize: bool,
    bias: torch.Tensor | None,
    groups: int,
    keep: int,
    factor: float,
) -> tuple[list[list[int]], list[list[float]]]:
    """One token and one expert at a time, in Python floats."""
    all_ids, all_weights = [], []
    for row in logits.double().tolist():
        if scoring == "softmax":
            total = sum(math.exp(v - max(row)) for v in row)
            scores = [math.exp(v - max(row)) / total for v in row]
        elif scoring == "sigmoid":
            scores = [1 / (1 + math.exp(-v)) for v in row]
        else:
            scores = [math.sqrt(math.log1p(math.exp(v))) for v in row]
        choice = (
            scores if bias is None else [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
        )
        size = len(row) // groups
        best = []
        for g in range(groups):
            members = sorted(choice[g * size : (g + 1) * size], reverse=True)
            best.append((-(members[0] if bias is None else sum(members[:2])), g))
        kept = {g for _, g in sorted(best)[:keep]}
        ranked = sorted((-choice[e], e) for e in range(len(row)) if e // size in kept)[:k]
        ids = [e for _, e in ranked]
        weights = [scores[e] for e in ids]
        if renormalize:
            weights = [w / sum(weights) for w in weights]
        all_ids.append(ids)
        all_weights.append([w * factor for w in weights])
    return all_ids, all_weights


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("groups", "keep"), [(1, 1), (4, 2)])
def test_definition(scoring: str, renormalize: bool, biased: bool, groups: int, keep: int) -> None:
    logits = torch.randn(33, 16)
    bias = torch.randn(16) if biased else None
    got = route(
        logits,
        4,
        scoring=scoring,
        renormalize=renormalize,
        correction_bias=bias,
        num_expert_group=groups,
        topk_group=keep,
        routed_scaling_factor=2.5,
    )
    ids, weights = by_hand(logits, 4, scoring, renormalize, bias, groups, keep, 2.5)
    assert got.topk_ids.tolist() == ids and got.topk_ids.dtype == torch.int64
    torch.testing.assert_close(got.topk_weights, torch.tensor(weights), rtol=1e-5, atol=1e-6)
    assert got.topk_weights.dtype == torch.float32


def test_softmax_over_the_chosen_equals_renormalized_softmax() -> None:
    logits = torch.randn(20, 12)
    chosen = logits.topk(3).values.softmax(-1)
    torch.testing.assert_close(route(logits, 3, renormalize=True).topk_weights, chosen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ties_go_to_the_lower_id(dtype: torch.dtype) -> None:
    logits = torch.zeros(5, 64, dtype=dtype)
    logits[:, 40] = 1
    assert route(logits, 4).topk_ids.tolist() == [[40, 0, 1, 2]] * 5


def test_padding_and_k_equals_e() -> None:
    is_padding = torch.tensor([False, True, False])
    logits = torch.randn(3, 4)
    logits[1] = float("nan")
    got = route(logits, 4, is_padding=is_padding)
    assert got.topk_ids[1].tolist() == [-1] * 4 and got.topk_weights[1].tolist() == [0.0] * 4
    assert sorted(got.topk_ids[0].tolist()) == [0, 1, 2, 3]


def test_custom() -> None:
    def last(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.arange(logits.shape[1] - k, logits.shape[1]).expand(len(logits), k)
        return torch.full(ids.shape, 0.5, dtype=torch.float16), ids.int()

    got = route(torch.randn(3, 8), 2, custom=last)
    assert got.topk_ids.tolist() == [[6, 7]] * 3 and got.topk_ids.dtype == torch.int64
    assert got.topk_weights.dtype == torch.float32
    with pytest.raises(InvalidInput, match=r"must be \(3, 3\) of a float dtype"):
        route(torch.randn(3, 8), 3, custom=lambda logits, k: last(logits, 2))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_logits_that_are_no_numbers(value: str) -> None:
    logits = torch.randn(6, 8)
    logits[4, 2] = float(value)
    with pytest.raises(InvalidInput, match="first token 4: check the layer"):
        route(logits, 2)
    unchecked = route(logits, 2, checked=False).topk_ids
    assert ((unchecked >= 0) & (unchecked < 8)).all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_masked_experts(scoring: str, renormalize: bool) -> None:
    """-infinity is as good as leaving the expert out, and where too few are left, weighs 0."""
    logits, left = torch.randn(6, 8), [0, 2, 3, 7]
    masked = torch.full_like(logits, -torch.inf)
    masked[:, left] = logits[:, left]
    got = route(masked, 3, scoring=scoring, renormalize=renormalize)
    want = route(logits[:, left], 3, scoring=scoring, renormalize=renormalize)
    assert torch.equal(got.topk_ids, torch.tensor(left)[want.topk_ids])
    torch.testing.assert_close(got.topk_weights, want.topk_weights)
    all_left = route(masked, 6, scoring=scoring, renormalize=renormalize)
    assert not all_left.topk_weights[:, 4:].any() and (all_left.topk_weights[:, :4] > 0).all()


def test_masks_that_mask_nothing() -> None:
    logits = torch.randn(6, 8)
    logits[3] = -torch.inf
    with pytest.raises(InvalidInput, match=r"only -infinity, first token 3: check the layer"):
        route(logits, 2)
    logits[3, 1:] = 0.0
    logits[1] = torch.nan
    is_padding = torch.arange(6) == 1
    with pytest.raises(InvalidInput, match=r"first token 3: .* set the bias to -infinity"):
        ones = torch.ones(8)
        route(logits, 2, scoring="sigmoid", correction_bias=ones, is_padding=is_padding)
    bias = torch.tensor([-torch.inf] + [1.0] * 7)
    got = route(torch.randn(6, 8), 7, scoring="sigmoid", correction_bias=bias)
    assert (got.topk_ids > 0).all()
    for never in (torch.nan, torch.inf):
        unfilled = torch.full((8,), never)
        with pytest.raises(InvalidInput, match="correction_bias must be finite"):
            route(torch.randn(6, 8), 2, scoring="sigmoid", correction_bias=unfilled)
    groups = {"num_expert_group": 4, "topk_group": 2}
    for top_k, more in ((8, {}), (2, groups)):
        with pytest.raises(InvalidInput, match="masks all but 7 experts"):
            route(torch.randn(6, 8), top_k, scoring="sigmoid", correction_bias=bias, **more)


@pytest.mark.parametrize(
    "call",
    [
        lambda: route(torch.randn(3, 8), 9),
        lambda: route(torch.randn(3, 8), 0),
        lambda: route(torch.randn(8), 2),
        lambda: route(torch.ones(3, 8, dtype=torch.int64), 2),
        lambda: route(torch.randn(3, 8), 2, scoring="cosine"),
        lambda: route(torch.randn(3, 8), 2, num_expert_group=3, topk_group=1),
        lambda: route(torch.randn(3, 8), 2, num_expert_group=4),
        lambda: route(torch.randn(3, 8), 2, num_expert_group=0, topk_group=0),
        lambda: route(torch.randn(3, 8), 5, num_expert_group=4, topk_group=2),
        lambda: route(torch.randn(3, 8), 2, correction_bias=torch.randn(7)),
        lambda: route(torch.randn(3, 8), 2, is_padding=torch.zeros(3)),
    ],
)
def test_bad_arguments(call) -> None:
    with pytest.raises((InvalidInput, InvalidProblem)):
        call()
