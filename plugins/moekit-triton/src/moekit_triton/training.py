"""The backward of the `triton` experts: rows sorted by expert without padding; x and h are saved.

    forward          h = W13 x + b13, saved; a = act(h); y = sum over k of p (W2 a + b2)
    backward_input   q = W2' g; dh = act'(h) p q; the gradient of p is <q, a> + <g, b2>; the
                     gradient of x is the sum over k of W13' dh
    backward_weight  of W2: g (p a)'; of W13: dh x'; of the biases: p g and dh

Quantized weights stay frozen: each product reads one dequantized weight, in the problem's dtype.
Tokens are not quantized in any scheme.

p is the router weight and g the gradient of the output row. The products gather x and g, or read
sorted copies that specialized warps write meanwhile. The product for q writes dh, p a and partial
sums of <q, a>.

The host never waits for the device: grids are upper bounds. Each sum has a fixed order, so two runs
give the same bits.

Shape suffixes beyond the contract's: A assignments (R * K), S assignments sorted by expert, W rows
of w13.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import triton
from moekit_kernels.align import SortedAssignments, align, align_capacity, align_scratch
from moekit_kernels.launch import cdiv
from moekit_kernels.rows import weighted_sum
from moekit_kernels.sorted_rows import copy_rows
from torch import Tensor

from moekit.plugin import (
    BufferSpec,
    Dispatched,
    ExpertsSpec,
    ExpertWeights,
    InputGradients,
    MoEProblem,
    PackedWeights,
    TrainableExperts,
    Unreduced,
    Wanted,
)

from .calls import Call, Layer
from .capabilities import num_sms, shared_memory, specializable, tma_possible
from .experts import TritonExperts
from .kernels.dequantize import dequantize
from .kernels.derivatives import list_blocks, router_gradient, sum_rows
from .kernels.tiles import GemmTile, SpecializedTile
from .kernels.training_gemm import CompactRows, Epilogue, outer_gemm, rows_gemm
from .plans import StandardPlan


@dataclass(frozen=True)
class Tiles:
    """The tiles of a training step: of GEMM 1 and of q, which have epilogues, of GEMM 2, of the
    gradient of x, and of the gradients of w13 and w2."""

    up: GemmTile | SpecializedTile
    pull: GemmTile | SpecializedTile
    down: GemmTile | SpecializedTile
    back: GemmTile | SpecializedTile
    outer_13: GemmTile | SpecializedTile
    outer_2: GemmTile | SpecializedTile

    @property
    def specialized(self) -> bool:
        """Whether products read sorted copies of x and g."""
        return isinstance(self.up, SpecializedTile)


@functools.lru_cache(1024)
def choose_tiles(problem: MoEProblem, assignments: int, contiguous: bool = True) -> Tiles:
    """Choose the tiles for a number of assignments.

    Tiles have 128 rows, and as few as 16 for fewer rows per expert. ``contiguous``: whether the
    weights are, as specialized warps need.
    """
    p = problem.replace(quant="none")  # products read dequantized weights
    H, inner = p.hidden_size, p.local_intermediate_size
    half, wide = p.dtype.itemsize == 2, (p.device.capability or (9, 0))[0] in (9, 10)
    per_expert = triton.cdiv(max(assignments, 1), p.num_local_experts)
    room, tma = shared_memory(p), tma_possible(p)
    # Columns that registers hold: of one sum, and without an epilogue.
    columns, plain = (128, 256 if wide else 128) if half else (64, 64)

    def size(length: int, most: int) -> int:
        return min(most, max(16, int(triton.next_power_of_2(length))))

    def tile(m: int, n: int, k: int, most_n: int, sums: int = 1) -> GemmTile:
        """Make a tile of m rows for a product with n columns and the inner size k."""
        block_n, block_k = size(n, most_n), size(k, 64 if half else 32)
        stage = (m + block_n * sums) * block_k * p.dtype.itemsize
        warps = 8 if m * block_n * sums >= 128 * 128 or not half else 4
        stages = max(2, min(4, room // stage))
        return GemmTile(m, block_n, block_k, num_warps=warps, num_stages=stages, tma=tma)

    def outer(m: int, n: int) -> GemmTile:
        return replace(tile(size(m, 128 if half else 64), n, per_expert, plain), tma=False)

    block_m, sums = size(per_expert, 128 if half else 64), 2 if p.activation.gated else 1
    if contiguous and block_m == 128 and _specializable(p):
        special = SpecializedTile()
        # The few columns of a block of rows share g and h in the cache (qwen3-30b: 6 % less).
        pull = replace(special, group_m=1) if inner <= 1024 else special
        down = tile(block_m, H, inner, plain) if Layer.of(p).split_weights else special
        return Tiles(special, pull, down, special, special, special)
    return Tiles(
        up=tile(block_m, inner, H, min(columns, plain // sums), sums),
        pull=tile(block_m, inner, H, columns),
        down=tile(block_m, H, inner, plain),
        back=tile(block_m, H, p.w13_rows, plain),
        outer_13=outer(p.w13_rows, H),
        outer_2=outer(H, inner),
    )


def _specializable(p: MoEProblem) -> bool:
    whole = p.hidden_size % 128 == 0 and p.local_intermediate_size % 128 == 0
    return whole and p.dtype.itemsize == 2 and specializable(p)


class TrainableTriton(TritonExperts, TrainableExperts):
    """Weights of any strides, every activation, bias and clamp; quantized weights are frozen."""

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        super().__init__(spec, problem)
        self._operand = problem.quant.weight
        # By the numbers alone, because a problem takes long to hash.
        self._choose = functools.lru_cache(1024)(functools.partial(choose_tiles, problem))

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        held = weights.tensors().items()  # no copies, of quantized weights either
        return PackedWeights(self.spec.name, {n: t for n, t in held if "input_scale" not in n})

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        return () if self._operand is not None else super().workspace(rows)

    def apply(
        self, y: Tensor, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> None:
        if self._operand is not None:
            self.forward(y, tokens, weights)
        else:
            super().apply(y, tokens, weights, workspace)

    def apply_unreduced(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Unreduced | None:
        if self._operand is not None:
            return None
        return super().apply_unreduced(tokens, weights, workspace)

    def _call(
        self, y: Any, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> tuple[StandardPlan, Call]:
        held = {name: t.contiguous() for name, t in weights.experts.items()}
        return super()._call(y, tokens, replace(weights, experts=held), workspace)

    def forward(self, y_RH: Tensor, tokens: Dispatched, weights: PackedWeights) -> list[Tensor]:
        ids_RK, topk_weights = _ids_and_weights(tokens)
        tiles, layer = self._tiles(ids_RK, weights), self._layer
        rows, places_A = self._sorted(ids_RK, tiles.up.block_m)
        x, p, S = _unit(tokens.x), self.problem, ids_RK.numel()
        h_SW = x.new_empty((S, p.w13_rows))
        a_SI = x.new_empty((S, p.local_intermediate_size))
        first = Epilogue("activation", layer.activation, h_SW, _bias(weights, "w13_bias"))
        y_SH = x.new_empty((S, p.hidden_size))  # holds a sorted copy of x until GEMM 2 writes y
        self._multiply(
            x, self._matrix("w13", weights, rows).mT, a_SI, rows, tiles.up, first, True, y_SH
        )
        kind, early = ("early", topk_weights) if layer.split_weights else ("store", None)
        second = Epilogue(kind, bias=_bias(weights, "w2_bias"), weights=early)
        self._multiply(a_SI, self._matrix("w2", weights, rows).mT, y_SH, rows, tiles.down, second)
        y = y_RH if y_RH.stride(1) == 1 else y_RH.new_empty(y_RH.shape)
        weighted_sum(
            y_SH, topk_weights, ids_RK, y, places_A, weight_before_applied=layer.split_weights
        )
        if y is not y_RH:
            y_RH.copy_(y)
        return [h_SW, rows.order_S, places_A, rows.ends_L, rows.blocks]

    def backward_input(
        self,
        grad_RH: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        saved: list[Tensor],
        wanted: Wanted,
    ) -> InputGradients:
        ids_RK, topk_weights = _ids_and_weights(tokens)
        tiles, p = self._tiles(ids_RK, weights), self.problem
        h_SW, places_A = saved[0], saved[2]
        rows, S = rows_of(saved, tiles, ids_RK), ids_RK.numel()
        inner, new = p.local_intermediate_size, h_SW.new_empty
        parts = cdiv(inner, tiles.pull.block_n)
        special, grad_RH = tiles.specialized, _unit(grad_RH)
        g = new((S, p.hidden_size)) if special else None  # the sorted gradient
        needed = wanted.x or wanted.weights or special  # specialized warps always write it
        dh_SW = torch.empty_like(h_SW) if needed else None
        pa_SI = new((S, inner)) if "w2" in wanted.weights else None
        partials = new((S, parts), dtype=torch.float32) if wanted.topk_weights else None
        pull = Epilogue("pull", self._layer.activation, h_SW, None, topk_weights, dh_SW, partials)
        self._multiply(
            grad_RH, self._matrix("w2", weights, rows), pa_SI, rows, tiles.pull, pull, True, g
        )
        dp_RK = dx_RH = None
        if partials is not None:
            dp_RK = torch.empty_like(topk_weights)
            bias = _bias(weights, "w2_bias")
            of_bias = None if bias is None else (grad_RH, ids_RK.view(-1), bias)
            router_gradient(partials, places_A, dp_RK.view(-1), of_bias)
        if wanted.x:
            assert dh_SW is not None
            dx_SH = new((S, p.hidden_size)) if g is None or pa_SI is not None else g
            self._multiply(
                dh_SW, self._matrix("w13", weights, rows), dx_SH, rows, tiles.back, Epilogue()
            )
            dx_RH = grad_RH.new_empty(tokens.x.shape)
            weighted_sum(dx_SH, None, ids_RK, dx_RH, places_A)
        made = dh_SW, pa_SI, None if pa_SI is None else g
        kept = tuple(t for t in made if t is not None) if wanted.weights else ()
        return InputGradients(dx_RH, dp_RK, kept)

    def backward_weight(
        self,
        grad_RH: Tensor,
        tokens: Dispatched,
        saved: list[Tensor],
        kept: tuple[Tensor, ...],
        into: Mapping[str, Tensor],
        add: bool,
    ) -> None:
        ids_RK, topk_weights = _ids_and_weights(tokens)
        tiles = self._choose(ids_RK.numel())
        rows, x, copied = rows_of(saved, tiles, ids_RK), _unit(tokens.x), False
        copy = (x, _empty_copy(x, rows)) if tiles.specialized and "w13" in into else None
        if "w2" in into:
            g, gather = (kept[2], "") if len(kept) == 3 else (_unit(grad_RH), "a")
            if gather and tiles.specialized:
                g, gather = _copy(g, _empty_copy(g, rows), saved[2]), ""
            copied = self._outer(g, kept[1], into["w2"], rows, "outer_2", gather, add, copy)
        if "w13" in into:
            if copy is not None and not copied:
                _copy(*copy, saved[2])
            b, gather = (x, "b") if copy is None else (copy[1], "")
            self._outer(kept[0], b, into["w13"], rows, "outer_13", gather, add)
        if "w13_bias" in into:
            sum_rows(kept[0], rows.ends_L, into["w13_bias"], add)
        if "w2_bias" in into:
            weighted = rows.order_S, topk_weights
            sum_rows(grad_RH, rows.ends_L, into["w2_bias"], add, weighted)

    def saved_bytes(self, rows: int) -> int:
        p, assignments = self.problem, rows * self.problem.top_k
        lists = 8 * assignments + 4 * (p.num_local_experts + 1) + 8 * self._most_blocks(assignments)
        return assignments * p.w13_rows * p.dtype.itemsize + lists

    def transient_bytes(self, rows: int) -> int:
        """Return the most of the forward's bytes and the backward's."""
        p, assignments = self.problem, rows * self.problem.top_k
        H, inner, size = p.hidden_size, p.local_intermediate_size, p.dtype.itemsize
        tiles = choose_tiles(p, assignments)
        parts: int = triton.cdiv(inner, choose_tiles(p, assignments, False).pull.block_n)
        forward = (H + inner) * size
        backward = ((1 + tiles.specialized) * H + inner + p.w13_rows) * size + 4 * parts
        scratch = 4 * align_scratch(assignments, p.num_local_experts)
        if self._operand is not None:
            scratch += p.num_local_experts * H * p.w13_rows * size  # one dequantized weight
        return max(super().transient_bytes(rows), assignments * max(forward, backward) + scratch)

    def _matrix(self, name: str, weights: PackedWeights, rows: CompactRows) -> Tensor:
        """Return w13 or w2 (L, N, K); of quantized ones the experts that have rows."""
        if self._operand is None:
            return weights.experts[name]
        return dequantize(weights.experts, name, self._operand, self.problem.dtype, rows.ends_L)

    def _tiles(self, ids_RK: Tensor, weights: PackedWeights) -> Tiles:
        dense = self._operand is not None or all(map(_contiguous, weights.experts.values()))
        return self._choose(ids_RK.numel(), dense)

    def _multiply(
        self,
        a: Tensor,
        w_LKN: Tensor,
        out: Tensor | None,
        rows: CompactRows,
        tile: GemmTile | SpecializedTile,
        epilogue: Epilogue,
        gather: bool = False,
        sorted_SK: Tensor | None = None,
    ) -> None:
        """Compute a product of rows. gather: the rows of ``a`` are not sorted.

        Specialized warps copy such rows to ``sorted_SK``.
        """
        epilogue = self._epilogue(epilogue, a, rows, gather)
        if isinstance(tile, SpecializedTile):
            a, source = (a, None) if sorted_SK is None else (sorted_SK, a)
            _specialized().specialized_rows(
                a, w_LKN, out, rows, tile, num_sms(self.problem), epilogue, source
            )
        else:
            rows_gemm(a, w_LKN, out, rows, tile, gather=gather, epilogue=epilogue)

    def _epilogue(self, epilogue: Epilogue, a: Tensor, rows: CompactRows, gather: bool) -> Epilogue:
        """Return the epilogue of a product of rows of ``a``; adapters add their deltas to it."""
        return epilogue

    def _outer(
        self,
        a: Tensor,
        b: Tensor,
        out_LMN: Tensor,
        rows: CompactRows,
        product: str,
        gather: str,
        add: bool,
        copy: tuple[Tensor, Tensor] | None = None,
    ) -> bool:
        """Compute the gradient of a weight, by specialized warps if they can write it.

        Return whether they filled the second tensor of ``copy`` with sorted rows of the first.
        """
        possible = not gather and _contiguous(out_LMN)
        tile = getattr(self._choose(rows.order_S.shape[0], possible), product)
        if isinstance(tile, SpecializedTile):
            _specialized().specialized_outer(
                a, b, out_LMN, rows, tile, num_sms(self.problem), add, copy
            )
            return copy is not None
        outer_gemm(a, b, out_LMN, rows, tile, gather=gather, add=add)
        return False

    def _sorted(self, ids_RK: Tensor, block_m: int) -> tuple[CompactRows, Tensor]:
        """Sort the assignments, and return their rows and the row of each assignment."""
        count, experts = ids_RK.numel(), self.problem.num_local_experts

        def ints(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=ids_RK.device)

        order_S, places_A, ends_L = ints(count), ints(count), ints(experts)
        if count:
            scratch = ints(align_scratch(count, experts))
            aligned = SortedAssignments(order_S, None, None, 1, places_A, ends_L)
            align(ids_RK, experts, aligned, scratch)
        else:
            ends_L.zero_()
        blocks = list_blocks(ends_L, self._most_blocks(count), block_m)
        return CompactRows(order_S, ends_L, blocks, block_m, ids_RK.shape[1]), places_A

    def _most_blocks(self, assignments: int) -> int:
        """Return an upper bound of the blocks of rows: each expert's last one may be partial."""
        block_m = self._choose(assignments).up.block_m
        return align_capacity(assignments, self.problem.num_local_experts, block_m) // block_m


@functools.cache
def _specialized() -> ModuleType:
    from .kernels import specialized_training  # needs a newer Gluon

    return specialized_training


def rows_of(saved: list[Tensor], tiles: Tiles, ids_RK: Tensor) -> CompactRows:
    _, order_S, _, ends_L, blocks = saved
    return CompactRows(order_S, ends_L, blocks, tiles.up.block_m, ids_RK.shape[1])


def _empty_copy(x: Tensor, rows: CompactRows) -> Tensor:
    """Return memory for rows of x in the order of the experts."""
    return x.new_empty((len(rows.order_S), x.shape[1]))


def _copy(x: Tensor, out_SH: Tensor, places_A: Tensor) -> Tensor:
    copy_rows(x, SortedAssignments(None, None, None, 1, places_A, places_A), out_SH)
    return out_SH


def _ids_and_weights(tokens: Dispatched) -> tuple[Tensor, Tensor]:
    assert tokens.topk_ids is not None and tokens.topk_weights is not None
    return tokens.topk_ids.contiguous(), tokens.topk_weights.contiguous()


def _contiguous(t: Tensor) -> bool:
    return t.is_contiguous() and t.data_ptr() % 16 == 0


def _unit(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _bias(weights: PackedWeights, name: str) -> Tensor | None:
    bias_LN = weights.experts.get(name)
    return None if bias_LN is None else _unit(bias_LN)
