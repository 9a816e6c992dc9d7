"""Tiles of tokens: their list, and swap-AB GEMMs by specialized warps, with NaN in padding rows.

The GEMMs run on the GPU where there is one, else in `gluon_emulator`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import gluon_emulator
import pytest
import torch
import torch.nn.functional as F
from moekit_kernels.align import COUNTERS, SortedAssignments, align, align_capacity, align_scratch
from moekit_kernels.numerics import Activation
from moekit_triton.candidates import attempts, sorted_candidates, token_candidates
from moekit_triton.kernels.operands import Scales
from moekit_triton.kernels.sorted_gemm import sorted_gemm
from moekit_triton.kernels.tiles import GemmConfig
from moekit_triton.kernels.token_tiles import (
    TokenSizes,
    list_token_tiles,
    tile_list_entries,
    token_sizes,
)
from moekit_triton.plans import Copied, Joined, plan_from_json
from triton_checks import check_block, compiled, real_rows, relative, use_plan

from moekit import MoEProblem

GPU = torch.cuda.is_available()
COUNTS = {
    "edges": [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 0],
    "rests": [258, 272, 273, 288, 289, 0, 160, 161, 300, 512, 513, 544, 545, 33],
    "nothing": [0, 0, 0],
}
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


@pytest.fixture
def gemm(request, monkeypatch) -> None:
    """Run specialized tiles of tokens: on a GPU of capability 9.0, or emulated."""
    if GPU:
        request.getfixturevalue("specialized")
        return
    for name, launcher in (
        ("specialized_tokens", "_launch_gemm"),
        ("specialized_tokens_fp8", "_launch_gemm"),
        ("specialized_tokens_block", "_launch_block"),
        ("specialized_fp8", "_launch_gemm"),
    ):
        module = pytest.importorskip(f"moekit_triton.kernels.{name}")
        run = partial(gluon_emulator.launch, getattr(module, launcher)._kernel)
        monkeypatch.setattr(module, launcher, run)


def problem(device: str) -> MoEProblem:
    return MoEProblem(
        num_experts=8, top_k=2, hidden_size=1024, intermediate_size=768, device=device
    )


def tile(weights: int, gated: bool, block_k: int = 64) -> GemmConfig:
    block_n = weights // (2 if gated else 1)
    return GemmConfig(128, block_n, block_k, group_m=3, specialized=True, swapped=True)


def sort(counts: list[int], device: torch.device) -> tuple[SortedAssignments, torch.Tensor]:
    """Return one assignment per token, so many to each expert, sorted; and memory for a list."""
    experts, n = len(counts), sum(counts)
    ids = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    ids = ids[torch.randperm(n)] if n else torch.full((5,), -1)
    n, capacity = len(ids), align_capacity(len(ids), experts, 128)
    sizes = (capacity, capacity // 128, 1, n, experts, COUNTERS + capacity // 128,
             tile_list_entries(n, experts), 1 + align_scratch(n, experts))  # fmt: skip
    ints = [torch.full((size,), -77, dtype=torch.int32, device=device) for size in sizes]
    assignments, blocks, rows, rows_A, ends, counters, tiles, scratch = ints
    aligned = SortedAssignments(assignments, blocks, rows, 128, rows_A, ends, counters)
    align(ids.to(device).view(-1, 1), experts, aligned, scratch)
    return aligned, tiles


@pytest.mark.parametrize("name", list(COUNTS))
@pytest.mark.parametrize("sizes", [(128, 16), (128, 32), (256, 32)])
def test_list(name, sizes, device):
    (tokens, rest), counts = sizes, COUNTS[name]
    aligned, tiles = sort(counts, device)
    list_token_tiles(aligned, tiles, TokenSizes(tokens, rest))
    want, start = [], 0
    for expert, count in enumerate(counts):
        first, left = start, count
        while left > 0:
            rows = left if left <= tokens + rest else tokens
            want.append([first, expert * 32 + -(-rows // 16)])
            first, left = first + rows, left - rows
        start += -(-count // 128) * 128
    assert tiles[0] == len(want)
    assert tiles[1 : 1 + 2 * len(want)].view(-1, 2).tolist() == want
    assert (tiles[1 + 2 * len(want) :] == -77).all(), "more than the tiles"


@pytest.mark.parametrize(("name", "k", "n"), [("edges", 320, 200), ("rests", 64, 264)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weights", [128, 256])
def test_gemm(gemm, name, k, n, gated, weights, device):
    check_gemm(COUNTS[name], k, n, gated, weights, torch.bfloat16, device)


@pytest.mark.parametrize("weights", [128, 256])
def test_early_weights(gemm, weights, device):
    check_gemm([258, 272, 0, 300, 10], 64, 264, False, weights, torch.float16, device, early=True)


@pytest.mark.parametrize("gated", [False, True])
def test_no_assignments(gemm, gated, device):
    check_gemm(COUNTS["nothing"], 64, 128, gated, 128, torch.bfloat16, device)


def check_gemm(
    counts: list[int],
    k: int,
    n: int,
    gated: bool,
    weights: int,
    dtype: torch.dtype,
    device: torch.device,
    early: bool = False,
) -> None:
    """Compare a GEMM with fp32 products; padding rows are NaN, and unused blocks stay so."""
    aligned, tiles = sort(counts, device)
    config, count = tile(weights, gated), aligned.rows_A.numel()
    list_token_tiles(aligned, tiles, token_sizes(config, gated))
    real = real_rows(aligned)
    a = torch.full((aligned.capacity, k), torch.nan, dtype=dtype, device=device)
    a[real] = torch.randn(int(real.sum()), k, device=device).to(dtype)
    rows = n * (2 if gated else 1)
    w = (torch.randn(len(counts), rows, k, device=device) * k**-0.5).to(dtype)
    share = torch.rand(count, device=device) * 2 if early else None
    out = torch.full((aligned.capacity, n), torch.nan, dtype=dtype, device=device)
    sorted_gemm(
        a, w, out, aligned, config, count, 5, token_tiles=tiles, weights_RK=share,
        activation=Activation("silu") if gated else None,
    )  # fmt: skip
    assert not aligned.counters.any(), "a next call would miss tiles"
    compare(out, a.float(), w.float(), aligned, counts, gated, share, LIMIT[dtype])


def compare(
    out: torch.Tensor,
    a: torch.Tensor,
    w: torch.Tensor,
    aligned: SortedAssignments,
    counts: list[int],
    gated: bool,
    share: torch.Tensor | None,
    limit: float,
) -> None:
    """Compare every expert's rows with the products of fp32 operands."""
    assert out[int(aligned.num_rows) :].isnan().all(), "written beyond the last block"
    expert_of, real = aligned.experts_B.repeat_interleave(128), real_rows(aligned)
    for expert, some in enumerate(counts):
        mine = real & (expert_of == expert)
        assert int(mine.sum()) == some
        want = a[mine] @ w[expert].T
        if gated:
            gate, up = want.chunk(2, dim=1)
            want = F.silu(gate) * up
        if share is not None:
            want *= share[aligned.assignments_S[mine].long()].clamp(max=1.0)[:, None]
        if some:
            error = relative(out[mine], want)
            assert error < limit, f"expert {expert}, {some} rows: relative error {error}"


@pytest.mark.parametrize(
    ("name", "k", "n", "gated", "early"),
    [
        ("edges", 320, 200, False, False),
        ("rests", 128, 264, False, True),
        ("edges", 320, 384, True, False),
        ("rests", 128, 256, True, False),
        ("nothing", 128, 128, True, False),
    ],
)
def test_fp8_gemm(gemm, name, k, n, gated, early, device):
    """fp8 blocks, against fp32 products and against tiles of 128 rows."""
    counts = COUNTS[name]
    aligned, tiles = sort(counts, device)
    config, count = tile(256, gated, 128), aligned.rows_A.numel()
    list_token_tiles(aligned, tiles, token_sizes(config, gated))
    real, capacity = real_rows(aligned), aligned.capacity
    experts, groups, rows = len(counts), -(-k // 128), n * (2 if gated else 1)

    def fp8(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=device) * 100).to(torch.float8_e4m3fn)

    a = torch.where(real[:, None], fp8(capacity, k).float(), torch.nan).to(torch.float8_e4m3fn)
    a_scale = torch.rand(groups, capacity, device=device).where(real, torch.nan) * 0.02
    w, w_scale = fp8(experts, rows, k), torch.rand(experts, -(-rows // 128), groups, device=device)
    w_scale *= 0.02 * k**-0.5
    share = torch.rand(count, device=device) * 2 if early else None
    whole = replace(config, swapped=False, halves=True)
    outs = []
    for each in (config, whole):
        out = torch.full((capacity, n), torch.nan, device=device)
        out = out.to(torch.float8_e4m3fn if gated else torch.bfloat16)
        out_scale = torch.full((-(-n // 128), capacity), torch.nan, device=device)
        scales = Scales(w_scale, a_scale, out_scale if gated else None)
        sorted_gemm(
            a, w, out, aligned, each, count, 5, token_tiles=tiles, weights_RK=share,
            activation=Activation("silu") if gated else None, scales=scales,
        )  # fmt: skip
        assert not aligned.counters.any(), "a next call would miss tiles"
        out = out.float()
        outs.append(out * widened(out_scale.T, 1, n) if gated else out)
    of_w = widened(widened(w_scale, 1, rows), 2, k)
    compare(outs[0], a.float() * widened(a_scale.T, 1, k), w.float() * of_w, aligned, counts,
            gated, share, 4e-2 if gated else 6e-3)  # fmt: skip
    if sum(counts):
        assert relative(outs[0][real], outs[1][real]) < 1e-3


def widened(scales: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return each scale for its 128 values."""
    return scales.repeat_interleave(128, dim).narrow(dim, 0, size)


@pytest.mark.parametrize("name", list(COUNTS))
@pytest.mark.parametrize("early", [False, True])
def test_both_gemms(gemm, name, early, device):
    """One launch gives the bits of two, with y where x was."""
    from moekit_triton.kernels.specialized_tokens_block import specialized_tokens_block

    counts, hidden, inner = COUNTS[name], 264, 200
    aligned, tiles = sort(counts, device)
    first, second, count = tile(256, True), tile(256, False), aligned.rows_A.numel()
    list_token_tiles(aligned, tiles, token_sizes(second))
    real, capacity = real_rows(aligned), aligned.capacity

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(torch.bfloat16)

    x = torch.where(real[:, None], rand(capacity, hidden), torch.nan)
    w13, w2 = rand(len(counts), 2 * inner, hidden) * 0.06, rand(len(counts), hidden, inner) * 0.07
    share = torch.rand(count, device=device) * 2 if early else None
    a, y = (torch.full((capacity, n), torch.nan, device=device).bfloat16() for n in (inner, hidden))
    options = {"token_tiles": tiles, "activation": Activation("silu")}
    sorted_gemm(x, w13, a, aligned, first, count, 5, **options)
    sorted_gemm(a, w2, y, aligned, second, count, 5, token_tiles=tiles, weights_RK=share)
    a.fill_(torch.nan)
    specialized_tokens_block(
        x, w13, a, w2, x, aligned, tiles, first, second, count, 5, share
    )  # fmt: skip
    assert torch.equal(x[real], y[real]) and not aligned.counters.any()


@pytest.mark.parametrize("weights", [(128, 128), (256, 256), (256, 128)])
@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_experts(specialized, monkeypatch, weights, scheme):
    """The whole block, with the buffers of the workspace, which overlap."""
    if scheme == "fp8_block" and weights != (256, 256):
        pytest.skip("fp8 blocks have one size of tile")
    block_k = 64 if scheme == "none" else 128
    first, second = tile(weights[0], True, block_k), tile(weights[1], False, block_k)
    kinds = (Copied, Joined) if weights == (256, 256) and scheme == "none" else (Copied,)
    for kind in kinds:
        use_plan(monkeypatch, kind(first, second))
        check_block(problem("cuda").replace(quant=scheme), 1100)


def test_plan_of_a_table():
    plan = Copied(tile(128, True), tile(256, False))
    assert plan_from_json(plan.to_json()) == plan
    for kind in ("ahead", "joined", "sorted"):
        with pytest.raises(ValueError, match="swapped"):
            plan_from_json(plan.to_json() | {"kind": kind})
    joined = Joined(tile(256, True), tile(256, False))
    assert plan_from_json(joined.to_json()) == joined


def test_candidates(monkeypatch):
    compiled(monkeypatch, triton_version="3.6.0")
    p = problem("sm90")
    for wide in (1, 2):
        assert not any(t.specialized and t.swapped for t in sorted_candidates(p, wide))
        found = token_candidates(p, wide)
        assert {token_sizes(t, wide == 2) for t in found} == {(128, 32), (256, 32)}
        assert token_sizes(replace(found[0], swapped=False)) is None
        found = token_candidates(p.replace(quant="fp8_block"), wide)
        assert {token_sizes(t, wide == 2) for t in found} == {(128, 16)}
    asked = {
        plan.first.swapped
        for _, plan in attempts(p, 4096, token_tiles=True)
        if isinstance(plan, Copied) and plan.first.specialized
    }
    assert asked == {True, False}
    assert not any(plan.first.swapped for _, plan in attempts(p, 4096))
