"""Both GEMMs over sorted rows against plain torch in fp32, with NaN in unread memory."""

from dataclasses import replace

import pytest
import torch
from moekit_kernels.numerics import INTERPRETED
from moekit_kernels.numerics import Activation as KernelActivation
from moekit_kernels.rows import quantize_rows
from moekit_kernels.sorted_rows import copy_rows, copy_rows_quantized
from moekit_triton import plans
from moekit_triton.kernels.gemm import grouped_gemm
from moekit_triton.kernels.operands import Epilogue, Rows, SortedLaunch
from moekit_triton.kernels.sorted_gemm import sorted_gemm
from moekit_triton.kernels.tiles import GemmTile, SortedTile, SpecializedTile
from moekit_triton.plans import Copied, Gathered, Sorted
from triton_checks import check_block, choose_plan, real_rows, relative, run_align, use_plan

from moekit import Activation, MoEProblem, Workspace, compose
from moekit.plugin import Dispatched
from moekit.problem.activation import apply_activation
from moekit.testing.calls import SUMS_ITSELF, kit_registry, pack
from moekit.testing.cases import make_case
from moekit.testing.memory import poison

BLOCK_M, SMS = 64, 3
TILE = SortedTile(BLOCK_M, 32, 32, group_m=2, num_warps=4, num_stages=3)
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def hopper(device):
    if not INTERPRETED and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor descriptors need compute capability 9.0")


def nan(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


@pytest.mark.parametrize(
    ("activation", "bias"),
    [
        (Activation("silu"), False),
        (Activation("swigluoai", limit=1.0), True),
        (Activation("relu2"), True),
    ],
)
@pytest.mark.parametrize("tiles", ["plain", "persistent", "halves"])
@pytest.mark.parametrize(
    ("dtype", "hidden", "inner"),
    [(torch.bfloat16, 64, 96), (torch.bfloat16, 72, 40), (torch.float16, 72, 40)],
)
def test_block(device, activation, bias, tiles, dtype, hidden, inner):
    fused = KernelActivation.of(activation)
    experts, rows, top_k = 3, 150, 2
    count = rows * top_k
    block_m = BLOCK_M if INTERPRETED else 128
    tile = replace(TILE, block_m=block_m, **({} if tiles == "plain" else {tiles: True}))
    wide = 2 * inner if activation.gated else inner

    def randn(*shape: int, by: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape) * by).to(device, dtype)

    x, ids = randn(rows, hidden), torch.randint(-1, experts, (rows, top_k), device=device)
    ids[:, 0], ids[:, 1] = -1, torch.arange(rows, device=device) % 2 * 2
    ids[: block_m + 9, 0] = 1  # two blocks, the second less than half full; else more, or less
    w13, w2 = randn(experts, wide, hidden, by=hidden**-0.5), randn(experts, hidden, inner, by=0.2)
    b13, b2 = (randn(experts, n) if bias else None for n in (wide, hidden))
    aligned = run_align(ids, experts, block_m)
    entries = aligned.capacity

    x_SH = nan(entries, hidden, like=x)
    copy_rows(x, aligned, x_SH)
    real = real_rows(aligned)
    assert torch.equal(x_SH[real], x[aligned.assignments_S[real] // top_k])
    assert bool(x_SH[~real].isnan().all()), "copied to a padding row"
    a_SI, gathered_SI = (nan(entries, inner, like=x) for _ in range(2))
    sorted_gemm(
        SortedLaunch(x_SH, w13, a_SI, aligned, tile, count, SMS, bias_LN=b13, activation=fused)
    )
    if tiles != "persistent":
        gathering = Rows.aligned(aligned, top_k, in_order=True)
        halves = tiles == "halves"
        plain = GemmTile(block_m, 32, 32, group_m=2, tma=not INTERPRETED, halves=halves)
        grouped_gemm(x, w13, gathered_SI, gathering, plain, bias_LN=b13,
                     epilogue=Epilogue(fused))  # fmt: skip
        assert bool(gathered_SI[~real].isnan().all()), "wrote a padding row"
        assert relative(gathered_SI[real], a_SI[real].float()) < LIMIT[dtype]
    y = nan(count, hidden, like=x)
    sorted_gemm(SortedLaunch(a_SI, w2, y, aligned, tile, count, SMS, bias_LN=b2))

    flat, assignment = ids.flatten(), torch.arange(count, device=device)
    assert bool(torch.isnan(y[flat < 0]).all()), "wrote an assignment without expert"
    for expert in range(experts):
        mine = assignment[flat == expert]
        h = x[mine // top_k].float() @ w13[expert].float().T
        h = h if b13 is None else h + b13[expert].float()
        a = apply_activation(h, activation).to(dtype).float()
        want = a @ w2[expert].float().T + (0 if b2 is None else b2[expert].float())
        error = relative(y[mine], want)
        assert error < LIMIT[dtype], f"expert {expert}: relative error {error}"


@pytest.mark.parametrize(("hidden", "top_k"), [(256, 2), (2320, 3)])
def test_quantize_into_order(device, hidden, top_k):
    """Like `quantize_rows`; x that is already quantized moves with its scales."""
    rows, groups = 24, (hidden + 127) // 128
    spread = torch.exp(2 * torch.randn(rows, groups)).repeat_interleave(128, 1)[:, :hidden]
    x = (torch.randn(rows, hidden) * spread).to(device, torch.bfloat16)
    ids = torch.randint(-1, 3, (rows, top_k), device=device)
    aligned = run_align(ids, 3, BLOCK_M)
    real, entries = real_rows(aligned), aligned.capacity
    of = aligned.assignments_S[real].long() // top_k
    q = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(rows, groups, device=device)
    quantize_rows(x, q, scale)
    strided = torch.empty(groups, rows, device=device).t().copy_(scale)
    for source, source_scale in ((x, None), (q, scale), (q, strided)):
        out = torch.full((entries, hidden), float("nan"), device=device).to(q.dtype)
        out_scale = torch.full((groups, entries), float("nan"), device=device)
        copy_rows_quantized(source, source_scale, aligned, out, out_scale)
        assert torch.equal(out[real].view(torch.uint8), q.view(torch.uint8)[of])
        assert torch.equal(out_scale[:, real], scale[of].T)
        assert bool(out.float()[~real].isnan().all()), "wrote a padding row"
        assert bool(out_scale[:, ~real].isnan().all()), "wrote a padding row's scale"


def test_no_assignments(device):
    ids = torch.full((5, 2), -1, device=device)
    aligned = run_align(ids, 3, BLOCK_M)
    x = torch.randn(5, 64, device=device, dtype=torch.bfloat16)
    x_SH = nan(aligned.capacity, 64, like=x)
    copy_rows(x, aligned, x_SH)
    y = nan(10, 32, like=x)
    w = torch.randn(3, 32, 64, device=device).bfloat16()
    for persistent in (False, True):
        tile = replace(TILE, persistent=persistent)
        sorted_gemm(SortedLaunch(x_SH, w, y, aligned, tile, ids.numel(), SMS))
    assert bool(torch.isnan(y).all() and torch.isnan(x_SH).all())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [Sorted, Copied])
def test_experts(device, monkeypatch, bias, kind):
    """The whole block, with the buffers of the workspace, which overlap."""
    first = GemmTile(BLOCK_M, 32, 32, tma=not INTERPRETED) if kind is Sorted else TILE
    use_plan(monkeypatch, kind(first, replace(TILE, persistent=True)))
    sizes = dict(num_experts=5, top_k=2, hidden_size=96, intermediate_size=160)
    problem = MoEProblem(**sizes, has_bias=bias, device=device.type)
    check_block(problem, tokens=90)


@pytest.mark.skipif(INTERPRETED, reason="large")
def test_experts_by_heuristic(device):
    sizes = dict(num_experts=8, top_k=2, hidden_size=1024, intermediate_size=2048)
    problem = MoEProblem(**sizes, device="cuda")
    assert type(choose_plan(problem, 1500, 2)) is Copied
    check_block(problem, tokens=1500)


def test_rows_that_specialized_warps_leave_have_places(device, monkeypatch) -> None:
    """Expert-sorted rows; the GEMMs, which need a Hopper GPU, write nothing here."""
    problem = MoEProblem(num_experts=4, top_k=2, hidden_size=128, intermediate_size=128,
                         device=device)  # fmt: skip
    use_plan(monkeypatch, plan := Copied(SpecializedTile(), SpecializedTile()))
    monkeypatch.setattr(plans, "sorted_gemm", lambda *args, **options: None)
    kernel = compose(problem, SUMS_ITSELF, "triton", backends=kit_registry(), workspace=Workspace())
    monkeypatch.setattr(
        kernel.experts, "workspace", lambda rows: plan.workspace(kernel.experts._layer, rows, 2)
    )
    case = make_case(problem, 40, "masked")
    kernel(case.x, pack(kernel, case.weights), case.routing)
    assert kernel.dispatcher.taken == 1


_SORTED_FIRST = GemmTile(BLOCK_M, 32, 32, tma=not INTERPRETED)
_SMALL = GemmTile(16, 32, 32)


@pytest.mark.parametrize(
    ("plan", "quant"),
    [
        (Gathered(_SMALL, _SMALL, fused=True), "none"),
        (Gathered(_SMALL, replace(_SMALL, block_k=64), fused=False), "fp8_channel_token"),
        (Sorted(_SORTED_FIRST, TILE), "none"),
        (Copied(TILE, TILE), "none"),
    ],
    ids=["fused", "quantized", "sorted", "copied"],
)
@pytest.mark.parametrize("live", [9, pytest.param(0, marks=pytest.mark.full)])
def test_rows_behind_the_live_ones(device, monkeypatch, plan, quant, live):
    """Many rows that hold NaN change no bit, and their outputs stay as they were."""
    use_plan(monkeypatch, plan)
    R = 600 if INTERPRETED else 4000
    problem = MoEProblem(num_experts=4, top_k=2, hidden_size=64, intermediate_size=64, quant=quant,
                         max_num_tokens=R, device=device.type)  # fmt: skip
    kernel = compose(problem, "local", "triton")
    case = make_case(problem, R, "masked")
    packed = pack(kernel, case.weights)
    x, ids, weights = (
        case.x.clone(),
        case.routing.topk_ids.clone(),
        case.routing.topk_weights.clone(),
    )
    x[live:], ids[live:], weights[live:] = float("nan"), -1, float("nan")
    specs = kernel.experts.workspace(R)
    found = []
    for num_rows in (None, torch.tensor([live], dtype=torch.int32, device=device)):
        memory = [torch.empty(s.shape, dtype=s.dtype, device=device) for s in specs]
        for each in memory:
            poison(each)
        y = nan(R, 64, like=x)
        given = Dispatched(x, None, ids, weights, num_rows=num_rows)
        kernel.experts.apply(y, given, packed, memory)
        found.append(y)
    assert torch.equal(found[1][:live], found[0][:live])
    assert bool(found[0].isfinite().all()) and bool(found[1][live:].isnan().all())
