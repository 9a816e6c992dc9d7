"""The backward of the `cutlass` experts, on quack's products: x and h are saved.

    forward          h = W13 x, saved; a = act(h); y = sum over k of p W2 a
    backward_input   q = W2' g; dh = act'(h) p q; the gradient of p is <q, a>; the gradient of x is
                     the sum over k of W13' dh
    backward_weight  of W2: g (p a)'; of W13: dh x'

p is the router weight and g the gradient of the output row. The products gather x and g, and the
product for q writes dh, p a and partial sums of <q, a>. quack's backward of a gate knows only
interleaved columns, so h and dh hold gate and up in turns; products with W13 read and write it in
halves through quack's layouts. Each sum has a fixed order, so two runs give the same bits.

quack's kernels read the offsets, and store the zeros of experts without rows, without waiting for
the launch before them. Each method therefore begins with an operator of torch, which waits.

Shape suffixes beyond the contract's: A assignments (R * K), S assignments sorted by expert, W rows
of w13, L1 local experts and one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from moekit_kernels.align import SortedAssignments, align, align_scratch
from moekit_kernels.rows import weighted_sum
from torch import Tensor

from moekit.plugin import (
    Dispatched,
    ExpertWeights,
    InputGradients,
    MoEProblem,
    PackedWeights,
    TrainableExperts,
    Wanted,
)

from . import providers
from .experts import CutlassExperts
from .library import FUSED
from .providers import Tile, run_compiled


@dataclass(frozen=True)
class Tiles:
    """The tiles of a training step: of GEMM 1 and of q, which gather and have epilogues, of GEMM 2,
    of the gradient of x, and of the gradients of w13 and w2, which gather."""

    up: Tile = Tile(128, 192, True, (2, 1))
    pull: Tile = Tile(128, 128, True, (2, 1))
    down: Tile = Tile(128, 192, True, (2, 1))
    back: Tile = Tile(128, 192, True, (2, 1))
    outer_13: Tile = Tile(128, 192, True, (2, 1))
    outer_2: Tile = Tile(128, 192, True, (2, 1))


def choose_tiles(problem: MoEProblem, assignments: int) -> Tiles:
    """Return one set of tiles for all sizes; `benchmarks/device/gradients.py` tries others."""
    return Tiles()


class Rows(NamedTuple):
    """Assignments sorted by expert, int32."""

    order_S: Tensor  # the assignment of each row; 0 behind the last expert's rows
    places_A: Tensor  # the row of each assignment, -1 without an expert
    offsets_L1: Tensor  # expert l has the rows offsets[l] to offsets[l + 1]

    def sources(self, top_k: int) -> Tensor:
        """Return the row of x of each sorted row. The operator waits for the launch before it."""
        return self.order_S.div(top_k, rounding_mode="floor")


class TrainableCutlass(CutlassExperts, TrainableExperts):
    """Unquantized weights without biases, and the activations of `FUSED` without a clamp.

    Matrices whose rows have no unit stride, or do not begin at multiples of 16 bytes, are copied in
    each call.
    """

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return PackedWeights(self.spec.name, weights.tensors())

    def apply(
        self, y: Tensor, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> None:
        held = {name: _rows(t) for name, t in weights.experts.items()}
        tokens, weights = replace(tokens, x=_rows(tokens.x)), replace(weights, experts=held)
        super().apply(y, tokens, weights, workspace)

    def forward(self, y_RH: Tensor, tokens: Dispatched, weights: PackedWeights) -> list[Tensor]:
        ids_RK, topk_weights = _ids_and_weights(tokens)
        x, rows, p, S = _rows(tokens.x), self._sorted(ids_RK), self.problem, ids_RK.numel()
        h_SW, tiles = x.new_empty((S, p.w13_rows)), choose_tiles(p, S)
        if S:
            a_SI = x.new_empty((S, p.local_intermediate_size))
            y_SH = x.new_empty((S, p.hidden_size))
            self._fused(
                "gemm_act", tiles.up, rows, x, _rows(weights["w13"]).mT,
                preact_out=h_SW, postact_out=a_SI, concat_layout=self._halves("B") or None,
            )  # fmt: skip
            w2 = _rows(weights["w2"])
            _product(a_SI, w2, y_SH, tiles.down, cu_seqlens_m=rows.offsets_L1)
            weighted_sum(y_SH, topk_weights, ids_RK, y_RH, rows.places_A)
        return [h_SW, *rows]

    def backward_input(
        self, grad_RH: Tensor, tokens: Dispatched, weights: PackedWeights, saved: list[Tensor],
        wanted: Wanted,
    ) -> InputGradients:  # fmt: skip
        ids_RK, topk_weights = _ids_and_weights(tokens)
        h_SW, rows, p, S = saved[0], Rows(*saved[1:]), self.problem, ids_RK.numel()
        tiles, new = choose_tiles(p, S), h_SW.new_empty
        dh_SW, pa_SI = torch.empty_like(h_SW), new((S, p.local_intermediate_size))
        dp_RK = torch.zeros_like(topk_weights) if wanted.topk_weights else None
        dx_RH = new(tokens.x.shape) if wanted.x else None
        if S:
            p_S = topk_weights.view(-1).index_select(0, rows.order_S)
            _, _, *sums = self._fused(
                "gemm_dact", tiles.pull, rows, _rows(grad_RH), _rows(weights["w2"]), h_SW,
                dx_out=dh_SW, postact_out=pa_SI, colvec_scale=p_S,
                colvec_reduce=wanted.topk_weights, dynamic_scheduler=False,
            )  # fmt: skip
            if sums:
                dp_A = sums[0].index_select(0, rows.places_A.clamp(min=0))
                dp_RK = dp_A.masked_fill_(rows.places_A < 0, 0.0).view(ids_RK.shape)
            if dx_RH is not None:
                dx_SH, w13 = new((S, p.hidden_size)), _rows(weights["w13"]).mT
                halves, offsets = self._halves("B"), rows.offsets_L1
                _product(dh_SW, w13, dx_SH, tiles.back, halves, cu_seqlens_m=offsets)
                weighted_sum(dx_SH, None, ids_RK, dx_RH, rows.places_A)
        return InputGradients(dx_RH, dp_RK, (dh_SW, pa_SI) if wanted.weights else ())

    def backward_weight(
        self, grad_RH: Tensor, tokens: Dispatched, saved: list[Tensor], kept: tuple[Tensor, ...],
        into: Mapping[str, Tensor], add: bool,
    ) -> None:  # fmt: skip
        rows, (dh_SW, pa_SI) = Rows(*saved[1:]), kept
        tiles = choose_tiles(self.problem, len(dh_SW))
        if len(dh_SW) == 0:
            for out in () if add else into.values():
                out.zero_()
            return
        lists = {"cu_seqlens_k": rows.offsets_L1, "A_idx": rows.sources(self.problem.top_k)}
        for name, out in into.items():
            made = out if _fits(out) else out.new_empty(out.shape)
            adds = add and made is out
            if name == "w2":
                grad = _rows(grad_RH).mT
                _product(grad, pa_SI.mT, made, tiles.outer_2, (), adds, **lists)
            else:
                x, halves = _rows(tokens.x).mT, self._halves("out")
                _product(x, dh_SW.mT, made.mT, tiles.outer_13, halves, adds, **lists)
            if made is not out:
                _ = out.add_(made) if add else out.copy_(made)

    def saved_bytes(self, rows: int) -> int:
        p, assignments = self.problem, rows * self.problem.top_k
        return assignments * (p.w13_rows * p.dtype.itemsize + 8) + 4 * (p.num_local_experts + 1)

    def transient_bytes(self, rows: int) -> int:
        """Return the most of the forward's bytes and the backward's."""
        p, assignments = self.problem, rows * self.problem.top_k
        H, inner, size = p.hidden_size, p.local_intermediate_size, p.dtype.itemsize
        parts = -(-inner // choose_tiles(p, assignments).pull.n)
        backward = (H + inner + p.w13_rows) * size + 4 * (parts + 1)
        each = max((H + inner) * size, backward) + 8  # sources and router weights
        scratch = 4 * align_scratch(assignments, p.num_local_experts)
        return max(super().transient_bytes(rows), assignments * each + scratch)

    def _sorted(self, ids_RK: Tensor) -> Rows:
        count, experts = ids_RK.numel(), self.problem.num_local_experts
        zeros = functools.partial(torch.zeros, dtype=torch.int32, device=ids_RK.device)
        rows = Rows(zeros(count), zeros(count), zeros(experts + 1))
        if count:
            scratch = ids_RK.new_empty(align_scratch(count, experts), dtype=torch.int32)
            ends_L = rows.offsets_L1[1:]
            lists = SortedAssignments(rows.order_S, None, None, 1, rows.places_A, ends_L)
            align(ids_RK, experts, lists, scratch)
        return rows

    def _halves(self, operand: str) -> tuple[str, ...]:
        """Name the operand that holds gate and up in halves, not in turns as h does."""
        return (operand,) if self.problem.activation.gated else ()

    def _fused(self, name: str, tile: Tile, rows: Rows, *args: Tensor, **options: Any) -> Any:
        """Call a product with an epilogue, of gathered rows."""
        function = FUSED[self.problem.activation.name]
        call = functools.partial(
            providers.quack_entry("quack.gemm_interface", name),
            *args, activation=function, cu_seqlens_m=rows.offsets_L1,
            A_idx=rows.sources(self.problem.top_k), tuned=False,
            config=providers.quack_config(tile), **options,
        )  # fmt: skip
        kinds = name, function, args[0].dtype, tile, options.get("colvec_reduce")
        return run_compiled(kinds, call)


def _product(
    a: Tensor, b: Tensor, out: Tensor, tile: Tile, concat: tuple[str, ...] = (), add: bool = False,
    **lists: Tensor,
) -> None:  # fmt: skip
    """Compute out = a b' for each expert, whose rows are a part of dimension S.

    Args:
        a, b, out: with cu_seqlens_m (S, K), (L, N, K) and (S, N); with cu_seqlens_k (M, S), (N, S)
            and (L, M, N). With A_idx, ``a`` has unsorted rows in place of S.
        concat: of "B" and "out", those that hold gate and up in halves.
        add: add to ``out``.
    """
    counter = torch.zeros(1, dtype=torch.int32, device=a.device) if tile.dynamic else None
    call = functools.partial(
        providers.quack_entry("quack.gemm", "gemm"),
        a, b, out, None, counter, tile.m, tile.n, *tile.cluster, pingpong=tile.pingpong,
        is_dynamic_persistent=tile.dynamic, max_swizzle_size=tile.swizzle, add_to_output=add,
        concat_layout=concat, **lists,
    )  # fmt: skip
    run_compiled((a.dtype, b.stride(-1) == 1, out.dtype, tile, concat, add, *lists), call)


def _fits(t: Tensor) -> bool:
    """Return whether quack takes a tensor: unit stride along rows, which begin at 16 bytes."""
    whole = all(stride * t.element_size() % 16 == 0 for stride in t.stride()[:-1])
    return t.stride(-1) == 1 and whole and t.data_ptr() % 16 == 0


def _rows(t: Tensor) -> Tensor:
    """Return a tensor that quack takes; of tensors that require gradients, their data."""
    return t.detach() if _fits(t) else t.clone(memory_format=torch.contiguous_format)


def _ids_and_weights(tokens: Dispatched) -> tuple[Tensor, Tensor]:
    assert tokens.topk_ids is not None and tokens.topk_weights is not None
    return tokens.topk_ids.contiguous(), tokens.topk_weights.contiguous()
