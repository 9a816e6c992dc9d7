"""A call's tensors and workspace, as launch plans take them.

Shape suffixes: see `plans`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from moekit_kernels.align import COUNTERS, SortedAssignments, align, align_capacity
from moekit_kernels.numerics import Activation
from moekit_kernels.rows import ValidRows, quantize_rows, quantize_rows_per_tensor
from torch import Tensor

from moekit.plugin import Adapters, BufferSpec, MoEProblem, PackedWeights

from .kernels.low_rank import LowRank, shrink
from .kernels.operands import Rows


@dataclass(frozen=True)
class Layer:
    """The properties that all calls of one layer share.

    a_dtype: of both GEMMs' inputs. quantized: these are quantized; static: by scales that come with
    the weights. split_weights: router weights are applied in two steps, the first before fp16
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
    """A call's workspace in the STANDARD format.

    gemm_out: GEMM 1's output, or its expert-sorted input; GEMM 2's output overwrites it.
    activated, scale: GEMM 2's input. x, x_scale: GEMM 1's, if it is quantized first.
    """

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


def buffer_specs(layer: Layer, **sizes: int) -> tuple[BufferSpec, ...]:
    """Return the specs of `Buffers`.

    sizes: entries by name, and rows of the last four; 0 where nothing is given, and ``scale`` has
    as many rows as ``activated``.
    """
    p = layer.problem
    hidden, inner = p.hidden_size, p.local_intermediate_size
    size = dict.fromkeys(Buffers._fields, 0) | {"num_rows": 1} | sizes
    x = (size["x"], hidden) if layer.quantized else (0,)
    x_scale = (size["x_scale"], layer.scale_columns(hidden)) if layer.quantized else (0,)
    return (
        *(BufferSpec((size[name],), torch.int32) for name in Buffers._fields[:GEMM_OUT]),
        BufferSpec((size["gemm_out"],), p.dtype),
        BufferSpec((size["activated"], inner), layer.a_dtype),
        BufferSpec((size["activated"], layer.scale_columns(inner)), torch.float32),
        BufferSpec(x, layer.a_dtype),
        BufferSpec(x_scale, torch.float32),
    )


# (most assignments, addends): `shrink` divides K among this number of programs, and the GEMM adds
# their results.
_ADDENDS = ((1024, 4), (16384, 2), (1 << 40, 1))


class CallAdapters(NamedTuple):
    """The adapters of a call, the slot of each token (R,) int32, and scratch in fp32.

    The scratch has `low_rank_entries` entries.
    """

    stack: Adapters
    slots_R: Tensor
    memory: Tensor

    def operands(self, name: str, ids_RK: Tensor) -> tuple[Tensor | None, LowRank | None]:
        """Return A, and the deltas, whose ``low`` has no values yet."""
        pair = self.stack.pair(name)
        if pair is None:
            return None, None
        a, b = pair
        sizes = low_rank_sizes(ids_RK.numel(), a.shape[2] * a.shape[3])
        low_PAU = self.memory[: math.prod(sizes)].view(sizes)
        return a, LowRank(low_PAU, b, self.slots_R, ids_RK.shape[1])

    @property
    def done_R(self) -> Tensor:
        """Return a counter for each token, int32, at the end of the scratch."""
        return self.memory[-len(self.slots_R) :].view(torch.int32)


def low_rank_sizes(count: int, columns: int) -> tuple[int, int, int]:
    """Return the sizes of `LowRank.low_PAU` for ``count`` assignments. Rows are multiples of 16, so
    that no kernel is compiled for odd strides."""
    return next(n for most, n in _ADDENDS if count <= most), -(-count // 16) * 16, columns


def low_rank_columns(problem: MoEProblem) -> int:
    """Return U of `LowRank.low_PAU` for w13, which has at least as many columns as for w2."""
    slots = problem.adapters
    assert slots is not None
    return slots.rank * (2 if slots.separate and problem.activation.gated else 1)


def low_rank_entries(problem: MoEProblem, rows: int) -> int:
    """Return the entries of `CallAdapters.memory` for calls of at most ``rows`` rows: low, and
    `CallAdapters.done_R`."""
    count = rows * problem.top_k
    low = max((min(count, most) + 15) * addends for most, addends in _ADDENDS)
    return low_rank_columns(problem) * low + rows


class Call(NamedTuple):
    """The tensors of one call in the STANDARD format.

    x (R, H) of the layer's dtype, or quantized with x_scale; ids_RK local ids, -1 = no expert;
    weights_RK fp32; y (R, H), or (R, K, H) unweighted in batch-invariant problems, written; live_R
    `Dispatched.num_rows`.
    """

    layer: Layer
    weights: PackedWeights
    workspace: Sequence[Tensor]
    x: Tensor
    x_scale: Tensor | None
    ids_RK: Tensor
    weights_RK: Tensor
    y: Tensor
    live_R: Tensor | None = None
    adapters: CallAdapters | None = None

    @property
    def buffers(self) -> Buffers:
        return Buffers(*self.workspace)

    @property
    def early_weights(self) -> Tensor | None:
        """Return the router weights that GEMM 2 applies in part."""
        return self.weights_RK if self.layer.split_weights else None

    def low_rank(
        self, name: str, x: Tensor, x_scale: Tensor | None, rows: Rows, block_m: int
    ) -> LowRank | None:
        """Return the deltas that GEMM 1 (w13) or GEMM 2 (w2) adds, or None if it has none."""
        if self.adapters is None:
            return None
        a, low = self.adapters.operands(name, self.ids_RK)
        if a is not None and low is not None:
            shrink(x, x_scale, a, self.adapters.stack.scaling, low, rows, block_m)
        return low


class BatchedCall(NamedTuple):
    """The tensors of one call in the BATCHED format: x (L, C, H), counts_L int32 used rows, y
    (L, C, H), written; buffers h_SN, a_SI, scale with L * C rows."""

    layer: Layer
    weights: PackedWeights
    buffers: tuple[Tensor, Tensor, Tensor]
    x: Tensor
    x_scale: Tensor | None
    counts_L: Tensor
    y: Tensor
    early_weights: None = None

    def low_rank(self, *_: object) -> None:
        """Return None: this format has no adapters."""


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
        counters=buffers.counters[: COUNTERS + blocks] if counters else None, live_R=call.live_R,
    )  # fmt: skip
    align(call.ids_RK, experts, aligned, buffers.scratch[reserved:])
    return aligned


def quantize_input(call: Call) -> tuple[Tensor, Tensor]:
    """Quantize x, each row by itself, so that padding rows do not matter."""
    rows, buffers = len(call.x), call.buffers
    q, scale = buffers.x[:rows], buffers.x_scale[:rows]
    live = call.live_R
    valid = ValidRows() if live is None else ValidRows(counts_L=live, capacity=rows)
    if call.layer.static:
        static: Tensor = call.weights.shared["a1_scale"]
        quantize_rows_per_tensor(call.x, q, static, valid, scratch=None)
        return q, static
    quantize_rows(call.x, q, scale, valid)
    return q, scale
