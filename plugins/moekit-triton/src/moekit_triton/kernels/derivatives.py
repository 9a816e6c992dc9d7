"""Derivatives of the activations, and the sums of a backward that are not products.

Rows are assignments in the order of their experts, without padding; ``ends_L`` says where each
expert's rows end. Each sum has a fixed order.
"""

import torch
import triton
import triton.language as tl
from moekit_kernels.launch import Launcher, cdiv, next_power_of_2, wait_then_launch_dependents
from moekit_kernels.numerics import convert, tanh

_LISTED = 32  # blocks that a program lists


def list_blocks(ends_L: torch.Tensor, blocks: int, block_m: int) -> torch.Tensor:
    """List the blocks of at most ``block_m`` rows of one expert.

    Args:
        ends_L: int32 (L,).
        blocks: an upper bound of their number.

    Returns:
        int32 (1 + 2 * blocks,): the number of blocks, the expert of each and the first row of each.
        Entries of unused blocks are undefined.
    """
    out = ends_L.new_empty(1 + 2 * blocks)
    _launch_list(
        (cdiv(max(blocks, 1), _LISTED),), ends_L, out, len(ends_L), blocks,
        BLOCK_M=block_m, BINS=max(16, next_power_of_2(len(ends_L))), EACH=_LISTED,
    )  # fmt: skip
    return out


def router_gradient(
    partials_ST: torch.Tensor,
    places_A: torch.Tensor,
    out_A: torch.Tensor,
    of_bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Compute out[a] = sum of partials[place of a] + <grad[row of a], bias[expert of a]> in fp32.

    Assignments without an expert, whose place is negative, get 0.

    Args:
        partials_ST: fp32 (S, T), contiguous.
        places_A: int32 (A,), the row of each assignment.
        out_A: fp32 (A,).
        of_bias: the gradient (R, H), ids, integers (A,), and the bias (L, H), with unit strides
            along H; None without a bias.
    """
    parts, assignments = partials_ST.shape[1], len(out_A)
    if assignments == 0:
        return
    sizes, top_k = (0, 0, 0), 1
    if of_bias is not None:
        grad_RH, _, bias_LH = of_bias
        sizes = grad_RH.shape[1], grad_RH.stride(0), bias_LH.stride(0)
        top_k = assignments // len(grad_RH)
    _launch_router(
        (cdiv(assignments, 16),),
        partials_ST, places_A, out_A, *(of_bias or (None, None, None)), assignments, parts, *sizes,
        TOP_K=top_k, PARTS=next_power_of_2(parts), BLOCK_A=16, BLOCK_H=128,
    )  # fmt: skip


def sum_rows(
    rows: torch.Tensor,
    ends_L: torch.Tensor,
    out_LN: torch.Tensor,
    add: bool,
    weighted: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write the sum of each expert's rows, accumulated in fp32; 0 for experts without rows.

    Args:
        rows: (S, N), or with ``weighted`` (R, N), of which assignment a takes row a // K; unit
            stride along N.
        out_LN: (L, N), any float dtype and strides.
        add: add to what ``out_LN`` holds.
        weighted: the assignment of each row, int32 (S,), and the fp32 weights (R, K).
    """
    experts, n = out_LN.shape
    order_S, weights_RK = weighted or (None, None)
    block_n = min(128, max(16, next_power_of_2(n)))
    _launch_sum(
        (experts, cdiv(n, block_n)),
        rows, ends_L, out_LN, order_S, weights_RK, n, rows.stride(0), *out_LN.stride(),
        TOP_K=0 if weights_RK is None else weights_RK.shape[1], ADD=add,
        BLOCK_R=32, BLOCK_N=block_n,
    )  # fmt: skip


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    """Return a plain activation of x and its derivative."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(x)
        return x * share, share * (1.0 + x * (1.0 - share))
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(z)) == sigmoid(2 * z)
        square = x * x
        share = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * square)
        return x * share, share + x * share * (1.0 - share) * inner
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.maximum(x, 0.0)
        return positive * positive, 2.0 * positive


@triton.jit
def pull_plain(x, da, ACTIVATION: tl.constexpr):
    """Return a = activation(x) and da * activation'(x), in fp32."""
    a, slope = _slope(x, ACTIVATION)
    return a, da * slope


@triton.jit
def pull_gated(gate, up, da, alpha, limit, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr):
    """Return a = activation(gate, up) and the gradients of gate and up, in fp32.

    A clamp passes the gradient where it changes nothing, at the limit too, as torch.clamp does.
    """
    up_slope = 1.0
    if ACTIVATION == "situ":
        bent, share = tanh(gate / alpha), tl.sigmoid(gate)
        act = alpha * bent * share
        slope = (1.0 - bent * bent) * share + act * (1.0 - share)
        if CLAMP:
            bent_up = tanh(up / limit)
            up, up_slope = limit * bent_up, 1.0 - bent_up * bent_up
    elif ACTIVATION == "swiglustep":
        act, slope = _slope(gate, "silu")
        slope = tl.where(act <= limit, slope, 0.0)
        act = tl.minimum(act, limit)
    else:
        inside = gate <= limit
        if CLAMP:
            gate = tl.minimum(gate, limit)
        if ACTIVATION == "swigluoai":
            share = tl.sigmoid(alpha * gate)
            act = gate * share
            slope = share + alpha * act * (1.0 - share)
        else:
            act, slope = _slope(gate, ACTIVATION)
        if CLAMP:
            slope = tl.where(inside, slope, 0.0)
    if CLAMP and ACTIVATION != "situ":
        up_slope = tl.where(tl.abs(up) <= limit, 1.0, 0.0)
        up = tl.clamp(up, -limit, limit)
    if ACTIVATION == "swigluoai":
        up += 1.0
    return act * up, da * up * slope, da * act * up_slope


@triton.jit(do_not_specialize=["blocks"])
def _list(ends_ptr, out_ptr, experts, blocks, BLOCK_M: tl.constexpr, BINS: tl.constexpr,
          EACH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """List EACH blocks."""
    if PDL:
        wait_then_launch_dependents()
    expert_L = tl.arange(0, BINS)
    last = tl.load(ends_ptr + experts - 1)
    end_L = tl.load(ends_ptr + expert_L, mask=expert_L < experts, other=0)
    end_L = tl.where(expert_L < experts, end_L, last)
    before = (expert_L > 0) & (expert_L < experts)
    start_L = tl.load(ends_ptr + expert_L - 1, mask=before, other=0)
    start_L = tl.where(expert_L < experts, start_L, last)
    blocks_L = tl.cdiv(end_L - start_L, BLOCK_M)
    behind_L = tl.cumsum(blocks_L, axis=0)
    if tl.program_id(0) == 0:
        tl.store(out_ptr, tl.sum(blocks_L))
    block_B = tl.program_id(0) * EACH + tl.arange(0, EACH)
    expert_B = tl.sum((behind_L[:, None] <= block_B[None, :]).to(tl.int32), axis=0)
    used_B = (expert_B < BINS) & (block_B < blocks)
    expert_B = tl.minimum(expert_B, BINS - 1)
    first_B = tl.gather(start_L - (behind_L - blocks_L) * BLOCK_M, expert_B, 0)
    tl.store(out_ptr + 1 + block_B, expert_B, mask=used_B)
    tl.store(out_ptr + 1 + blocks + block_B, first_B + block_B * BLOCK_M, mask=used_B)


@triton.jit
def _router(
    partials_ptr, places_ptr, out_ptr, grad_ptr, ids_ptr, bias_ptr, assignments, parts, hidden,
    grad_stride, bias_stride, TOP_K: tl.constexpr, PARTS: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_then_launch_dependents()
    assignment_A = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    ok_A = assignment_A < assignments
    place_A = tl.load(places_ptr + assignment_A, mask=ok_A, other=-1)
    real = (place_A >= 0)[:, None]
    part_T = tl.arange(0, PARTS)[None, :]
    pointers = partials_ptr + place_A[:, None].to(tl.int64) * parts + part_T
    total_A = tl.sum(tl.load(pointers, mask=real & (part_T < parts), other=0.0), axis=1)
    if bias_ptr is not None:
        expert_A = tl.load(ids_ptr + assignment_A, mask=ok_A, other=0).to(tl.int64)
        row_A = (assignment_A // TOP_K).to(tl.int64)
        sum_AH = tl.zeros((BLOCK_A, BLOCK_H), tl.float32)
        for start in range(0, hidden, BLOCK_H):
            col = start + tl.arange(0, BLOCK_H)[None, :]
            ok = real & (col < hidden)
            g = tl.load(grad_ptr + row_A[:, None] * grad_stride + col, mask=ok, other=0.0)
            b = tl.load(bias_ptr + expert_A[:, None] * bias_stride + col, mask=ok, other=0.0)
            sum_AH += g.to(tl.float32) * b.to(tl.float32)
        total_A += tl.sum(sum_AH, axis=1)
    tl.store(out_ptr + assignment_A, total_A, mask=ok_A)


@triton.jit
def _sum(
    rows_ptr, ends_ptr, out_ptr, order_ptr, weights_ptr, N, row_stride, out_expert, out_col,
    TOP_K: tl.constexpr, ADD: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sum BLOCK_N columns of an expert's rows. TOP_K > 0: weighted rows of the assignments."""
    if PDL:
        wait_then_launch_dependents()
    expert = tl.program_id(0)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sum_RN = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for first in range(start, end, BLOCK_R):
        row_R = first + tl.arange(0, BLOCK_R)
        ok_R = row_R < end
        source_R = row_R
        if TOP_K > 0:
            assignment_R = tl.load(order_ptr + row_R, mask=ok_R, other=0)
            source_R = assignment_R // TOP_K
        pointers = rows_ptr + source_R[:, None].to(tl.int64) * row_stride + col[None, :]
        value = tl.load(pointers, mask=ok_R[:, None] & (col < N)[None, :], other=0.0)
        value = value.to(tl.float32)
        if TOP_K > 0:
            value *= tl.load(weights_ptr + assignment_R, mask=ok_R, other=0.0)[:, None]
        sum_RN += value
    total_N = tl.sum(sum_RN, axis=0)
    out_ptrs = out_ptr + expert.to(tl.int64) * out_expert + col * out_col
    if ADD:
        total_N += tl.load(out_ptrs, mask=col < N, other=0.0).to(tl.float32)
    tl.store(out_ptrs, convert(total_N, out_ptr.dtype.element_ty), mask=col < N)


_launch_list, _launch_router, _launch_sum = map(Launcher, (_list, _router, _sum))
