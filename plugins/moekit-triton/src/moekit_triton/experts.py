"""The two experts backends: pack weights, state the workspace, pick a launch plan and launch it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from moekit_kernels.launch import launches_of
from moekit_kernels.rows import quantize_activations, weight_and_reduce
from torch import Tensor

from moekit.plugin import (
    ActivationFormat,
    AdapterExperts,
    BufferSpec,
    Dispatched,
    ExpertsSpec,
    ExpertWeights,
    MoEProblem,
    PackedWeights,
    PermuteExpertsUnpermute,
    Unreduced,
)

from .calls import BatchedCall, Call, CallAdapters, Layer, low_rank_entries
from .heuristics import Planner, workspace
from .packing import pack_weights
from .plans import Batched, StandardPlan

_MAX_PLANS = 1024

logger = logging.getLogger("moekit")
# All layers of a model run the same plans: one line tells of them.
_log_once = functools.lru_cache(_MAX_PLANS)(logger.debug)


class _TritonExperts(PermuteExpertsUnpermute):
    """The part of the backend that both formats share.

    Quantized schemes: x arrives quantized, or (STANDARD) `apply` quantizes it, except for a few
    tokens, whose dot products read it unquantized. The input of GEMM 2 is quantized with the static
    scale, per group, or per row. Dynamic fp8_tensor also has a scale per row: this is more exact,
    needs no second pass, and keeps rows independent. Sums are fp32, except that fp8 tiles of 64
    rows or more leave sums under one scale to Hopper's tensor cores, which keep about 14 bits, as
    other libraries do.
    """

    quantizer = staticmethod(quantize_activations)
    weight_and_reduce = staticmethod(weight_and_reduce)

    def __init__(self, spec: ExpertsSpec, problem: MoEProblem) -> None:
        super().__init__(spec, problem)
        self._layer = Layer.of(problem)
        self._planner = Planner(problem, batched=spec.format is ActivationFormat.BATCHED)
        # Kept: a dispatcher may bring another number of rows in every call.
        self.plan = functools.lru_cache(_MAX_PLANS)(self._plan)
        self._launches = launches_of(problem)

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return pack_weights(self.spec.name, weights, self.problem)

    @staticmethod
    def tune(argv: Sequence[str]) -> int:
        """Run `python -m moekit tune triton ...`, see `moekit_triton.tune`."""
        from .tune import main

        return main(argv)

    def _plan(self, rows: int, top_k: int) -> StandardPlan | Batched:
        """Return the launch plan for ``rows`` rows (BATCHED: a capacity) of ``top_k`` ids."""
        plan, p = self._planner.plan(rows, top_k), self.problem
        if logger.isEnabledFor(logging.DEBUG):
            _log_once(
                "moekit: %s, %d experts, H=%d, I=%d, %s %s, %d rows of %d ids: %s (%s)",
                self.spec.name, p.num_local_experts, p.hidden_size, p.local_intermediate_size,
                p.dtype_name, p.quant.name, rows, top_k, plan.describe(), self._planner.source,
            )  # fmt: skip
        return plan

    def _repeat(
        self,
        plan: StandardPlan | Batched,
        call: Call | BatchedCall,
        memory: Sequence[Tensor],
        function: Callable[[], Any],
    ) -> Any:
        """Call ``function``, or repeat its launches for tensors of the same forms."""
        held, given = call.weights.tensors(), [*call[3:9]]  # from x to the adapters
        if isinstance(call, Call) and call.adapters is not None:
            given += *vars(call.adapters.stack).values(), call.adapters.slots_R
        return self._launches((plan, *held), (*given, *held.values()), memory, function)


class TritonExperts(_TritonExperts):
    """STANDARD, weighted and summed over K."""

    def largest_calls(self, num_tokens: int) -> Sequence[int]:
        """Return ``num_tokens``, and below it a call of each launch plan: its kernels compile.

        Rows of all batches of tokens may arrive here.
        """
        p, calls = self.problem, dict[StandardPlan | Batched, int]()
        while num_tokens:
            plan = self._planner.plan(num_tokens * p.parallel.dp_size, p.top_k)
            calls.setdefault(plan, num_tokens)
            num_tokens -= max(1, num_tokens // 64)
        return tuple(calls.values())

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        pinned = self._planner.pinned
        if pinned is None:
            return workspace(self._layer, rows)
        assert not isinstance(pinned, Batched)
        return pinned.workspace(self._layer, rows, self.problem.top_k)

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        plan, call = self._call(y, tokens, weights, workspace)
        self._repeat(plan, call, workspace, partial(plan.launch, call))

    def apply_unreduced(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Unreduced | None:
        if self._layer.split_weights:
            return None
        plan, call = self._call(None, tokens, weights, workspace)

        def rows() -> tuple[Tensor, Tensor | None] | None:
            made = plan.unreduced(call)
            return None if made is None else (made.rows_NH, made.places_RK)

        made = self._repeat(plan, call, workspace, rows)
        return None if made is None else Unreduced(*made)

    def _call(
        self, y: Any, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> tuple[StandardPlan, Call]:
        assert tokens.topk_ids is not None and tokens.topk_weights is not None
        ids_RK, weights_RK = tokens.topk_ids.contiguous(), tokens.topk_weights.contiguous()
        plan: StandardPlan = self.plan(*ids_RK.shape)  # type: ignore[assignment]
        return plan, Call(
            self._layer, weights, workspace, tokens.x, tokens.x_scale, ids_RK, weights_RK, y,
            tokens.num_rows,
        )  # fmt: skip


class AdapterTriton(TritonExperts, AdapterExperts):
    """TritonExperts with adapters: `kernels.gemm` adds deltas of the rows that the base reads."""

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        memory = BufferSpec((low_rank_entries(self.problem, rows),), torch.float32)
        return (*super().workspace(rows), memory)

    def _call(
        self, y: Any, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> tuple[StandardPlan, Call]:
        *buffers, memory = workspace
        plan, call = super()._call(y, tokens, weights, buffers)
        if weights.adapters is None or tokens.adapter_ids is None:
            return plan, call
        adapters = CallAdapters(weights.adapters, tokens.adapter_ids, memory)
        return plan, call._replace(adapters=adapters)


class BatchedTritonExperts(_TritonExperts):
    """BATCHED: every expert's used rows."""

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        return Batched.workspace(self._layer, rows)

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        counts_L = tokens.expert_num_tokens
        assert counts_L is not None
        plan = self.plan(tokens.x.shape[1], self.problem.top_k)
        assert isinstance(plan, Batched)
        h, a, scale = workspace
        x, x_scale = tokens.x, tokens.x_scale
        call = BatchedCall(self._layer, weights, (h, a, scale), x, x_scale, counts_L, y)
        self._repeat(plan, call, workspace, partial(plan.launch, call))
