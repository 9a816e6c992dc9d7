"""The diagnosis of wrong outputs: each known mistake or its place is named, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moekit import MoEProblem, Routing
from moekit.backends.reference import oracle
from moekit.problem.activation import Activation
from moekit.testing import assert_close, cases
from moekit.testing.diagnose import diagnose
from moekit.testing.invariance import rows_of

PROBLEM = MoEProblem(
    num_experts=6, top_k=3, hidden_size=96, intermediate_size=80, has_bias=True, device="cpu"
)
# Of fewer tokens each may have expert 2 or 4, and then none is right.
CASE = cases.make_case(PROBLEM, 64)
RIGHT = CASE.reference()


def result(case=CASE, *, problem=PROBLEM, ids=None, topk_weights=None, **weights):
    routing = Routing(
        case.routing.topk_weights if topk_weights is None else topk_weights,
        case.routing.topk_ids if ids is None else ids,
    )
    return oracle(case.x, replace(case.weights, **weights), routing, problem)


def swap_gate_and_up(experts):
    w13 = CASE.weights.w13.clone()
    w13[experts] = w13[experts].roll(80, dims=1)
    bias = CASE.weights.w13_bias
    return result(w13=w13, w13_bias=bias)


def without(dropped):
    return result(ids=torch.where(dropped, -1, CASE.routing.topk_ids))


def rank_in_expert():
    ids = CASE.routing.topk_ids.flatten()
    one_hot = ids[:, None] == torch.arange(6)
    return (one_hot.cumsum(0) * one_hot).sum(1).view_as(CASE.routing.topk_ids)


IDS, SCALES = CASE.routing.topk_ids, CASE.routing.topk_weights

KNOWN = {
    "only tokens with these experts are wrong: 3": lambda: swap_gate_and_up([3]),
    "only tokens with these experts are wrong: 2, 4": lambda: swap_gate_and_up([2, 4]),
    "looks like: gate and up swapped": lambda: swap_gate_and_up(slice(None)),
    "looks like: gate and up taken for alternating rows": lambda: result(
        w13=torch.cat((CASE.weights.w13[:, 0::2], CASE.weights.w13[:, 1::2]), dim=1)
    ),
    "looks like: zeros": lambda: torch.zeros_like(RIGHT),
    "looks like: doubled": lambda: 2 * RIGHT,
    "looks like: router weights applied twice": lambda: result(topk_weights=SCALES.square()),
    "looks like: router weights not applied": lambda: result(topk_weights=SCALES.clone().fill_(1)),
    "looks like: router weights normalized": lambda: result(
        topk_weights=SCALES / SCALES.sum(dim=1, keepdim=True)
    ),
    "looks like: w2's bias dropped": lambda: result(w2_bias=torch.zeros_like(CASE.weights.w2_bias)),
    "looks like: w13's bias dropped": lambda: result(
        w13_bias=torch.zeros_like(CASE.weights.w13_bias)
    ),
    "looks like: the activation is gelu": lambda: result(
        problem=PROBLEM.replace(activation="gelu")
    ),
    "only tokens with these experts are wrong: 4, 5": lambda: without(IDS >= 4),
    "only tokens with these rows of an expert are wrong: 5, 6, 7": lambda: without(
        rank_in_expert() > 5
    ),
}


@pytest.mark.parametrize("says", KNOWN)
def test_a_known_mistake_is_named(says):
    found = diagnose(KNOWN[says]().to(PROBLEM.dtype), CASE)
    assert says in found


def test_a_dropped_clamp_is_named():
    problem = PROBLEM.replace(activation=Activation("silu", limit=1.0))
    case = cases.make_case(problem, 17)
    out = oracle(case.x, case.weights, case.routing, PROBLEM).to(problem.dtype)
    assert diagnose(out, case) == "looks like: clamp dropped"


def test_an_unknown_mistake_has_no_name():
    noise = torch.randn(RIGHT.shape, generator=torch.Generator().manual_seed(1))
    assert diagnose(RIGHT * (1 + 0.1 * noise), CASE) == ""
    assert diagnose(RIGHT[:-1], CASE) == ""
    zero_token = replace(CASE, x=CASE.x.clone())
    zero_token.x[0] = noise[0] = 0
    assert diagnose(zero_token.reference() * (1 + 0.1 * noise), zero_token) == ""
    assert diagnose(RIGHT[1:2] * (1 + 0.1 * noise[1:2]), rows_of(CASE, slice(1, 2))) == ""


def test_a_failure_begins_with_the_diagnosis():
    out = swap_gate_and_up([3]).to(PROBLEM.dtype)
    says = "^output: only tokens with these experts are wrong: 3: relative error too large: RMS"
    with pytest.raises(AssertionError, match=says):
        assert_close(out, RIGHT, PROBLEM, case=CASE)


def test_a_broken_diagnosis_does_not_hide_the_failure(monkeypatch):
    monkeypatch.setattr("moekit.testing.diagnose.wrong_results", None)
    with pytest.raises(AssertionError, match="(?s)no diagnosis.*relative error too large"):
        assert_close(2 * RIGHT.to(PROBLEM.dtype), RIGHT, PROBLEM, case=CASE)
