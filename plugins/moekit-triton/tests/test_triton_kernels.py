"""The grouped GEMM against plain torch in fp32."""

from dataclasses import replace

import pytest
import torch
from moekit_kernels.numerics import INTERPRETED
from moekit_kernels.rows import (
    Activation,
    ValidRows,
    activate_rows,
)
from moekit_triton.kernels.gemm import grouped_gemm
from moekit_triton.kernels.operands import Epilogue, Rows
from moekit_triton.kernels.tiles import GemmTile
from triton_checks import run_align

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


def rand_scale(*shape: int, device: torch.device) -> torch.Tensor:
    return (torch.rand(shape) + 0.5).to(device)


def dequantized(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return a (..., K) or w (L, N, K) in fp32, with a scale of any layout."""
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
# (N, K, block_n, block_k, a row for each assignment): whole tiles, partial tiles, one partial tile,
# several scale groups a tile
SHAPES = [
    (64, 256, 32, 64, True), (96, 200, 64, 128, False), (40, 72, 64, 64, False),
    (320, 136, 256, 32, True),
]  # fmt: skip


@pytest.mark.parametrize(("a_dtype", "w_dtype", "a_kind", "w_kind", "swapped"), SCHEMES_AND_ORDERS)
@pytest.mark.parametrize(("n", "k", "block_n", "block_k", "by_assignment"), SHAPES)
def test_grouped_gemm(
    device, a_dtype, w_dtype, a_kind, w_kind, n, k, block_n, block_k, by_assignment, swapped
):
    torch.manual_seed(0)
    rows, top_k, experts = 7, 3, 3
    ids = torch.randint(-1, experts, (rows, top_k), device=device)
    ids[0] = -1
    a_rows = rows * top_k if by_assignment else rows
    a = randn(a_rows, k, dtype=a_dtype, device=device)
    w = randn(experts, n, k, dtype=w_dtype, device=device)
    shape = a_scale_shape(a_kind, a_rows, k)
    a_scale = None if shape is None else rand_scale(*shape, device=device)
    shape = w_scale_shape(w_kind, experts, n, k)
    w_scale = None if shape is None else rand_scale(*shape, device=device)
    bias = randn(experts, n, dtype=torch.bfloat16, device=device)

    assignment_a = a if by_assignment else a.repeat_interleave(top_k, dim=0)
    assignment_scale = a_scale
    if a_scale is not None and a_scale.numel() > 1 and not by_assignment:
        assignment_scale = a_scale.repeat_interleave(top_k, dim=0)
    flat = ids.flatten()
    w_fp32 = dequantized(w, w_scale)[flat.clamp(min=0)]
    reference = torch.einsum("sk,snk->sn", dequantized(assignment_a, assignment_scale), w_fp32)
    reference += bias.float()[flat.clamp(min=0)]

    if a_dtype != INT8:  # rows that no expert asked for may hold anything
        unread = (flat < 0) if by_assignment else (ids < 0).all(dim=1)
        a[unread] = torch.full_like(a[unread], NAN, dtype=torch.float32).to(a_dtype)
    out_dtype = torch.float32 if a_dtype in (FP8, INT8) else a_dtype
    out = torch.full((rows * top_k, n), NAN, dtype=out_dtype, device=device)
    config = GemmTile(16, block_n, block_k, 2, num_warps=4, num_stages=2, swapped=swapped)
    per_row = 1 if by_assignment else top_k
    for named in (Rows.aligned(run_align(ids, experts, 16), per_row), Rows.direct(ids, per_row)):
        out.fill_(NAN)
        grouped_gemm(a, w, out, named, config, a_scale=a_scale, w_scale=w_scale, bias_LN=bias)
        assert out[flat < 0].isnan().all(), "an assignment without expert was written"
        limit = GEMM_LIMITS[a_dtype]
        assert relative_error(out[flat >= 0], reference[flat >= 0]) < limit


@pytest.mark.parametrize("a_kind", ["none", "group"])
@pytest.mark.parametrize("columns", [128, 96])  # 96: one tile and a half, done singly
def test_wide(device, a_kind, columns):
    """Two tiles side by side give the same bits as one at a time."""
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
    config = GemmTile(64, 64, 64, num_stages=2)
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
    """GEMM 1 with fused activation and quantization equals separate steps."""
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
    config = GemmTile(
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
    assert fused[~used].float().isnan().all(), "an assignment without expert was written"
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
    block_m, capacity = (16, 30) if INTERPRETED or swapped else (128, 240)
    # Last blocks more than half full, and less.
    counts = torch.tensor([0, capacity, 1, block_m + 5], dtype=torch.int32, device=device)
    a = randn(experts, capacity, k, dtype=a_dtype, device=device)
    w = randn(experts, n, k, dtype=w_dtype, device=device)
    shape = a_scale_shape(a_kind, capacity, k)
    a_scale = None
    if shape is not None:
        a_scale = rand_scale(*(shape if a_kind == "tensor" else (experts, *shape)), device=device)
    shape = w_scale_shape(w_kind, experts, n, k)
    w_scale = None if shape is None else rand_scale(*shape, device=device)
    used = torch.arange(capacity, device=device)[None, :] < counts[:, None]
    reference = dequantized(a, a_scale) @ dequantized(w, w_scale).transpose(1, 2)

    if a_dtype != INT8:
        a[~used] = torch.full_like(a[~used], NAN, dtype=torch.float32).to(a_dtype)
    if a_scale is not None and a_kind != "tensor":
        a_scale[~used] = NAN
    out_dtype = torch.float32 if a_dtype in (FP8, INT8) else a_dtype
    out = torch.full((experts, capacity, n), NAN, dtype=out_dtype, device=device)
    config = GemmTile(block_m, 64, 64, num_stages=2, halves=not swapped, swapped=swapped)
    rows = Rows.batched(counts, capacity, block_m)
    grouped_gemm(a, w, out, rows, config, a_scale=a_scale, w_scale=w_scale)
    limit = GEMM_LIMITS[a_dtype]
    assert relative_error(out[used], reference[used]) < limit
    assert out[~used].isnan().all()
