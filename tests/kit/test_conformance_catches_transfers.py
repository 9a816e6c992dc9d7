"""Wrong dispatchers that are right for few calls, for two or four ranks, and by themselves."""

from __future__ import annotations

import random
import threading
from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist
from conformance_catches import killed_by, wrong
from right_naive import Naive

from moekit import Routing
from moekit.contract.pending import Pending

many = killed_by("test_many_assignments", 4, says="tokens are wrong")

# -- what travels ------------------------------------------------------------------------


@killed_by("test_quantized_tokens", "fp8_block", 4, says="relative error", _to_send=Naive)
def OneScaleColumn(self, x_TH, routing, quantize):
    """Sends the scale of a token's first group for all its groups."""
    x, columns = Naive._to_send(self, x_TH, routing, quantize)
    first = 2 * self.problem.top_k
    columns[:, first:] = columns[:, first : first + 1]
    return x, columns


@killed_by("test_quantized_tokens", "fp8_block", 4, says="relative error|other bits",
           _to_send=OneScaleColumn)  # fmt: skip
def EightScaleColumns(self, x_TH, routing, quantize):
    """Sends the scales of a token's first eight groups, and the eighth for the others."""
    x, columns = Naive._to_send(self, x_TH, routing, quantize)
    behind = 2 * self.problem.top_k + 8
    columns[:, behind:] = columns[:, behind - 1 : behind]
    return x, columns


@killed_by("test_quantized_tokens", "fp8_block", 2, says="expected a contiguous tensor")
class RowsInTheirMessage(Naive):
    """Leaves quantized rows in the message in which their scales also arrived."""

    def _arrived(self, x_RH, *args):
        tokens = super()._arrived(x_RH, *args)
        if tokens.x_scale is None:
            return tokens
        R, H = x_RH.shape
        message = torch.zeros(R, H + 16, dtype=torch.uint8, device=x_RH.device)
        message[:, :H] = x_RH.view(torch.uint8)
        return replace(tokens, x=message.view(x_RH.dtype)[:, :H])


@killed_by("test_quantized_tokens", "fp8_channel_token", 2, says="meta")
def ScalesOnTheDefaultDevice(self, handed):
    """Receives scales in a tensor on torch's default device."""
    if handed.x_scale is None:
        return handed
    return replace(handed, x_scale=torch.empty(handed.x_scale.shape).copy_(handed.x_scale))


@killed_by("test_tokens_per_rank", "even", 2, says="finalize must return a Pending", finalize=Naive)
def ReturnsTheOutput(self, *args):
    """Returns its output from `finalize`, and not a `Pending`."""
    return Naive.finalize(self, *args).result()


@many
def SixteenChoices(self, routing):
    """Drops a token's assignments from the 17th on."""
    ids = routing.topk_ids.clone()
    ids[:, 16:] = -1
    return Routing(routing.topk_weights, ids)


@many
def Assignments65536(self, handed):
    """Counts assignments in 16 bits without a sign."""
    handed.topk_ids.view(-1)[65536:] = -1
    return handed


@many
def SmallWeightsDropped(self, routing):
    """Sends no assignment whose router weight is below 1e-4."""
    ids = routing.topk_ids.where(routing.topk_weights.abs() >= 1e-4, -1)
    return Routing(routing.topk_weights, ids)


@many
def WeightsInFloat16(self, routing):
    """Sends router weights in float16, which cannot hold small ones."""
    weights = routing.topk_weights.half().float()
    return Routing(weights, routing.topk_ids)


@killed_by("test_three_ranks", says="relative error")
def ForPowersOfTwo(self, handed):
    """Exchanges tokens in pairs of ranks, so that one of three gets none."""
    if self.group.size() == 3 and self.group.rank() == 2:
        handed.topk_ids.fill_(-1)
    return handed


@killed_by("test_full_capacity", 4, says="call 1 .*relative error|call 1 .*exact zeros")
class MostlyEvenRanks(Naive):
    """Has room for three times the assignments that a rank gets on average."""

    def _arrived(self, *args):
        tokens, p = super()._arrived(*args), self.problem
        room = 3 * p.max_num_tokens * p.parallel.dp_size * p.top_k // p.parallel.ep_size
        ids = tokens.topk_ids.view(-1)
        ids[(ids >= 0).cumsum(0) > room] = -1
        return tokens


class SumsItself(Naive):
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


@killed_by("test_deterministic", 4, says="equal calls give different bits", total=SumsItself)
def OrderOfArrival(self, partial_GTH):
    """Sums depend on the order of arrival."""
    order = random.SystemRandom().sample(range(len(partial_GTH)), len(partial_GTH))
    return sum(partial_GTH[rank] for rank in order)


@killed_by("test_dtype", "float32", 4, says="relative error", total=SumsItself)
def SumsByMatmul(self, partial_GTH):
    """Sums with an operator that torch.autocast runs in bfloat16."""
    rows_GN = partial_GTH.flatten(1)
    return (rows_GN.new_ones(1, len(rows_GN)) @ rows_GN).view(partial_GTH.shape[1:])


@killed_by("test_outputs_beyond_float16", 4, says="NaN or infinite", finalize=Naive)
def RoundsRows(self, y, dispatched, out_TH):
    """Declares weights_in_fp32, and sends the experts' rows in the problem's dtype."""
    return Naive.finalize(self, y.to(self.problem.dtype).to(y.dtype), dispatched, out_TH)


# -- how it is called --------------------------------------------------------------------


@killed_by("test_many_calls", 2, says="NaN|relative error", prepare=Naive)
def FromItsStorage(self, x_TH, routing, quantize):
    """Reads tokens from where their storage begins."""
    x = torch.as_strided(x_TH, x_TH.shape, x_TH.stride(), 0)
    return Naive.prepare(self, x, routing, quantize)


class CombineBuffer(Naive):
    """Combines through a tensor that `kept` returns."""

    @abstractmethod
    def kept(self, out): ...

    def finalize(self, y, dispatched, out_TH):
        pending = super().finalize(y, dispatched, out_TH)

        def arrive():
            out = pending.result()
            return out.copy_(self.kept(out).copy_(out))

        return Pending(arrive)


@killed_by("test_many_calls", 2, says="inference")
class BufferOfInferenceMode(CombineBuffer):
    """Keeps the buffer that a call in inference mode made, which other calls cannot write."""

    _own = None

    def kept(self, out):
        if self._own is None:
            self._own = out.new_empty(64, out.shape[1])
        return self._own[: len(out)]


@killed_by("test_many_calls", 2, says="same scalar type", kept=CombineBuffer)
def DefaultDtype(self, out):
    """Adds float32 to a tensor of torch's default dtype."""
    rows = torch.arange(len(out), device=out.device)
    return torch.zeros(out.shape, device=out.device).index_add_(0, rows, out.float())


wrong("DefaultDevice", "Combines on torch's default device",
      killed_by("test_many_calls", 2, says="meta"), of=CombineBuffer,
      kept=lambda self, out: torch.empty(out.shape, dtype=out.dtype))  # fmt: skip


@killed_by("test_tokens_per_rank", "even", 2, says="random numbers")
class ConstructorReseeds(Naive):
    """Seeds the process's random numbers when it is made."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        torch.manual_seed(0)


@killed_by("test_long_run_of_one_shape", 4, says="call 256 of one shape")
class ByteOfCalls(Naive):
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


@killed_by("test_groups_in_threads", 4, says="has no attribute 'free'")
class OnlyInItsThread(Naive):
    """Keeps what it needs where other threads do not find it."""

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._own = threading.local()
        self._own.free = True

    def prepare(self, *args):
        assert self._own.free
        return super().prepare(*args)


# -- memory ------------------------------------------------------------------------------


@killed_by("test_memory_is_stated", 4, says="stay allocated after destroy")
class KeptAfterDestroy(Naive):
    """Keeps its buffer, whose bytes it states, when it is destroyed."""

    _kept: ClassVar = []

    def __init__(self, spec, problem, group=None):
        super().__init__(spec, problem, group)
        self._kept.append(torch.zeros(1 << 20, dtype=torch.uint8))

    def buffer_bytes(self):
        return 1 << 20


@killed_by("test_memory_is_stated", 4, says="a call of \\d+ tokens held")
class RoomForTheFullest(Naive):
    """Gives every expert the room of the fullest, and states the room of equally full ones."""

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


@killed_by("test_memory_is_stated", 4, says="a call of \\d+ tokens held")
def QuantizedUnstated(self, handed):
    """Does not state what it allocates for tokens that travel quantized."""
    room = torch.empty(0 if handed.x_scale is None else 1 << 24)
    del room
    return handed
