"""Deliberately wrong dispatchers: each must fail a named kit test that a right one passes."""

from __future__ import annotations

from dataclasses import replace

import torch
from conformance_catches import killed_by
from torch.nn.functional import pad

from moekit import Routing
from moekit.backends.local import LocalDispatcher
from moekit.backends.reference import BatchedReference
from moekit.contract.pending import Pending
from moekit.plugin import Unreduced
from moekit.testing.calls import SumsItself


class Local_(LocalDispatcher):
    """The right control."""

    BASE = "local"


class Batched_(BatchedReference):
    """The right control."""

    BASE = "batched_reference"


class Quantizes_(Local_):
    """The right control where tokens travel quantized."""

    BASE = "local"
    DECLARED = {"wire_schemes": frozenset({"fp8_channel_token"})}


class BatchedQuantizes_(Batched_):
    """The right control where batched tokens travel quantized."""

    BASE = "batched_reference"
    DECLARED = {"wire_schemes": frozenset({"fp8_block"})}


class Sums(SumsItself):
    """The right control of dispatchers that sum over K."""

    BASE = "local"


@killed_by("test_tokens_per_rank", "uneven", 1, says="worst row")
@killed_by("test_each_assignment_is_delivered_once", "uneven", "random", 1, says=".")
class TokenDropped(Local_):
    """The last token has no expert."""

    def prepare(self, x_TH, routing, quantize):
        ids = routing.topk_ids.clone()
        ids[-1:] = -1
        return super().prepare(x_TH, Routing(routing.topk_weights, ids), quantize)


@killed_by("test_each_assignment_is_delivered_once", "uneven", "random", 1,
           says="ids have 8 columns, expected at most top_k=2", prepare=Local_)  # fmt: skip
def EightColumns(self, x_TH, routing, quantize):
    """Sends eight assignments a row, as a library of fixed size would; -1 in the rest."""
    more = 8 - routing.topk_ids.shape[1]
    weights = pad(routing.topk_weights, (0, more))
    ids = pad(routing.topk_ids, (0, more), value=-1)
    return Local_.prepare(self, x_TH, Routing(weights, ids), quantize)


@killed_by("test_each_assignment_is_delivered_once", "uneven", "rows", 1,
           says="num_rows=.*, but rows .* have experts", prepare=Local_)  # fmt: skip
def RowsWithExpertsCounted(self, x_TH, routing, quantize):
    """Takes the number of rows with an expert for the end of these rows, which have gaps."""
    tokens = Local_.prepare(self, x_TH, routing, quantize).result()
    count = (tokens.topk_ids >= 0).any(dim=1).sum(dtype=torch.int32).view(1)
    return Pending.ready(replace(tokens, num_rows=count))


@killed_by("test_tokens_per_rank", "even", 2, says="worst row|exact zeros", finalize=Local_)
def TokensSwapped(self, y, dispatched, out_TH):
    """Two rows are exchanged."""
    y = y.clone()
    if len(y) > 1:
        y[[0, 1]] = y[[1, 0]]
    return Local_.finalize(self, y, dispatched, out_TH)


@killed_by("test_dtype", "float32", 1, says="relative error", prepare=Local_)
def DispatcherWeightsTwice(self, x_TH, routing, quantize):
    """Router weights are squared."""
    squared = Routing(routing.topk_weights.square(), routing.topk_ids)
    return Local_.prepare(self, x_TH, squared, quantize)


@killed_by("test_dtype", "float32", 1, says="relative error", prepare=Batched_)
def BatchedWeightsTwice(self, x_TH, routing, quantize):
    """Router weights are squared."""
    squared = Routing(routing.topk_weights.square(), routing.topk_ids)
    return Batched_.prepare(self, x_TH, squared, quantize)


@killed_by("test_calls", "one_expert_a_token", 1, says="relative error", prepare=Local_)
def TopOneUnweighted(self, x_TH, routing, quantize):
    """Sends no router weights to a token's only expert."""
    if self.problem.top_k == 1:
        routing = Routing(torch.ones_like(routing.topk_weights), routing.topk_ids)
    return Local_.prepare(self, x_TH, routing, quantize)


@killed_by("test_calls", "one_expert_a_token", 1, says="relative error", prepare=Batched_)
def BatchedTopOneUnweighted(self, x_TH, routing, quantize):
    """Keeps no router weights for a token's only expert."""
    if self.problem.top_k == 1:
        routing = Routing(torch.ones_like(routing.topk_weights), routing.topk_ids)
    return Batched_.prepare(self, x_TH, routing, quantize)


@killed_by("test_full_capacity", 1, says="relative error|NaN", prepare=Batched_)
def Capacity1024(self, x_TH, routing, quantize):
    """Drops an expert's rows beyond 1024."""
    tokens = Batched_.prepare(self, x_TH, routing, quantize).result()
    counts = tokens.expert_num_tokens.clamp(max=1024)
    return Pending.ready(replace(tokens, expert_num_tokens=counts))


@killed_by("test_batch_invariant", "float32", "none", 1, says="not batch-invariant")
class SumOrderByPosition(Local_):
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


@killed_by("test_batch_invariant", "float32", "none", 1, says="not batch-invariant")
class BatchedSumsByExpert(Batched_):
    """Sums in the order of ids, and not of K."""

    def prepare(self, x_TH, routing, quantize):
        ids, order = routing.topk_ids.sort(dim=1)
        ascending = Routing(routing.topk_weights.gather(1, order), ids)
        return super().prepare(x_TH, ascending, quantize)


@killed_by("test_each_assignment_is_delivered_once", "uneven", "random", 1, says=".")
class DeliveredTwice(Batched_):
    """An expert computes its first row twice; the second result is never used."""

    def prepare(self, x_TH, routing, quantize):
        tokens = super().prepare(x_TH, routing, quantize).result()
        counts = tokens.expert_num_tokens.clone()
        room = (counts > 0) & (counts < tokens.x.shape[1])
        for expert in room.nonzero().flatten().tolist():
            tokens.x[expert, counts[expert]] = tokens.x[expert, 0]
            counts[expert] += 1
        return Pending.ready(replace(tokens, expert_num_tokens=counts))


@killed_by("test_calls", "tokens_without_experts", 1, says="modified the caller's x")
class DispatcherModifies(Local_):
    """It writes the caller's x."""

    def prepare(self, x_TH, routing, quantize):
        x_TH[(routing.topk_ids < 0).all(dim=1)] = 0.0
        return super().prepare(x_TH, routing, quantize)


@killed_by("test_tokens_per_rank", "none", 1, says="non-zero size|reduction", prepare=Local_)
def DispatcherFailsOnNoTokens(self, x_TH, routing, quantize):
    """It fails for T = 0."""
    x_TH.amax()  # no value for an empty tensor
    return Local_.prepare(self, x_TH, routing, quantize)


@killed_by("test_calls", "tokens_without_experts", 1, says="NaN", finalize=Batched_)
def NothingWrittenForIdleTokens(self, y, dispatched, out_TH):
    """Tokens without an expert get no zeros."""
    keep = out_TH.clone()
    Batched_.finalize(self, y, dispatched, out_TH)
    _, ids, _ = dispatched.handle
    idle = (ids < 0).all(dim=1)
    out_TH[idle] = keep[idle]
    return Pending.ready(out_TH)


@killed_by("test_two_calls_in_flight", 1, says=".")
class StateInTheDispatcher(Batched_):
    """Finalize uses the handle of the last call."""

    def prepare(self, x_TH, routing, quantize):
        pending = super().prepare(x_TH, routing, quantize)
        self._handle = pending.result().handle
        return pending

    def finalize(self, y, dispatched, out_TH):
        return super().finalize(y, replace(dispatched, handle=self._handle), out_TH)


@killed_by("test_each_assignment_is_delivered_once", "uneven", "random", 1, says="max_rows")
class RowsUnderstated(Batched_):
    """More rows than `max_rows` says."""

    def prepare(self, x_TH, routing, quantize):
        tokens = super().prepare(x_TH, routing, quantize).result()
        wider = torch.cat([tokens.x, torch.full_like(tokens.x, float("nan"))], dim=1)
        return Pending.ready(replace(tokens, x=wider))


@killed_by("test_memory_is_stated", 1, says="stay allocated")
class BuffersUnderstated(Local_):
    """More bytes than `buffer_bytes` says."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._buffer = torch.empty(1 << 20, dtype=torch.uint8)


@killed_by("test_sums_left_by_experts", 1, says="relative error|NaN or infinite", finalize=Sums)
def IgnoresPlaces(self, y, dispatched, out_TH):
    """Takes the row of each assignment for the one of its number."""
    if isinstance(y, Unreduced):
        y = Unreduced(y.rows_NH[: dispatched.topk_ids.numel()])
    return Sums.finalize(self, y, dispatched, out_TH)


@killed_by("test_sums_left_by_experts", 1, says="relative error|NaN or infinite", finalize=Sums)
def SumsWithoutWeights(self, y, dispatched, out_TH):
    """It sums the rows that experts leave without their weights."""
    if isinstance(y, Unreduced):
        ones = torch.ones_like(dispatched.topk_weights)
        dispatched = replace(dispatched, topk_weights=ones)
    return Sums.finalize(self, y, dispatched, out_TH)


@killed_by("test_sums_left_by_experts", 1, says="relative error|NaN or infinite", finalize=Sums)
def SumsRowsWithoutExpert(self, y, dispatched, out_TH):
    """It sums a row of NaN where the id is -1."""
    if isinstance(y, Unreduced):
        y = Unreduced(y.rows_NH, y.places_RK.clamp(min=0))
        dispatched = replace(dispatched, topk_ids=dispatched.topk_ids.clamp(min=0))
    return Sums.finalize(self, y, dispatched, out_TH)


@killed_by(
    "test_quantized_tokens",
    "fp8_block",
    1,
    says="x is torch.bfloat16, expected torch.float8_e4m3fn",
)
class SendsUnquantized(BatchedQuantizes_):
    """Declares a wire scheme that it does not send."""

    def prepare(self, x_TH, routing, quantize):
        return super().prepare(x_TH, routing, None)


@killed_by(
    "test_tokens_per_rank",
    "uneven",
    2,
    moves_tokens=True,
    says="(?s)ranks .0.*raised.*relative error",
)
class ExchangesNothing(Local_):
    """Declares an exchange that it does not make."""


@killed_by("test_quantized_tokens", "fp8_channel_token", 1, prepare=Quantizes_)
def ScalesInAByte(self, x_TH, routing, quantize):
    """Sends scales as e4m3, which costs less than the rounding of the tokens themselves."""
    tokens = Quantizes_.prepare(self, x_TH, routing, quantize).result()
    scale = tokens.x_scale
    if scale is not None and len(scale):
        largest = scale.nan_to_num(0.0).max()
        scale = (scale / largest * 448).to(torch.float8_e4m3fn).float() * largest / 448
    return Pending.ready(replace(tokens, x_scale=scale))


@killed_by("test_outputs_beyond_float16", 2, says="NaN or infinite", finalize=Batched_)
def RoundsBeforeWeighting(self, y, dispatched, out_TH):
    """Declares weights_in_fp32, and rounds experts' outputs to the problem's dtype."""
    return Batched_.finalize(self, y.to(self.problem.dtype), dispatched, out_TH)


@killed_by("test_two_calls_in_flight", 1, says="last first|must match|out of bounds")
class FirstInFirstOut(Batched_):
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


@killed_by("test_threads", says="the call of thread [01] of two")
class SumsInAnAttribute(Batched_):
    """Its calls sum in one tensor."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._total = torch.empty(64, problem.hidden_size, dtype=problem.dtype)

    def finalize(self, y, dispatched, out_TH):
        total = self._total[: len(out_TH)]
        super().finalize(y, dispatched, total)
        return Pending.ready(out_TH.copy_(total))
