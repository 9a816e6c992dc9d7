"""Both GEMMs for a few tokens: two kernels of dot products, each assignment on its own.

So few rows hardly share experts, and reading weights bounds the time, so nothing is sorted or
padded. `gemv_up` is GEMM 1 with the activation, `gemv_down` is GEMM 2 with the weighted sum over K,
in a fixed order.

The result of `gemv_up` is neither quantized nor scaled: it is rounded once to the problem's dtype.

A program's tile has three dimensions: parts x weight rows x columns. Parts are gate and up, or a
token's K assignments. A chunk of columns is what one thread loads at once, and neighbours in a warp
load neighbouring chunks: Triton assigns threads first along the dimension that is contiguous in
memory, and only there do its versions agree. Without the hint about contiguous columns a thread
would take 16 bytes of e4m3 weights, but as many columns of x are 32. Products are summed within a
thread first, so that the scale of a group of columns costs one multiplication a chunk.

With adapters, `low_rank.shrink` computes x @ A.T while `gemv_up` computes its sums. In `gemv_down`
the first programs compute x @ A.T, and the others wait for them after their sums. A GPU starts
programs in the order of their ids, so programs that wait never keep the first ones from starting.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from moekit_kernels.launch import Launcher, cdiv, next_power_of_2, wait_then_launch_dependents
from moekit_kernels.numerics import SCALE_GROUP, Activation, activate, activate_gated, convert
from triton.language.extra import cuda

from .low_rank import LowRank
from .tiles import DotTile

_A_ROWS = 16
"""The rows of A that one program of `gemv_down` multiplies by its input."""


def gemv_up(
    x: torch.Tensor,
    w_LNK: torch.Tensor,
    out: torch.Tensor,
    ids_RK: torch.Tensor,
    activation: Activation,
    tile: DotTile,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    bias_LN: torch.Tensor | None = None,
    low_rank: LowRank | None = None,
    done_R: torch.Tensor | None = None,
) -> None:
    """Compute out[a] = act(x[a // K] @ w[id of a].T + bias) for the assignments a, in fp32.

    Assignments without an expert stay untouched. low_rank: deltas, added with the bias; the
    previous kernel is then their `shrink`. done_R: int32, set to 0.

    x (R, H), any dtype; w (L, 2I if gated else I, H); out (R * K, I), a float dtype; ids (R, K),
    contiguous; scales as `grouped_gemm` takes them.
    """
    count, top_k = ids_RK.numel(), ids_RK.shape[1]
    _, w_rows, k = w_LNK.shape
    n = w_rows // 2 if activation.gated else w_rows
    assert x.shape[1] == k and x.stride(1) == 1 and w_LNK.is_contiguous()
    assert out.shape == (count, n) and out.stride(1) == 1 and ids_RK.is_contiguous()
    if count == 0:
        return
    x_kind, x_row_stride, x_group_stride = _x_scale_layout(x_scale)
    _launch_up(
        (count, cdiv(n, tile.rows)),
        x, w_LNK, out, ids_RK, x_scale, w_scale, bias_LN, *_low_rank(low_rank), done_R,
        x.stride(0), out.stride(0), x_row_stride, x_group_stride,
        activation.alpha, 0.0 if activation.limit is None else activation.limit,
        **_low_rank_form(low_rank), TOP_K=top_k, ACTIVATION=activation.name, GATED=activation.gated,
        CLAMP=activation.limit is not None,
        **_constants(x, w_LNK, n, x_kind, w_scale, bias_LN, tile),
        CHUNKS=32 * tile.num_warps,
        num_warps=tile.num_warps,
    )  # fmt: skip


def gemv_down(
    x: torch.Tensor,
    w_LNK: torch.Tensor,
    out: torch.Tensor,
    ids_RK: torch.Tensor,
    weights_RK: torch.Tensor,
    tile: DotTile,
    *,
    w_scale: torch.Tensor | None = None,
    bias_LN: torch.Tensor | None = None,
    low_rank: LowRank | None = None,
    a_SLGrK: torch.Tensor | None = None,
    scaling_S: torch.Tensor | None = None,
    done_R: torch.Tensor | None = None,
) -> None:
    """Compute out[r] = sum over k of weights[r, k] * (x[r * K + k] @ w[ids[r, k]].T + bias).

    Sums are fp32. Assignments with a negative id are skipped, so x and weights may hold anything
    there; rows without other assignments become 0.

    x (R * K, I) and out (R, H), float dtypes; w (L, H, I); ids and weights (R, K), contiguous.
    low_rank: deltas, added with the bias. This kernel writes their ``low`` = scaling * x @ A.T, and
    ``done_R`` counts the programs that have written it.
    """
    rows, top_k = ids_RK.shape
    _, n, k = w_LNK.shape
    assert x.shape == (rows * top_k, k) and x.stride(1) == 1 and w_LNK.is_contiguous()
    assert out.shape == (rows, n) and out.stride(1) == 1
    assert ids_RK.is_contiguous() and weights_RK.is_contiguous()
    if rows == 0:
        return
    parts, form = next_power_of_2(top_k), _low_rank_form(low_rank)
    shrinks = top_k * cdiv(form["RANK"], _A_ROWS)
    a_strides = (0, 0) if a_SLGrK is None else a_SLGrK.stride()[:2]
    _launch_down(
        (rows, shrinks + cdiv(n, tile.rows)),
        x, w_LNK, out, ids_RK, weights_RK, w_scale, bias_LN, *_low_rank(low_rank), done_R,
        a_SLGrK, scaling_S, *a_strides, x.stride(0), out.stride(0),
        **form, SHRINKS=shrinks, A_ROWS=_A_ROWS, TOP_K=top_k, PARTS=parts,
        **_constants(x, w_LNK, n, "none", w_scale, bias_LN, tile),
        CHUNKS=32 * max(1, tile.num_warps // parts),
        num_warps=tile.num_warps,
    )  # fmt: skip


def _constants(
    x: torch.Tensor, w: torch.Tensor, n: int, x_kind: str, w_scale: torch.Tensor | None,
    bias: torch.Tensor | None, tile: DotTile,
) -> dict[str, Any]:  # fmt: skip
    k, values = w.shape[2], 16 // max(x.itemsize, w.itemsize)
    w_kind = "none" if w_scale is None else ("tensor", "channel", "block")[w_scale.dim() - 1]
    return {
        "N": n, "W_ROWS": w.shape[1], "K": k, "X_SCALE": x_kind, "W_SCALE": w_kind,
        "GROUP": SCALE_GROUP, "BIAS": bias is not None, "EVEN_N": n % tile.rows == 0,
        "ROWS": tile.rows, "VALUES": values,
    }  # fmt: skip


def _low_rank(low: LowRank | None) -> tuple[Any, ...]:
    """Return low, B, slots, and the strides of low's addends, B's slots and B's experts."""
    if low is None:
        return None, None, None, 0, 0, 0
    return *low[:3], low.low_PAU.stride(0), *low.b_SLNr.stride()[:2]


def _low_rank_form(low: LowRank | None) -> dict[str, Any]:
    rank, columns, addends = low.form[:3] if low else (0, 0, 0)
    return {"RANK": rank, "RANKS": next_power_of_2(rank), "LOW_COLUMNS": columns,
            "ADDENDS": addends}  # fmt: skip


def _x_scale_layout(scale: torch.Tensor | None) -> tuple[str, int, int]:
    """Return the kind, and the strides of row and group."""
    if scale is None:
        return "none", 0, 0
    kind = "row" if scale.shape[1] == 1 else "group"
    return kind, 0 if scale.shape[0] == 1 else scale.stride(0), scale.stride(1)


@triton.jit
def _step(
    x_rows, x_ok, x_scales, x_group_stride, w_rows, w_ok, w_scales, step,
    X_SCALE: tl.constexpr, W_SCALE: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    MASKED: tl.constexpr, CHUNKS: tl.constexpr, VALUES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Return (parts, rows, chunks): x * w, summed over each chunk's values, times the scales.

    x_rows (1 or parts, 1, 1), w_rows (parts, rows, 1), x_scales and w_scales: pointers to rows.
    WAIT: the previous kernel writes x.
    """
    COLS: tl.constexpr = CHUNKS * VALUES
    col = (step * COLS + tl.arange(0, COLS))[None, None, :]
    w_ptrs = tl.max_contiguous(w_rows + col, (1, 1, VALUES))
    x_ptrs = tl.max_contiguous(x_rows + col, (1, 1, VALUES))
    if K % COLS != 0:
        w = tl.load(w_ptrs, mask=w_ok & (col < K), other=0.0)
        if WAIT:
            wait_then_launch_dependents()
        x = tl.load(x_ptrs, mask=x_ok & (col < K), other=0.0)
    elif MASKED:
        w = tl.load(w_ptrs, mask=w_ok, other=0.0)
        if WAIT:
            wait_then_launch_dependents()
        x = tl.load(x_ptrs, mask=x_ok, other=0.0)
    else:
        w = tl.load(w_ptrs)
        if WAIT:
            wait_then_launch_dependents()
        x = tl.load(x_ptrs)
    products = x.to(tl.float32) * w.to(tl.float32)
    PARTS: tl.constexpr = products.shape[0]
    ROWS: tl.constexpr = products.shape[1]
    sums = tl.sum(tl.reshape(products, (PARTS, ROWS, CHUNKS, VALUES)), axis=3)
    if X_SCALE == "group" or W_SCALE == "block":
        GROUPS: tl.constexpr = COLS // GROUP  # at least one: a warp's chunks have 128 columns
        group = (step * GROUPS + tl.arange(0, GROUPS))[None, None, :]
        in_k = group * GROUP < K
        scale = tl.full((1, 1, GROUPS), 1.0, tl.float32)
        if X_SCALE == "group":
            scale = tl.load(x_scales + group * x_group_stride, mask=in_k, other=0.0)
        if W_SCALE == "block":
            scale = scale * tl.load(w_scales + group, mask=in_k, other=0.0)
        sums = tl.reshape(sums, (PARTS, ROWS, GROUPS, CHUNKS // GROUPS)) * scale[:, :, :, None]
        sums = tl.reshape(sums, (PARTS, ROWS, CHUNKS))
    return sums


@triton.jit
def _dot(
    x_rows, x_ok, x_scales, x_group_stride, w_rows, w_ok, w_scales,
    X_SCALE: tl.constexpr, W_SCALE: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    MASKED: tl.constexpr, CHUNKS: tl.constexpr, VALUES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Return x @ w.T (parts, rows) over all of K."""
    sums = _step(x_rows, x_ok, x_scales, x_group_stride, w_rows, w_ok, w_scales, 0,
                 X_SCALE, W_SCALE, GROUP, K, MASKED, CHUNKS, VALUES, WAIT)  # fmt: skip
    STEPS: tl.constexpr = (K + CHUNKS * VALUES - 1) // (CHUNKS * VALUES)
    for step in tl.range(1, STEPS):
        sums += _step(x_rows, x_ok, x_scales, x_group_stride, w_rows, w_ok, w_scales, step,
                      X_SCALE, W_SCALE, GROUP, K, MASKED, CHUNKS, VALUES, False)  # fmt: skip
    return tl.sum(sums, axis=2)


@triton.jit
def _rank_of(slot, RANK: tl.constexpr):
    return tl.where(slot >= 0, RANK, 0)


@triton.jit
def _b_rows(b_ptr, slot, expert_P, row_PN, slot_stride, expert_stride, ok_PN, RANK: tl.constexpr,
            RANKS: tl.constexpr):  # fmt: skip
    """Return B (parts, rows, RANKS) of a slot in fp32; zeros without a slot, and past RANK."""
    r = tl.arange(0, RANKS)[None, None, :]
    offset_P = slot.to(tl.int64) * slot_stride + expert_P * expert_stride
    b_ptrs = b_ptr + offset_P[:, None, None] + row_PN.to(tl.int64)[:, :, None] * RANK + r
    return tl.load(b_ptrs, mask=ok_PN[:, :, None] & (r < _rank_of(slot, RANK)), other=0.0)


@triton.jit
def _plus_delta(value, b, slot, low_ptrs, ok, addend_stride, RANK: tl.constexpr,
                RANKS: tl.constexpr, ADDENDS: tl.constexpr):  # fmt: skip
    """Return value (parts, rows) + low @ B.T; without a slot, value. low_ptrs (parts, 1, 1)."""
    r = tl.arange(0, RANKS)[None, None, :]
    low_ok = ok & (r < _rank_of(slot, RANK))
    low = tl.load(low_ptrs + r, mask=low_ok, other=0.0)
    for addend in tl.static_range(1, ADDENDS):
        low += tl.load(low_ptrs + addend * addend_stride + r, mask=low_ok, other=0.0)
    delta = tl.sum(low * b.to(tl.float32), axis=2)
    return tl.where(slot >= 0, value + delta, value)


@triton.jit
def _up(
    x_ptr, w_ptr, out_ptr, ids_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, low_ptr, b_ptr, slots_ptr,
    addend_stride, b_slot_stride, b_expert_stride, done_ptr, x_stride, out_stride,
    x_scale_row_stride, x_scale_group_stride, alpha, limit,
    RANK: tl.constexpr, RANKS: tl.constexpr, LOW_COLUMNS: tl.constexpr, ADDENDS: tl.constexpr,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr,
    N: tl.constexpr, W_ROWS: tl.constexpr, K: tl.constexpr,
    X_SCALE: tl.constexpr, W_SCALE: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
    EVEN_N: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Assignments vary fastest: those that share an expert read its weights at the same time.
    assignment, first = tl.program_id(0), tl.program_id(1) * ROWS
    if PDL:
        if RANK > 0:  # as in `gemm._gemm`, this kernel waits for `shrink` after its sums
            cuda.gdc_launch_dependents()
        else:
            wait_then_launch_dependents()
    token = (assignment // TOP_K).to(tl.int64)
    if done_ptr is not None:
        if first == 0:
            tl.store(done_ptr + token, 0)
    expert = tl.load(ids_ptr + assignment).to(tl.int64)
    if expert < 0:
        if PDL and RANK > 0:
            cuda.gdc_wait()
        return
    PARTS: tl.constexpr = 2 if GATED else 1
    col_N = first + tl.arange(0, ROWS)
    row_PN = N * tl.arange(0, PARTS)[:, None] + col_N[None, :]
    n_ok = col_N < N
    ok_PN = n_ok[None, :] & (tl.arange(0, PARTS) >= 0)[:, None]
    w_rows = w_ptr + expert * (W_ROWS * K) + (row_PN.to(tl.int64) * K)[:, :, None]
    x_row = x_ptr + token * x_stride + tl.zeros((1, 1, 1), tl.int32)
    x_scales = x_scale_ptr
    if X_SCALE != "none":
        x_scales += token * x_scale_row_stride
    GROUPS_N: tl.constexpr = (W_ROWS + GROUP - 1) // GROUP
    GROUPS_K: tl.constexpr = (K + GROUP - 1) // GROUP
    w_scales = w_scale_ptr
    if W_SCALE == "block":
        w_scales += expert * (GROUPS_N * GROUPS_K)
        if GROUP % ROWS == 0 and N % GROUP == 0:  # one scale for all rows of a part
            w_scales += ((N * tl.arange(0, PARTS) + first) // GROUP * GROUPS_K)[:, None, None]
        else:
            w_scales += (tl.minimum(row_PN, W_ROWS - 1) // GROUP * GROUPS_K)[:, :, None]
    if RANK > 0:
        slot = tl.load(slots_ptr + token)
        b = _b_rows(b_ptr, slot, expert + tl.zeros((PARTS,), tl.int64), row_PN, b_slot_stride,
                    b_expert_stride, ok_PN, RANK, RANKS)  # fmt: skip
    value = _dot(x_row, True, x_scales, x_scale_group_stride, w_rows, ok_PN[:, :, None],
                 w_scales, X_SCALE, W_SCALE, GROUP, K, not EVEN_N, CHUNKS, VALUES,
                 False)  # fmt: skip
    if X_SCALE == "row":
        value *= tl.load(x_scales)
    if W_SCALE == "tensor":
        value *= tl.load(w_scale_ptr + expert)
    elif W_SCALE == "channel":
        value *= tl.load(w_scale_ptr + expert * W_ROWS + row_PN, mask=ok_PN, other=0.0)
    if BIAS:
        value += tl.load(bias_ptr + expert * W_ROWS + row_PN, mask=ok_PN, other=0.0).to(tl.float32)
    if RANK > 0:
        if PDL:
            cuda.gdc_wait()
        column_P = (LOW_COLUMNS - RANK) * tl.arange(0, PARTS)  # up may have its own A
        low_ptrs = low_ptr + (assignment.to(tl.int64) * LOW_COLUMNS + column_P)[:, None, None]
        ok = tl.full((1, 1, 1), 1, tl.int1)
        value = _plus_delta(value, b, slot, low_ptrs, ok, addend_stride, RANK, RANKS, ADDENDS)
    if GATED:
        gate, up = tl.split(tl.trans(value))
        result = activate_gated(gate, up, alpha, limit, ACTIVATION, CLAMP)
    else:
        result = activate(tl.reshape(value, (ROWS,)), ACTIVATION)
    out_ptrs = out_ptr + assignment.to(tl.int64) * out_stride + col_N
    tl.store(out_ptrs, convert(result, out_ptr.dtype.element_ty), mask=n_ok)


@triton.jit
def _down(
    x_ptr, w_ptr, out_ptr, ids_ptr, weights_ptr, w_scale_ptr, bias_ptr, low_ptr, b_ptr, slots_ptr,
    addend_stride, b_slot_stride, b_expert_stride, done_ptr, a_ptr, scaling_ptr, a_slot_stride,
    a_expert_stride, x_stride, out_stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, LOW_COLUMNS: tl.constexpr, ADDENDS: tl.constexpr,
    SHRINKS: tl.constexpr, A_ROWS: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr,
    N: tl.constexpr, W_ROWS: tl.constexpr, K: tl.constexpr,
    X_SCALE: tl.constexpr, W_SCALE: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
    EVEN_N: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute out[token] = sum over k of weights[token, k] * (x[token, k] @ w[expert].T + bias).

    ids, router weights and w were written before the previous kernel, which has waited for them;
    only x is loaded after the wait."""
    token, first = tl.program_id(0).to(tl.int64), (tl.program_id(1) - SHRINKS) * ROWS
    if RANK > 0:
        slot = tl.load(slots_ptr + token)
        if first < 0:
            _shrink(x_ptr, a_ptr, low_ptr, ids_ptr, scaling_ptr, done_ptr, token, slot,
                    tl.program_id(1), a_slot_stride, a_expert_stride, x_stride, RANK, A_ROWS, TOP_K,
                    K, CHUNKS, VALUES, PDL)  # fmt: skip
            return
    k_P = tl.arange(0, PARTS)
    assignment_P = token * TOP_K + k_P
    expert_P = tl.load(ids_ptr + assignment_P, mask=k_P < TOP_K, other=-1).to(tl.int64)
    present_P = expert_P >= 0
    expert_P = tl.maximum(expert_P, 0)
    weight_P = tl.load(weights_ptr + assignment_P, mask=present_P, other=0.0)
    col_N = first + tl.arange(0, ROWS)
    n_ok = col_N < N
    ok_PN = present_P[:, None] & n_ok[None, :]
    offset_PN = expert_P[:, None] * N + col_N[None, :]
    w_rows = w_ptr + (offset_PN * K)[:, :, None]
    x_rows = x_ptr + (assignment_P * x_stride)[:, None, None]
    GROUPS_N: tl.constexpr = (N + GROUP - 1) // GROUP
    GROUPS_K: tl.constexpr = (K + GROUP - 1) // GROUP
    w_scales = w_scale_ptr
    if W_SCALE == "block":
        w_scales += (expert_P * (GROUPS_N * GROUPS_K))[:, None, None]
        if GROUP % ROWS == 0:
            w_scales += first // GROUP * GROUPS_K
        else:
            w_scales += (tl.minimum(col_N, N - 1) // GROUP * GROUPS_K)[None, :, None]
    if RANK > 0:
        row_PN = tl.zeros((PARTS, 1), tl.int32) + col_N[None, :]
        b = _b_rows(b_ptr, slot, expert_P, row_PN, b_slot_stride, b_expert_stride, ok_PN, RANK,
                    RANKS)  # fmt: skip
    value = _dot(x_rows, present_P[:, None, None], x_ptr, 0, w_rows,
                 ok_PN[:, :, None], w_scales,
                 X_SCALE, W_SCALE, GROUP, K, True, CHUNKS, VALUES, PDL)  # fmt: skip
    if W_SCALE == "tensor":
        value *= tl.load(w_scale_ptr + expert_P)[:, None]
    elif W_SCALE == "channel":
        value *= tl.load(w_scale_ptr + offset_PN, mask=ok_PN, other=0.0)
    if BIAS:
        value += tl.load(bias_ptr + offset_PN, mask=ok_PN, other=0.0).to(tl.float32)
    if RANK > 0:
        done = SHRINKS
        if slot >= 0:
            done = tl.atomic_add(done_ptr + token, 0, sem="acquire")
        while done < SHRINKS:
            done = tl.atomic_add(done_ptr + token, 0, sem="acquire")
        low_ptrs = low_ptr + (assignment_P * RANK)[:, None, None]
        value = _plus_delta(value, b, slot, low_ptrs, present_P[:, None, None], addend_stride, RANK,
                            RANKS, 1)  # fmt: skip
    result = tl.sum(value * weight_P[:, None], axis=0)
    out_ptrs = out_ptr + token * out_stride + col_N
    tl.store(out_ptrs, convert(result, out_ptr.dtype.element_ty), mask=n_ok)


@triton.jit
def _shrink(
    x_ptr, a_ptr, low_ptr, ids_ptr, scaling_ptr, done_ptr, token, slot, program, slot_stride,
    expert_stride, x_stride, RANK: tl.constexpr, A_ROWS: tl.constexpr, TOP_K: tl.constexpr,
    K: tl.constexpr, CHUNKS: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store low = scaling * x @ A.T of one assignment for A_ROWS rows of A; add 1 to done."""
    assignment, r = token * TOP_K + program % TOP_K, program // TOP_K * A_ROWS
    r += tl.arange(0, A_ROWS)
    expert = tl.load(ids_ptr + assignment).to(tl.int64)
    rank = tl.where(expert >= 0, _rank_of(slot, RANK), 0)
    ok = r < rank
    a_rows = a_ptr + slot.to(tl.int64) * slot_stride + expert * expert_stride + r * K
    x_row = x_ptr + assignment * x_stride + tl.zeros((1, 1, 1), tl.int32)
    x_ok = tl.zeros((1, 1, 1), tl.int32) < rank
    low = _dot(x_row, x_ok, x_ptr, 0, a_rows[None, :, None], ok[None, :, None], x_ptr, "none",
               "none", 1, K, True, CHUNKS, VALUES, PDL)  # fmt: skip
    low = tl.reshape(low, (A_ROWS,)) * tl.load(scaling_ptr + slot, mask=rank > 0, other=0.0)
    tl.store(low_ptr + assignment * RANK + r, low, mask=ok)
    tl.debug_barrier()
    tl.atomic_add(done_ptr + token, 1, sem="release")


_launch_up, _launch_down = map(Launcher, (_up, _down))
