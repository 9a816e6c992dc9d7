"""The libraries' entry points in plain torch: their documented semantics, checked strictly.

`installed()` puts them in place of the libraries, and `registry()` offers the experts on the CPU.
Rows that a library does not write are NaN.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from moekit_cutlass import library, moekit_experts, providers
from torch import Tensor

import moekit

NAN = float("nan")
FP8 = torch.float8_e4m3fn

_ACTS = {
    None: lambda x: x,
    "silu": F.silu,
    "gelu_erf": F.gelu,
    "gelu_tanh_approx": lambda x: F.gelu(x, approximate="tanh"),
    "relu_sq": lambda x: F.relu(x).square(),
}
_GATED = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
}

# torch.autocast does not reach into libraries.
_AS_IT_IS = torch.autocast("cpu", enabled=False)


def _gathered(a: Tensor, index: Tensor | None, offsets: Tensor, config: Any) -> Tensor:
    """The rows of ``a`` that an index names, which is read up to the last offset."""
    assert offsets.dtype == torch.int32 and offsets.is_contiguous() and offsets[0] == 0
    if index is None:
        return a
    assert index.dtype == torch.int32 and config.cluster[1] == 1 and not config.dynamic
    total = int(offsets[-1])
    assert bool(((index >= 0) & (index < a.shape[0])).all())
    out = torch.full((len(index), a.shape[1]), NAN, dtype=a.dtype)
    out[:total] = a[index[:total].long()]
    return out


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    ends = offsets.tolist()
    for expert, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        yield expert, start, end


def _interleaved(t: Tensor, dim: int) -> Tensor:
    """[first; second] -> [f0, s0, f1, s1, ...] along a dimension."""
    dim %= t.dim()
    return t.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _aligned(*tensors: Tensor) -> None:
    """quack's tensor maps: one contiguous dimension, whose lines begin at multiples of 16 bytes."""
    for t in tensors:
        assert t.data_ptr() % 16 == 0 and 1 in t.stride()[-2:] and not t.requires_grad
        assert all(s == 1 or s * t.element_size() % 16 == 0 for s in t.stride()), t.stride()


@_AS_IT_IS
def quack_gemm_act(
    A: Tensor,
    B: Tensor,
    *,
    activation: str | None,
    store_preact: bool = True,
    preact_out: Tensor | None = None,
    postact_out: Tensor,
    cu_seqlens_m: Tensor,
    A_idx: Tensor | None,
    tuned: bool,
    config: Any,
    concat_layout: tuple[str, ...] | None,
) -> None:
    """quack.gemm_interface.gemm_act with varlen_m: A (rows, K), B (L, K, N) K-major.

    Gate and up alternate in preact_out.
    """
    assert store_preact is (preact_out is not None) and not tuned and config is not None
    assert A.dim() == 2 and A.stride(-1) == 1 and A.dtype in (torch.bfloat16, torch.float16)
    assert B.dim() == 3 and B.stride(-2) == 1 and B.dtype == A.dtype
    assert len(cu_seqlens_m) == B.shape[0] + 1
    _aligned(A, B, postact_out)
    A = _gathered(A, A_idx, cu_seqlens_m, config)
    assert A.shape[0] == postact_out.shape[0]
    gated = activation in _GATED
    assert postact_out.shape[1] == B.shape[2] // (2 if gated else 1)
    assert concat_layout == (("B",) if gated else None)
    for expert, start, end in _groups(cu_seqlens_m):
        h = A[start:end].float() @ B[expert].float()
        out = _GATED[activation](*h.chunk(2, dim=1)) if gated else _ACTS[activation](h)
        postact_out[start:end] = out.to(postact_out.dtype)
        if preact_out is not None:
            assert preact_out.shape == (len(A), B.shape[2]) and preact_out.dtype == A.dtype
            preact_out[start:end] = _interleaved(h, 1) if gated else h


@_AS_IT_IS
def quack_gemm_dact(
    A: Tensor,
    B: Tensor,
    PreAct: Tensor,
    activation: str | None,
    *,
    dx_out: Tensor,
    postact_out: Tensor,
    colvec_scale: Tensor,
    colvec_reduce: bool,
    cu_seqlens_m: Tensor,
    A_idx: Tensor,
    dynamic_scheduler: bool,
    tuned: bool,
    config: Any,
) -> tuple[Tensor, ...]:
    """quack.gemm_interface.gemm_dact with varlen_m: A (rows, K), B (L, K, N); gates alternate."""
    (L, K, N), S = B.shape, len(A_idx)
    _aligned(A, B, PreAct, dx_out, postact_out)
    assert not tuned and not dynamic_scheduler and A.shape[1] == K and A.stride(-1) == 1
    assert colvec_scale.shape == (S,) and colvec_scale.dtype == torch.float32
    gated = activation in _GATED
    assert PreAct.shape == dx_out.shape == (S, 2 * N if gated else N)
    assert postact_out.shape == (S, N) and len(cu_seqlens_m) == L + 1
    A = _gathered(A, A_idx, cu_seqlens_m, config)
    reduced = torch.full((S,), NAN)
    for expert, start, end in _groups(cu_seqlens_m):
        q, p = A[start:end].float() @ B[expert].float(), colvec_scale[start:end, None]
        h = PreAct[start:end].float().requires_grad_()
        with torch.enable_grad():
            a = _GATED[activation](h[:, ::2], h[:, 1::2]) if gated else _ACTS[activation](h)
        dx_out[start:end] = torch.autograd.grad(a, h, p * q)[0].to(dx_out.dtype)
        postact_out[start:end] = (p * a.detach()).to(postact_out.dtype)
        reduced[start:end] = (q * a.detach()).sum(dim=1)
    return (dx_out, postact_out, reduced) if colvec_reduce else (dx_out, postact_out)


@_AS_IT_IS
def quack_gemm(
    A: Tensor,
    B: Tensor,
    D: Tensor,
    C: None,
    tile_count_semaphore: Tensor | None,
    tile_M: int,
    tile_N: int,
    cluster_M: int,
    cluster_N: int,
    *,
    pingpong: bool,
    is_dynamic_persistent: bool,
    max_swizzle_size: int,
    add_to_output: bool,
    concat_layout: tuple[str, ...],
    cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    A_idx: Tensor | None = None,
) -> None:
    """quack.gemm.gemm: A (S, K), B (L, N, K), D (S, N), or A (M, S), B (N, S), D (L, M, N)."""
    assert C is None and (tile_count_semaphore is not None) is is_dynamic_persistent
    _aligned(A, B, D)
    config = SimpleNamespace(cluster=(cluster_M, cluster_N), dynamic=is_dynamic_persistent)
    assert set(concat_layout) <= {"B", "out"}
    if "B" in concat_layout:  # along the dimension that is not contiguous
        B = _interleaved(B, -2 if B.stride(-1) == 1 else -1)
    if cu_seqlens_m is not None:
        assert cu_seqlens_k is None and not add_to_output and "out" not in concat_layout
        assert A.stride(-1) == D.stride(-1) == 1 and A.dtype == B.dtype
        A = _gathered(A, A_idx, cu_seqlens_m, config)
        for expert, start, end in _groups(cu_seqlens_m):
            D[start:end] = (A[start:end].float() @ B[expert].float().mT).to(D.dtype)
        return
    assert cu_seqlens_k is not None and A.stride(-2) == 1 and B.stride(-2) == 1
    A = _gathered(A.mT, A_idx, cu_seqlens_k, config).mT
    assert A.shape[1] == B.shape[1] and D.shape == (len(cu_seqlens_k) - 1, len(A), len(B))
    gate_first = torch.arange(len(B))
    if "out" in concat_layout:  # where each column lies in D
        assert D.stride(-2) == 1
        gate_first = _interleaved(gate_first, 0)
    for expert, start, end in _groups(cu_seqlens_k):
        made = (A[:, start:end].float() @ B[:, start:end].float().mT).to(D.dtype)
        D[expert, :, gate_first] = made + D[expert, :, gate_first] if add_to_output else made


_GROUPED_MM = F.grouped_mm


def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """torch's own on the CPU, which has no such limit as on SM90: fewer than 1024 groups."""
    assert b.shape[0] < 1024, "Can't process more than 1024 groups"
    return _GROUPED_MM(a, b, offs=offs)


@_AS_IT_IS
def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """torch._scaled_grouped_mm on SM90: rowwise scales, bf16 out, sizes in multiples of 16."""
    (rows, k), (L, _, n) = a.shape, b.shape
    assert L < 1024 and a.dtype == b.dtype == FP8 and a.is_contiguous() and b.mT.is_contiguous()
    assert k % 16 == 0 and n % 16 == 0 and out_dtype == torch.bfloat16
    assert a_scale.shape == (rows,) and b_scale.shape == (L, n) and b_scale.is_contiguous()
    assert a_scale.dtype == b_scale.dtype == torch.float32
    assert offs.dtype == torch.int32 and offs.shape == (L,)
    out = torch.full((rows, n), NAN, dtype=out_dtype)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        wide = a[start:end].float() @ b[expert].float()
        out[start:end] = (wide * a_scale[start:end, None] * b_scale[expert]).to(out_dtype)
        start = end
    return out


@_AS_IT_IS
def cutlass_moe_mm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    expert_offsets: Tensor,
    problem_sizes: Tensor,
    a_strides: Tensor,
    b_strides: Tensor,
    c_strides: Tensor,
    per_act_token: bool,
    per_out_ch: bool,
) -> None:
    """vLLM's operator: per row and channel scales, transposed problems for 64 rows or fewer."""
    (rows, k), (L, n, _) = a.shape, b.shape
    assert L <= 1024, "one block prepares pointers, with a thread for each expert"
    assert a.dtype == b.dtype == FP8 and a_scale.dtype == b_scale.dtype == torch.float32
    assert expert_offsets.dtype == torch.int64 and expert_offsets.shape == (L,)
    assert problem_sizes.dtype == torch.int32 and problem_sizes.shape == (L, 3)
    assert problem_sizes.is_contiguous() and out.dtype in (torch.bfloat16, torch.float16)
    assert per_act_token and per_out_ch and b_scale.shape == (L, n) and a_scale.numel() == rows
    for strides, value in ((a_strides, k), (b_strides, k), (c_strides, n)):
        assert strides.dtype == torch.int64 and strides.tolist() == [value] * L
    for expert, (start, sizes) in enumerate(
        zip(expert_offsets.tolist(), problem_sizes.tolist(), strict=True)
    ):
        m = sizes[1 if rows <= 64 else 0]
        assert sizes == ([n, m, k] if rows <= 64 else [m, n, k])
        wide = a[start : start + m].float() @ b[expert].float().T
        scale = a_scale.view(-1)[start : start + m, None] * b_scale[expert]
        out[start : start + m] = (wide * scale).to(out.dtype)


def encode_and_reorder_int4b_grouped(b: Tensor) -> tuple[Tensor, Tensor]:
    """Two's complement (L, N, K / 8), a row's first column lowest -> codes in another order, and a
    description of the order for each expert. Which order is the library's secret; here columns
    run backwards. Codes: 1..7 become 8 - value, that is -value without its sign."""
    L, n, words = b.shape
    assert b.dtype == torch.int32 and b.is_contiguous()
    assert words * 8 % 256 == 0 and n % 16 == 0
    values = _nibbles(b)
    codes = torch.where((values > 0) & (values < 8), 8 - values, values).flip(2)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8).view(torch.int32)
    return packed, torch.tensor([[77, n, 8 * words]] * L, dtype=torch.int32)


def _nibbles(words: Tensor) -> Tensor:
    halves = words.view(torch.uint8)
    return torch.stack((halves & 15, halves >> 4), dim=-1).flatten(-2)


@_AS_IT_IS
def cutlass_w4a8_moe_mm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    b_group_scales: Tensor,
    b_group_size: int,
    expert_offsets: Tensor,
    problem_sizes: Tensor,
    a_strides: Tensor,
    b_strides: Tensor,
    c_strides: Tensor,
    group_scale_strides: Tensor,
    maybe_schedule: str | None,
) -> None:
    """vLLM's operator: weights are looked up in their group's table, and e4m3 from then on."""
    (rows, k), (L, n, words) = a.shape, b.shape
    assert a.dtype == b_group_scales.dtype == FP8 and b.dtype == torch.int32 and words * 8 == k
    assert a_scale.dtype == b_scale.dtype == torch.float32 and out.dtype == torch.bfloat16
    assert all(t.is_contiguous() for t in (out, a, b, a_scale, b_scale, b_group_scales))
    assert out.shape == (rows, n) and a_scale.numel() == rows and b_scale.shape == (L, n)
    assert b_group_size == 128 and b_group_scales.numel() == L * k // 128 * n * 8
    assert expert_offsets.dtype == torch.int64 and expert_offsets.shape == (L,)
    assert problem_sizes.dtype == torch.int32 and problem_sizes.is_contiguous()
    assert maybe_schedule is None and b_strides.tolist() == [[77, n, k]] * L
    for strides, value in ((a_strides, k), (c_strides, n), (group_scale_strides, [n, 0])):
        assert strides.dtype == torch.int64 and strides.tolist() == [value] * L
    for expert, (start, sizes) in enumerate(
        zip(expert_offsets.tolist(), problem_sizes.tolist(), strict=True)
    ):
        m = sizes[1]
        assert sizes == [n, m, k]
        table = b_group_scales.float().view(L, k // 128, n, 8)[expert].transpose(0, 1)
        codes = _nibbles(b[expert]).long().flip(1).view(n, k // 128, 128)
        negative = table.gather(2, codes & 7)
        positive = torch.where(codes == 0, 0.0, -negative)
        weight = torch.where(codes >= 8, negative, positive).view(n, k)
        wide = a[start : start + m].float() @ weight.T
        scale = a_scale.view(-1)[start : start + m, None] * b_scale[expert]
        out[start : start + m] = (wide * scale).to(out.dtype)


QUACK = {
    ("quack.gemm_interface", "gemm_act"): quack_gemm_act,
    ("quack.gemm_interface", "gemm_dact"): quack_gemm_dact,
    ("quack.gemm", "gemm"): quack_gemm,
}
VLLM = {
    "cutlass_moe_mm": cutlass_moe_mm,
    "cutlass_w4a8_moe_mm": cutlass_w4a8_moe_mm,
    "cutlass_encode_and_reorder_int4b_grouped": encode_and_reorder_int4b_grouped,
}


@contextlib.contextmanager
def installed(**preferred: str) -> Iterator[None]:
    """The stand-ins in place of the libraries; ``preferred``: scheme -> the only provider used."""
    order = {scheme: table for scheme, table in library.PREFERRED.items()}
    for scheme, name in preferred.items():
        order[scheme] = ((0, (name,)),)
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (library, "missing", lambda provider: ""),
            (providers, "quack_entry", lambda module, name: QUACK[module, name]),
            (providers, "quack_config", lambda tile: tile),
            (providers, "vllm_operator", VLLM.__getitem__),
            (library, "PREFERRED", order),
            (F, "grouped_mm", grouped_mm),
            (torch, "_scaled_grouped_mm", scaled_grouped_mm),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def registry() -> moekit.Registry:
    """The core's backends, and both experts as if they ran on the CPU."""
    backends = moekit.Registry.discover({"MOEKIT_PLUGINS": ""})
    for spec in moekit_experts():
        changes = {
            "devices": ("cpu",),
            "dtypes": frozenset({"bfloat16", "float16"}),
            "schemes": frozenset(library.PREFERRED),
        }
        backends.register(dataclasses.replace(spec, **changes))
    return backends
