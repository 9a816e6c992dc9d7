"""Wrong dispatchers that are right for few calls, for two or four ranks, and by themselves."""

from __future__ import annotations

import random
import threading
from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from moekit_naive.dispatcher import NaiveDispatcher
from right_naive import caught_naive

from moekit import Routing
from moekit.contract.pending import Pending
from moekit.contract.sizes import Footprint

# -- what travels ------------------------------------------------------------------------


class OneScaleColumn(NaiveDispatcher):
    """Sends the scale of a token's first group for all its groups."""

    def _to_send(self, x_TH, routing, quantize):
        x, columns = super()._to_send(x_TH, routing, quantize)
        first = 2 * self.problem.top_k
        columns[:, first:] = columns[:, first : first + 1]
        return x, columns


class EightScaleColumns(OneScaleColumn):
    """Sends the scales of a token's first eight groups, and the eighth for the others."""

    def _to_send(self, x_TH, routing, quantize):
        x, columns = NaiveDispatcher._to_send(self, x_TH, routing, quantize)
        behind = 2 * self.problem.top_k + 8
        columns[:, behind:] = columns[:, behind - 1 : behind]
        return x, columns


@pytest.mark.parametrize("wrong", [OneScaleColumn, EightScaleColumns])
def test_scales_of_other_groups(wrong):
    caught_naive(wrong, "test_quantized_tokens", "fp8_block", 4, says="relative error")


class RowsInTheirMessage(NaiveDispatcher):
    """Leaves quantized rows in the message in which their scales arrived, too."""

    def _arrived(self, x_RH, *args):
        tokens = super()._arrived(x_RH, *args)
        if tokens.x_scale is None:
            return tokens
        R, H = x_RH.shape
        message = torch.zeros(R, H + 16, dtype=torch.uint8, device=x_RH.device)
        message[:, :H] = x_RH.view(torch.uint8)
        return replace(tokens, x=message.view(x_RH.dtype)[:, :H])


def test_quantized_rows_that_are_not_contiguous():
    test, says = "test_quantized_wire", "expected a contiguous tensor"
    caught_naive(RowsInTheirMessage, test, "fp8_block", 2, says=says)


class ScalesOnTheDefaultDevice(NaiveDispatcher):
    """Receives scales in a tensor on torch's default device."""

    def _arrived(self, *args):
        tokens = super()._arrived(*args)
        if tokens.x_scale is None:
            return tokens
        return replace(tokens, x_scale=torch.empty(tokens.x_scale.shape).copy_(tokens.x_scale))


def test_scales_on_another_device():
    test = "test_quantized_tokens"
    caught_naive(ScalesOnTheDefaultDevice, test, "fp8_channel_token", 2, says="meta")


class ReturnsTheOutput(NaiveDispatcher):
    """Returns its output from `finalize`, and not a `Pending`."""

    def finalize(self, *args):
        return super().finalize(*args).result()


def test_output_that_is_no_pending():
    says = "finalize must return a Pending"
    caught_naive(ReturnsTheOutput, "test_tokens_per_rank", "even", 2, says=says)


class SixteenChoices(NaiveDispatcher):
    """Drops a token's assignments from the 17th on."""

    def _to_send(self, x_TH, routing, quantize):
        ids = routing.topk_ids.clone()
        ids[:, 16:] = -1
        return super()._to_send(x_TH, Routing(routing.topk_weights, ids), quantize)


class Assignments65536(NaiveDispatcher):
    """Counts assignments in 16 bits without a sign."""

    def _arrived(self, *args):
        tokens = super()._arrived(*args)
        tokens.topk_ids.view(-1)[65536:] = -1
        return tokens


class SmallWeightsDropped(NaiveDispatcher):
    """Sends no assignment whose router weight is below 1e-4."""

    def _to_send(self, x_TH, routing, quantize):
        ids = routing.topk_ids.where(routing.topk_weights.abs() >= 1e-4, -1)
        return super()._to_send(x_TH, Routing(routing.topk_weights, ids), quantize)


class WeightsInFloat16(NaiveDispatcher):
    """Sends router weights in float16, which cannot hold small ones."""

    def _to_send(self, x_TH, routing, quantize):
        weights = routing.topk_weights.half().float()
        return super()._to_send(x_TH, Routing(weights, routing.topk_ids), quantize)


@pytest.mark.parametrize(
    "wrong", [SixteenChoices, Assignments65536, SmallWeightsDropped, WeightsInFloat16]
)
def test_more_assignments(wrong):
    caught_naive(wrong, "test_many_assignments", 4, says="tokens are wrong")


class ForPowersOfTwo(NaiveDispatcher):
    """Exchanges tokens in pairs of ranks, so that one of three gets none."""

    def _arrived(self, *args):
        tokens = super()._arrived(*args)
        if self.group.size() == 3 and self.group.rank() == 2:
            tokens.topk_ids.fill_(-1)
        return tokens


def test_number_of_ranks():
    caught_naive(ForPowersOfTwo, "test_three_ranks", says="relative error")


class MostlyEvenRanks(NaiveDispatcher):
    """Has room for three times the assignments that a rank gets on average."""

    def _arrived(self, *args):
        tokens, p = super()._arrived(*args), self.problem
        room = 3 * p.max_num_tokens * p.parallel.dp_size * p.top_k // p.parallel.ep_size
        ids = tokens.topk_ids.view(-1)
        ids[(ids >= 0).cumsum(0) > room] = -1
        return tokens


def test_all_assignments_on_one_rank():
    says = r"call 1 .*relative error|call 1 .*exact zeros"
    caught_naive(MostlyEvenRanks, "test_full_capacity", 4, says=says)


class SumsItself(NaiveDispatcher):
    """Sums what the ranks return by a method."""

    @abstractmethod
    def total(self, partial_GTH): ...

    def finalize(self, y, dispatched, out_TH):
        counts = list(dispatched.handle.sizes.out)
        partial_GTH = y.new_empty((len(counts), *out_TH.shape))
        mine, theirs = y.contiguous().view(torch.uint8), partial_GTH.flatten(0, 1).view(torch.uint8)
        sizes = [len(out_TH)] * len(counts), counts
        dist.all_to_all_single(theirs, mine, *sizes, group=self.group)
        return Pending.ready(out_TH.copy_(self.total(partial_GTH.float())))


class OrderOfArrival(SumsItself):
    def total(self, partial_GTH):
        order = random.SystemRandom().sample(range(len(partial_GTH)), len(partial_GTH))
        return sum(partial_GTH[rank] for rank in order)


class SumsByMatmul(SumsItself):
    """Sums with an operator that torch.autocast runs in bfloat16."""

    def total(self, partial_GTH):
        rows_GN = partial_GTH.flatten(1)
        return (rows_GN.new_ones(1, len(rows_GN)) @ rows_GN).view(partial_GTH.shape[1:])


def test_sums_that_depend_on_more_than_the_call():
    says = "equal calls give different bits"
    caught_naive(OrderOfArrival, "test_deterministic", 4, says=says)
    caught_naive(SumsByMatmul, "test_dtype", "float32", 4, says="relative error")


class RoundsRows(NaiveDispatcher):
    """Declares weights_in_fp32, and sends the experts' rows in the problem's dtype."""

    def finalize(self, y, dispatched, out_TH):
        return super().finalize(y.to(self.problem.dtype).to(y.dtype), dispatched, out_TH)


def test_rows_rounded_before_they_are_weighted():
    caught_naive(RoundsRows, "test_outputs_beyond_float16", 4, says="NaN or infinite")


# -- how it is called --------------------------------------------------------------------


class FromItsStorage(NaiveDispatcher):
    """Reads tokens from where their storage begins."""

    def prepare(self, x_TH, routing, quantize):
        x = torch.as_strided(x_TH, x_TH.shape, x_TH.stride(), 0)
        return super().prepare(x, routing, quantize)


class CombineBuffer(NaiveDispatcher):
    """Combines through a tensor that `kept` returns."""

    @abstractmethod
    def kept(self, out): ...

    def finalize(self, y, dispatched, out_TH):
        pending = super().finalize(y, dispatched, out_TH)

        def arrive():
            out = pending.result()
            return out.copy_(self.kept(out).copy_(out))

        return Pending(arrive)


class BufferOfInferenceMode(CombineBuffer):
    """Keeps the buffer that a call in inference mode made, which other calls cannot write."""

    _own = None

    def kept(self, out):
        if self._own is None:
            self._own = out.new_empty(64, out.shape[1])
        return self._own[: len(out)]


class DefaultDtype(CombineBuffer):
    """Adds float32 to a tensor of torch's default dtype."""

    def kept(self, out):
        rows = torch.arange(len(out), device=out.device)
        return torch.zeros(out.shape, device=out.device).index_add_(0, rows, out.float())


class DefaultDevice(CombineBuffer):
    """Combines on torch's default device."""

    def kept(self, out):
        return torch.empty(out.shape, dtype=out.dtype)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (DefaultDevice, "meta"),
        (FromItsStorage, "NaN|relative error"),
        (BufferOfInferenceMode, "inference"),
        (DefaultDtype, "same scalar type"),
    ],
)
def test_what_engines_set(wrong, says):
    caught_naive(wrong, "test_many_calls", 2, says=says)


class ConstructorReseeds(NaiveDispatcher):
    """Seeds the process's random numbers when it is made."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        torch.manual_seed(0)


def test_constructor_changes_the_process():
    caught_naive(ConstructorReseeds, "test_tokens_per_rank", "even", 2, says="random numbers")


class ByteOfCalls(NaiveDispatcher):
    """Returns the last result of a shape again when its number of calls is 256."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._calls, self._last = 0, None

    def finalize(self, y, dispatched, out_TH):
        pending = super().finalize(y, dispatched, out_TH)
        self._calls += 1
        again = self._calls == 256

        def arrive():
            out = pending.result()
            new = out.clone()
            if again:
                out.copy_(self._last)
            self._last = new
            return out

        return Pending(arrive)


def test_number_of_calls_in_a_byte():
    caught_naive(ByteOfCalls, "test_long_run_of_one_shape", 4, says="call 256 of one shape")


class OnlyInItsThread(NaiveDispatcher):
    """Keeps what it needs where other threads do not find it."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._own = threading.local()
        self._own.free = True

    def prepare(self, *args):
        assert self._own.free
        return super().prepare(*args)


def test_other_threads_than_its_constructor_s():
    caught_naive(OnlyInItsThread, "test_groups_in_threads", 4, says="has no attribute 'free'")


# -- memory ------------------------------------------------------------------------------


class KeptAfterDestroy(NaiveDispatcher):
    """Keeps its buffer, whose bytes it states, when it is destroyed."""

    _kept: ClassVar = []

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._kept.append(torch.zeros(1 << 20, dtype=torch.uint8))

    def buffer_bytes(self):
        return 1 << 20


class RoomForTheFullest(NaiveDispatcher):
    """Gives every expert the room of the fullest, and states that of equally full ones."""

    def _bytes(self, rows):
        return (1 << 16) * self.problem.num_local_experts * rows

    def _arrived(self, *args):
        tokens = super()._arrived(*args)
        ids = tokens.topk_ids[tokens.topk_ids >= 0]
        room = torch.empty(self._bytes(int(ids.bincount().max()) if len(ids) else 0))
        del room
        return tokens

    def transient_bytes(self, num_tokens):
        p = self.problem
        share = num_tokens * p.parallel.dp_size * p.top_k // p.num_physical_experts
        return super().transient_bytes(num_tokens) + 4 * self._bytes(share) * 3 // 2


class QuantizedUnstated(NaiveDispatcher):
    """Does not state what it allocates for tokens that travel quantized."""

    def _arrived(self, *args):
        tokens = super()._arrived(*args)
        room = torch.empty(0 if tokens.x_scale is None else 1 << 24)
        del room
        return tokens


def small_footprint(problem):
    return Footprint(rows=problem.max_num_tokens, buffers={}, transient=0, source="a guess")


def test_footprint_of_less_than_it_needs():
    test, says = "test_memory_is_stated", "footprint says 32 rows, and the dispatcher 128"
    caught_naive(NaiveDispatcher, test, 4, says=says, footprint=small_footprint)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (KeptAfterDestroy, "stay allocated after destroy"),
        (RoomForTheFullest, "a call held"),
        (QuantizedUnstated, "a call held"),
    ],
)
def test_memory(wrong, says):
    caught_naive(wrong, "test_memory_is_stated", 4, says=says, footprint=None)
