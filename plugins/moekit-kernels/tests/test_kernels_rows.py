"""Compare the row kernels with plain torch in fp32."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from moekit_kernels.align import SortedAssignments, align, align_capacity
from moekit_kernels.numerics import QMAX
from moekit_kernels.numerics import Activation as KernelActivation
from moekit_kernels.rows import (
    AMAX_PARTIALS,
    Tiling,
    ValidRows,
    activate_rows,
    quantize_rows,
    quantize_rows_per_tensor,
    weighted_sum,
)
from moekit_kernels.sorted_rows import copy_rows, copy_rows_quantized

from moekit import Activation
from moekit.problem.activation import apply_activation

FP8, INT8 = torch.float8_e4m3fn, torch.int8
NAN = float("nan")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    assert torch.isfinite(out.float()).all()
    return float((out.float() - reference.float()).norm() / reference.float().norm())


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> torch.Tensor:
    """Return values that every dtype holds, drawn on the CPU, so the same on every device."""
    if dtype == INT8:
        return torch.randint(-127, 128, shape, dtype=INT8).to(device)
    return torch.randn(shape).to(dtype).to(device)


def activation_reference(x: torch.Tensor, act: Activation) -> torch.Tensor:
    return apply_activation(x.float(), act, dim=1)


ACTIVATIONS = [
    Activation("silu"),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("swigluoai", limit=2.0),
    Activation("silu", limit=1.0),
    Activation("swiglustep", limit=1.5),
    Activation("situ", alpha=2.5),
    Activation("situ", alpha=1.3, limit=0.7),
    Activation("relu2_and_mul"),
    *(Activation(f"{name}_no_mul") for name in ("silu", "gelu", "gelu_tanh", "relu2")),
]


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation(device, act, dtype):
    torch.manual_seed(0)
    rows, cols = 6, 200
    x = (3 * torch.randn(rows, cols * (1 + act.gated))).to(dtype).to(device)
    reference = activation_reference(x, act)
    ids = torch.tensor([0, -1, 3, 5, -1, 2], device=device)
    x[ids < 0] = NAN
    out = torch.full((rows, cols), 7.0, dtype=dtype, device=device)
    activate_rows(x, out, KernelActivation.of(act), ValidRows(ids=ids))
    assert relative_error(out[ids >= 0], reference[ids >= 0]) < (
        3e-3 if dtype == torch.bfloat16 else 1e-6
    )
    assert (out[ids < 0] == 7.0).all()


def quantize_reference(
    x: torch.Tensor, dtype: torch.dtype, group: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, scale) with one scale per ``group`` columns; None = one for the tensor."""
    x = x.float().cpu()  # a GPU's torch divides by a number as by its reciprocal
    rows, cols = x.shape
    if group is None:
        scale = (x.abs().max().clamp(min=1e-12) / QMAX[dtype]).reshape(1, 1)
        wide = scale
    else:
        padded = F.pad(x, (0, -cols % group)).view(rows, -1, group)
        scale = padded.abs().amax(dim=2).clamp(min=1e-12) / QMAX[dtype]
        wide = scale.repeat_interleave(group, dim=1)[:, :cols]
    q = (x / wide).clamp(-QMAX[dtype], QMAX[dtype])
    return (q.round() if dtype == INT8 else q).to(dtype), scale


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "cols"), list(itertools.product(["static", "tensor", "row", "group"], [64, 200, 384]))
)
@pytest.mark.parametrize("valid_kind", ["all", "ids", "counts"])
def test_quantize(device, dtype, source, kind, cols, valid_kind):
    torch.manual_seed(0)
    rows = 6
    x = (
        torch.randn(rows, 2 * cols)
        .mul(torch.logspace(-3, 2, rows)[:, None])
        .to(source)
        .to(device)[:, :cols]
    )
    x[0] = 0
    ids = torch.tensor([0, 3, -1, 5, -1, 2], device=device)
    counts = torch.tensor([2, 1], dtype=torch.int32, device=device)
    valid, present = {
        "all": (ValidRows(), torch.ones(rows, dtype=torch.bool)),
        "ids": (ValidRows(ids=ids), ids >= 0),
        "counts": (ValidRows(counts_L=counts, capacity=3), torch.tensor([1, 1, 0, 1, 0, 0]).bool()),
    }[valid_kind]
    present = present.to(device)
    x[~present] = NAN
    q = torch.zeros(rows, cols, dtype=dtype, device=device)
    group = {"static": None, "tensor": None, "row": cols, "group": 128}[kind]
    q_ref, scale_ref = quantize_reference(x[present], dtype, group)
    if kind in ("static", "tensor"):
        scale = torch.full((1, 1), NAN) if kind == "tensor" else scale_ref.clone()
        scale = scale.to(device)
        scratch = None if kind == "static" else torch.full((AMAX_PARTIALS,), NAN, device=device)
        quantize_rows_per_tensor(x, q, scale, valid, scratch=scratch)
    else:
        scale = torch.full((rows, cdiv(cols, group)), NAN, device=device)
        quantize_rows(x, q, scale, valid)
        assert scale[~present].isnan().all()
        scale = scale[present]
    assert torch.equal(scale.cpu(), scale_ref)
    assert torch.equal(q[present].float().cpu(), q_ref.float())
    assert (q[~present].float() == 0).all()


@pytest.mark.parametrize("kind", ["static", "row", "group"])
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_activation_quantized(device, dtype, kind):
    torch.manual_seed(0)
    rows, cols = 4, 200
    x = randn(rows, 2 * cols, dtype=torch.bfloat16, device=device)
    counts = torch.tensor([1, 2], dtype=torch.int32, device=device)
    present = torch.tensor([True, False, True, True], device=device)
    act = Activation("silu")
    x[~present] = NAN
    group = {"static": None, "row": cols, "group": 128}[kind]
    q_ref, scale_ref = quantize_reference(activation_reference(x[present], act), dtype, group)
    shape = (1, 1) if kind == "static" else (rows, cdiv(cols, group))
    scale = torch.full(shape, NAN, device=device)
    if kind == "static":
        scale = scale_ref.to(device)
    q = torch.zeros(rows, cols, dtype=dtype, device=device)
    valid = ValidRows(counts_L=counts, capacity=2)
    activate_rows(x, q, KernelActivation.of(act), valid, scale=scale, static_scale=kind == "static")
    scale = scale if kind == "static" else scale[present]
    torch.testing.assert_close(scale.cpu(), scale_ref, rtol=1e-5, atol=0)
    # the activation's last bit may move a value across a rounding boundary
    assert (q[present].float().cpu() != q_ref.float()).float().mean() < 0.01
    assert (q[~present].float() == 0).all()


TILINGS = [
    (300, "row", Tiling(4, 2, 256, 4)), (300, "row", Tiling(1, 5, 64, 2)),
    (96, "row", Tiling(2, 3, 32, 2)), (768, "row", Tiling(8, 3, 256, 4)),
    (300, "group", Tiling(32, 1, 128, 4)), (768, "group", Tiling(8, 1, 128, 2)),
    (300, "static", Tiling(16, 1, 128, 4)), (96, "static", Tiling(4, 2, 64, 1)),
    (300, "none", Tiling(32, 1, 128, 4)), (96, "none", Tiling(16, 2, 32, 4)),
    (768, "none", Tiling(1, 3, 128, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("cols", "kind", "tiling"), TILINGS, ids=str)
@pytest.mark.parametrize("valid_kind", ["all", "mask", "ids", "one expert", "experts"])
def test_rows_tilings(device, monkeypatch, cols, kind, tiling, valid_kind):
    """Several rows per program, several tiles per row, partial tiles; absent rows are NaN."""
    monkeypatch.setattr(Tiling, "of", lambda *_: tiling)
    torch.manual_seed(0)
    rows, act = 42, Activation("silu")
    kernel_act = KernelActivation.of(act)
    counts = [29] if valid_kind == "one expert" else [5, 0, 1, 7, 6, 7]
    capacity = rows // len(counts)
    present = torch.rand(rows) < 0.6
    present[8:29] = False  # programs without any row
    if valid_kind not in ("mask", "ids"):
        full = valid_kind == "all"
        present = torch.tensor([full or r % capacity < counts[r // capacity] for r in range(rows)])
    present = present.to(device)
    batched = ValidRows(counts_L=torch.tensor(counts).int().to(device), capacity=capacity)
    ids = ValidRows(ids=torch.where(present, 3, -1))
    others = {"all": ValidRows(), "mask": ValidRows(mask=present), "ids": ids}
    valid = others.get(valid_kind, batched)
    x = randn(rows, 2 * cols, dtype=torch.bfloat16, device=device)
    x[~present] = NAN
    h = activation_reference(x[present], act)

    if kind == "none":
        out = torch.full((rows, cols), 7.0, dtype=torch.bfloat16, device=device)
        activate_rows(x, out, kernel_act, valid)
        assert relative_error(out[present], h) < 3e-3
        assert (out[~present] == 7.0).all()
        return
    group = {"row": cols, "group": 128, "static": None}[kind]
    for source, activation in ((x[:, :cols], None), (x, act)):
        want = source[present] if activation is None else h
        q_ref, scale_ref = quantize_reference(want, FP8, group)
        q = torch.full((rows, cols), 7.0, device=device).to(FP8)
        written = group is not None
        shape = (rows, cdiv(cols, group)) if written else (1, 1)
        scale = torch.full(shape, NAN, device=device) if written else scale_ref.to(device)
        if activation is not None:
            activate_rows(source, q, kernel_act, valid, scale=scale, static_scale=not written)
        elif not written:
            quantize_rows_per_tensor(source, q, scale, valid, scratch=None)
        else:
            quantize_rows(source, q, scale, valid)
        assert (q[~present].float() == 7.0).all()
        if written:
            assert scale[~present].isnan().all()
            torch.testing.assert_close(scale[present].cpu(), scale_ref, rtol=1e-5, atol=0)
        moved = (q[present].float().cpu() != q_ref.float()).float().mean()
        assert moved == 0 if activation is None else moved < 0.01


def test_tilings_fit():
    """Tiles cover a row and fit a thread's registers, for every width and number of rows."""
    sizes, flags = itertools.product((1, 64, 1000, 1 << 17), range(16, 32_000, 112)), (False, True)
    for (rows, cols), whole, gated in itertools.product(sizes, flags, flags):
        t = Tiling.of(rows, cols, whole, gated)
        assert all(n & (n - 1) == 0 for n in (t.lines, t.block, t.warps)) and t.warps <= 32
        assert t.lines * t.width <= 64 * 32 * t.warps
        assert t.width >= cols if whole else t.width == 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_weighted_sum(device, dtype, weighted):
    torch.manual_seed(0)
    rows, top_k, cols = 5, 3, 200
    y = randn(rows * top_k, cols, dtype=dtype, device=device)
    ids = torch.tensor(
        [[0, 1, -1], [-1, -1, -1], [2, 2, 2], [-1, 4, -1], [3, -1, 0]], device=device
    )
    weights = torch.rand(rows, top_k, device=device) * 3
    factor = (weights if weighted else torch.ones_like(weights)) * (ids >= 0)
    reference = (y.float().view(rows, top_k, cols) * factor[:, :, None]).sum(1)
    y[ids.flatten() < 0] = NAN
    out = torch.full((rows, cols), NAN, dtype=dtype, device=device)
    weighted_sum(y, weights if weighted else None, ids, out)
    assert relative_error(out, reference) < (3e-3 if dtype == torch.bfloat16 else 2e-6)
    assert (out[1] == 0).all()

    sorted_rows = torch.randperm(2 * rows * top_k, device=device)[: rows * top_k].int()
    sorted_rows[ids.flatten() < 0] = -1
    y_S = torch.full((2 * rows * top_k, cols), NAN, dtype=dtype, device=device)
    y_S[sorted_rows[ids.flatten() >= 0].long()] = y[ids.flatten() >= 0]
    by_rows = torch.full_like(out, NAN)
    weighted_sum(y_S, weights if weighted else None, ids, by_rows, sorted_rows)
    assert torch.equal(by_rows, out)

    bias = randn(5, cols, dtype=dtype, device=device)
    reference += (bias.float()[ids.clamp(min=0)] * factor[:, :, None]).sum(1)
    weights[ids < 0] = NAN
    for given in ((y, None), (y_S, sorted_rows)):
        biased = torch.full_like(out, NAN)
        weighted_sum(given[0], weights if weighted else None, ids, biased, given[1], bias)
        assert relative_error(biased, reference) < (3e-3 if dtype == torch.bfloat16 else 2e-6)
        assert (biased[1] == 0).all()


@pytest.mark.parametrize("live", [0, 1, 7, 11])
def test_live_rows(device, live):
    """Rows behind the live ones are neither read nor written."""
    rows, top_k, cols, experts, block_m = 11, 2, 200, 3, 16
    ids = torch.randint(-1, experts, (rows, top_k), dtype=torch.int32, device=device)
    ids[0, 0] = 1
    count = torch.tensor([live], dtype=torch.int32, device=device)
    weights, y = torch.rand(rows, top_k, device=device), randn(rows * top_k, cols, device=device)
    want = torch.empty(rows, cols, device=device)
    weighted_sum(y, weights, ids, want)
    want[live:] = NAN
    x = randn(rows, cols, dtype=torch.bfloat16, device=device)
    capacity = align_capacity(ids.numel(), experts, block_m)
    sizes = (capacity, capacity // block_m, 1, rows * top_k)
    lists = [torch.zeros(n, dtype=torch.int32, device=device) for n in sizes]
    held = ids.clone()
    held[live:] = -1
    aligned = SortedAssignments(*lists[:3], block_m, lists[3], live_R=count)
    align(held, experts, aligned, lists[0][:0])
    sorted_rows = lists[3].clone()

    weights[live:], y[live * top_k :], x[live:] = NAN, NAN, NAN
    ids[live:], lists[3][live * top_k :] = 2**30, 2**30
    out = torch.full_like(want, NAN)
    weighted_sum(y, weights, ids, out, live_R=count)
    assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0))

    x_SH = torch.full((capacity, cols), NAN, dtype=x.dtype, device=device)
    q_SH, scale_GS = x_SH.to(FP8), torch.full((2, capacity), NAN, device=device)
    copy_rows(x, aligned, x_SH)
    copy_rows_quantized(x, None, aligned, q_SH, scale_GS)
    real = sorted_rows >= 0
    source = torch.arange(rows, device=device).repeat_interleave(top_k)[real]
    x_want, used = torch.full_like(x_SH, NAN), sorted_rows[real].long()
    x_want[used] = x[source]
    assert torch.equal(x_SH.nan_to_num(7.0), x_want.nan_to_num(7.0))
    scaled = q_SH[used].float() * scale_GS[:, used].repeat_interleave(128, 0)[:cols].T
    assert live == 0 or relative_error(scaled, x[source].float()) < 0.05
    assert bool(scale_GS[:, ~torch.isin(torch.arange(capacity), used.cpu())].isnan().all())


def test_no_rows(device):
    x = torch.empty(0, 64, device=device)
    q, scale = torch.empty(0, 64, dtype=FP8, device=device), torch.empty(0, 1, device=device)
    quantize_rows(x, q, scale)
    activate_rows(torch.empty(0, 128, device=device), x, KernelActivation("silu"))
    ids = torch.empty(0, 2, dtype=torch.int64, device=device)
    weighted_sum(x, None, ids, torch.empty(0, 64, device=device))
