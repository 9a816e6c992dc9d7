"""Deliberately wrong dispatchers: each must fail a named kit test that a right one passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance_catches import caught, suite
from torch.nn.functional import pad

from moekit import Routing
from moekit.backends.local import LocalDispatcher
from moekit.backends.reference import BatchedReference
from moekit.contract.pending import Pending
from moekit.plugin import Unreduced
from moekit.testing.calls import SumsItself


class Local_(LocalDispatcher):
    """The right control."""


class Batched_(BatchedReference):
    """The right control."""


def caught_local(wrong: type, test: str, *args: Any, says: str, **declared: Any) -> None:
    caught(wrong, "local", test, *args, says=says, right=Local_, **declared)


def caught_batched(wrong: type, test: str, *args: Any, says: str, **declared: Any) -> None:
    caught(wrong, "batched_reference", test, *args, says=says, right=Batched_, **declared)


class TokenDropped(LocalDispatcher):
    def prepare(self, x_TH, routing, quantize):
        ids = routing.topk_ids.clone()
        ids[-1:] = -1
        return super().prepare(x_TH, Routing(routing.topk_weights, ids), quantize)


def test_token_dropped():
    once = "test_each_assignment_is_delivered_once"
    caught_local(TokenDropped, "test_tokens_per_rank", "uneven", 1, says="worst row")
    caught_local(TokenDropped, once, "uneven", "random", 1, says=".")


class EightColumns(LocalDispatcher):
    """Sends eight assignments a row, as a library of fixed size would; -1 in the rest."""

    def prepare(self, x_TH, routing, quantize):
        more = 8 - routing.topk_ids.shape[1]
        weights = pad(routing.topk_weights, (0, more))
        ids = pad(routing.topk_ids, (0, more), value=-1)
        return super().prepare(x_TH, Routing(weights, ids), quantize)


def test_more_columns_than_top_k():
    once = "test_each_assignment_is_delivered_once"
    says = "ids have 8 columns, expected at most top_k=2"
    caught_local(EightColumns, once, "uneven", "random", 1, says=says)


class TokensSwapped(LocalDispatcher):
    def finalize(self, y, dispatched, out_TH):
        y = y.clone()
        if len(y) > 1:
            y[[0, 1]] = y[[1, 0]]
        return super().finalize(y, dispatched, out_TH)


def test_tokens_swapped():
    caught_local(TokensSwapped, "test_tokens_per_rank", "even", 2, says="worst row|exact zeros")


class DispatcherWeightsTwice(LocalDispatcher):
    def prepare(self, x_TH, routing, quantize):
        squared = Routing(routing.topk_weights.square(), routing.topk_ids)
        return super().prepare(x_TH, squared, quantize)


class BatchedWeightsTwice(BatchedReference):
    def prepare(self, x_TH, routing, quantize):
        squared = Routing(routing.topk_weights.square(), routing.topk_ids)
        return super().prepare(x_TH, squared, quantize)


def test_dispatcher_weighs_twice():
    caught_local(DispatcherWeightsTwice, "test_dtype", "float32", 1, says="relative error")
    caught_batched(BatchedWeightsTwice, "test_dtype", "float32", 1, says="relative error")


class TopOneUnweighted(LocalDispatcher):
    """Sends no router weights to a token's only expert."""

    def prepare(self, x_TH, routing, quantize):
        if self.problem.top_k == 1:
            routing = Routing(torch.ones_like(routing.topk_weights), routing.topk_ids)
        return super().prepare(x_TH, routing, quantize)


class BatchedTopOneUnweighted(BatchedReference):
    """Keeps no router weights for a token's only expert."""

    def prepare(self, x_TH, routing, quantize):
        if self.problem.top_k == 1:
            routing = Routing(torch.ones_like(routing.topk_weights), routing.topk_ids)
        return super().prepare(x_TH, routing, quantize)


def test_weights_of_tokens_with_one_expert():
    caught_local(TopOneUnweighted, "test_given_output", 1, says="relative error")
    caught_batched(BatchedTopOneUnweighted, "test_given_output", 1, says="relative error")


class Capacity1024(BatchedReference):
    """Drops an expert's rows beyond 1024."""

    def prepare(self, x_TH, routing, quantize):
        tokens = super().prepare(x_TH, routing, quantize).result()
        counts = tokens.expert_num_tokens.clamp(max=1024)
        return Pending.ready(replace(tokens, expert_num_tokens=counts))


def test_more_rows_than_a_batched_layout_has():
    caught_batched(Capacity1024, "test_full_capacity", 1, says="relative error|NaN")


class SumOrderByPosition(LocalDispatcher):
    """Sums K backwards in every second token, as tiles with other orders would."""

    def finalize(self, y, dispatched, out_TH):
        odd = torch.arange(len(y))[:, None] % 2 == 1
        ids, weights = dispatched.topk_ids, dispatched.topk_weights
        turned = replace(
            dispatched,
            topk_ids=torch.where(odd, ids.flip(1), ids),
            topk_weights=torch.where(odd, weights.flip(1), weights),
        )
        y = torch.where(odd[..., None], y.flip(1), y) if y.dim() == 3 else y
        return super().finalize(y, turned, out_TH)


class BatchedSumsByExpert(BatchedReference):
    """Sums in the order of ids, and not of K."""

    def prepare(self, x_TH, routing, quantize):
        ids, order = routing.topk_ids.sort(dim=1)
        ascending = Routing(routing.topk_weights.gather(1, order), ids)
        return super().prepare(x_TH, ascending, quantize)


def test_order_of_sums():
    caught_local(
        SumOrderByPosition, "test_batch_invariant", "float32", "none", 1, says="not batch-invariant"
    )
    caught_batched(
        BatchedSumsByExpert,
        "test_batch_invariant",
        "float32",
        "none",
        1,
        says="not batch-invariant",
    )


class DeliveredTwice(BatchedReference):
    """An expert computes its first row twice; the second result is never used."""

    def prepare(self, x_TH, routing, quantize):
        tokens = super().prepare(x_TH, routing, quantize).result()
        counts = tokens.expert_num_tokens.clone()
        room = (counts > 0) & (counts < tokens.x.shape[1])
        for expert in room.nonzero().flatten().tolist():
            tokens.x[expert, counts[expert]] = tokens.x[expert, 0]
            counts[expert] += 1
        return Pending.ready(replace(tokens, expert_num_tokens=counts))


def test_pair_delivered_twice():
    args = ("uneven", "random", 1)
    caught_batched(DeliveredTwice, "test_each_assignment_is_delivered_once", *args, says=".")


class DispatcherModifies(LocalDispatcher):
    def prepare(self, x_TH, routing, quantize):
        x_TH[(routing.topk_ids < 0).all(dim=1)] = 0.0
        return super().prepare(x_TH, routing, quantize)


def test_dispatcher_modifies_input():
    caught_local(DispatcherModifies, "test_routing", "rows", 1, says="modified the caller's x")


class DispatcherFailsOnNoTokens(LocalDispatcher):
    def prepare(self, x_TH, routing, quantize):
        x_TH.amax()  # no value for an empty tensor
        return super().prepare(x_TH, routing, quantize)


class NothingWrittenForIdleTokens(BatchedReference):
    def finalize(self, y, dispatched, out_TH):
        keep = out_TH.clone()
        super().finalize(y, dispatched, out_TH)
        _, ids, _ = dispatched.handle
        idle = (ids < 0).all(dim=1)
        out_TH[idle] = keep[idle]
        return Pending.ready(out_TH)


def test_dispatcher_garbage_on_no_tokens():
    says = "non-zero size|reduction"
    caught_local(DispatcherFailsOnNoTokens, "test_tokens_per_rank", "none", 1, says=says)
    caught_batched(NothingWrittenForIdleTokens, "test_routing", "rows", 1, says="NaN")


class StateInTheDispatcher(BatchedReference):
    def prepare(self, x_TH, routing, quantize):
        pending = super().prepare(x_TH, routing, quantize)
        self._handle = pending.result().handle
        return pending

    def finalize(self, y, dispatched, out_TH):
        return super().finalize(y, replace(dispatched, handle=self._handle), out_TH)


def test_state_kept_in_the_dispatcher():
    caught_batched(StateInTheDispatcher, "test_two_calls_in_flight", 1, says=".")


class RowsUnderstated(BatchedReference):
    def prepare(self, x_TH, routing, quantize):
        tokens = super().prepare(x_TH, routing, quantize).result()
        wider = torch.cat([tokens.x, torch.full_like(tokens.x, float("nan"))], dim=1)
        return Pending.ready(replace(tokens, x=wider))


class BuffersUnderstated(LocalDispatcher):
    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._buffer = torch.empty(1 << 20, dtype=torch.uint8)


def test_dispatcher_memory_understated():
    args = ("uneven", "random", 1)
    once = "test_each_assignment_is_delivered_once"
    caught_batched(RowsUnderstated, once, *args, says="max_rows")
    caught_local(BuffersUnderstated, "test_memory_is_stated", 1, says="stay allocated")


class IgnoresPlaces(SumsItself):
    """Takes the row of each assignment for the one of its number."""

    def finalize(self, y, dispatched, out_TH):
        if isinstance(y, Unreduced):
            y = Unreduced(y.rows_NH[: dispatched.topk_ids.numel()])
        return super().finalize(y, dispatched, out_TH)


class SumsWithoutWeights(SumsItself):
    def finalize(self, y, dispatched, out_TH):
        if isinstance(y, Unreduced):
            ones = torch.ones_like(dispatched.topk_weights)
            dispatched = replace(dispatched, topk_weights=ones)
        return super().finalize(y, dispatched, out_TH)


class SumsRowsWithoutExpert(SumsItself):
    def finalize(self, y, dispatched, out_TH):
        if isinstance(y, Unreduced):
            y = Unreduced(y.rows_NH, y.places_RK.clamp(min=0))
            dispatched = replace(dispatched, topk_ids=dispatched.topk_ids.clamp(min=0))
        return super().finalize(y, dispatched, out_TH)


@pytest.mark.parametrize("wrong", [IgnoresPlaces, SumsWithoutWeights, SumsRowsWithoutExpert])
def test_rows_that_experts_leave(wrong):
    says = "relative error|NaN or infinite"
    caught(wrong, "local", "test_sums_left_by_experts", 1, says=says, right=SumsItself)


class SendsUnquantized(BatchedReference):
    def prepare(self, x_TH, routing, quantize):
        return super().prepare(x_TH, routing, None)


def test_dispatcher_declares_wrongly():
    wire = frozenset({"fp8_block"})
    suite(Batched_, "batched_reference", wire_schemes=wire).test_quantized_wire("fp8_block", 1)
    wrong = suite(SendsUnquantized, "batched_reference", wire_schemes=wire)
    with pytest.raises(AssertionError, match="x is torch.bfloat16, expected torch.float8_e4m3fn"):
        wrong.test_quantized_wire("fp8_block", 1)
    # It says that it exchanges tokens: two rank processes show that it does not.
    args = ("test_tokens_per_rank", "uneven", 2)
    caught_local(Local_, *args, says="(?s)ranks .0.*raised.*relative error", moves_tokens=True)


class ScalesInAByte(LocalDispatcher):
    """Sends scales as e4m3, which costs less than the rounding of the tokens themselves."""

    def prepare(self, x_TH, routing, quantize):
        tokens = super().prepare(x_TH, routing, quantize).result()
        scale = tokens.x_scale
        if scale is not None and len(scale):
            largest = scale.nan_to_num(0.0).max()
            scale = (scale / largest * 448).to(torch.float8_e4m3fn).float() * largest / 448
        return Pending.ready(replace(tokens, x_scale=scale))


def test_scales_lose_bits():
    declared = {"wire_schemes": frozenset({"fp8_channel_token"})}
    args = ("test_quantized_tokens", "fp8_channel_token", 1)
    suite(Local_, "local", **declared).test_quantized_tokens(*args[1:])
    caught_local(ScalesInAByte, *args, says="relative error", **declared)


class RoundsBeforeWeighting(BatchedReference):
    """Declares weights_in_fp32, and rounds experts' outputs to the problem's dtype."""

    def finalize(self, y, dispatched, out_TH):
        return super().finalize(y.to(self.problem.dtype), dispatched, out_TH)


def test_outputs_rounded_before_they_are_weighted():
    caught_batched(RoundsBeforeWeighting, "test_outputs_beyond_float16", 2, says="NaN or infinite")


class FirstInFirstOut(BatchedReference):
    """Finalizes the oldest call in flight, whichever is asked for."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._handles = []

    def prepare(self, x_TH, routing, quantize):
        pending = super().prepare(x_TH, routing, quantize)
        self._handles.append(pending.result().handle)
        return pending

    def finalize(self, y, dispatched, out_TH):
        return super().finalize(y, replace(dispatched, handle=self._handles.pop(0)), out_TH)


def test_calls_finished_only_in_the_order_of_their_starts():
    caught_batched(
        FirstInFirstOut, "test_two_calls_in_flight", 1, says="last first|must match|out of bounds"
    )


class SumsInAnAttribute(BatchedReference):
    """Its calls sum in one tensor."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._total = torch.empty(64, problem.hidden_size, dtype=problem.dtype)

    def finalize(self, y, dispatched, out_TH):
        total = self._total[: len(out_TH)]
        super().finalize(y, dispatched, total)
        return Pending.ready(out_TH.copy_(total))


def test_scratch_that_threads_share():
    caught_batched(SumsInAnAttribute, "test_threads", says="the call of thread [01] of two")
