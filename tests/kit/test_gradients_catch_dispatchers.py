"""Dispatchers with one wrong gradient each: each must fail a named test of the gradient kit.

Mutants of `local` run in this process, and mutants of `naive` on four ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from conformance_catches import killed_by
from moekit_naive.training import TrainableNaive

from moekit import ParallelConfig
from moekit.backends.local import TrainableLocal
from moekit.contract.pending import Pending

SHARED_SLICES = ParallelConfig(ep_size=2, tp_size=2, dp_size=2)


class LocalTrains(TrainableLocal):
    """The right control."""

    BASE = "local"


class NaiveTrains(TrainableNaive):
    """The right control. Mutants change what is sent, arrives, returns or is handed out."""

    BASE = "naive"

    def handed(self, tokens):
        return tokens

    def sent(self, grad_TH):
        return grad_TH

    def got(self, grad_RH, sizes):
        return grad_RH

    def returned(self, rows, sizes):
        return rows

    def home(self, found):
        return found

    def _arrived(self, *args):
        return self.handed(super()._arrived(*args))

    def prepare_backward(self, grad_TH, dispatched):
        arriving, sizes = (
            super().prepare_backward(self.sent(grad_TH), dispatched),
            dispatched.handle,
        )
        return Pending(lambda: self.got(arriving.result(), sizes.sizes))

    def finalize_backward(self, grad_RH, grad_RK, dispatched):
        sizes = dispatched.handle.sizes
        returning = super().finalize_backward(grad_RH, self.returned(grad_RK, sizes), dispatched)
        return Pending(lambda: self.home(returning.result()))


def gradients(name, world=4, says="relative error too large", **of):
    return killed_by("test_gradients", name, world, says=says, **of)


@gradients("even", 1, "gradient of topk_weights", finalize_backward=LocalTrains)
def LocalLosesRouterGradients(self, grad_RH, grad_RK, dispatched):
    """Brings no gradients of router weights home."""
    return Pending.ready((grad_RH, None if grad_RK is None else torch.zeros_like(grad_RK)))


@gradients("even", 1, "gradient of x", finalize_backward=LocalTrains)
def LocalSwapsTokens(self, grad_RH, grad_RK, dispatched):
    """Brings the gradients of two tokens home to each other."""
    return Pending.ready((grad_RH.roll(1, dims=0), grad_RK))


@gradients("first_first", 1, ".")
class XInAReusedBuffer(LocalTrains):
    """Hands out tokens in a buffer that the next call overwrites."""

    buffer = None

    def prepare(self, x_TH, routing, quantize):
        tokens = super().prepare(x_TH, routing, quantize).result()
        if self.buffer is None:
            self.buffer = x_TH.new_empty((64, x_TH.shape[1]))
        held = self.buffer.data[: len(x_TH)]
        held.copy_(tokens.x)
        return Pending.ready(replace(tokens, x=held))


@gradients("backward_twice", 1, says=".")
class OneBackward(LocalTrains):
    """Forgets a call when its backward has sent the gradient."""

    def prepare(self, x_TH, routing, quantize):
        tokens = super().prepare(x_TH, routing, quantize).result()
        return Pending.ready(replace(tokens, handle=["the map"]))

    def prepare_backward(self, grad_TH, dispatched):
        dispatched.handle.pop()
        return super().prepare_backward(grad_TH, dispatched)


@gradients("first_first", says="gradient of", got=NaiveTrains)
def StaleGradient(self, grad_RH, sizes):
    """Hands out the gradient of the first backward of that size again."""
    self.first = getattr(self, "first", {})
    return self.first.setdefault(len(grad_RH), grad_RH)


@gradients("even", says="gradient of w13 |gradient of x", got=NaiveTrains)
def OwnGradientsOnly(self, grad_RH, sizes):
    """Hands out the gradients of this rank's tokens only."""
    rank = self.group.rank()
    mine = slice(sum(sizes.sent[:rank]), sum(sizes.sent[: rank + 1]))
    kept = torch.zeros_like(grad_RH)
    kept[mine] = grad_RH[mine]
    return kept


@gradients("even", says="gradient of x", home=NaiveTrains)
def SumsARankTwice(self, found):
    """Counts the gradients of the first rank's tokens twice."""
    of_x, of_weights = found
    return (of_x * 2 if self.group.rank() == 0 else of_x), of_weights


@killed_by("test_gradients_of_slices_and_shared_tokens", SHARED_SLICES, says="gradient of")
class CopiesAdded(NaiveTrains):
    """Adds the gradients of all ranks that hold the same tokens."""

    def sent(self, grad_TH):
        return grad_TH * (self.group.size() // self.problem.parallel.dp_size)


@killed_by("test_gradients_of_slices_and_shared_tokens", SHARED_SLICES, says="gradient of")
class CopiesAveraged(NaiveTrains):
    """Divides gradients by the number of ranks, as data-parallel training does."""

    def sent(self, grad_TH):
        return grad_TH / self.group.size()


@gradients("even", says="gradient of topk_weights", returned=NaiveTrains)
def RouterGradientsOfOwnExperts(self, rows, sizes):
    """Keeps the gradients of router weights on the ranks of the experts."""
    rank, kept = self.group.rank(), torch.zeros_like(rows)
    mine = slice(sum(sizes.sent[:rank]), sum(sizes.sent[: rank + 1]))
    kept[mine] = rows[mine]
    return kept


@gradients("float32", says="gradient of topk_weights", returned=NaiveTrains)
def RouterGradientsIn16Bits(self, rows, sizes):
    """Sends the gradients of router weights in bfloat16."""
    return rows.bfloat16().float()


@gradients("last_first", says=".")
class BufferOfTheGroup(NaiveTrains):
    """Hands out tokens in the receive buffer of the group."""

    buffer = None

    def handed(self, tokens):
        if self.buffer is None:
            self.buffer = tokens.x.new_empty((256, tokens.x.shape[1]))
        held = self.buffer.data[: len(tokens.x)]
        held.copy_(tokens.x)
        return replace(tokens, x=held)


@gradients("tokens_without_experts", says="NaN")
class DeadGradientsTimesZero(NaiveTrains):
    """Multiplies the gradients of tokens without an expert by zero when they are home."""

    def sent(self, grad_TH):
        self.dead = 0 * grad_TH
        return grad_TH

    def home(self, found):
        return found[0] + self.dead, found[1]


@killed_by("test_memory_of_calls_without_backward", 4, says="bytes are left", handed=NaiveTrains)
def LastTokensStay(self, tokens):
    """Keeps the tokens of a call until the next one."""
    self.last = tokens
    return tokens


@killed_by("test_memory_of_calls_without_backward", 4, says="a call keeps", handed=NaiveTrains)
def RoomForTwice(self, tokens):
    """Hands out tokens in a buffer for twice as many, which the call keeps for its backward."""
    return replace(tokens, x=tokens.x.repeat(2, 1)[: len(tokens.x)])
