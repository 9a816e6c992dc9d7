"""GEMMs by specialized warps against plain torch in fp32, with NaN in unread memory."""

import pytest
import torch
import torch.nn.functional as F
from moekit_kernels.numerics import Activation
from moekit_kernels.sorted_rows import copy_rows
from moekit_triton.kernels.operands import SortedLaunch
from moekit_triton.kernels.sorted_gemm import sorted_gemm
from moekit_triton.kernels.tiles import SpecializedTile
from moekit_triton.plans import Sorted
from triton_checks import (
    choose_plan,
    compiled,
    real_rows,
    relative,
    run_align,
    uneven_ids,
)

from moekit import MoEProblem

LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


def problem(**changes) -> MoEProblem:
    sizes = dict(num_experts=8, top_k=2, hidden_size=512, intermediate_size=384)
    return MoEProblem(**{**sizes, **changes}, device="sm90")


def test_only_where_it_can(monkeypatch) -> None:
    compiled(monkeypatch, triton_version="3.9.0")
    wide = problem(hidden_size=4096, intermediate_size=2048)
    for p in (wide.replace(has_bias=True), wide.replace(activation="gelu"),
              wide.replace(activation="relu2")):  # fmt: skip
        plan = choose_plan(p, 8192, 2)
        assert isinstance(plan, Sorted) and SpecializedTile not in (
            type(plan.first),
            type(plan.second),
        )
    plan = choose_plan(wide, 8192, 2)
    assert type(plan.first) is type(plan.second) is SpecializedTile


@pytest.mark.parametrize("order", ["copied", "ahead"])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden", "inner", "rows"),
    [
        (8, 2, 512, 384, 700),
        (4, 1, 328, 200, 513),  # edges of both products
        (64, 4, 256, 768, 2000),
        (16, 8, 2048, 256, 5000),  # several tiles a program
        (1, 1, 64, 64, 1),
    ],
)
def test_block(specialized, order, halves, dtype, num_experts, top_k, hidden, inner, rows):
    def randn(*shape: int, by: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") * by).to(dtype)

    def nan(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device="cuda")

    ids = uneven_ids(num_experts, top_k, rows)
    aligned = run_align(ids, num_experts, 128)
    real, count, capacity = real_rows(aligned), ids.numel(), aligned.capacity

    x = randn(rows, hidden + 8)[:, :hidden]
    w13 = randn(num_experts, 2 * inner, hidden, by=hidden**-0.5)
    w2 = randn(num_experts, hidden, inner, by=inner**-0.5)
    tile = SpecializedTile(halves=halves)
    x_SH, a_SI, y_SH = nan(capacity, hidden), nan(capacity, inner), nan(capacity, hidden)
    options = {"activation": Activation("silu"), "x_RK": x if order == "ahead" else None}
    outs = []
    for _ in range(3):
        for buffer in (x_SH, a_SI, y_SH):
            buffer.fill_(float("nan"))
        if order != "ahead":
            copy_rows(x, aligned, x_SH)
        sorted_gemm(SortedLaunch(x_SH, w13, a_SI, aligned, tile, count, 132, **options))
        a_SI[~real] = float("nan")
        sorted_gemm(SortedLaunch(a_SI, w2, y_SH, aligned, tile, count, 132))
        outs.append(y_SH[real])
        assert not aligned.counters.any(), "a next call would miss tiles"
    assert all(torch.equal(out, outs[0]) for out in outs), "not the same twice"

    flat = ids.flatten()
    of = flat[aligned.assignments_S[real].long()]
    rows_of = aligned.assignments_S[real].long() // top_k
    for expert in range(num_experts):
        mine = of == expert
        gate, up = (x[rows_of[mine]].float() @ w13[expert].float().T).chunk(2, dim=1)
        want = (F.silu(gate) * up).to(dtype).float() @ w2[expert].float().T
        if len(want):
            error = relative(outs[0][mine], want)
            assert error < LIMIT[dtype], f"expert {expert}: relative error {error}"


@pytest.mark.parametrize("order", ["copied", "ahead"])
@pytest.mark.parametrize("halves", [False, True])
def test_no_assignments(specialized, halves, order):
    ids = torch.full((300, 2), -1, device="cuda")
    aligned = run_align(ids, 3, 128)
    capacity, count = aligned.capacity, ids.numel()
    tile = SpecializedTile(halves=halves)
    x, w13, w2 = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((300, 64), (3, 256, 64), (3, 64, 128))
    )
    x_SH, a_SI, y_SH = (x.new_full((capacity, n), torch.nan) for n in (64, 128, 64))
    options = {"activation": Activation("silu"), "x_RK": x if order == "ahead" else None}
    sorted_gemm(SortedLaunch(x_SH, w13, a_SI, aligned, tile, count, 132, **options))
    sorted_gemm(SortedLaunch(a_SI, w2, y_SH, aligned, tile, count, 132))
    assert all(bool(buffer.isnan().all()) for buffer in (x_SH, a_SI, y_SH))
    assert not aligned.counters.any()


def test_more_programs_than_run_at_once(specialized):
    """Programs wait for rows, but never for a program that has not started."""
    ids = uneven_ids(8, 2, 4000)
    aligned = run_align(ids, 8, 128)
    real, count, capacity = real_rows(aligned), ids.numel(), aligned.capacity
    x, w13 = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5
        for shape in ((4000, 512), (8, 4096, 512))
    )
    tile = SpecializedTile(halves=True)

    def run(programs: int) -> torch.Tensor:
        x_SH, a_SI = x.new_full((capacity, 512), torch.nan), x.new_full((capacity, 2048), torch.nan)
        silu = Activation("silu")
        sorted_gemm(
            SortedLaunch(x_SH, w13, a_SI, aligned, tile, count, programs, activation=silu, x_RK=x)
        )
        return a_SI[real]

    want = run(1)
    assert not want.isnan().any()
    for programs in (2, 132, 133, 1000):
        assert torch.equal(run(programs), want), f"{programs} programs"
        assert not aligned.counters.any()
