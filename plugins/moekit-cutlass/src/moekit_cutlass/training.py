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
from collections.abc import Callable, Mapping, Sequence
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
    """Choose the tiles for a number of assignments. The rule is not measured yet."""
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

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._function = FUSED[self.problem.activation.name]
        self._halves = self.problem.activation.gated

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return PackedWeights(self.spec.name, weights.tensors())

    def apply(
        self, y: Tensor, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> None:
        super().apply(y, replace(tokens, x=_rows(tokens.x)), self._held(weights), workspace)

    def forward(self, y_RH: Tensor, tokens: Dispatched, weights: PackedWeights) -> list[Tensor]:
        ids_RK, topk_weights = _ids_and_weights(tokens)
        rows, S = self._sorted(ids_RK), ids_RK.numel()
        x, held, p = _rows(tokens.x), self._held(weights), self.problem
        tiles = choose_tiles(p, S)
        h_SW = x.new_empty((S, p.w13_rows))
        if S == 0:
            return [h_SW, *rows]
        a_SI = x.new_empty((S, p.local_intermediate_size))
        sources_S, halves = rows.sources(ids_RK.shape[1]), ("B",) if self._halves else None
        run_compiled(
            ("up", x.dtype, self._function, tiles.up),
            functools.partial(
                _quack("gemm_act"),
                x, held["w13"].mT, activation=self._function, preact_out=h_SW, postact_out=a_SI,
                cu_seqlens_m=rows.offsets_L1, A_idx=sources_S, tuned=False,
                config=providers.quack_config(tiles.up), concat_layout=halves,
            ),
        )  # fmt: skip
        y_SH = x.new_empty((S, p.hidden_size))
        _product(a_SI, held["w2"], y_SH, tiles.down, cu_seqlens_m=rows.offsets_L1)
        y = y_RH if y_RH.stride(1) == 1 else y_RH.new_empty(y_RH.shape)
        weighted_sum(y_SH, topk_weights, ids_RK, y, rows.places_A)
        if y is not y_RH:
            y_RH.copy_(y)
        return [h_SW, *rows]

    def backward_input(
        self,
        grad_RH: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        saved: list[Tensor],
        wanted: Wanted,
    ) -> InputGradients:
        ids_RK, topk_weights = _ids_and_weights(tokens)
        h_SW, rows, held, p = saved[0], Rows(*saved[1:]), self._held(weights), self.problem
        S, tiles = ids_RK.numel(), choose_tiles(p, ids_RK.numel())
        dp_RK, dx_RH = torch.zeros_like(topk_weights), None
        dh_SW, pa_SI = torch.empty_like(h_SW), h_SW.new_empty((S, p.local_intermediate_size))
        if S:
            grad, sources_S = _rows(grad_RH), rows.sources(ids_RK.shape[1])
            p_S = topk_weights.view(-1).index_select(0, rows.order_S)
            made = run_compiled(
                ("pull", h_SW.dtype, self._function, tiles.pull, wanted.topk_weights),
                functools.partial(
                    _quack("gemm_dact"),
                    grad, held["w2"], h_SW, self._function, dx_out=dh_SW, postact_out=pa_SI,
                    colvec_scale=p_S, colvec_reduce=wanted.topk_weights,
                    cu_seqlens_m=rows.offsets_L1, A_idx=sources_S, dynamic_scheduler=False,
                    tuned=False, config=providers.quack_config(tiles.pull),
                ),
            )  # fmt: skip
            if wanted.topk_weights:
                dp_A = made[2].index_select(0, rows.places_A.clamp(min=0))
                dp_RK = dp_A.masked_fill_(rows.places_A < 0, 0.0).view(ids_RK.shape)
        if wanted.x:
            dx_RH = grad_RH.new_empty(tokens.x.shape)
            dx_SH = h_SW.new_empty((S, p.hidden_size))
            if S:
                halves = ("B",) if self._halves else ()
                w13 = held["w13"].mT
                _product(dh_SW, w13, dx_SH, tiles.back, halves, cu_seqlens_m=rows.offsets_L1)
                weighted_sum(dx_SH, None, ids_RK, dx_RH, rows.places_A)
        kept = (dh_SW, pa_SI) if wanted.weights else ()
        return InputGradients(dx_RH, dp_RK if wanted.topk_weights else None, kept)

    def backward_weight(
        self,
        grad_RH: Tensor,
        tokens: Dispatched,
        saved: list[Tensor],
        kept: tuple[Tensor, ...],
        into: Mapping[str, Tensor],
        add: bool,
    ) -> None:
        ids_RK, (dh_SW, pa_SI), rows = _ids_and_weights(tokens)[0], kept, Rows(*saved[1:])
        if ids_RK.numel() == 0:
            for out in into.values():
                _ = out if add else out.zero_()
            return
        tiles = choose_tiles(self.problem, ids_RK.numel())
        sources_S, halves = rows.sources(ids_RK.shape[1]), ("out",) if self._halves else ()
        x, grad, lists = _rows(tokens.x), _rows(grad_RH), {"cu_seqlens_k": rows.offsets_L1}
        for name, out in into.items():
            made = out if _fits(out) else torch.empty_like(out, memory_format=_DENSE)
            adds, lists["A_idx"] = add and made is out, sources_S
            if name == "w2":
                _product(grad.mT, pa_SI.mT, made, tiles.outer_2, add=adds, **lists)
            else:
                made_LHW = made.mT
                _product(x.mT, dh_SW.mT, made_LHW, tiles.outer_13, halves, adds, **lists)
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
        each = max((H + inner) * size, backward) + 8  # lists of sources and router weights
        scratch = 4 * align_scratch(assignments, p.num_local_experts)
        return max(super().transient_bytes(rows), assignments * each + scratch)

    def _held(self, weights: PackedWeights) -> PackedWeights:
        held = {name: _rows(t) for name, t in weights.experts.items()}
        return replace(weights, experts=held)

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


_DENSE = torch.contiguous_format


def _quack(name: str, module: str = "quack.gemm_interface") -> Callable[..., Any]:
    return providers.quack_entry(module, name)


def _product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    tile: Tile,
    concat: tuple[str, ...] = (),
    add: bool = False,
    **lists: Tensor,
) -> None:
    """Compute out = a b' per expert, in fp32, by rows or by columns of ``a``.

    Args:
        a, b, out: with cu_seqlens_m (S, K), (L, N, K) and (S, N); with cu_seqlens_k (M, S), (N, S)
            and (L, M, N). With A_idx the sorted dimension of ``a`` is that of its rows.
        concat: of "B" and "out", those that hold gate and up in halves.
    """
    semaphore = torch.zeros(1, dtype=torch.int32, device=a.device) if tile.dynamic else None
    kinds = *(t.dtype for t in (a, out)), *(t.stride(-1) == 1 for t in (b, out))
    run_compiled(
        (*kinds, tile, concat, add, *lists),
        functools.partial(
            _quack("gemm", "quack.gemm"),
            a, b, out, None, semaphore, tile.m, tile.n, *tile.cluster, pingpong=tile.pingpong,
            is_dynamic_persistent=tile.dynamic, max_swizzle_size=tile.swizzle, add_to_output=add,
            concat_layout=concat, **lists,
        ),
    )  # fmt: skip


def _fits(t: Tensor) -> bool:
    """Return whether quack takes a tensor: unit stride along rows, which begin at 16 bytes."""
    whole = all(stride * t.element_size() % 16 == 0 for stride in t.stride()[:-1])
    return t.stride(-1) == 1 and whole and t.data_ptr() % 16 == 0


def _rows(t: Tensor) -> Tensor:
    return t if _fits(t) else t.clone(memory_format=_DENSE)


def _ids_and_weights(tokens: Dispatched) -> tuple[Tensor, Tensor]:
    assert tokens.topk_ids is not None and tokens.topk_weights is not None
    return tokens.topk_ids.contiguous(), tokens.topk_weights.contiguous()
