"""Dot products: calls in every tile and scheme, and when the plan is chosen."""

from __future__ import annotations

import pytest
from moekit_bench import SHAPES
from moekit_kernels.numerics import INTERPRETED
from moekit_triton import heuristics
from moekit_triton.heuristics import dot_products, dots_pay
from moekit_triton.kernels.tiles import DotTile
from moekit_triton.plans import Batched, DotProducts
from triton_checks import choose_plan, use_plan

import moekit
from moekit.problem.quant import SCHEMES, WIRE_SCHEMES
from moekit.runtime.workspace import Workspace
from moekit.testing.calls import QUANTIZED_WIRE, check_call, kit_registry
from moekit.testing.cases import make_case

UNPACKED = sorted(
    name
    for name in moekit.registry().expert("triton").schemes
    if (weight := SCHEMES[name].weight) is None or not weight.packed
)


TILES = [DotTile(64, 1), DotTile(32, 2), DotTile(128)]
if not INTERPRETED:
    TILES = [DotTile(8), DotTile(1, 1), DotTile(4, 2), DotTile(2, 8)]


@pytest.mark.parametrize("scheme", UNPACKED)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dispatcher", ["local", QUANTIZED_WIRE])
def test_calls(device, monkeypatch, scheme, tile, dispatcher) -> None:
    """Partial steps and tiles, a scale block over gate and up, x that arrives quantized."""
    if dispatcher == QUANTIZED_WIRE and scheme not in WIRE_SCHEMES:
        pytest.skip("its tokens do not travel quantized")
    sizes = dict(num_experts=4, top_k=3, hidden_size=264, intermediate_size=72)
    problem = moekit.MoEProblem(**sizes, quant=scheme, has_bias=True, device=device.type)
    use_plan(monkeypatch, DotProducts(tile, tile))
    options = {"backends": kit_registry(), "workspace": Workspace()}
    kernel = moekit.compose(problem, dispatcher, "triton", **options)
    check_call(kernel, make_case(problem, 3, "masked"))


@pytest.mark.parametrize(
    ("name", "tokens"), [("qwen3-30b", 4), ("mixtral", 2), ("dsv3-ep8", 2), ("dsv3-tp8", 8)]
)
def test_when_experts_are_hardly_shared(name, tokens):
    problem = SHAPES[name].problem(device="sm90")
    top_k = problem.top_k
    assert all(dots_pay(problem, rows, top_k) for rows in range(1, tokens + 1))
    assert not dots_pay(problem, 4 * tokens, top_k)
    assert isinstance(choose_plan(problem, 1, top_k), DotProducts)
    assert isinstance(choose_plan(problem, 1, top_k, batched=True), Batched)


@pytest.mark.parametrize("tokens", [1, 4, 64])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_numbers_of_programs(name, tokens, monkeypatch):
    """GEMM 2 fills the multiprocessors, and GEMM 1 has no more programs than its sizes ask for."""
    monkeypatch.setattr(heuristics, "INTERPRETED", False)
    problem = SHAPES[name].problem(device="sm90")
    plan = dot_products(problem, tokens, problem.top_k)
    assert tokens * problem.hidden_size // plan.down.rows >= 2.5 * 132 or plan.down.rows == 1
    columns = tokens * problem.top_k * problem.intermediate_size
    assert plan.up.rows == (2 if columns <= 32768 else 8)
