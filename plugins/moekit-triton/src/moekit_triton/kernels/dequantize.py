"""Dequantize a weight for the products of training, which read the problem's dtype."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from moekit_kernels.launch import Launcher, cdiv, wait_then_launch_dependents
from moekit_kernels.numerics import convert

from moekit.plugin import INT4_ZERO, OperandQuant

from .packed import value_of_code

_ELEMENTS = 4096  # of a program's tile
_WHOLE = 1 << 30  # rows or columns of a group that covers them all
_ZERO = tl.constexpr(INT4_ZERO)


def dequantize(
    experts: Mapping[str, torch.Tensor],
    name: str,
    operand: OperandQuant,
    dtype: torch.dtype,
    ends_L: torch.Tensor,
) -> torch.Tensor:
    """Return w13 or w2 (L, N, K), contiguous, with the bits of `moekit.plugin.dequantize`.

    experts: canonical tensors of any strides, without act-order; groups along K are whole or powers
    of two. ends_L: int32, where each expert's rows end. Experts without rows stay undefined.
    """
    codes, scale, zeros = (experts.get(name + end) for end in ("", "_scale", "_zero_points"))
    assert codes is not None and scale is not None and not operand.act_order
    each, (group_n, group_k) = operand.codes.per_byte, operand.group
    (count, n, stored), k = codes.shape, codes.shape[2] * each
    out = codes.new_empty((count, n, k), dtype=dtype)
    block_k = group_k if group_k > 0 else 128
    block_n = _ELEMENTS // block_k
    _launch(
        (count * cdiv(n, block_n) * cdiv(k, block_k),),
        codes, scale, zeros, ends_L, out, n, stored,
        *codes.stride(), *scale.stride(), *((0, 0, 0) if zeros is None else zeros.stride()),
        GROUP_N=group_n if group_n > 0 else _WHOLE, GROUP_K=group_k if group_k > 0 else _WHOLE,
        EACH=each, E2M1=bool(operand.codes.codebook), BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize(
    codes_ptr, scale_ptr, zeros_ptr, ends_ptr, out_ptr, N, STORED,
    codes_expert, codes_row, codes_col, scale_expert, scale_row, scale_col,
    zeros_expert, zeros_row, zeros_col,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, EACH: tl.constexpr, E2M1: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N rows and BLOCK_K columns, of one group along K. STORED: columns of codes."""
    if PDL:
        wait_then_launch_dependents()
    across = tl.cdiv(STORED * EACH, BLOCK_K)
    tiles = tl.cdiv(N, BLOCK_N) * across
    expert, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends_ptr + expert) > start:
        first = tile % across * BLOCK_K
        row_N = tile // across * BLOCK_N + tl.arange(0, BLOCK_N)
        col = first // EACH + tl.arange(0, BLOCK_K // EACH)[None, :]
        ok_N = row_N < N
        ok = ok_N[:, None] & (col < STORED)
        group_N, group = (row_N // GROUP_N).to(tl.int64), first // GROUP_K
        scale_ptr += expert * scale_expert + group * scale_col
        scale = tl.load(scale_ptr + group_N * scale_row, mask=ok_N, other=0.0)[:, None]
        rows_N1 = row_N[:, None].to(tl.int64)
        codes_ptrs = codes_ptr + expert * codes_expert + rows_N1 * codes_row + col * codes_col
        codes = tl.load(codes_ptrs, mask=ok, other=0.0)
        if EACH == 2:
            zero_N = tl.full((BLOCK_N,), _ZERO, tl.int32)
            if zeros_ptr is not None:
                zeros_ptr += expert * zeros_expert + group * zeros_col
                zero_N = tl.load(zeros_ptr + group_N * zeros_row, mask=ok_N, other=0).to(tl.int32)
            even = value_of_code(codes, zero_N[:, None], 0, E2M1, tl.float32)
            value = tl.interleave(even, value_of_code(codes, zero_N[:, None], 1, E2M1, tl.float32))
        else:
            value = codes.to(tl.float32)
        out_col = first + tl.arange(0, BLOCK_K)[None, :]
        out_ptrs = out_ptr + (expert * N + rows_N1) * (STORED * EACH) + out_col
        ok = ok_N[:, None] & (out_col < STORED * EACH)
        tl.store(out_ptrs, convert(value * scale, out_ptr.dtype.element_ty), mask=ok)


_launch = Launcher(_dequantize)
