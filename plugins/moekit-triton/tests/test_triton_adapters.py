"""Adapters (LoRA) of `triton`, beyond moekit's kit: tiles that slots share, memory, and plans."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from moekit_kernels.numerics import INTERPRETED
from moekit_triton.calls import low_rank_entries, low_rank_sizes
from moekit_triton.kernels.tiles import DotTile
from moekit_triton.pins import PLAN_VARIABLE, pinned_plan
from moekit_triton.plans import DotProducts
from triton_checks import use_plan

import moekit
from moekit import DeviceSpec, MoEProblem
from moekit.backends.reference import oracle
from moekit.errors import InvalidInput
from moekit.plugin import AdapterSlots
from moekit.testing.adapters import random_adapters
from moekit.testing.cases import make_case
from moekit.testing.compare import complain
from moekit.testing.diagnose import assert_right


@pytest.mark.parametrize(("rank", "separate"), [(5, False), (8, True), (72, False)])
@pytest.mark.parametrize("first", [0, 10])
def test_tiles_of_many_slots(device, rank, separate, first) -> None:
    """Several steps of a product have the slots of a tile, of which some have no row."""
    problem = MoEProblem(
        num_experts=2, top_k=2, hidden_size=72, intermediate_size=40, device=str(device),
        adapters=AdapterSlots(20, rank, separate),
    )  # fmt: skip
    case = make_case(problem, 30)
    ids = torch.arange(30, dtype=torch.int32, device=device) % 10 + first
    ids[::7] = -1
    routing, adapters = replace(case.routing, adapter_ids=ids), random_adapters(problem)
    adapters.scaling.fill_(1)  # slot 19 would have 2217
    case = replace(case, routing=routing, adapters=adapters)
    kernel = moekit.compose(problem, "local", "triton")
    out = kernel(case.x, replace(kernel.pack(case.weights), adapters=adapters), routing)
    assert_right(out, case)


@pytest.mark.parametrize("kind", ["", "w13", "w2", "shared"])
@pytest.mark.parametrize("quant", ["none", "fp8_block"])
@pytest.mark.parametrize("separate", [False, True])
def test_dot_products(device, monkeypatch, kind, quant, separate) -> None:
    """Tokens have different adapters or none, and some assignments have no expert."""
    problem = MoEProblem(
        num_experts=4, top_k=3, hidden_size=264, intermediate_size=72, device=str(device),
        quant=quant, has_bias=True, adapters=AdapterSlots(3, 20, separate),
    )  # fmt: skip
    tile = DotTile(64) if INTERPRETED else DotTile(4, 2)
    use_plan(monkeypatch, DotProducts(tile, tile))
    case = make_case(problem, 5, "masked")
    ids = torch.arange(5, dtype=torch.int32, device=device) % 4 - 1
    routing, adapters = replace(case.routing, adapter_ids=ids), random_adapters(problem, kind)
    kernel = moekit.compose(problem, "local", "triton")
    packed = kernel.pack(case.weights)
    out = kernel(case.x, replace(packed, adapters=adapters), routing)
    want = oracle(case.x, case.weights, routing, problem, adapters)
    assert not complain(out, want, problem)
    base = kernel(case.x, packed, case.routing)
    assert torch.equal(out[ids < 0], base[ids < 0])


def test_memory_serves_fewer_rows() -> None:
    """Fewer assignments have more addends each, and still fit."""
    problem = MoEProblem(num_experts=8, top_k=2, hidden_size=64, intermediate_size=32,
                         adapters=AdapterSlots(2, 16))  # fmt: skip
    for rows in (1, 500, 512, 513, 8192, 8193, 20000):
        entries = low_rank_entries(problem, rows)
        for fewer in range(1, rows + 1, 97):
            assert math.prod(low_rank_sizes(2 * fewer, 16)) <= entries


def test_plans_without_deltas_cannot_be_pinned(monkeypatch) -> None:
    problem = MoEProblem(num_experts=8, top_k=2, hidden_size=2048, intermediate_size=768,
                         device=DeviceSpec("cuda", (9, 0)))  # fmt: skip
    problem = problem.replace(adapters=AdapterSlots(1, 8))
    monkeypatch.setenv(PLAN_VARIABLE, "dot_products: 2 rows w4 | 4 rows w8")
    assert pinned_plan(problem, batched=False) is not None
    monkeypatch.setenv(PLAN_VARIABLE, "copied: 128x128x64 w8 s4 halves | 128x256x64 w8 s4")
    with pytest.raises(InvalidInput, match="adapters.* take plans of kind dot_products, direct or"):
        pinned_plan(problem, batched=False)
