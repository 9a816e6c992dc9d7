"""Deliberately wrong dispatchers: each must fail a named kit test that a right one passes."""

from __future__ import annotations

from dataclasses import replace

import torch
from conformance_catches import killed_by, wrong
from torch.nn.functional import pad

from moekit import Routing
from moekit.backends.local import LocalDispatcher
from moekit.backends.reference import BatchedReference
from moekit.contract.pending import Pending
from moekit.plugin import PrepareAndFinalize, Unreduced
from moekit.testing.calls import SumsItself


class Hooks(PrepareAndFinalize):
    """Mutants change the routing that is sent, or the tokens that the experts get."""

    def routed(self, routing):
        return routing

    def handed(self, tokens):
        return tokens

    def prepare(self, x_TH, routing, quantize):
        tokens = super().prepare(x_TH, self.routed(routing), quantize).result()
        return Pending.ready(self.handed(tokens))


class Local_(Hooks, LocalDispatcher):
    """The right control."""

    BASE = "local"


class Batched_(Hooks, BatchedReference):
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
@killed_by("test_each_assignment_is_delivered_once", "uneven", "random", 1, says=".",
           routed=Local_)  # fmt: skip
def TokenDropped(self, routing):
    """The last token has no expert."""
    ids = routing.topk_ids.clone()
    ids[-1:] = -1
    return Routing(routing.topk_weights, ids)


@killed_by("test_each_assignment_is_delivered_once", "uneven", "random", 1,
           says="ids have 8 columns, expected at most top_k=2", routed=Local_)  # fmt: skip
def EightColumns(self, routing):
    """Sends eight assignments a row, as a library of fixed size would; -1 in the rest."""
    more = 8 - routing.topk_ids.shape[1]
    weights = pad(routing.topk_weights, (0, more))
    return Routing(weights, pad(routing.topk_ids, (0, more), value=-1))


@killed_by("test_each_assignment_is_delivered_once", "uneven", "rows", 1,
           says="num_rows=.*, but rows .* have experts", handed=Local_)  # fmt: skip
def RowsWithExpertsCounted(self, tokens):
    """Takes the number of rows with an expert for the end of these rows, which have gaps."""
    count = (tokens.topk_ids >= 0).any(dim=1).sum(dtype=torch.int32).view(1)
    return replace(tokens, num_rows=count)


@killed_by("test_tokens_per_rank", "even", 2, says="worst row|exact zeros", finalize=Local_)
def TokensSwapped(self, y, dispatched, out_TH):
    """Two rows are exchanged."""
    y = y.clone()
    if len(y) > 1:
        y[[0, 1]] = y[[1, 0]]
    return Local_.finalize(self, y, dispatched, out_TH)


def squared(self, routing):
    return Routing(routing.topk_weights.square(), routing.topk_ids)


kill = killed_by("test_dtype", "float32", 1, says="relative error")
wrong("DispatcherWeightsTwice", "Router weights are squared", kill, of=Local_, routed=squared)
wrong("BatchedWeightsTwice", "Router weights are squared", kill, of=Batched_, routed=squared)


def unweighted(self, routing):
    alone = self.problem.top_k == 1
    return Routing(torch.ones_like(routing.topk_weights), routing.topk_ids) if alone else routing


kill = killed_by("test_calls", "one_expert_a_token", 1, says="relative error")
wrong("TopOneUnweighted", "Sends no router weights to a token's only expert", kill, of=Local_,
      routed=unweighted)  # fmt: skip
wrong("BatchedTopOneUnweighted", "Keeps no router weights for a token's only expert", kill,
      of=Batched_, routed=unweighted)  # fmt: skip


@killed_by("test_full_capacity", 1, says="relative error|NaN", handed=Batched_)
def Capacity1024(self, tokens):
    """Drops an expert's rows beyond 1024."""
    return replace(tokens, expert_num_tokens=tokens.expert_num_tokens.clamp(max=1024))


@killed_by("test_batch_invariant", "float32", "none", 1, says="not batch-invariant",
           finalize=Local_)  # fmt: skip
def SumOrderByPosition(self, y, dispatched, out_TH):
    """Sums K backwards in every second token, as tiles with other orders would."""
    odd = torch.arange(len(y))[:, None] % 2 == 1
    ids, weights = dispatched.topk_ids, dispatched.topk_weights
    turned = replace(
        dispatched,
        topk_ids=torch.where(odd, ids.flip(1), ids),
        topk_weights=torch.where(odd, weights.flip(1), weights),
    )
    y = torch.where(odd[..., None], y.flip(1), y) if y.dim() == 3 else y
    return Local_.finalize(self, y, turned, out_TH)


@killed_by("test_batch_invariant", "float32", "none", 1, says="not batch-invariant",
           routed=Batched_)  # fmt: skip
def BatchedSumsByExpert(self, routing):
    """Sums in the order of ids, and not of K."""
    ids, order = routing.topk_ids.sort(dim=1)
    return Routing(routing.topk_weights.gather(1, order), ids)


@killed_by("test_each_assignment_is_delivered_once", "uneven", "random", 1, says=".",
           handed=Batched_)  # fmt: skip
def DeliveredTwice(self, tokens):
    """An expert computes its first row twice; the second result is never used."""
    counts = tokens.expert_num_tokens.clone()
    room = (counts > 0) & (counts < tokens.x.shape[1])
    for expert in room.nonzero().flatten().tolist():
        tokens.x[expert, counts[expert]] = tokens.x[expert, 0]
        counts[expert] += 1
    return replace(tokens, expert_num_tokens=counts)


@killed_by("test_calls", "tokens_without_experts", 1, says="modified the caller's x",
           prepare=Local_)  # fmt: skip
def DispatcherModifies(self, x_TH, routing, quantize):
    """It writes the caller's x."""
    x_TH[(routing.topk_ids < 0).all(dim=1)] = 0.0
    return Local_.prepare(self, x_TH, routing, quantize)


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

    def handed(self, tokens):
        self._handle = tokens.handle
        return tokens

    def finalize(self, y, dispatched, out_TH):
        return super().finalize(y, replace(dispatched, handle=self._handle), out_TH)


@killed_by("test_each_assignment_is_delivered_once", "uneven", "random", 1, says="max_rows",
           handed=Batched_)  # fmt: skip
def RowsUnderstated(self, tokens):
    """More rows than `max_rows` says."""
    wider = torch.cat([tokens.x, torch.full_like(tokens.x, float("nan"))], dim=1)
    return replace(tokens, x=wider)


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


@killed_by("test_quantized_tokens", "fp8_block", 1, prepare=BatchedQuantizes_,
           says="x is torch.bfloat16, expected torch.float8_e4m3fn")  # fmt: skip
def SendsUnquantized(self, x_TH, routing, quantize):
    """Declares a wire scheme that it does not send."""
    return BatchedQuantizes_.prepare(self, x_TH, routing, None)


@killed_by("test_tokens_per_rank", "uneven", 2, moves_tokens=True,
           says="(?s)ranks .0.*raised.*relative error")  # fmt: skip
class ExchangesNothing(Local_):
    """Declares an exchange that it does not make."""


@killed_by("test_quantized_tokens", "fp8_channel_token", 1, handed=Quantizes_,
           says="rows arrive with other bits")  # fmt: skip
def ScalesInAByte(self, tokens):
    """Sends scales as e4m3, which costs less than the rounding of the tokens themselves."""
    scale = tokens.x_scale
    if scale is not None and len(scale):
        largest = scale.nan_to_num(0.0).max()
        scale = (scale / largest * 448).to(torch.float8_e4m3fn).float() * largest / 448
    return replace(tokens, x_scale=scale)


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

    def handed(self, tokens):
        self._handles.append(tokens.handle)
        return tokens

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
