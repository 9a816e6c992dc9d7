"""Experts leave the sum over K to the combine: the kernel in Triton's interpreter."""

from __future__ import annotations

import sys

import pytest
import torch
from moekit_nvlink import transfer
from test_nvlink_kernels import KINDS, Call, Shape

from moekit.plugin import Unreduced, weight_and_reduce

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["moekit_nvlink.layout"], "REDUCED_FROM", 1)
    monkeypatch.setattr(transfer.Tile, "few_programs", 4)


def unreduced(call: Call, rank: int, tokens, in_order: bool) -> Unreduced:
    """Return rows of experts that return (e + 1) * x; NaN where no assignment has its row."""
    problem, tp = call.host.layer[rank], call.shape.tp
    slice_of = (2 * (rank % tp) + 1) / tp**2
    ids = tokens.topk_ids
    rows = tokens.x[:, None].float() * (ids + problem.local_experts.start + 1)[..., None]
    rows = (rows * slice_of).to(call.shape.dtype)
    rows[ids < 0] = float("nan")
    rows = rows.flatten(0, 1)
    if in_order:
        return Unreduced(rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(rank))
    places = order.argsort().int().view(ids.shape)
    places[ids < 0] = -(2**30)
    return Unreduced(rows[order], places.contiguous())


@pytest.mark.parametrize("in_order", [True, False], ids=["in order", "sorted"])
@pytest.mark.parametrize(
    ("ep", "tp", "leave"),
    [(2, 1, (0, 1)), (3, 1, (0, 1, 2)), (3, 1, (1,)), (2, 2, (0, 1, 2, 3)), (2, 2, (3,))],
)
@pytest.mark.parametrize(("top_k", "most"), [(3, 5), pytest.param(5, 21, marks=pytest.mark.full)])
def test_sums_are_those_of_the_experts(top_k, most, ep, tp, leave, in_order) -> None:
    """Bit by bit, also where only some ranks' experts leave the sum."""
    shape = Shape(False, ep, tp, top_k=top_k, hidden=80, capacity=most, programs=2,
                  dtype=torch.bfloat16)  # fmt: skip
    host, draw = shape.host(), torch.Generator().manual_seed(7)
    assert host.layout.chunks > 1
    calls = [(most, most - 2, 1), (0, most - 1), (1,), (0,), (2, most, 0)]
    for counts, kind in zip(calls, (*KINDS, "random"), strict=True):
        call = Call(shape, host, counts, kind, draw)

        def reduced(rank: int, tokens, y, call=call) -> None:
            rows = unreduced(call, rank, tokens, in_order)
            weight_and_reduce(rows.rows_NH, tokens.topk_ids, tokens.topk_weights, y, rows.places_RK)

        def left(rank: int, tokens, y, call=call) -> Unreduced | None:
            if rank in leave:
                return unreduced(call, rank, tokens, in_order)
            return reduced(rank, tokens, y, call)

        call.dispatch()
        want = host.combine(call.flight, reduced)
        call.dispatch()
        outs = host.combine(call.flight, left, leave)
        call.check(outs)
        assert all(torch.equal(*pair) for pair in zip(outs, want, strict=True))
