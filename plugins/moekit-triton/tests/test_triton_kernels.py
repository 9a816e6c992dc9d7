"""The raw kernels against plain torch in fp32."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from moekit_kernels.numerics import INTERPRETED, QMAX
from moekit_kernels.rows import (
    AMAX_PARTIALS,
    Activation,
    Tiling,
    ValidRows,
    activate_rows,
    quantize_rows,
    quantize_rows_per_tensor,
    weighted_sum,
)
from moekit_triton.kernels.gemm import Epilogue, Rows, grouped_gemm
from moekit_triton.kernels.tiles import GemmConfig
from triton_checks import run_align

FP8, INT8 = torch.float8_e4m3fn, torch.int8
NAN = float("nan")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    assert torch.isfinite(out.float()).all()
    return float((out.float() - reference.float()).norm() / reference.float().norm())


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> torch.Tensor:
    """Values that every dtype holds; drawn on the CPU so that every device sees the same."""
    if dtype == INT8:
        return torch.randint(-127, 128, shape, dtype=INT8).to(device)
    return torch.randn(shape).to(dtype).to(device)


def rand_scale(*shape: int, device: torch.device) -> torch.Tensor:
    return (torch.rand(shape) + 0.5).to(device)


def dequantized(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """fp32 of a (..., K) or w (L, N, K) under any of the scale layouts."""
    x = x.float()
    if scale is None or scale.numel() == 1:
        return x if scale is None else x * scale.flatten()
    if scale.dim() == 1:  # per expert
        return x * scale[:, None, None]
    if scale.dim() == 2 and x.dim() == 3:  # per channel
        return x * scale[:, :, None]
    if scale.shape[-2] != x.shape[-2]:
        scale = scale.repeat_interleave(128, dim=-2)[..., : x.shape[-2], :]
    if scale.shape[-1] != 1:
        scale = scale.repeat_interleave(128, dim=-1)[..., : x.shape[-1]]
    return x * scale


def a_scale_shape(kind: str, rows: int, k: int) -> tuple[int, ...] | None:
    return {"none": None, "tensor": (1, 1), "row": (rows, 1), "group": (rows, cdiv(k, 128))}[kind]


def w_scale_shape(kind: str, experts: int, n: int, k: int) -> tuple[int, ...] | None:
    return {
        "none": None,
        "tensor": (experts,),
        "channel": (experts, n),
        "block": (experts, cdiv(n, 128), cdiv(k, 128)),
    }[kind]


# relative RMS error: of rounding the output; fp8 tensor cores accumulate in fewer bits than fp32
GEMM_LIMITS = {
    torch.bfloat16: 4e-3,
    torch.float16: 1e-3,
    torch.float32: 2e-6,
    FP8: 1e-3,
    INT8: 2e-6,
}
SCHEMES = [
    (torch.float32, torch.float32, "none", "none"),
    (torch.bfloat16, torch.bfloat16, "none", "none"),
    (torch.float16, torch.float16, "none", "none"),
    (FP8, FP8, "tensor", "tensor"),
    (FP8, FP8, "row", "tensor"),
    (FP8, FP8, "row", "channel"),
    (FP8, FP8, "group", "block"),
    (INT8, INT8, "row", "channel"),
    (torch.bfloat16, FP8, "none", "tensor"),
    (torch.float16, FP8, "none", "channel"),
    (torch.bfloat16, FP8, "none", "block"),
    (torch.bfloat16, INT8, "none", "channel"),
    (torch.float16, INT8, "none", "tensor"),
]
# Operands swapped: fp8, which that is for, and weights of it alone.
SCHEMES_AND_ORDERS = [(*scheme, False) for scheme in SCHEMES] + [
    (*scheme, True) for scheme in SCHEMES if FP8 in scheme[:2] and torch.float16 not in scheme
]
# (N, K, block_n, block_k, a row for each pair): whole tiles, partial tiles, one partial tile,
# several scale groups a tile
SHAPES = [
    (64, 256, 32, 64, True), (96, 200, 64, 128, False), (40, 72, 64, 64, False),
    (320, 136, 256, 32, True),
]  # fmt: skip


@pytest.mark.parametrize(("a_dtype", "w_dtype", "a_kind", "w_kind", "swapped"), SCHEMES_AND_ORDERS)
@pytest.mark.parametrize(("n", "k", "block_n", "block_k", "by_pair"), SHAPES)
def test_grouped_gemm(
    device, a_dtype, w_dtype, a_kind, w_kind, n, k, block_n, block_k, by_pair, swapped
):
    torch.manual_seed(0)
    rows, top_k, experts = 7, 3, 3
    ids = torch.randint(-1, experts, (rows, top_k), device=device)
    ids[0] = -1
    a_rows = rows * top_k if by_pair else rows
    a = randn(a_rows, k, dtype=a_dtype, device=device)
    w = randn(experts, n, k, dtype=w_dtype, device=device)
    shape = a_scale_shape(a_kind, a_rows, k)
    a_scale = None if shape is None else rand_scale(*shape, device=device)
    shape = w_scale_shape(w_kind, experts, n, k)
    w_scale = None if shape is None else rand_scale(*shape, device=device)
    bias = randn(experts, n, dtype=torch.bfloat16, device=device)

    pair_a = a if by_pair else a.repeat_interleave(top_k, dim=0)
    pair_scale = a_scale
    if a_scale is not None and a_scale.numel() > 1 and not by_pair:
        pair_scale = a_scale.repeat_interleave(top_k, dim=0)
    flat = ids.flatten()
    w_fp32 = dequantized(w, w_scale)[flat.clamp(min=0)]
    reference = torch.einsum("sk,snk->sn", dequantized(pair_a, pair_scale), w_fp32)
    reference += bias.float()[flat.clamp(min=0)]

    if a_dtype != INT8:  # rows that no expert asked for may hold anything
        unread = (flat < 0) if by_pair else (ids < 0).all(dim=1)
        a[unread] = torch.full_like(a[unread], NAN, dtype=torch.float32).to(a_dtype)
    out_dtype = torch.float32 if a_dtype in (FP8, INT8) else a_dtype
    out = torch.full((rows * top_k, n), NAN, dtype=out_dtype, device=device)
    config = GemmConfig(16, block_n, block_k, 2, num_warps=4, num_stages=2, swapped=swapped)
    per_row = 1 if by_pair else top_k
    for named in (Rows.aligned(run_align(ids, experts, 16), per_row), Rows.direct(ids, per_row)):
        out.fill_(NAN)
        grouped_gemm(a, w, out, named, config, a_scale=a_scale, w_scale=w_scale, bias_LN=bias)
        assert out[flat < 0].isnan().all(), "a pair without expert was written"
        limit = GEMM_LIMITS[a_dtype]
        assert relative_error(out[flat >= 0], reference[flat >= 0]) < limit


@pytest.mark.parametrize("a_kind", ["none", "group"])
@pytest.mark.parametrize("columns", [128, 96])  # 96: one tile and a half, done singly
def test_wide(device, a_kind, columns):
    """Two tiles side by side against one at a time, to the bit."""
    torch.manual_seed(0)
    rows, experts, k = 70, 3, 256
    dtype = torch.bfloat16 if a_kind == "none" else FP8
    a, w = randn(rows, k, dtype=dtype, device=device), randn(experts, columns, k, device=device)
    scales = {"bias_LN": randn(experts, columns, dtype=torch.bfloat16, device=device)}
    if a_kind == "group":
        scales["a_scale"] = rand_scale(rows, 2, device=device)
        scales["w_scale"] = rand_scale(experts, 1, 2, device=device)
    ids = torch.randint(-1, experts, (rows, 1), device=device)
    named = Rows.aligned(run_align(ids, experts, 64), 1)
    config = GemmConfig(64, 64, 64, num_stages=2)
    single, double = (torch.full((rows, columns), NAN, device=device) for _ in range(2))
    grouped_gemm(a, w.to(dtype), single, named, config, **scales)
    grouped_gemm(a, w.to(dtype), double, named, replace(config, wide=True), **scales)
    assert single[ids.flatten() >= 0].isfinite().all()
    assert torch.equal(single.nan_to_num(7.0), double.nan_to_num(7.0))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("inner", [96, 256, 300])
@pytest.mark.parametrize(
    ("activation", "quantize"),
    [
        (Activation("silu"), "none"),
        (Activation("silu", limit=0.7), "group"),
        (Activation("swigluoai", alpha=1.3, limit=2.0), "tensor"),
        (Activation("relu2", gated=False), "none"),
        (Activation("gelu", gated=False), "group"),
    ],
)
def test_fused_activation(device, activation, quantize, inner, swapped):
    """GEMM 1 with its activation, and quantization, against the same steps apart."""
    torch.manual_seed(0)
    # Blocks more and less than half full.
    block_m, rows = (16, 9) if INTERPRETED else (32, 30) if swapped else (128, 120)
    top_k, experts, k = 2, 3, 128
    w_rows = inner * (2 if activation.gated else 1)
    a = randn(rows, k, dtype=FP8, device=device)
    w = randn(experts, w_rows, k, dtype=FP8, device=device)
    groups = -(-w_rows // 128)
    a_scale, w_scale = (rand_scale(*s, device=device) for s in ((rows, 1), (experts, groups, 1)))
    bias = randn(experts, w_rows, dtype=torch.bfloat16, device=device)
    ids = torch.randint(-1, experts, (rows, top_k), device=device)
    named = Rows.aligned(run_align(ids, experts, block_m), top_k)
    used = ids.flatten() >= 0
    config = GemmConfig(
        block_m, 128, 64, num_warps=8, num_stages=2, halves=not swapped, swapped=swapped
    )
    scales = {"a_scale": a_scale, "w_scale": w_scale, "bias_LN": bias}

    h = torch.full((rows * top_k, w_rows), NAN, device=device)
    grouped_gemm(a, w, h, named, replace(config, swapped=False), **scales)
    dtype = torch.float32 if quantize == "none" else FP8
    shape = (rows * top_k, -(-inner // 128)) if quantize == "group" else (1, 1)
    scale = None if quantize == "none" else torch.full(shape, 0.05, device=device)
    apart, fused = (
        torch.full((rows * top_k, inner), NAN, device=device).to(dtype) for _ in range(2)
    )
    fused_scale = None if scale is None else scale.clone()
    activate_rows(
        h, apart, activation, ValidRows(ids=ids), scale=scale, static_scale=quantize == "tensor"
    )
    epilogue = Epilogue(activation, quantize, fused_scale)
    grouped_gemm(a, w, fused, named, config, epilogue=epilogue, **scales)
    assert fused[~used].float().isnan().all(), "a pair without expert was written"
    # Hopper's wgmma, which the swapped kernel alone has here, sums e4m3 products in fewer bits
    # than mma.sync: 1.3e-4 apart.
    close = 5e-4 if swapped and not INTERPRETED else 1e-5
    if quantize == "group":
        assert torch.allclose(fused_scale[used], scale[used], rtol=2 * close)
    # Sums may be ordered differently: a few values fall to the other side of a rounding.
    error = relative_error(fused[used].float(), apart[used].float())
    assert error < (close if quantize == "none" else 2e-2)


@pytest.mark.parametrize(("a_dtype", "w_dtype", "a_kind", "w_kind", "swapped"), SCHEMES_AND_ORDERS)
def test_batched_gemm(device, a_dtype, w_dtype, a_kind, w_kind, swapped):
    torch.manual_seed(0)
    experts, n, k = 4, 96, 200
    block_m, slab = (16, 30) if INTERPRETED or swapped else (128, 240)
    # Last blocks more than half full, and less.
    counts = torch.tensor([0, slab, 1, block_m + 5], dtype=torch.int32, device=device)
    a = randn(experts, slab, k, dtype=a_dtype, device=device)
    w = randn(experts, n, k, dtype=w_dtype, device=device)
    shape = a_scale_shape(a_kind, slab, k)
    a_scale = None
    if shape is not None:
        a_scale = rand_scale(*(shape if a_kind == "tensor" else (experts, *shape)), device=device)
    shape = w_scale_shape(w_kind, experts, n, k)
    w_scale = None if shape is None else rand_scale(*shape, device=device)
    used = torch.arange(slab, device=device)[None, :] < counts[:, None]
    reference = dequantized(a, a_scale) @ dequantized(w, w_scale).transpose(1, 2)

    if a_dtype != INT8:
        a[~used] = torch.full_like(a[~used], NAN, dtype=torch.float32).to(a_dtype)
    if a_scale is not None and a_kind != "tensor":
        a_scale[~used] = NAN
    out_dtype = torch.float32 if a_dtype in (FP8, INT8) else a_dtype
    out = torch.full((experts, slab, n), NAN, dtype=out_dtype, device=device)
    config = GemmConfig(block_m, 64, 64, num_stages=2, halves=not swapped, swapped=swapped)
    rows = Rows.batched(counts, slab, block_m)
    grouped_gemm(a, w, out, rows, config, a_scale=a_scale, w_scale=w_scale)
    limit = GEMM_LIMITS[a_dtype]
    assert relative_error(out[used], reference[used]) < limit
    assert out[~used].isnan().all()


def activation_reference(x: torch.Tensor, act: Activation) -> torch.Tensor:
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "relu2": lambda v: F.relu(v).square(),
    }
    if not act.gated:
        return functions[act.name](x.float())
    gate, up = x.float().chunk(2, dim=1)
    if act.limit is not None:
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    if act.name == "swigluoai":
        return (up + 1) * gate * torch.sigmoid(act.alpha * gate)
    return functions[act.name](gate) * up


ACTIVATIONS = [
    Activation("silu"),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("swigluoai", limit=2.0),
    Activation("silu", limit=1.0),
    Activation("silu", gated=False),
    Activation("gelu", gated=False),
    Activation("gelu_tanh", gated=False),
    Activation("relu2", gated=False),
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
    activate_rows(x, out, act, ValidRows(ids=ids))
    assert relative_error(out[ids >= 0], reference[ids >= 0]) < (
        3e-3 if dtype == torch.bfloat16 else 1e-6
    )
    assert (out[ids < 0] == 7.0).all()


def quantize_reference(
    x: torch.Tensor, dtype: torch.dtype, group: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale) with one scale per `group` columns; None = one for the tensor."""
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
    activate_rows(x, q, act, valid, scale=scale, static_scale=kind == "static")
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
@pytest.mark.parametrize("valid_kind", ["all", "mask", "ids", "one slab", "slabs"])
def test_rows_tilings(device, monkeypatch, cols, kind, tiling, valid_kind):
    """Several rows a program, more than one tile a row, odd ends of both; what is absent is NaN."""
    monkeypatch.setattr(Tiling, "of", lambda *_: tiling)
    torch.manual_seed(0)
    rows, act = 42, Activation("silu")
    counts = [29] if valid_kind == "one slab" else [5, 0, 1, 7, 6, 7]
    slab = rows // len(counts)
    present = torch.rand(rows) < 0.6
    present[8:29] = False  # programs without any row
    if valid_kind not in ("mask", "ids"):
        full = valid_kind == "all"
        present = torch.tensor([full or r % slab < counts[r // slab] for r in range(rows)])
    present = present.to(device)
    slabs = ValidRows(counts_L=torch.tensor(counts).int().to(device), capacity=slab)
    ids = ValidRows(ids=torch.where(present, 3, -1))
    others = {"all": ValidRows(), "mask": ValidRows(mask=present), "ids": ids}
    valid = others.get(valid_kind, slabs)
    x = randn(rows, 2 * cols, dtype=torch.bfloat16, device=device)
    x[~present] = NAN
    h = activation_reference(x[present], act)

    if kind == "none":
        out = torch.full((rows, cols), 7.0, dtype=torch.bfloat16, device=device)
        activate_rows(x, out, act, valid)
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
            activate_rows(source, q, act, valid, scale=scale, static_scale=not written)
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
    """Every width and number of rows: tiles that cover a row, within what a thread can hold."""
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

    entries = torch.randperm(2 * rows * top_k, device=device)[: rows * top_k].int()
    entries[ids.flatten() < 0] = -1
    y_S = torch.full((2 * rows * top_k, cols), NAN, dtype=dtype, device=device)
    y_S[entries[ids.flatten() >= 0].long()] = y[ids.flatten() >= 0]
    by_entry = torch.full_like(out, NAN)
    weighted_sum(y_S, weights if weighted else None, ids, by_entry, entries)
    assert torch.equal(by_entry, out)

    bias = randn(5, cols, dtype=dtype, device=device)
    reference += (bias.float()[ids.clamp(min=0)] * factor[:, :, None]).sum(1)
    weights[ids < 0] = NAN
    for given in ((y, None), (y_S, entries)):
        biased = torch.full_like(out, NAN)
        weighted_sum(given[0], weights if weighted else None, ids, biased, given[1], bias)
        assert relative_error(biased, reference) < (3e-3 if dtype == torch.bfloat16 else 2e-6)
        assert (biased[1] == 0).all()


def test_empty(device):
    x = torch.empty(0, 64, device=device)
    q, scale = torch.empty(0, 64, dtype=FP8, device=device), torch.empty(0, 1, device=device)
    quantize_rows(x, q, scale)
    activate_rows(torch.empty(0, 128, device=device), x, Activation("silu"))
    ids = torch.empty(0, 2, dtype=torch.int64, device=device)
    weighted_sum(x, None, ids, torch.empty(0, 64, device=device))
    aligned = run_align(ids, 4, 16)
    assert aligned.num_rows.item() == 0 and (aligned.experts_B == -1).all()
    out = torch.full((3, 32), NAN, device=device)  # more than is its
    grouped_gemm(
        x, torch.ones(4, 32, 64, device=device), out, Rows.aligned(aligned), GemmConfig(16, 32, 32)
    )
    assert out.isnan().all()
