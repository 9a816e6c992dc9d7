"""fp8 blocks by specialized warps against plain torch in fp32, with NaN in unread memory."""

import pytest
import torch
import torch.nn.functional as F
import triton
from moekit_kernels.numerics import QMAX, Activation
from moekit_kernels.sorted_rows import copy_rows_quantized
from moekit_triton import capabilities, heuristics
from moekit_triton.kernels.operands import Scales, SortedLaunch
from moekit_triton.kernels.sorted_gemm import sorted_gemm
from moekit_triton.kernels.tiles import SpecializedTile
from moekit_triton.plans import Copied, Gathered, Sorted
from triton_checks import (
    choose_plan,
    compiled,
    real_rows,
    relative,
    run_align,
    uneven_ids,
)

from moekit import MoEProblem

E4M3 = torch.float8_e4m3fn


def problem(**changes) -> MoEProblem:
    sizes = dict(num_experts=8, top_k=2, hidden_size=512, intermediate_size=384, quant="fp8_block")
    return MoEProblem(**{**sizes, "device": "sm90", **changes})


def test_only_where_it_can(monkeypatch) -> None:
    compiled(monkeypatch, triton_version="3.6.0")
    wide = problem(hidden_size=4096, intermediate_size=2048)
    plan = choose_plan(wide, 8192, 2)
    assert type(plan) is Copied and type(plan.first) is type(plan.second) is SpecializedTile
    padded = wide.replace(intermediate_size=2048 + 64)
    assert padded.local_intermediate_size == 2048 + 128 and choose_plan(padded, 8192, 2) == plan
    for p in (wide.replace(has_bias=True), wide.replace(activation="gelu"),
              wide.replace(quant="fp8_w8a16_block"), wide.replace(dtype=torch.float32),
              wide.replace(device="sm89"), wide.replace(device="sm100")):  # fmt: skip
        assert type(choose_plan(p, 8192, 2)) is Gathered
    assert type(choose_plan(wide, 64, 2)) is Gathered
    monkeypatch.setattr(capabilities, "GLUON_VERSIONS", ())
    assert type(choose_plan(wide, 8192, 2)) is Gathered


def test_sorted_rows_override_older_measurements(monkeypatch) -> None:
    """A near entry may be older than these tiles, which win from 56 rows per expert on; in 16 bits
    token tiles do from 96."""
    compiled(monkeypatch)
    monkeypatch.setattr(heuristics, "specializable", lambda p: True)
    fp8 = problem(hidden_size=4096, intermediate_size=2048)
    older = [(rows, heuristics.heuristic(fp8, rows)) for rows in (55.0, 95.0)]
    monkeypatch.setattr(heuristics, "measured_plans", lambda p: older)
    for p, least in ((fp8, 56), (fp8.replace(quant="none"), 96)):
        assert type(choose_plan(p, 4 * least - 4, 2)) is Gathered
        assert isinstance(choose_plan(p, 4 * least, 2), Sorted)


def spread(scale: torch.Tensor, columns: int, rows: int = 1) -> torch.Tensor:
    """Expand scales (R, G) to ``columns`` columns, and each row of scales to ``rows`` rows."""
    return scale.repeat_interleave(rows, 0).repeat_interleave(128, 1)[:, :columns]


def weights(num_experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales that are four times or a fourth of their neighbours."""
    blocks = triton.cdiv(rows, 128), triton.cdiv(columns, 128)
    w = torch.randn(num_experts, rows, columns, device="cuda").to(E4M3)
    odd = sum(torch.meshgrid(*(torch.arange(n, device="cuda") for n in blocks), indexing="ij")) % 2
    scale = 4.0**odd * torch.exp(0.2 * torch.randn(num_experts, *blocks, device="cuda"))
    return w, scale * columns**-0.5


def of_expert(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, expert: int) -> torch.Tensor:
    rows, columns = w.shape[1:]
    return x @ (w[expert].float() * spread(scale[expert], columns, 128)[:rows]).T


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden", "inner", "rows"),
    [
        (8, 2, 512, 384, 700),
        (4, 1, 336, 256, 513),  # edges of both products
        (64, 4, 256, 768, 2000),
        (16, 8, 2048, 256, 5000),  # several tiles a program
        (3, 2, 1040, 128, 300),
        (128, 8, 384, 128, 4096),  # three steps and one, and more half blocks than whole ones
        (1, 1, 144, 128, 1),
    ],
)
def test_gemms(specialized, halves, num_experts, top_k, hidden, inner, rows):
    ids = uneven_ids(num_experts, top_k, rows)
    aligned = run_align(ids, num_experts, 128)
    real, count, capacity = real_rows(aligned), ids.numel(), aligned.capacity
    of = ids.flatten()[aligned.assignments_S[real].long()]
    tile = SpecializedTile(halves=halves)

    def nan(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device="cuda").to(dtype)

    x = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda")
    x *= spread(
        torch.exp(torch.randn(rows, triton.cdiv(hidden, 128), device="cuda")), hidden
    ).bfloat16()
    w13, s13 = weights(num_experts, 2 * inner, hidden)
    w2, s2 = weights(num_experts, hidden, inner)
    x_SH, xs = nan(E4M3, capacity, hidden), nan(torch.float32, triton.cdiv(hidden, 128), capacity)
    copy_rows_quantized(x, None, aligned, x_SH, xs)
    outs = []
    for _ in range(3):
        a_SI, a_s = nan(E4M3, capacity, inner), nan(torch.float32, inner // 128, capacity)
        y_SH = nan(torch.bfloat16, capacity, hidden)
        sorted_gemm(SortedLaunch(
            x_SH, w13, a_SI, aligned, tile, count, 132, activation=Activation("silu"),
            scales=Scales(s13, xs, a_s),
        ))  # fmt: skip
        a_SI.view(torch.uint8)[~real], a_s[:, ~real] = 0x7F, float("nan")
        sorted_gemm(SortedLaunch(a_SI, w2, y_SH, aligned, tile, count, 132, scales=Scales(s2, a_s)))
        outs.append((a_SI[real].view(torch.uint8), a_s[:, real], y_SH[real]))
        assert not aligned.counters.any(), "a next call would miss tiles"
    for out in outs:
        assert all(map(torch.equal, out, outs[0])), "not the same twice"

    x_real = x_SH[real].float() * spread(xs[:, real].T, hidden)
    codes, a_scale, y = a_SI[real].float(), a_s[:, real].T, y_SH[real]
    a = codes * spread(a_scale, inner)
    for expert in range(num_experts):
        mine = of == expert
        if not mine.any():
            continue
        gate, up = of_expert(x_real[mine], w13, s13, expert).chunk(2, dim=1)
        want = F.silu(gate) * up
        scale = want.view(len(want), -1, 128).abs().amax(2) / QMAX[E4M3]
        assert relative(a_scale[mine], scale) < 1e-2, f"expert {expert}: scales"
        exact = (want / spread(scale, inner)).clamp(-448, 448).to(E4M3).float()
        assert (exact == codes[mine]).float().mean() > 0.9, f"expert {expert}: codes"
        assert relative(a[mine], want) < 3.5e-2
        error = relative(y[mine], of_expert(a[mine], w2, s2, expert))
        assert error < 1e-2, f"expert {expert}: relative error {error}"
        if s2.shape[1] > 1:
            wrong = of_expert(a[mine], w2, s2.roll(1, 1), expert)
            assert relative(y[mine], wrong) > 0.2, "neighbouring scales would do as well"


@pytest.mark.parametrize("halves", [False, True])
def test_no_assignments(specialized, halves):
    aligned = run_align(torch.full((300, 2), -1, device="cuda"), 3, 128)
    capacity = aligned.capacity
    (w, scale), a_s = weights(3, 256, 128), torch.ones(1, capacity, device="cuda")
    y = torch.full((capacity, 256), float("nan"), dtype=torch.bfloat16, device="cuda")
    tile = SpecializedTile(halves=halves)
    a = torch.ones(capacity, 128, device="cuda").to(E4M3)
    sorted_gemm(SortedLaunch(a, w, y, aligned, tile, 600, 132, scales=Scales(scale, a_s)))
    assert bool(y.isnan().all()) and not aligned.counters.any()
