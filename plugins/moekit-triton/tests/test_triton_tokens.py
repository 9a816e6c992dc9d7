"""Token tiles: their list, and swap-AB GEMMs by specialized warps, with NaN in padding rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from moekit_kernels.align import COUNTERS, SortedAssignments, align, align_capacity, align_scratch
from moekit_kernels.numerics import Activation
from moekit_triton.kernels.operands import SortedLaunch
from moekit_triton.kernels.sorted_gemm import sorted_gemm
from moekit_triton.kernels.tiles import TokenTile
from moekit_triton.kernels.token_tiles import list_token_tiles, tile_list_entries
from moekit_triton.plans import Copied
from moekit_triton.search import attempts
from triton_checks import check_block, compiled, real_rows, relative, use_plan

from moekit import MoEProblem

COUNTS = {
    "edges": [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 0],
    "rests": [258, 272, 273, 288, 289, 0, 160, 161, 300, 512, 513, 544, 545, 33],
    "nothing": [0, 0, 0],
}
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


def problem(device: str) -> MoEProblem:
    return MoEProblem(
        num_experts=8, top_k=2, hidden_size=1024, intermediate_size=768, device=device
    )


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
@pytest.mark.parametrize("tokens", [128, 256])
def test_list(name, tokens, device):
    counts = COUNTS[name]
    aligned, tiles = sort(counts, device)
    list_token_tiles(aligned, tiles, tokens)
    want, start = [], 0
    for expert, count in enumerate(counts):
        first, left = start, count
        while left > 0:
            rows = left if left <= tokens + 32 else tokens
            want.append([first, expert * 32 + -(-rows // 16)])
            first, left = first + rows, left - rows
        start += -(-count // 128) * 128
    assert tiles[0] == len(want)
    assert tiles[1 : 1 + 2 * len(want)].view(-1, 2).tolist() == want
    assert (tiles[1 + 2 * len(want) :] == -77).all(), "more than the tiles"


@pytest.mark.parametrize(("name", "k", "n"), [("edges", 320, 200), ("rests", 64, 264)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weights", [128, 256])
def test_gemm(specialized, name, k, n, gated, weights, device):
    check_gemm(COUNTS[name], k, n, gated, weights, torch.bfloat16, device)


@pytest.mark.parametrize("weights", [128, 256])
def test_early_weights(specialized, weights, device):
    check_gemm([258, 272, 0, 300, 10], 64, 264, False, weights, torch.float16, device, early=True)


@pytest.mark.parametrize("gated", [False, True])
def test_no_assignments(specialized, gated, device):
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
    tile, count = TokenTile(weights, 3), aligned.rows_A.numel()
    list_token_tiles(aligned, tiles, tile.tokens)
    real = real_rows(aligned)
    a = torch.full((aligned.capacity, k), torch.nan, dtype=dtype, device=device)
    a[real] = torch.randn(int(real.sum()), k, device=device).to(dtype)
    rows = n * (2 if gated else 1)
    w = (torch.randn(len(counts), rows, k, device=device) * k**-0.5).to(dtype)
    share = torch.rand(count, device=device) * 2 if early else None
    out = torch.full((aligned.capacity, n), torch.nan, dtype=dtype, device=device)
    sorted_gemm(SortedLaunch(
        a, w, out, aligned, tile, count, 5, token_tiles=tiles, weights_RK=share,
        activation=Activation("silu") if gated else None,
    ))  # fmt: skip
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


@pytest.mark.parametrize("weights", [(128, 128), (256, 256), (256, 128)])
def test_experts(specialized, monkeypatch, weights):
    """The whole block, with the buffers of the workspace, which overlap."""
    use_plan(monkeypatch, Copied(*(TokenTile(rows, 3) for rows in weights)))
    check_block(problem("cuda"), 1100)


def test_candidates(monkeypatch):
    """Token tiles are timed for 16 bits, up to 1024 rows an expert."""
    compiled(monkeypatch, triton_version="3.6.0")
    p = problem("sm90")

    def timed(p: MoEProblem, rows: int) -> set[tuple[str, type]]:
        return {(step, type(plan)) for step, plan in attempts(p, rows)
                if isinstance(plan.first, TokenTile)}  # fmt: skip

    for rows in (512, 4096):
        assert timed(p, rows) == {("gemm_1", Copied), ("gemm_2", Copied)}
    for other in (p.replace(quant="fp8_block"), p.replace(has_bias=True), p.replace(device="sm89")):
        assert not timed(other, 1024)
    assert not timed(p, 4100) and not timed(p, 64)
