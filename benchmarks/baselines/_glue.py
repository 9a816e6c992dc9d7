"""The steps around the baselines' GEMMs for which a library brings no kernel.

These are sorting by expert, quantization, SiLU * mul and the weighted sum: in Triton on a GPU, in
torch elsewhere. Shapes: S expert-sorted rows, N columns, G scale groups in a row.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def vllm_version() -> str:
    """Return the version of the vllm in the folder that MOEKIT_VLLM_PATH names, or of the installed
    one; "vllm ?" if neither its _version.py nor the dist-info next to it tells."""
    if not (named := os.environ.get("MOEKIT_VLLM_PATH")):
        try:
            return f"vllm {importlib.metadata.version('vllm')}"
        except importlib.metadata.PackageNotFoundError:
            return ""
    file = Path(named, "_version.py")
    text = file.read_text() if file.is_file() else ""
    beside = " ".join(f.name for f in Path(named).resolve().parent.glob("vllm-*.dist-info"))
    match = re.search(r"^(?:__)?version(?:__)? *=.*?'([^']+)'", text, re.M) or re.search(
        r"vllm-(.+?)\.dist-info", beside
    )
    return f"vllm {match[1] if match else '?'}"


def sorted_by_expert(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the assignments by expert.

    Returns:
        order_S: the assignment t * K + k of each row; ends_L (int32): the end of each expert's
        rows; place_TK: the row of each assignment.
    """
    ids, order = ids_TK.reshape(-1).sort()
    bounds = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(ids, bounds, right=True).int()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return order, ends, place.view_as(ids_TK)


if triton is not None:

    @triton.jit
    def _silu_mul(h, out, N, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        gate = tl.load(h + row * 2 * N + col, mask=col < N).to(tl.float32)
        up = tl.load(h + row * 2 * N + N + col, mask=col < N).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
        tl.store(out + row * N + col, value.to(out.dtype.element_ty), mask=col < N)

    @triton.jit
    def _quantize(
        x, source, q, scale, N, stride_s, stride_g, GROUP: tl.constexpr, BLOCK: tl.constexpr,
        GATHER: tl.constexpr, GATED: tl.constexpr,
    ):  # fmt: skip
        row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
        col = group * GROUP + tl.arange(0, BLOCK)
        end = tl.minimum(group * GROUP + GROUP, N)
        mask = col < end
        start, read = row, mask
        if GATHER:
            start = tl.load(source + row).to(tl.int64)
            read = col < tl.where(start >= 0, end, 0)
        if GATED:
            gate = tl.load(x + start * 2 * N + col, mask=read, other=0).to(tl.float32)
            up = tl.load(x + start * 2 * N + N + col, mask=read, other=0).to(tl.float32)
            value = gate * tl.sigmoid(gate) * up
        else:
            value = tl.load(x + start * N + col, mask=read, other=0).to(tl.float32)
        s = tl.maximum(tl.max(tl.abs(value)), 1e-10) / 448.0
        tl.store(scale + row * stride_s + group * stride_g, s)
        value = tl.clamp(value / s, -448.0, 448.0)
        tl.store(q + row * N + col, value.to(q.dtype.element_ty), mask=mask)

    @triton.jit
    def _weighted_sum(z, place, weights, out, N, K: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for k in range(K):
            start = tl.load(place + row * K + k).to(tl.int64) * N
            weight = tl.load(weights + row * K + k)
            total += weight * tl.load(z + start + col, mask=col < N, other=0).to(tl.float32)
        tl.store(out + row * N + col, total.to(out.dtype.element_ty), mask=col < N)


def silu_mul(h_S2N: Tensor, out: Tensor | None = None) -> Tensor:
    S, N = h_S2N.shape[0], h_S2N.shape[1] // 2
    out = h_S2N.new_empty((S, N)) if out is None else out
    if not h_S2N.is_cuda:
        return out.copy_(F.silu(h_S2N[:, :N].float()) * h_S2N[:, N:].float())
    _silu_mul[(S, triton.cdiv(N, 1024))](h_S2N, out, N, BLOCK=1024)
    return out


def quantize(
    x: Tensor, group: int, source_S: Tensor | None = None, *, gated: bool = False,
    columns_first: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return fp8 values (S, N) and fp32 scales (S, G) of groups of ``group`` columns.

    Args:
        source_S: The row of x that each row is a copy of; -1 for zeros.
        gated: x is (S, 2N), and SiLU * mul comes first.
        columns_first: Store the scales group by group.
    """
    S = len(x if source_S is None else source_S)
    N = x.shape[1] // (2 if gated else 1)
    G = -(-N // group)
    q = x.new_empty((S, N), dtype=torch.float8_e4m3fn)
    scale = torch.empty((G, S) if columns_first else (S, G), device=x.device)
    scale = scale.T if columns_first else scale
    _quantize[(S, G)](
        x, source_S, q, scale, N, *scale.stride(), GROUP=group,
        BLOCK=triton.next_power_of_2(group), GATHER=source_S is not None, GATED=gated,
        num_warps=1 if group <= 256 else 8,
    )  # fmt: skip
    return q, scale


def weighted_sum(z_SN: Tensor, place_TK: Tensor, weights_TK: Tensor) -> Tensor:
    T, K = place_TK.shape
    N = z_SN.shape[1]
    if not z_SN.is_cuda:
        return (z_SN[place_TK].float() * weights_TK[..., None]).sum(1).to(z_SN.dtype)
    out = z_SN.new_empty((T, N))
    grid = (T, triton.cdiv(N, 1024))
    _weighted_sum[grid](z_SN, place_TK, weights_TK, out, N, K=K, BLOCK=1024)
    return out
