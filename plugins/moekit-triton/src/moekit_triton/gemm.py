"""Grouped GEMM: every block of rows times the weights of its own expert.

One kernel serves both formats. STANDARD: rows are listed by `AlignedPairs`. BATCHED: rows of expert
l are the first counts_L[l] of its slab of C rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .align import AlignedPairs
from .numerics import convert, dot

SCALE_GROUP = 128
"""Rows and columns that share one scale in block quantization."""


@dataclass(frozen=True)
class GemmConfig:
    """Tile and launch parameters. `group_m` row blocks run next to each other per column block, for
    L2 reuse."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3


def grouped_gemm(
    a_RK: torch.Tensor,
    w_LNK: torch.Tensor,
    out_SN: torch.Tensor,
    aligned: AlignedPairs,
    config: GemmConfig,
    *,
    a_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    bias_LN: torch.Tensor | None = None,
    pairs_per_row: int = 1,
) -> None:
    """out[pair] = a[pair // pairs_per_row] @ w[expert of pair].T (+ bias), for the pairs in
    `aligned`.

    a and w of one dtype (bf16, fp16, fp32, e4m3, int8), or w e4m3 or int8 and a of 16 bits.
    a_scale: None, one value, (rows, 1) or (rows or 1, ceil(K / 128)); w_scale: None, (L,), (L, N)
    or (L, ceil(N / 128), ceil(K / 128)); all fp32. out: any float dtype, last dim contiguous; rows
    of pairs that `aligned` does not list stay untouched.
    """
    assert aligned.block_m == config.block_m
    _launch(
        a_RK, w_LNK, out_SN, config, a_scale, w_scale, bias_LN,
        rows=aligned.pairs_S, experts=aligned.experts_B, num_rows=out_SN.shape[0],
        row_blocks=aligned.experts_B.numel(), slab_blocks=0, slab=0, pairs_per_row=pairs_per_row,
    )  # fmt: skip


def batched_gemm(
    a_LCK: torch.Tensor,
    w_LNK: torch.Tensor,
    out_LCN: torch.Tensor,
    counts_L: torch.Tensor,
    config: GemmConfig,
    *,
    a_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    bias_LN: torch.Tensor | None = None,
) -> None:
    """out[l, c] = a[l, c] @ w[l].T (+ bias[l]) for c < counts_L[l] (int32); other rows are not read
    nor written.

    dtypes and scales as in `grouped_gemm`, with a_scale None, one value or (L, C, 1 or ceil(K /
    128)), where L and C may also be 1 for all.
    """
    num_experts, slab = a_LCK.shape[:2]
    slab_blocks = triton.cdiv(slab, config.block_m)
    _launch(
        a_LCK.flatten(0, 1), w_LNK, out_LCN.view(num_experts * slab, -1), config,
        a_scale, w_scale, bias_LN, rows=None, experts=counts_L, num_rows=0,
        row_blocks=num_experts * slab_blocks, slab_blocks=slab_blocks, slab=slab, pairs_per_row=1,
    )  # fmt: skip


def _launch(
    a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, config: GemmConfig,
    a_scale: torch.Tensor | None, w_scale: torch.Tensor | None, bias: torch.Tensor | None, *,
    rows: torch.Tensor | None, experts: torch.Tensor,
    num_rows: int, row_blocks: int, slab_blocks: int, slab: int, pairs_per_row: int,
) -> None:  # fmt: skip
    _, n, k = w.shape
    assert a.shape[1] == k and out.shape[1] == n and w.is_contiguous()
    assert a.stride(1) == 1 and out.stride(1) == 1
    if row_blocks == 0:
        return
    a_kind, a_scale_strides = _a_scale_layout(a_scale)
    w_kind = "none" if w_scale is None else _W_SCALE_KINDS[w_scale.dim()]
    if w_kind == "block" or a_kind == "group":
        assert SCALE_GROUP % config.block_k == 0, "a step of K must lie within one scale group"
    # Hopper's fp8 tensor cores accumulate with about 14 bits; sums per step of K are added up in
    # fp32.
    promote = a.dtype == torch.float8_e4m3fn
    _gemm[(row_blocks * triton.cdiv(n, config.block_n),)](
        a, w, out, rows, experts, a_scale, w_scale, bias,
        n, k, num_rows, row_blocks, slab_blocks, slab, a.stride(0), out.stride(0), *a_scale_strides,
        PAIRS_PER_ROW=pairs_per_row, BATCHED=rows is None, A_SCALE=a_kind, W_SCALE=w_kind,
        SCALE_GROUP=SCALE_GROUP, BIAS=bias is not None, PROMOTE=promote, INT8=a.dtype == torch.int8,
        EVEN_N=n % config.block_n == 0, EVEN_K=k % config.block_k == 0,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


_W_SCALE_KINDS = {1: "tensor", 2: "channel", 3: "block"}


def _a_scale_layout(a_scale: torch.Tensor | None) -> tuple[str, tuple[int, int, int]]:
    """Kind, and the strides of slab, row and group; 0 where one scale serves all."""
    if a_scale is None:
        return "none", (0, 0, 0)
    if a_scale.numel() == 1:
        return "tensor", (0, 0, 0)
    strides = [
        0 if size == 1 else stride
        for size, stride in zip(a_scale.shape, a_scale.stride(), strict=True)
    ]
    slab, row, group = strides if len(strides) == 3 else (0, *strides)
    return "row" if a_scale.shape[-1] == 1 else "group", (slab, row, group)


# Integers that change with the number of tokens must not compile a kernel each.
@triton.jit(do_not_specialize=["num_rows", "row_blocks", "slab_blocks", "slab"])
def _gemm(
    a_ptr, w_ptr, out_ptr, rows_ptr, experts_ptr, a_scale_ptr, w_scale_ptr, bias_ptr,
    N, K, num_rows, row_blocks, slab_blocks, slab, a_stride, out_stride,
    a_scale_stride_l, a_scale_stride_m, a_scale_stride_k,
    PAIRS_PER_ROW: tl.constexpr, BATCHED: tl.constexpr,
    A_SCALE: tl.constexpr, W_SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr, BIAS: tl.constexpr, PROMOTE: tl.constexpr, INT8: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """STANDARD: rows_ptr lists pairs, experts_ptr the expert of each block (-1: unused). BATCHED:
    slab_blocks row blocks for each expert's slab, and experts_ptr holds its number of rows."""
    pid = tl.program_id(0)
    col_blocks = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * col_blocks)
    group_rows = tl.minimum(row_blocks - group * GROUP_M, GROUP_M)
    in_group = pid - group * (GROUP_M * col_blocks)
    block_m = group * GROUP_M + in_group % group_rows
    block_n = in_group // group_rows

    if not BATCHED:
        expert = tl.load(experts_ptr + block_m).to(tl.int64)
        if expert < 0:
            return
        pair_M = tl.load(rows_ptr + block_m * BLOCK_M + tl.arange(0, BLOCK_M))
        row_ok = pair_M < num_rows
        out_row = pair_M.to(tl.int64)
        a_row = (pair_M // PAIRS_PER_ROW).to(tl.int64)
        a_scale_row = a_row * a_scale_stride_m
    else:
        expert = (block_m // slab_blocks).to(tl.int64)
        used = tl.load(experts_ptr + expert)
        first = block_m % slab_blocks * BLOCK_M
        if first >= used:
            return
        slot_M = first + tl.arange(0, BLOCK_M)
        row_ok = slot_M < tl.minimum(used, slab)
        out_row = expert * slab + slot_M
        a_row = out_row
        a_scale_row = expert * a_scale_stride_l + slot_M * a_scale_stride_m

    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    n_ok = offs_n < N
    a_ptrs = a_ptr + a_row[:, None] * a_stride + offs_k[None, :]
    w_ptrs = w_ptr + expert * N * K + offs_n[None, :].to(tl.int64) * K + offs_k[:, None]

    PER_STEP: tl.constexpr = (W_SCALE == "block") or (A_SCALE == "group")
    ACC: tl.constexpr = tl.int32 if INT8 and not PER_STEP else tl.float32
    PARTIAL: tl.constexpr = tl.int32 if INT8 else tl.float32
    # fp32 inputs are multiplied exactly (no tf32); 16- and 8-bit inputs ignore this.
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    scale_rows = tl.cdiv(N, SCALE_GROUP)
    scale_cols = tl.cdiv(K, SCALE_GROUP)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=row_ok[:, None], other=0.0)
            if EVEN_N:
                w = tl.load(w_ptrs)
            else:
                w = tl.load(w_ptrs, mask=n_ok[None, :], other=0.0)
        else:
            k_ok = offs_k < K - step * BLOCK_K
            a = tl.load(a_ptrs, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=k_ok[:, None] & n_ok[None, :], other=0.0)
        if PER_STEP:
            partial = dot(a, w, tl.zeros((BLOCK_M, BLOCK_N), dtype=PARTIAL), "ieee").to(tl.float32)
            scale_col = step * BLOCK_K // SCALE_GROUP
            if A_SCALE == "group":
                pointers = a_scale_ptr + a_scale_row + scale_col * a_scale_stride_k
                partial *= tl.load(pointers, mask=row_ok, other=0.0)[:, None]
            if W_SCALE == "block":
                pointer = w_scale_ptr + expert * scale_rows * scale_cols + scale_col
                if SCALE_GROUP % BLOCK_N == 0:
                    partial *= tl.load(pointer + block_n * BLOCK_N // SCALE_GROUP * scale_cols)
                else:
                    pointers = pointer + offs_n // SCALE_GROUP * scale_cols
                    partial *= tl.load(pointers, mask=n_ok, other=0.0)[None, :]
            acc += partial
        elif PROMOTE:
            acc += dot(a, w, tl.zeros((BLOCK_M, BLOCK_N), dtype=PARTIAL), "ieee")
        else:
            acc = dot(a, w, acc, "ieee")
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K

    result = acc.to(tl.float32)
    if A_SCALE == "tensor":
        result *= tl.load(a_scale_ptr)
    elif A_SCALE == "row":
        result *= tl.load(a_scale_ptr + a_scale_row, mask=row_ok, other=0.0)[:, None]
    if W_SCALE == "tensor":
        result *= tl.load(w_scale_ptr + expert)
    elif W_SCALE == "channel":
        result *= tl.load(w_scale_ptr + expert * N + offs_n, mask=n_ok, other=0.0)[None, :]
    if BIAS:
        result += tl.load(bias_ptr + expert * N + offs_n, mask=n_ok, other=0.0).to(tl.float32)[
            None, :
        ]
    out_ptrs = out_ptr + out_row[:, None] * out_stride + offs_n[None, :]
    tl.store(
        out_ptrs, convert(result, out_ptr.dtype.element_ty), mask=row_ok[:, None] & n_ok[None, :]
    )
