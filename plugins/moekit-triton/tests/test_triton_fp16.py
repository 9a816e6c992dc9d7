"""fp16: experts whose output is above 65504, under router weights that bring it back into range.

Every path from GEMM 2 to the sum over K rounds to fp16 in between, except the dot products.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loud_experts import check_overflows, check_tokens, loud, loud_call
from moekit_kernels.numerics import INTERPRETED
from moekit_triton.capabilities import BLOCKS_M
from moekit_triton.kernels.tiles import GemmTile, SortedTile, SpecializedTile
from moekit_triton.plans import Copied, CopiedAhead, Direct, Gathered, Sorted
from triton_checks import choose_plan, use_plan

import moekit
from moekit import MoEProblem
from moekit.backends.reference import oracle

SMALL = GemmTile(min(BLOCKS_M), 32, 32)
ROWS = 32 if INTERPRETED else 128  # halves of a tile are wgmma's 64 rows
LARGE, SORTED = GemmTile(ROWS, 64, 64), SortedTile(ROWS, 64, 64, num_warps=4, num_stages=3)
PLANS = {
    "direct": Direct(SMALL, SMALL, fused=True),
    "gathered": Gathered(SMALL, SMALL, fused=True),
    "not fused": Gathered(SMALL, SMALL, fused=False),
    "wide": Gathered(SMALL, replace(SMALL, wide=True), fused=True),
    "halves": Gathered(LARGE, replace(LARGE, halves=True), fused=True),
    "sorted": Sorted(LARGE, SORTED),
    "copied": Copied(SORTED, replace(SORTED, halves=True)),
    "persistent": Copied(SORTED, replace(SORTED, persistent=True)),
}
SMALL_SIZES = dict(num_experts=5, top_k=2, hidden_size=128, intermediate_size=96)
LARGE_SIZES = dict(num_experts=8, top_k=2, hidden_size=1024, intermediate_size=2048)


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the seed: which values overflow depends on the draw."""
    monkeypatch.setenv("MOEKIT_TEST_SEED", "2")


def check(
    problem: MoEProblem, tokens: int, combination: tuple[str, str] = ("local", "triton"), limit=2e-3
) -> None:
    torch.manual_seed(tokens)
    weights, (x, routing) = loud(problem), loud_call(problem, tokens)
    check_overflows(problem, weights, x, routing)
    kernel = moekit.compose(problem, *combination)
    out = kernel(x, kernel.pack(weights), routing)
    check_tokens(out, oracle(x, weights, routing, problem), limit)


@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("name", PLANS)
def test_every_plan(device, monkeypatch, name, tokens):
    use_plan(monkeypatch, PLANS[name])
    check(MoEProblem(**SMALL_SIZES, dtype=torch.float16, device=device.type), tokens)


def test_programs_that_share_k(device, monkeypatch):
    problem = MoEProblem(
        num_experts=2, top_k=2, hidden_size=64, intermediate_size=4096,
        quant="int4_w4a16_g128", dtype=torch.float16, device=device.type,
    )  # fmt: skip
    assert choose_plan(problem, 2, 2).splits > 1
    check(problem, 2, limit=4e-3)


@pytest.mark.skipif(INTERPRETED, reason="large")
@pytest.mark.parametrize("tokens", [1, 4, 64, 512, 4096])
@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_chosen_plans(scheme, tokens):
    problem = MoEProblem(**LARGE_SIZES, quant=scheme, dtype=torch.float16, device="cuda")
    check(problem, tokens, limit=2e-3 if scheme == "none" else 0.2)


@pytest.mark.parametrize("tokens", [64, 700, 4096])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(
    ("kind", "scheme"),
    [(Copied, "none"), (CopiedAhead, "none"), (Copied, "fp8_block")],
)
def test_specialized_plans(specialized, monkeypatch, kind, scheme, halves, tokens):
    problem = MoEProblem(**LARGE_SIZES, quant=scheme, dtype=torch.float16, device="cuda")
    tile = SpecializedTile(halves=halves)
    use_plan(monkeypatch, kind(tile, tile))
    check(problem, tokens, limit=2e-3 if scheme == "none" else 0.2)
