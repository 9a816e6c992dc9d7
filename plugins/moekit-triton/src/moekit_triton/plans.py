"""Launch plans: which kernels compute a call, with which tiles, in which workspace.

Members of `LaunchPlan`, by how rows reach the experts' tiles:

    DotProducts  no tiles: a dot product for each assignment and output column (a few tokens)
    Direct       each assignment is a row block, so nothing is sorted
    Gathered     assignments are sorted by expert; GEMM 1 gathers tokens by them
    Sorted       GEMM 1 gathers tokens and stores expert-sorted rows for GEMM 2
    Copied       tokens are copied (fp8 blocks: quantized) to expert-sorted rows before GEMM 1
    CopiedAhead  GEMM 1 copies them itself, ahead of its tiles (specialized warps)
    Batched      the BATCHED format: rows are already grouped by expert

A plan is immutable and knows no tensors. ``workspace`` returns the specs of `calls.Buffers` for
calls of ``rows`` rows of ``top_k`` ids; ``launch`` writes ``call.y``; ``unreduced`` returns all
assignments' rows without the weighted sum, or None where programs sum. `launch` calls ``gemm_1``
and ``gemm_2``, which the tuner times apart.

Shape suffixes: R rows, K experts of a row, A = R * K assignments, S expert-sorted rows (padding
included), L local experts, C capacity, H hidden size, I intermediate size, N = 2I (I without gate).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
import triton
from moekit_kernels.align import COUNTERS, SortedAssignments, align_capacity, align_scratch
from moekit_kernels.numerics import SCALE_GROUP
from moekit_kernels.rows import ValidRows, activate_rows, weighted_sum
from moekit_kernels.sorted_rows import copy_rows, copy_rows_quantized
from torch import Tensor

from moekit.plugin import BufferSpec, Unreduced

from .calls import (
    GEMM_OUT,
    BatchedCall,
    Call,
    Layer,
    buffer_specs,
    quantize_input,
    sort_assignments,
)
from .capabilities import BLOCKS_M, num_sms
from .kernels.gemm import grouped_gemm
from .kernels.gemv import gemv_down, gemv_up
from .kernels.operands import Epilogue, Rows, Scales, SortedLaunch
from .kernels.sorted_gemm import sorted_gemm
from .kernels.tiles import (
    DotTile,
    GemmTile,
    OrderedTile,
    SortedTile,
    SpecializedTile,
    Tile,
    TokenTile,
    tile_from_text,
)
from .kernels.token_tiles import list_token_tiles, tile_list_entries

_Tiles = Sequence[Sequence[type[Tile]]]


class _Plan:
    """The base of the launch plans: the members of `LaunchPlan`.

    tiles: the types of GEMM 1's and GEMM 2's tiles, which are the first two fields.
    """

    kind: ClassVar[str]
    tiles: ClassVar[_Tiles]

    def describe(self) -> str:
        """Return for example ``gathered: 16x128x128 w4 s3 | 16x64x128 w4 s5, fused``, which
        `plan_from_text` reads."""
        first, second = (getattr(self, f.name) for f in fields(self)[:2])  # type: ignore[arg-type]
        return f"{self.kind}: {first.describe()} | {second.describe()}"


@dataclass(frozen=True)
class DotProducts(_Plan):
    """Both GEMMs by dot products, one for each assignment: see `kernels.gemv`."""

    kind = "dot_products"
    tiles: ClassVar[_Tiles] = ((DotTile,), (DotTile,))
    up: DotTile
    down: DotTile

    def workspace(self, layer: Layer, rows: int, top_k: int) -> tuple[BufferSpec, ...]:
        return buffer_specs(layer, gemm_out=rows * top_k * layer.problem.local_intermediate_size)

    def unreduced(self, call: Call) -> None:
        """Return None: GEMM 2's programs sum over K."""

    def launch(self, call: Call) -> None:
        layer, weights, ids = call.layer, call.weights, call.ids_RK
        count, inner = ids.numel(), layer.problem.local_intermediate_size
        a_AI = call.workspace[GEMM_OUT][: count * inner].view(count, inner)
        rows, down = Rows.direct(ids, ids.shape[1]), dict[str, Any]()
        if (adapters := call.adapters) is not None:
            a, low = adapters.operands("w2", ids)
            if low is not None:
                down = dict(low_rank=low, a_SLGrK=a, scaling_S=adapters.stack.scaling,
                            done_R=adapters.done_R)  # fmt: skip
        gemv_up(
            call.x, weights["w13"], a_AI, ids, layer.activation, self.up, x_scale=call.x_scale,
            w_scale=weights.get("w13_scale"), bias_LN=weights.get("w13_bias"),
            low_rank=call.low_rank("w13", call.x, call.x_scale, rows, 16),
            done_R=down.get("done_R"),
        )  # fmt: skip
        gemv_down(
            a_AI, weights["w2"], call.y, ids, call.weights_RK, self.down,
            w_scale=weights.get("w2_scale"), bias_LN=weights.get("w2_bias"), **down,
        )  # fmt: skip


def _compute(plan: Gathered | Sorted, call: Call) -> Any:
    """Run both GEMMs, and return the operands."""
    operands: Any = plan.prepare(call)
    plan.gemm_1(call, operands)
    plan.gemm_2(call, operands)
    return operands


def _reduce(rows: Unreduced, call: Call) -> None:
    """Sum the rows of all assignments, unless the dispatcher does (batch-invariant problems)."""
    if not call.layer.problem.batch_invariant:
        weighted_sum(
            rows.rows_NH, call.weights_RK, call.ids_RK, call.y, rows.places_RK,
            weight_before_applied=call.layer.split_weights, live_R=call.live_R,
        )  # fmt: skip


class _Operands(NamedTuple):
    """Inputs and outputs of the GEMMs of a plan that gathers rows; h None: fused activation."""

    x: Tensor
    x_scale: Tensor | None
    h: Tensor | None
    a: Tensor
    a_scale: Tensor | None
    y: Tensor
    first: Rows
    second: Rows
    valid: ValidRows


@dataclass(frozen=True)
class _TwoGemms(_Plan):
    """Both GEMMs by `kernels.gemm`.

    fused: GEMM 1 applies the activation, and quantizes its result where groups or a static scale
    allow it; otherwise another kernel does. splits: programs that share K in GEMM 2, of 4-bit
    weights and few rows.
    """

    tiles: ClassVar[_Tiles] = ((GemmTile,), (GemmTile,))
    first: GemmTile
    second: GemmTile
    fused: bool
    splits: int = 1

    @property
    def block_m(self) -> int:
        return self.first.block_m

    def describe(self) -> str:
        """Return the text, with ``fused`` and the splits."""
        splits = f", k{self.splits}" if self.splits > 1 else ""
        return super().describe() + (", fused" if self.fused else "") + splits

    def gemm_1(self, call: Call | BatchedCall, operands: _Operands) -> None:
        """Compute GEMM 2's input from x: GEMM 1 and the activation."""
        layer, w, o = call.layer, call.weights, operands
        epilogue = None
        if self.fused:
            kind = "none" if not layer.quantized else "tensor" if layer.static else "group"
            epilogue = Epilogue(layer.activation, kind, o.a_scale)
        out = o.a if o.h is None else o.h
        low = call.low_rank("w13", call.x, call.x_scale, o.first, self.block_m)
        grouped_gemm(
            o.x, w["w13"], out, o.first, self.first, a_scale=o.x_scale,
            w_scale=w.get("w13_scale"), w_offset=w.get("w13_offset"), bias_LN=w.get("w13_bias"),
            epilogue=epilogue, low_rank=low,
        )  # fmt: skip
        if o.h is not None:
            activate_rows(
                o.h.flatten(0, -2), o.a.flatten(0, -2), layer.activation, o.valid,
                scale=o.a_scale, static_scale=layer.static,
            )  # fmt: skip

    def gemm_2(self, call: Call | BatchedCall, operands: _Operands) -> None:
        """Compute the experts' output rows from GEMM 2's input."""
        w, o, a_scale = call.weights, operands, operands.a_scale
        if a_scale is not None and o.a.dim() == 3 and not call.layer.static:
            a_scale = a_scale.view(*o.a.shape[:2], -1)
        low = call.low_rank("w2", o.a, a_scale, o.second, self.block_m)
        grouped_gemm(
            o.a, w["w2"], o.y, o.second, self.second, a_scale=a_scale,
            w_scale=w.get("w2_scale"), w_offset=w.get("w2_offset"), bias_LN=w.get("w2_bias"),
            weights_RK=call.early_weights, splits=self.splits,
            low_rank=low,
        )  # fmt: skip

    def _a_scale(self, call: Call | BatchedCall, computed: Tensor) -> Tensor | None:
        if call.layer.static:
            return call.weights.shared["a2_scale"]
        return computed if call.layer.quantized else None


@dataclass(frozen=True)
class Gathered(_TwoGemms):
    """Assignments sorted by expert; GEMM 1 gathers tokens, GEMM 2 stores by assignment."""

    kind = "gathered"

    def workspace(self, layer: Layer, rows: int, top_k: int) -> tuple[BufferSpec, ...]:
        count, experts = rows * top_k, layer.problem.num_local_experts
        capacity = align_capacity(count, experts, self.block_m)
        return self._workspace(
            layer, rows, count, assignments_S=capacity, experts_B=capacity // self.block_m,
            scratch=align_scratch(count, experts),
        )  # fmt: skip

    def _workspace(
        self, layer: Layer, rows: int, count: int, **lists: int
    ) -> tuple[BufferSpec, ...]:
        p = layer.problem
        gemm_out = 0 if p.batch_invariant else count * self.splits * p.hidden_size
        if not self.fused:
            gemm_out = max(gemm_out, count * p.w13_rows)
        return buffer_specs(
            layer, gemm_out=gemm_out, activated=count, x=rows, x_scale=rows, **lists
        )

    def launch(self, call: Call) -> None:
        _reduce(Unreduced(_compute(self, call).y), call)

    def unreduced(self, call: Call) -> Unreduced | None:
        return None if self.splits > 1 else Unreduced(_compute(self, call).y)

    def prepare(self, call: Call) -> _Operands:
        """Quantize x if needed, sort the assignments, and divide the workspace."""
        p, buffers, count = call.layer.problem, call.buffers, call.ids_RK.numel()
        x, x_scale = call.x, call.x_scale
        if x_scale is None and call.layer.quantized:
            x, x_scale = quantize_input(call)
        first, second = self._rows(call)
        h, sums = None, count * self.splits
        if not self.fused:
            h = buffers.gemm_out[: count * p.w13_rows].view(count, p.w13_rows)
        y = call.y if p.batch_invariant else buffers.gemm_out[: sums * p.hidden_size]
        return _Operands(
            x, x_scale, h, buffers.activated[:count], self._a_scale(call, buffers.scale[:count]),
            y.view(sums, p.hidden_size), first, second, ValidRows(ids=call.ids_RK),
        )  # fmt: skip

    def _rows(self, call: Call) -> tuple[Rows, Rows]:
        aligned = sort_assignments(call, self.block_m)
        return Rows.aligned(aligned, call.ids_RK.shape[1]), Rows.aligned(aligned)


@dataclass(frozen=True)
class Direct(Gathered):
    """Each assignment is a row block: few assignments hardly share experts."""

    kind = "direct"

    def workspace(self, layer: Layer, rows: int, top_k: int) -> tuple[BufferSpec, ...]:
        return self._workspace(layer, rows, rows * top_k)

    def _rows(self, call: Call) -> tuple[Rows, Rows]:
        return Rows.direct(call.ids_RK, call.ids_RK.shape[1]), Rows.direct(call.ids_RK)


@dataclass(frozen=True)
class Batched(_TwoGemms):
    """The BATCHED format: row blocks over the used rows of every expert."""

    kind = "batched"

    @staticmethod
    def workspace(layer: Layer, capacity: int) -> tuple[BufferSpec, ...]:
        """Return the specs of `BatchedCall.buffers` for ``capacity`` rows of each expert."""
        p = layer.problem
        rows, inner = p.num_local_experts * capacity, p.local_intermediate_size
        return (
            BufferSpec((rows, p.w13_rows), p.dtype),
            BufferSpec((rows, inner), layer.a_dtype),
            BufferSpec((rows, layer.scale_columns(inner)), torch.float32),
        )

    def launch(self, call: BatchedCall) -> None:
        """Write the used rows of ``call.y``."""
        experts, capacity = call.x.shape[:2]
        h, a, scale = (buffer[: experts * capacity] for buffer in call.buffers)
        rows = Rows.batched(call.counts_L, capacity, self.block_m)
        operands = _Operands(
            call.x, call.x_scale, None if self.fused else h.view(experts, capacity, -1),
            a.view(experts, capacity, -1), self._a_scale(call, scale), call.y, rows, rows,
            ValidRows(counts_L=call.counts_L, capacity=capacity),
        )  # fmt: skip
        self.gemm_1(call, operands)
        self.gemm_2(call, operands)


class _SortedOperands(NamedTuple):
    """Inputs and outputs of the GEMMs over expert-sorted rows. y_SH has x_SH's memory, and is
    expert-sorted or by assignment; first, second: scales; tiles: lists of token tiles."""

    aligned: SortedAssignments
    x_SH: Tensor
    a_SI: Tensor
    y_SH: Tensor
    first: Scales | None
    second: Scales | None
    num_sms: int
    tiles: tuple[Tensor | None, Tensor | None] = (None, None)


@dataclass(frozen=True)
class Sorted(_Plan):
    """GEMM 1 gathers tokens and stores expert-sorted rows; GEMM 2 reads them by descriptors."""

    kind = "sorted"
    tiles: ClassVar[_Tiles] = ((GemmTile,), (SortedTile, SpecializedTile))
    first: Any  # GemmTile; OrderedTile where tokens are copied
    second: OrderedTile

    @property
    def block_m(self) -> int:
        size: int = self.first.block_m
        return size

    @property
    def by_assignment(self) -> bool:
        """Return whether GEMM 2 stores rows by assignment, not expert-sorted."""
        return isinstance(self.second, SortedTile)

    def workspace(self, layer: Layer, rows: int, top_k: int) -> tuple[BufferSpec, ...]:
        count, experts = rows * top_k, layer.problem.num_local_experts
        capacity = align_capacity(count, experts, self.block_m)
        return buffer_specs(
            layer, assignments_S=capacity, experts_B=capacity // self.block_m,
            counters=COUNTERS + capacity // max(BLOCKS_M), rows_A=count,
            scratch=sum(_list_entries(count, experts)) + align_scratch(count, experts),
            gemm_out=capacity * layer.problem.hidden_size, activated=capacity, x_scale=capacity,
        )  # fmt: skip

    def launch(self, call: Call) -> None:
        _reduce(self.unreduced(call), call)

    def unreduced(self, call: Call) -> Unreduced:
        """Return the rows of all assignments, expert-sorted if GEMM 2 is specialized."""
        operands: _SortedOperands = _compute(self, call)
        rows = None if self.by_assignment else operands.aligned.rows_A
        return Unreduced(operands.y_SH, None if rows is None else rows.view_as(call.ids_RK))

    def prepare(self, call: Call) -> _SortedOperands:
        """Sort the assignments and divide the workspace."""
        layer, buffers, count = call.layer, call.buffers, call.ids_RK.numel()
        hidden = layer.problem.hidden_size
        aligned, tiles = self._sort(call)
        capacity = aligned.capacity
        rows = count if self.by_assignment else capacity
        first = second = None
        if layer.quantized:
            x_scale_GS, a_scale_GS = (
                memory.flatten()[: triton.cdiv(columns, SCALE_GROUP) * capacity].view(-1, capacity)
                for memory, columns in (
                    (buffers.x_scale, hidden),
                    (buffers.scale, layer.problem.local_intermediate_size),
                )
            )
            first = Scales(call.weights["w13_scale"], x_scale_GS, a_scale_GS)
            second = Scales(call.weights["w2_scale"], a_scale_GS)
        return _SortedOperands(
            aligned,
            buffers.gemm_out.view(layer.a_dtype)[: capacity * hidden].view(capacity, hidden),
            buffers.activated[:capacity],
            buffers.gemm_out[: rows * hidden].view(rows, hidden),
            first, second, num_sms(layer.problem), tiles,
        )  # fmt: skip

    def _sort(self, call: Call) -> tuple[SortedAssignments, tuple[Tensor | None, Tensor | None]]:
        """Sort the assignments, and list the token tiles of each GEMM."""
        both = self.first, self.second
        sizes = dict.fromkeys(tile.tokens for tile in both if isinstance(tile, TokenTile))
        if not sizes:
            counters = SpecializedTile in map(type, both)
            aligned = sort_assignments(call, self.block_m, rows_A=True, counters=counters)
            return aligned, (None, None)
        entries = _list_entries(call.ids_RK.numel(), call.layer.problem.num_local_experts)
        ends_L, *memory = torch.split(call.buffers.scratch[: sum(entries)], entries)
        aligned = sort_assignments(
            call, self.block_m, rows_A=True, counters=True, ends_L=ends_L, reserved=sum(entries)
        )
        lists: dict[int, Tensor] = {}
        for tokens, own in zip(sizes, memory, strict=False):  # equal tiles share a list
            list_token_tiles(aligned, own, tokens)
            lists[tokens] = own
        first, second = (
            lists[tile.tokens] if isinstance(tile, TokenTile) else None for tile in both
        )
        return aligned, (first, second)

    def gemm_1(self, call: Call, operands: _SortedOperands) -> None:
        """Compute GEMM 2's input from x: GEMM 1 with the activation."""
        rows = Rows.aligned(operands.aligned, call.ids_RK.shape[1], in_order=True)
        grouped_gemm(
            call.x, call.weights["w13"], operands.a_SI, rows, self.first,
            bias_LN=call.weights.get("w13_bias"), epilogue=Epilogue(call.layer.activation),
        )  # fmt: skip

    def gemm_2(self, call: Call, operands: _SortedOperands) -> None:
        """Compute the experts' output rows: expert-sorted if specialized, else by assignment."""
        o = operands
        sorted_gemm(SortedLaunch(
            o.a_SI, call.weights["w2"], o.y_SH, o.aligned, self.second, call.ids_RK.numel(),
            o.num_sms, bias_LN=call.weights.get("w2_bias"), weights_RK=call.early_weights,
            scales=o.second, token_tiles=o.tiles[1],
        ))  # fmt: skip


def _list_entries(count: int, experts: int) -> list[int]:
    """Return the int32 entries of the experts' ends, and of both GEMMs' lists of token tiles."""
    return [experts] + 2 * [tile_list_entries(count, experts)]


@dataclass(frozen=True)
class Copied(Sorted):
    """Tokens are copied to expert-sorted rows, quantized if the scheme says so, before GEMM 1."""

    kind = "copied"
    tiles: ClassVar[_Tiles] = ((SortedTile, SpecializedTile, TokenTile),) * 2

    def gemm_1(self, call: Call, operands: _SortedOperands) -> None:
        """Copy x, then compute GEMM 2's input."""
        o = operands
        if o.first is not None:
            copy_rows_quantized(call.x, call.x_scale, o.aligned, o.x_SH, o.first.a_GS)
        else:
            copy_rows(call.x, o.aligned, o.x_SH)
        self._sorted_gemm_1(call, o, None)

    def _sorted_gemm_1(self, call: Call, o: _SortedOperands, x_RK: Tensor | None) -> None:
        sorted_gemm(SortedLaunch(
            o.x_SH, call.weights["w13"], o.a_SI, o.aligned, self.first, call.ids_RK.numel(),
            o.num_sms, bias_LN=call.weights.get("w13_bias"), activation=call.layer.activation,
            scales=o.first, x_RK=x_RK, token_tiles=o.tiles[0],
        ))  # fmt: skip


@dataclass(frozen=True)
class CopiedAhead(Copied):
    """GEMM 1 copies tokens to expert-sorted rows ahead of the tiles that read them; 16 bits, by
    specialized warps."""

    kind = "ahead"
    tiles: ClassVar[_Tiles] = ((SpecializedTile,), (SortedTile, SpecializedTile))

    def gemm_1(self, call: Call, operands: _SortedOperands) -> None:
        """Compute GEMM 2's input, copying x on the way."""
        self._sorted_gemm_1(call, operands, call.x)


StandardPlan = DotProducts | Direct | Gathered | Sorted | Copied | CopiedAhead
LaunchPlan = StandardPlan | Batched
TilePlan = Gathered | Sorted
"""The plans that a tuned table holds."""

KINDS: Mapping[str, type[LaunchPlan]] = {
    plan.kind: plan
    for plan in (DotProducts, Direct, Gathered, Sorted, Copied, CopiedAhead, Batched)
}
"""The plans by the name of their kind."""


def plan_from_text(text: str) -> LaunchPlan:
    """Make a plan of what its `describe` returns. Raises ValueError for other text."""
    match = re.fullmatch(r"(\w+):([^|,]+)\|([^|,]+)(, fused)?(?:, k([24]))?", text)
    made: Any = KINDS.get(match[1]) if match else None
    if match is None or made is None:
        raise ValueError("not a kind of plan and its two tiles")
    first, second = (tile_from_text(match[2 + i], made.tiles[i]) for i in (0, 1))
    rows = {getattr(tile, "block_m", 0) for tile in (first, second)}
    if len(rows) > 1:
        raise ValueError(f"the tiles have different numbers of rows: {rows}")
    more: tuple[Any, ...] = ()
    if issubclass(made, _TwoGemms):
        more = bool(match[4]), int(match[5] or 1)
    elif match[4] or match[5]:
        raise ValueError(f"plans of kind {made.kind} have nothing after the tiles")
    plan: LaunchPlan = made(first, second, *more)
    return plan
