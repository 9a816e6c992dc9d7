"""Grouped GEMM for many rows per expert: both operands come through tensor descriptors.

Rows are expert-sorted (`SortedAssignments`). The modules `specialized*` do the same by specialized
warps.

Operands have 16 bits, or are e4m3 with specialized tiles. Padding rows may hold anything, because
rows do not mix: their results are undefined in expert-sorted output, and not stored by assignment.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from moekit_kernels import numerics
from moekit_kernels.launch import Constants, Launcher, wait_then_launch_dependents
from moekit_kernels.numerics import NO_ACTIVATION, Activation
from triton.tools.tensor_descriptor import TensorDescriptor

from .operands import SortedLaunch
from .order import tile_at
from .tiles import SortedTile, TokenTile


class _Pointers(NamedTuple):
    """The tensors of a launch but the GEMM's operands; None where it has none."""

    out: torch.Tensor
    assignments: torch.Tensor | None
    experts: torch.Tensor | None
    num_rows: torch.Tensor | None
    bias: torch.Tensor | None
    weights: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class _Tile(Constants):
    """The tile and what follows its sums: constants of the kernel, see `gemm`."""

    n: int
    k: int
    persistent: bool
    halves: bool
    by_assignment: bool
    bias: bool
    activation: str
    gated: bool
    clamp: bool


_tile = functools.cache(_Tile)


def sorted_gemm(g: SortedLaunch) -> None:
    """Compute out[s] = activation(a[s] @ w[expert of s].T + bias) for the sorted rows s.

    Padding rows become undefined, or do not exist with ``by_assignment``. Specialized tiles support
    no bias, and no activation but silu with a gate.
    """
    tile = g.tile
    assert g.weights_RK is None or g.activation is None and g.weights_RK.is_contiguous()
    if not isinstance(tile, SortedTile):
        act = g.activation or Activation("silu")
        assert act.name == "silu" and act.gated and act.limit is None
        assert g.bias_LN is None
        # These modules need the Gluon of newer versions of triton.
        if isinstance(tile, TokenTile):
            assert g.x_RK is None and g.token_tiles is not None
            from .specialized_tokens import specialized_tokens_gemm as gemm
        elif g.scales is None:
            from .specialized import specialized_gemm as gemm
        else:
            assert g.x_RK is None
            from .specialized_fp8 import specialized_fp8_gemm as gemm
        gemm(g)
        return
    assert g.scales is None and g.x_RK is None, "only specialized tiles take these"
    num_experts, w_rows, n, k = g.sizes()
    a_SK, out, aligned, activation = g.a_SK, g.out, g.aligned, g.activation or NO_ACTIVATION
    capacity = aligned.capacity
    assert a_SK.is_contiguous() and out.stride(1) == 1 and aligned.block_m == tile.block_m
    tiles = capacity // tile.block_m * triton.cdiv(n, tile.block_n)
    a_box, half_box, w_box = (
        [rows, tile.block_k] for rows in (tile.block_m, tile.block_m // 2, tile.block_n)
    )
    limit = activation.limit
    _launch_gemm(
        (min(tiles, g.num_sms) if tile.persistent else tiles,),
        TensorDescriptor(a_SK, [capacity, k], [k, 1], a_box),
        TensorDescriptor(a_SK, [capacity, k], [k, 1], half_box) if tile.halves else None,
        TensorDescriptor(g.w_LNK, [num_experts * w_rows, k], [k, 1], w_box),
        _Pointers(out, aligned.assignments_S, aligned.experts_B, aligned.num_rows, g.bias_LN,
                  g.weights_RK),
        n, k, g.num_assignments, tile.group_m, out.stride(0), activation.alpha, limit or 0.0,
        TILE=_tile(tile.block_n, tile.block_k, tile.persistent, tile.halves, g.by_assignment,
                   g.bias_LN is not None, activation.name, activation.gated, limit is not None),
        BLOCK_M=tile.block_m, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit
def _compute(
    row0, col0, w_row, a, w, pointers, N, K, padding, out_stride, alpha, limit,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows by TILE.n columns of out = activation(a @ w.T + bias); with a gate, from
    two weight tiles N rows apart."""
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    ACTIVATION: tl.constexpr = TILE.activation
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Past K both tiles are zero; past N weights are another expert's, and sums are not stored.
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        a_tile = a.load([row0, step * BLOCK_K])
        acc = numerics.dot(a_tile, w.load([w_row, step * BLOCK_K]).T, acc, "ieee")
        if TILE.gated:
            up = numerics.dot(a_tile, w.load([w_row + N, step * BLOCK_K]).T, up, "ieee")

    cols = col0 + tl.arange(0, BLOCK_N)
    ok = (cols < N)[None, :]
    if TILE.bias:
        bias_ptrs = pointers.bias + w_row + tl.arange(0, BLOCK_N)
        acc += tl.load(bias_ptrs, mask=cols < N, other=0.0)[None, :]
    if TILE.gated:
        if TILE.bias:
            bias_ptrs = pointers.bias + w_row + N + tl.arange(0, BLOCK_N)
            up += tl.load(bias_ptrs, mask=cols < N, other=0.0)[None, :]
        acc = numerics.activate_gated(acc, up, alpha, limit, ACTIVATION, TILE.clamp)
    elif ACTIVATION != "none":
        acc = numerics.activate(acc, ACTIVATION)
    rows = row0 + tl.arange(0, BLOCK_M)
    if TILE.by_assignment:
        rows = tl.load(pointers.assignments + rows)
        ok = ok & (rows < padding)[:, None]
        if pointers.weights is not None:
            weights = tl.load(pointers.weights + rows, mask=rows < padding, other=0.0)
            acc *= numerics.weight_before(weights)[:, None]
    out_ptrs = pointers.out + rows[:, None].to(tl.int64) * out_stride + cols[None, :]
    tl.store(out_ptrs, numerics.convert(acc, pointers.out.dtype.element_ty), mask=ok)


@triton.jit
def _position(tile, row_blocks, pointers, N, group_m, TILE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a tile's first row, column and weight row."""
    BLOCK_N: tl.constexpr = TILE.n
    block_m, block_n = tile_at(tile, row_blocks, tl.cdiv(N, BLOCK_N), group_m)
    w_rows = 2 * N if TILE.gated else N
    w_row = tl.load(pointers.experts + block_m) * w_rows + block_n * BLOCK_N
    return block_m * BLOCK_M, block_n * BLOCK_N, w_row


@triton.jit(do_not_specialize=["padding", "group_m"])
def _gemm(
    a, a_half, w, pointers, N, K, padding, group_m, out_stride, alpha, limit,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of a launch.

    TILE.persistent: a program takes tiles by a stride, and loads the next while it stores one.
    TILE.halves: a block whose second half has no rows is a half tile, loaded through a_half.
    """
    if PDL:
        wait_then_launch_dependents()
    row_blocks = tl.load(pointers.num_rows) // BLOCK_M
    tiles = row_blocks * tl.cdiv(N, TILE.n)
    HALF: tl.constexpr = BLOCK_M // 2
    if TILE.persistent:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            row0, col0, w_row = _position(tile, row_blocks, pointers, N, group_m, TILE, BLOCK_M)
            _compute(row0, col0, w_row, a, w, pointers, N, K, padding, out_stride, alpha, limit,
                     TILE, BLOCK_M)  # fmt: skip
        return
    if tl.program_id(0) >= tiles:
        return
    row0, col0, w_row = _position(tl.program_id(0), row_blocks, pointers, N, group_m, TILE, BLOCK_M)
    if TILE.halves:
        if tl.load(pointers.assignments + row0 + HALF) >= padding:
            _compute(row0, col0, w_row, a_half, w, pointers, N, K, padding, out_stride, alpha,
                     limit, TILE, HALF)  # fmt: skip
            return
    _compute(row0, col0, w_row, a, w, pointers, N, K, padding, out_stride, alpha, limit, TILE,
             BLOCK_M)  # fmt: skip


_launch_gemm = Launcher(_gemm)
