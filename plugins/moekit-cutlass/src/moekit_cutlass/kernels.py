"""Kernels around the grouped GEMMs: sorting assignments, copying rows into order, biases.

Everything runs on the device with sizes fixed by the worst case, so a CUDA graph may capture it.
Rows without an expert, and sorted rows from the last offset on, are neither read nor written.

Shape suffixes: R rows, K experts of a row, S = R * K assignments, L local experts, C capacity. The
batched layout is L * C rows with one assignment each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from moekit_kernels.align import SortedAssignments, align
from moekit_kernels.numerics import INTERPRETED, QMAX, convert, quantize, scale_of
from torch import Tensor

CHUNK = 1024


@dataclass(frozen=True)
class Groups:
    """Assignments sorted by expert. Tensors are int32; ids may also be int64."""

    ids_RK: Tensor  # the expert of each assignment, negative for none
    slots_RK: Tensor  # the sorted row of each assignment, -1 without an expert
    offsets_L1: Tensor  # (L + 1,), expert l has the sorted rows offsets[l] to offsets[l + 1]
    rows_S: Tensor | None = None  # the source row of each sorted row, undefined from `total` on

    @property
    def num_experts(self) -> int:
        return self.offsets_L1.shape[0] - 1

    @property
    def total(self) -> Tensor:
        """Return the number of assignments with an expert, as a tensor (1,)."""
        return self.offsets_L1[self.num_experts :]


def sort_assignments(groups: Groups, scratch: Tensor) -> None:
    """Fill the rest of ``groups`` from its ids (contiguous; in [0, L), or -1)."""
    slots_S, offsets_L1 = groups.slots_RK.view(-1), groups.offsets_L1
    pairs = SortedAssignments(groups.rows_S, None, None, 1, slots_S, offsets_L1[1:])
    align(groups.ids_RK, groups.num_experts, pairs, scratch, zeros=offsets_L1[:1])
    if groups.rows_S is not None:
        # For K = 1 too: quack reads offsets without waiting for the launch right before it.
        groups.rows_S.div_(groups.ids_RK.shape[1], rounding_mode="floor")


def group_batched(counts_L: Tensor, slab: int, groups: Groups) -> None:
    """Fill ``groups`` and its int32 ids from the batched layout with capacity ``slab``.

    Expert l has the rows l * C + c for c < counts_L[l] (int32), with one assignment each.
    """
    n = groups.num_experts * slab
    assert counts_L.dtype == torch.int32 and groups.slots_RK.shape == (n, 1)
    _group_batched[(triton.cdiv(n, CHUNK),)](
        counts_L.contiguous(), groups.ids_RK, groups.slots_RK, groups.offsets_L1, groups.rows_S,
        n, slab, groups.num_experts,
        CHUNK=CHUNK, BINS=max(32, triton.next_power_of_2(groups.num_experts + 1)), num_warps=4,
    )  # fmt: skip
    if groups.rows_S is not None:
        groups.rows_S.div_(1, rounding_mode="floor")  # a launch between, as in `sort_assignments`


def problem_sizes(groups: Groups, n: int, k: int, swap: bool) -> tuple[Tensor, Tensor]:
    """Return each expert's first row, int64 (L,), and its (rows, n, k), int32 (L, 3).

    With ``swap`` (n, rows, k), for swap-AB GEMMs.
    """
    num_experts, device = groups.num_experts, groups.offsets_L1.device
    starts_L = torch.empty(num_experts, dtype=torch.int64, device=device)
    sizes_L3 = torch.empty((num_experts, 3), dtype=torch.int32, device=device)
    _problem_sizes[(1,)](
        groups.offsets_L1, starts_L, sizes_L3, num_experts, n, k, SWAP=swap,
        BINS=triton.next_power_of_2(num_experts), num_warps=4,
    )  # fmt: skip
    return starts_L, sizes_L3


def spread_rows(
    x_RH: Tensor, slots_RK: Tensor, out_SH: Tensor, *, x_scale: Tensor | None = None,
    out_scale_S: Tensor | None = None, static: bool = False,
) -> None:  # fmt: skip
    """Copy each row to its sorted rows; every row is read once.

    Args:
        out_SH: In x's dtype: rows are copied. In e4m3: rows are quantized, with one scale per row,
            or with the value of x_scale (``static``).
        x_scale: fp32, one value or one per row.
        out_scale_S: Receives the scale of each sorted row.
    """
    rows, cols = x_RH.shape
    assert out_SH.shape[1] == cols and x_RH.stride(1) == 1 and slots_RK.is_contiguous()
    assert (x_scale is None) or (out_scale_S is not None)
    kind = "copy"
    if x_RH.dtype != out_SH.dtype:
        kind = "static" if static else "row"
    elif x_RH.element_size() == 1:
        x_RH, out_SH = x_RH.view(torch.uint8), out_SH.view(torch.uint8)
    per_row = x_scale is not None and x_scale.numel() > 1
    _spread[(rows,)](
        x_RH, out_SH, x_scale, out_scale_S, slots_RK, cols, x_RH.stride(0), out_SH.stride(0),
        KIND=kind, SCALED=x_scale is not None, SCALE_PER_ROW=per_row, TOP_K=slots_RK.shape[1],
        QMAX=QMAX.get(out_SH.dtype, 0.0), BLOCK=triton.next_power_of_2(cols),
        num_warps=max(1, min(16, triton.next_power_of_2(cols) // 512)),  # 16 elements a thread
    )  # fmt: skip


def add_bias(h_SN: Tensor, bias_LN: Tensor, groups: Groups) -> None:
    """Add the expert's bias to each sorted row, in place; rounds to h's dtype."""
    return_rows(h_SN, bias_LN, groups, h_SN, to_slots=True)


def return_rows(
    z: Tensor, bias: Tensor | None, groups: Groups, out: Tensor, *, to_slots: bool = False
) -> None:
    """Write ``out[r] = z[sorted row] + bias[expert]`` for K = 1; other rows stay unchanged.

    to_slots: Write the sum to its sorted row instead, for any K.
    """
    cols = z.shape[1]
    assert z.stride(1) == 1 and out.stride(1) == 1 and (bias is None or bias.is_contiguous())
    block = min(triton.next_power_of_2(cols), 8192 if INTERPRETED else 1024)
    _take[(groups.slots_RK.numel(), triton.cdiv(cols, block))](
        z, bias, groups.slots_RK, groups.ids_RK, out, cols, z.stride(0), out.stride(0),
        TO_SLOTS=to_slots, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "slab"])
def _group_batched(
    counts_ptr, ids_ptr, slots_ptr, offsets_ptr, rows_ptr, n, slab, num_experts,
    CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    bin_B = tl.arange(0, BINS)
    count_B = tl.load(counts_ptr + bin_B, mask=bin_B < num_experts, other=0)
    count_B = tl.minimum(count_B, slab)
    offset_B = tl.cumsum(count_B, axis=0) - count_B
    if tl.program_id(0) == 0:
        tl.store(offsets_ptr + bin_B, offset_B, mask=bin_B <= num_experts)

    row_C = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert_C = row_C // slab
    inside_C = row_C < n
    bin_C = tl.minimum(expert_C, num_experts - 1)
    used_C = inside_C & (row_C % slab < tl.gather(count_B, bin_C, 0))
    slot_C = tl.gather(offset_B, bin_C, 0) + row_C % slab
    tl.store(ids_ptr + row_C, tl.where(used_C, expert_C, -1), mask=inside_C)
    tl.store(slots_ptr + row_C, tl.where(used_C, slot_C, -1), mask=inside_C)
    if rows_ptr is not None:
        tl.store(rows_ptr + slot_C, row_C, mask=used_C)


@triton.jit
def _problem_sizes(
    offsets_ptr, starts_ptr, sizes_ptr, num_experts, n, k, SWAP: tl.constexpr, BINS: tl.constexpr
):
    expert_B = tl.arange(0, BINS)
    inside_B = expert_B < num_experts
    start_B = tl.load(offsets_ptr + expert_B, mask=inside_B, other=0)
    rows_B = tl.load(offsets_ptr + expert_B + 1, mask=inside_B, other=0) - start_B
    tl.store(starts_ptr + expert_B, start_B.to(tl.int64), mask=inside_B)
    tl.store(sizes_ptr + 3 * expert_B + SWAP, rows_B, mask=inside_B)
    tl.store(sizes_ptr + 3 * expert_B + (1 - SWAP), n + 0 * rows_B, mask=inside_B)
    tl.store(sizes_ptr + 3 * expert_B + 2, k + 0 * rows_B, mask=inside_B)


@triton.jit
def _spread(
    x_ptr, out_ptr, x_scale_ptr, out_scale_ptr, slots_ptr, cols, x_stride, out_stride,
    KIND: tl.constexpr, SCALED: tl.constexpr, SCALE_PER_ROW: tl.constexpr,
    TOP_K: tl.constexpr, QMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slots = ()
    last = tl.full((), -1, tl.int32)
    for k in tl.static_range(TOP_K):
        slots += (tl.load(slots_ptr + row * TOP_K + k),)
        last = tl.maximum(last, slots[k])
    if last < 0:
        return
    col = tl.arange(0, BLOCK)[None, :]
    ok = col < cols
    one = tl.zeros((1, 1), tl.int32)
    x = tl.load(x_ptr + row * x_stride + col, mask=ok, other=0)
    if SCALED:
        scale = tl.load(x_scale_ptr + (row if SCALE_PER_ROW else 0) + one)
    if KIND != "copy":
        value = x.to(tl.float32)
        if KIND == "row":
            scale = scale_of(tl.max(tl.abs(value), axis=1, keep_dims=True), QMAX)
        x = quantize(value, scale, QMAX, out_ptr.dtype.element_ty)
    for k in tl.static_range(TOP_K):
        slot = slots[k].to(tl.int64)  # type: ignore[var-annotated]
        end = tl.where(slot >= 0, cols, 0)
        tl.store(out_ptr + slot * out_stride + col, x, mask=col < end)
        if SCALED or KIND == "row":
            tl.store(out_scale_ptr + slot + one, scale, mask=(one + slot) >= 0)


@triton.jit
def _take(
    z_ptr, bias_ptr, slots_ptr, ids_ptr, out_ptr, cols, z_stride, out_stride,
    TO_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    if slot < 0:
        return
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = col < cols
    value = tl.load(z_ptr + slot * z_stride + col, mask=ok, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias_row = tl.load(ids_ptr + pair).to(tl.int64) * cols
        value += tl.load(bias_ptr + bias_row + col, mask=ok, other=0.0).to(tl.float32)
    out_row = slot if TO_SLOTS else pair
    out_ptrs = out_ptr + out_row * out_stride + col
    tl.store(out_ptrs, convert(value, out_ptr.dtype.element_ty), mask=ok)
