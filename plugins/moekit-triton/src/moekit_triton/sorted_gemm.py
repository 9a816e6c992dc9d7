"""Grouped GEMM for many rows per expert, 16 bits: both operands come through tensor descriptors.

    gather_rows   x -> the order of `AlignedPairs`: a block's rows become one tile of memory
    GEMM 1        sorted x -> sorted a, activated
    GEMM 2        sorted a -> y by pair

Padding rows may hold anything: rows do not mix, and y is written for pairs alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .align import AlignedPairs
from .gemm import GemmConfig, tile_at
from .launch import Launcher, take_turn
from .numerics import Activation, activate, activate_gated, convert, dot

_COLUMNS = 4096


def gather_rows(
    x_RH: torch.Tensor, aligned: AlignedPairs, pairs_per_row: int, out_SH: torch.Tensor
) -> None:
    """out[s] = x[pair of entry s // pairs_per_row]; padding entries stay as they are."""
    rows, hidden = x_RH.shape
    assert out_SH.shape == (aligned.pairs_S.numel(), hidden)
    assert x_RH.stride(1) == 1 and out_SH.is_contiguous()
    _launch_gather(
        (len(out_SH), triton.cdiv(hidden, _COLUMNS)),
        x_RH, out_SH, aligned.pairs_S, aligned.num_rows, hidden, rows * pairs_per_row,
        x_RH.stride(0), PAIRS_PER_ROW=pairs_per_row,
        BLOCK=min(_COLUMNS, triton.next_power_of_2(hidden)), num_warps=4,
    )  # fmt: skip


def sorted_gemm(
    a_SK: torch.Tensor,
    w_LNK: torch.Tensor,
    out: torch.Tensor,
    aligned: AlignedPairs,
    config: GemmConfig,
    num_sms: int,
    *,
    bias_LN: torch.Tensor | None = None,
    activation: Activation | None = None,
    by_pair: bool = False,
) -> None:
    """out[s] = activation(a[s] @ w[expert of s].T + bias) for the entries s of `aligned`.

    a (capacity, K) and w of one 16-bit dtype, with rows of whole 16 bytes; out of any float dtype:
    (capacity, N) in the order of `aligned`, or with ``by_pair`` (pairs, N). N is half of w's rows
    if the activation has a gate. Rows that belong to no pair become undefined, or with ``by_pair``
    are not there. ``num_sms`` programs run where the config is persistent.
    """
    num_experts, w_rows, k = w_LNK.shape
    gated = activation is not None and activation.gated
    n = w_rows // 2 if gated else w_rows
    entries = aligned.pairs_S.numel()
    assert a_SK.shape == (entries, k) and out.shape[1] == n and w_LNK.is_contiguous()
    assert a_SK.is_contiguous() and out.stride(1) == 1 and aligned.block_m == config.block_m
    assert by_pair or len(out) == entries
    tiles = entries // config.block_m * triton.cdiv(n, config.block_n)
    a_box, w_box = ([rows, config.block_k] for rows in (config.block_m, config.block_n))
    limit = None if activation is None else activation.limit
    _launch_gemm(
        (min(tiles, num_sms) if config.persistent else tiles,),
        TensorDescriptor(a_SK, [entries, k], [k, 1], a_box),
        TensorDescriptor(w_LNK, [num_experts * w_rows, k], [k, 1], w_box),
        out, aligned.pairs_S, aligned.experts_B, aligned.num_rows, bias_LN,
        n, k, len(out), out.stride(0),
        0.0 if activation is None else activation.alpha, 0.0 if limit is None else limit,
        ACTIVATION="none" if activation is None else activation.name, GATED=gated,
        CLAMP=limit is not None, BIAS=bias_LN is not None, BY_PAIR=by_pair,
        PERSISTENT=config.persistent,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        GROUP_M=config.group_m, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def _gather(
    x_ptr, out_ptr, pairs_ptr, num_rows_ptr, hidden, num_pairs, x_stride,
    PAIRS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        take_turn()
    entry = tl.program_id(0)
    if entry >= tl.load(num_rows_ptr):
        return
    pair = tl.load(pairs_ptr + entry)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = col < tl.where(pair < num_pairs, hidden, 0)
    x = tl.load(x_ptr + (pair // PAIRS_PER_ROW).to(tl.int64) * x_stride + col, mask=ok)
    tl.store(out_ptr + entry.to(tl.int64) * hidden + col, x, mask=ok)


@triton.jit
def _tile(
    tile, row_blocks, a, w, out_ptr, pairs_ptr, experts_ptr, bias_ptr, N, K, num_pairs, out_stride,
    alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr, BIAS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of the output; with a gate, two tiles of weights, N rows apart."""
    block_m, block_n = tile_at(tile, row_blocks, tl.cdiv(N, BLOCK_N), GROUP_M)
    row0, col0 = block_m * BLOCK_M, block_n * BLOCK_N
    w_row = tl.load(experts_ptr + block_m) * (2 * N if GATED else N) + col0

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Past K both tiles are zero; past N they are another expert's, and are not stored.
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        a_tile = a.load([row0, step * BLOCK_K])
        acc = dot(a_tile, w.load([w_row, step * BLOCK_K]).T, acc, "ieee")
        if GATED:
            up = dot(a_tile, w.load([w_row + N, step * BLOCK_K]).T, up, "ieee")

    cols = col0 + tl.arange(0, BLOCK_N)
    ok = (cols < N)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + w_row + tl.arange(0, BLOCK_N), mask=cols < N, other=0.0)[None, :]
    if GATED:
        if BIAS:
            bias_ptrs = bias_ptr + w_row + N + tl.arange(0, BLOCK_N)
            up += tl.load(bias_ptrs, mask=cols < N, other=0.0)[None, :]
        acc = activate_gated(acc, up, alpha, limit, ACTIVATION, CLAMP)
    elif ACTIVATION != "none":
        acc = activate(acc, ACTIVATION)
    rows = row0 + tl.arange(0, BLOCK_M)
    if BY_PAIR:
        rows = tl.load(pairs_ptr + rows)
        ok = ok & (rows < num_pairs)[:, None]
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * out_stride + cols[None, :]
    tl.store(out_ptrs, convert(acc, out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_pairs"])
def _gemm(
    a, w, out_ptr, pairs_ptr, experts_ptr, num_rows_ptr, bias_ptr, N, K, num_pairs, out_stride,
    alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr, BIAS: tl.constexpr,
    BY_PAIR: tl.constexpr, PERSISTENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """PERSISTENT: tiles in turn, the next one's loads under way while one is stored."""
    if PDL:
        take_turn()
    row_blocks = tl.load(num_rows_ptr) // BLOCK_M
    tiles = row_blocks * tl.cdiv(N, BLOCK_N)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _tile(
                tile, row_blocks, a, w, out_ptr, pairs_ptr, experts_ptr, bias_ptr, N, K, num_pairs,
                out_stride, alpha, limit, ACTIVATION, GATED, CLAMP, BIAS, BY_PAIR,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
            )  # fmt: skip
    elif tl.program_id(0) < tiles:
        _tile(
            tl.program_id(0), row_blocks, a, w, out_ptr, pairs_ptr, experts_ptr, bias_ptr, N, K,
            num_pairs, out_stride, alpha, limit, ACTIVATION, GATED, CLAMP, BIAS, BY_PAIR,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
        )  # fmt: skip


_launch_gather, _launch_gemm = map(Launcher, (_gather, _gemm))
