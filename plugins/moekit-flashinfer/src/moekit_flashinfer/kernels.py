"""Kernels for expert ids and quantized rows, one launch each.

They run between two library calls of 10 to 20 microseconds, so the number of launches matters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from moekit_kernels.numerics import convert
from torch import Tensor

_BLOCK = 1024
_GROUP = 128


def local_ids(ids_RK: Tensor, first: int, num_local: int, counts_G: Tensor | None = None) -> Tensor:
    """Return the local ids of int32 global ids: -1 for experts of other ranks and for no expert.

    counts_G: int32, how many of the R / G rows from each source rank are used. Ids of the other
    rows may have any value.
    """
    out = torch.empty_like(ids_RK)
    total = ids_RK.numel()
    if total:
        per_source = total if counts_G is None else total // counts_G.numel()
        _local_ids[(triton.cdiv(total, _BLOCK),)](
            ids_RK, counts_G, out, total, per_source, ids_RK.shape[1], first, num_local,
            COUNTED=counts_G is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def reroute(ids_TK: Tensor, nowhere: int) -> Tensor:
    """Return ids (T, K) int32 in which an expert of the token replaces every -1.

    A token without any expert gets ``nowhere``.
    """
    out = torch.empty_like(ids_TK)
    tokens, slots = ids_TK.shape
    if tokens:
        padded = triton.next_power_of_2(slots)
        block = max(1, _BLOCK // padded)
        _reroute[(triton.cdiv(tokens, block),)](
            ids_TK, out, tokens, nowhere, SLOTS=slots, PADDED=padded, BLOCK=block
        )
    return out


def dequantize_rows(q_RH: Tensor, scale_RG: Tensor, ids_RK: Tensor, out_RH: Tensor) -> None:
    """Multiply q (R, H) e4m3 by its scales, one per 128 columns, into ``out`` in 16 bits.

    The library quantizes the result again. Rows without any expert are not written.
    """
    rows, columns = q_RH.shape
    assert scale_RG.shape == (rows, triton.cdiv(columns, _GROUP)) and scale_RG.stride(1) == 1
    assert q_RH.is_contiguous() and out_RH.is_contiguous() and ids_RK.is_contiguous()
    if rows:
        _dequantize[(rows,)](
            q_RH, scale_RG, ids_RK, out_RH, columns, scale_RG.stride(0),
            SLOTS=ids_RK.shape[1], PADDED=triton.next_power_of_2(ids_RK.shape[1]),
            GROUP=_GROUP, BLOCK=triton.next_power_of_2(columns), num_warps=8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["total", "per_source", "first", "num_local"])
def _local_ids(
    ids_ptr, counts_ptr, out_ptr, total, per_source, slots, first, num_local,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    expert = tl.load(ids_ptr + i, mask=inside, other=-1) - first
    here = (expert >= 0) & (expert < num_local)
    if COUNTED:
        count = tl.load(counts_ptr + i // per_source, mask=inside, other=0)
        here = here & ((i % per_source) // slots < count)
    tl.store(out_ptr + i, tl.where(here, expert, -1), mask=inside)


@triton.jit(do_not_specialize=["tokens", "nowhere"])
def _reroute(
    ids_ptr, out_ptr, tokens, nowhere,
    SLOTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    slot = tl.arange(0, PADDED)[None, :]
    inside = (token < tokens) & (slot < SLOTS)
    ids = tl.load(ids_ptr + token * SLOTS + slot, mask=inside, other=-1)
    some = tl.max(ids, axis=1, keep_dims=True)
    some = tl.where(some < 0, nowhere, some)
    tl.store(out_ptr + token * SLOTS + slot, tl.where(ids < 0, some, ids), mask=inside)


@triton.jit
def _dequantize(
    q_ptr, scale_ptr, ids_ptr, out_ptr, columns, scale_stride,
    SLOTS: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, PADDED)
    ids = tl.load(ids_ptr + row * SLOTS + slot, mask=slot < SLOTS, other=-1)
    if tl.max(ids, axis=0) >= 0:
        column = tl.arange(0, BLOCK)
        inside = column < columns
        scale = tl.load(scale_ptr + row * scale_stride + column // GROUP, mask=inside, other=0.0)
        q = tl.load(q_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        wide = convert(q * scale, out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * columns + column, wide, mask=inside)
