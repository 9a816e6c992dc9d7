"""A call's tensors and workspace, as launch plans take them.

Shape suffixes: see `plans`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from moekit_kernels.align import COUNTERS, SortedAssignments, align, align_capacity
from moekit_kernels.numerics import Activation
from moekit_kernels.rows import quantize_rows, quantize_rows_per_tensor
from torch import Tensor

from moekit.plugin import BufferSpec, MoEProblem, PackedWeights


@dataclass(frozen=True)
class Layer:
    """The properties that all calls of one layer share.

    Args:
        problem: the problem.
        activation: its activation, as the kernels take it.
        a_dtype: dtype of both GEMMs' inputs.
        quantized: whether these are quantized.
        static: whether their scales are given with the weights.
        split_weights: whether router weights are applied in two steps, the first before fp16
            rounds: fp16 cannot hold an expert's output above 65504, but may hold it weighted.
    """

    problem: MoEProblem
    activation: Activation
    a_dtype: torch.dtype
    quantized: bool
    static: bool
    split_weights: bool

    @classmethod
    def of(cls, problem: MoEProblem) -> Layer:
        """Derive the record from a problem."""
        operand = problem.quant.activation
        return cls(
            problem,
            Activation.of(problem.activation),
            problem.dtype if operand is None else operand.torch_dtype,
            operand is not None,
            operand is not None and operand.static,
            problem.dtype == torch.float16 and not problem.batch_invariant,
        )

    def scale_columns(self, columns: int) -> int:
        """Return the scales that are computed for a row of ``columns``."""
        operand = self.problem.quant.activation
        return 0 if operand is None or operand.static else operand.scale_shape(1, columns)[1]


GEMM_OUT = 6
"""Index of ``gemm_out`` in `Buffers`."""


class Buffers(NamedTuple):
    """A call's workspace in the STANDARD format; `buffer_specs` has the sizes."""

    assignments_S: Tensor
    experts_B: Tensor
    num_rows: Tensor
    counters: Tensor
    rows_A: Tensor
    scratch: Tensor
    gemm_out: Tensor
    activated: Tensor
    scale: Tensor
    x: Tensor
    x_scale: Tensor


def buffer_specs(
    layer: Layer,
    *,
    capacity: int = 0,
    blocks: int = 0,
    counters: int = 0,
    rows_A: int = 0,
    scratch: int = 0,
    gemm_out: int = 0,
    activated: int = 0,
    x: int = 0,
    x_scale: int = 0,
) -> tuple[BufferSpec, ...]:
    """Return the specs of `Buffers`.

    Args:
        layer: the layer.
        capacity: entries of ``assignments_S``.
        blocks: entries of ``experts_B``.
        counters: counters of specialized warps.
        rows_A: entries of ``rows_A``.
        scratch: scratch of `align`.
        gemm_out: elements for GEMM 1's output, or its expert-sorted input; GEMM 2's output
            overwrites it.
        activated: rows of GEMM 2's input, and of its scale.
        x: rows that are quantized before GEMM 1.
        x_scale: rows of scales of GEMM 1's input.
    """
    p, i32, f32 = layer.problem, torch.int32, torch.float32
    hidden, inner, quantized = p.hidden_size, p.local_intermediate_size, layer.quantized
    return (
        BufferSpec((capacity,), i32),
        BufferSpec((blocks,), i32),
        BufferSpec((1,), i32),
        BufferSpec((counters,), i32),
        BufferSpec((rows_A,), i32),
        BufferSpec((scratch,), i32),
        BufferSpec((gemm_out,), p.dtype),
        BufferSpec((activated, inner), layer.a_dtype),
        BufferSpec((activated, layer.scale_columns(inner)), f32),
        BufferSpec((x, hidden) if quantized else (0,), layer.a_dtype),
        BufferSpec((x_scale, layer.scale_columns(hidden)) if quantized else (0,), f32),
    )


class Call(NamedTuple):
    """The tensors of one call in the STANDARD format.

    x (R, H) of the layer's dtype, or quantized with x_scale; ids_RK local ids, -1 = no expert;
    weights_RK fp32; y (R, H), or (R, K, H) unweighted in batch-invariant problems, written.
    """

    layer: Layer
    x: Tensor
    x_scale: Tensor | None
    ids_RK: Tensor
    weights_RK: Tensor
    weights: PackedWeights
    y: Tensor
    workspace: Sequence[Tensor]

    @property
    def buffers(self) -> Buffers:
        """The workspace by name."""
        return Buffers(*self.workspace)

    @property
    def early_weights(self) -> Tensor | None:
        """The router weights that GEMM 2 applies in part."""
        return self.weights_RK if self.layer.split_weights else None


class BatchedCall(NamedTuple):
    """The tensors of one call in the BATCHED format: x (L, C, H), counts_L int32 used rows, y
    (L, C, H), written; buffers h_SN, a_SI, scale with L * C rows."""

    layer: Layer
    x: Tensor
    x_scale: Tensor | None
    counts_L: Tensor
    weights: PackedWeights
    y: Tensor
    buffers: tuple[Tensor, Tensor, Tensor]


def sort_assignments(
    call: Call,
    block_m: int,
    *,
    rows_A: bool = False,
    counters: bool = False,
    ends_L: Tensor | None = None,
    reserved: int = 0,
) -> SortedAssignments:
    """Sort the call's assignments by expert in blocks of ``block_m``. reserved: entries at the
    beginning of the scratch memory that are left alone."""
    experts, count = call.layer.problem.num_local_experts, call.ids_RK.numel()
    buffers = call.buffers
    capacity = align_capacity(count, experts, block_m)
    blocks = capacity // block_m
    aligned = SortedAssignments(
        buffers.assignments_S[:capacity], buffers.experts_B[:blocks], buffers.num_rows, block_m,
        buffers.rows_A[:count] if rows_A else None, ends_L,
        counters=buffers.counters[: COUNTERS + blocks] if counters else None,
    )  # fmt: skip
    align(call.ids_RK, experts, aligned, buffers.scratch[reserved:])
    return aligned


def quantize_input(call: Call) -> tuple[Tensor, Tensor]:
    """Quantize x, each row by itself, so that padding rows do not matter."""
    rows, buffers = len(call.x), call.buffers
    q, scale = buffers.x[:rows], buffers.x_scale[:rows]
    if call.layer.static:
        static: Tensor = call.weights.shared["a1_scale"]
        quantize_rows_per_tensor(call.x, q, static, scratch=None)
        return q, static
    quantize_rows(call.x, q, scale)
    return q, scale
