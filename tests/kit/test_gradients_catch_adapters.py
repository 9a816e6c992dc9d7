"""Experts that add one wrong delta, or give one wrong gradient: each must fail a named test."""

from __future__ import annotations

from dataclasses import replace

import torch
from conformance_catches import killed_by, wrong

from moekit.backends.torch_training import TrainableTorch


class Adapts(TrainableTorch):
    """The right control. Mutants change what it sees, returns or writes."""

    BASE, ADAPTS = "torch", True

    def stack(self, adapters):
        return adapters

    def seen(self, tokens):
        return tokens

    def made(self, y, base, tokens):
        return y

    def back(self, adapters):
        return adapters

    def wrote(self, name, into, add):
        pass

    def _given(self, tokens, weights, change=None):
        if weights.adapters is None:
            return tokens, weights
        adapters = (change or self.stack)(weights.adapters)
        return self.seen(tokens), replace(weights, adapters=adapters)

    def apply(self, y, tokens, weights, workspace):
        base = torch.empty_like(y)
        super().apply(base, tokens, replace(weights, adapters=None), workspace)
        super().apply(y, *self._given(tokens, weights), workspace)
        y.copy_(self.made(y, base, tokens))

    def backward_input(self, grad_RH, tokens, weights, saved, wanted):
        given = self._given(tokens, weights, self.back)
        return super().backward_input(grad_RH, *given, saved, wanted)

    def backward_weight(self, grad_RH, tokens, saved, kept, into, add):
        super().backward_weight(grad_RH, tokens, saved, kept, into, add)
        for name, written in into.items():
            self.wrote(name, written, add)


def changed(**changes):
    """Return a change of some matrices."""

    def change(self, adapters):
        held = adapters.tensors()
        made = {n: f(held[n]) for n, f in changes.items() if n in held}
        return replace(adapters, **made)

    return change


def outputs(name="random", says="random|merged|relative"):
    return killed_by("test_adapters", name, says=says)


def gradients(name="random", says="relative error too large"):
    return killed_by("test_adapter_gradients", name, says=says)


def ids(change):
    return lambda self, tokens: replace(tokens, adapter_ids=change(tokens.adapter_ids))


# -- outputs ---------------------------------------------------------------------------------------

wrong("AdaptersIgnored", "Computes the base alone", outputs(), of=Adapts,
      made=lambda self, y, base, tokens: base)  # fmt: skip
wrong("ScalingForgotten", "Adds B A unscaled", outputs(), of=Adapts,
      stack=lambda self, a: replace(a, scaling=torch.ones_like(a.scaling)))  # fmt: skip
wrong("ScalingOfSlotZero", "Scales every adapter as the first one", outputs(), of=Adapts,
      stack=lambda self, a: replace(a, scaling=a.scaling[:1].expand(len(a.scaling))))  # fmt: skip
wrong("ScaledTwice", "Scales A x and B of it", outputs(), of=Adapts,
      stack=lambda self, a: replace(a, scaling=a.scaling**2))  # fmt: skip
wrong("OtherAdapter", "Gives a token the adapter of the next slot", outputs(), of=Adapts,
      seen=ids(lambda ids: torch.where(ids < 0, ids, (ids + 1) % 3)))  # fmt: skip
wrong("AdapterOfTheFirstRow", "Gives all tokens the adapter of one", outputs(), of=Adapts,
      seen=ids(lambda ids: ids.clamp(min=0, max=0)))  # fmt: skip
wrong("NoneIsSlotZero", "Takes no adapter for the first slot",
      killed_by("test_bits_without_adapters", says="have other bits"), of=Adapts,
      seen=ids(lambda ids: ids.clamp(min=0)))  # fmt: skip
wrong("NoneIsTheLastSlot", "Indexes the stack with -1",
      killed_by("test_bits_without_adapters", says="have other bits"), of=Adapts,
      seen=ids(lambda ids: torch.where(ids < 0, 2, ids)))  # fmt: skip
wrong("RoundsOtherTokens", "Rounds tokens without an adapter once more",
      killed_by("test_bits_without_adapters", says="have other bits"), of=Adapts,
      made=lambda self, y, base, tokens: torch.where(
          (tokens.adapter_ids[:, None] < 0) & (y != base).any(), y * 1.01, y))  # fmt: skip
wrong("ZerosRound", "Adds deltas of zeros in a way that rounds",
      killed_by("test_bits_without_adapters", says="zeros change bits"), of=Adapts,
      made=lambda self, y, base, tokens: torch.where(
          tokens.adapter_ids[:, None] < 0, y, (y * 1.01).to(y.dtype)))  # fmt: skip
wrong("GateAndUpSwapped", "Adds the delta of gate to up, and of up to gate", outputs(), of=Adapts,
      stack=changed(w13_b=lambda b: torch.cat(b.chunk(2, dim=2)[::-1], dim=2)))  # fmt: skip
wrong("OneAForGateAndUp", "Takes A of gate for up as well", outputs("gate_and_up_apart"),
      of=Adapts, stack=changed(w13_a=lambda a: a[:, :, :1].expand(a.shape)))  # fmt: skip
wrong("RankInterleavedWrong", "Reads the rank of B in another order", outputs(), of=Adapts,
      stack=changed(w2_b=lambda b: b.unflatten(3, (2, -1)).mT.flatten(3)))  # fmt: skip
wrong("ExpertsAndRankSwapped", "Reads A as (r, E) and not as (E, r)", outputs(), of=Adapts,
      stack=changed(w2_a=lambda a: a.transpose(1, 2).reshape(a.shape)))  # fmt: skip
wrong("OtherExpert", "Takes the adapter of the next expert", outputs(), of=Adapts,
      stack=changed(w13_a=lambda a: a.roll(1, 1), w13_b=lambda b: b.roll(1, 1)))  # fmt: skip
wrong("OtherExpertOfDown", "Takes the next expert's adapter of w2", outputs(), of=Adapts,
      stack=changed(w2_b=lambda b: b.roll(1, 1)))  # fmt: skip
wrong("W13Alone", "Leaves the deltas of w2 out", outputs(), of=Adapts,
      stack=lambda self, a: replace(a, w2_a=None, w2_b=None))  # fmt: skip
wrong("W2Alone", "Leaves the deltas of w13 out", outputs(), of=Adapts,
      stack=lambda self, a: replace(a, w13_a=None, w13_b=None))  # fmt: skip
wrong("RanksFrom65On", "Leaves out what lies beyond a rank of 64", outputs("rank_72"), of=Adapts,
      stack=changed(w2_a=lambda a: a.where(torch.arange(a.shape[2])[:, None] < 64, 0)))  # fmt: skip
wrong("RanksOfAMultipleOf4", "Leaves out the rank behind a multiple of 4", outputs("rank_5"),
      of=Adapts, stack=changed(w2_a=lambda a: a.where(
          torch.arange(a.shape[2])[:, None] < a.shape[2] // 4 * 4, 0)))  # fmt: skip
wrong("AddedUnweighted", "Adds the delta to the weighted sum", outputs(), of=Adapts,
      made=lambda self, y, base, tokens: base + (y - base) / tokens.topk_weights.sum(
          dim=1, keepdim=True).to(y.dtype))  # fmt: skip
wrong("StridesOfSharedMatrices", "Reads another expert's memory where experts share a matrix",
      outputs("shared_by_experts"), of=Adapts,
      stack=changed(w13_a=lambda a: a if a.stride(1) else torch.where(
          torch.arange(a.shape[1])[:, None, None, None] > 0, 0, a)))  # fmt: skip
wrong("KeepsTheFirstStack", "Copies the adapters at the first call",
      killed_by("test_slots_change_in_place", says="slots changed 1 times"), of=Adapts,
      stack=lambda self, a: self.__dict__.setdefault("copied", replace(
          a, scaling=a.scaling.clone(),
          **{n: t.clone() for n, t in a.tensors().items()})))  # fmt: skip
wrong("DenseBaseAlone", "Ignores adapters over quantized weights",
      killed_by("test_adapters_over_scheme", "int8_w8a16", says="int8_w8a16"), of=Adapts,
      made=lambda self, y, base, tokens: base if self.problem.quant.weight else y)  # fmt: skip

# -- gradients -------------------------------------------------------------------------------------

wrong("NoGradientThroughW13", "Leaves A' B' dh out of the gradient of x",
      gradients(says="gradient of x"), of=Adapts,
      back=changed(w13_b=torch.zeros_like))  # fmt: skip
wrong("NoGradientThroughW2", "Leaves A' B' g out of the gradient of h",
      gradients(says="gradient of (x|topk_weights)"), of=Adapts,
      back=changed(w2_b=torch.zeros_like))  # fmt: skip
wrong("BackwardUnscaled", "Forgets the scaling in the backward",
      gradients(says="gradient of (x|topk_weights)"), of=Adapts,
      back=lambda self, a: replace(a, scaling=torch.ones_like(a.scaling)))  # fmt: skip
wrong("BackwardOfOtherExpert", "Goes back through the next expert's A",
      gradients(says="gradient of x"), of=Adapts,
      back=changed(w13_a=lambda a: a.roll(1, 1)))  # fmt: skip
for matrix in ("w13_a", "w13_b", "w2_a", "w2_b"):
    wrong(f"Frozen_{matrix}", f"Writes zeros for the gradient of {matrix}",
          gradients(says=f"gradient of {matrix}|" + r"\{"), of=Adapts,
          wrote=lambda self, name, into, add, matrix=matrix:
          into.zero_() if name == matrix else None)  # fmt: skip
wrong("FrozenSecondSlot", "Trains the first adapter alone", gradients(says="gradient of w13_a"),
      of=Adapts, wrote=lambda self, name, into, add: into[1:].zero_())  # fmt: skip
wrong("GradientOfGateAlone", "Leaves up's rows of the gradient of B at zero",
      gradients(says="gradient of w13_b"), of=Adapts,
      wrote=lambda self, name, into, add:
      into.chunk(2, dim=2)[1].zero_() if name == "w13_b" else None)  # fmt: skip
wrong("GradientOfOneGroup", "Writes A of gate alone, where up has another one",
      gradients("gate_and_up_apart", "gradient of w13_a"), of=Adapts,
      wrote=lambda self, name, into, add:
      into[:, :, 1:].zero_() if name == "w13_a" else None)  # fmt: skip
wrong("UnusedMatricesUnwritten", "Leaves the gradients of experts without tokens unwritten",
      gradients("one_token", "is not zero|NaN"), of=Adapts,
      wrote=lambda self, name, into, add: into.masked_fill_(into == 0, 0.5))  # fmt: skip
wrong("NoTokensUnwritten", "Writes no gradient in calls without tokens",
      gradients("no_tokens", "is not zero|NaN"), of=Adapts,
      wrote=lambda self, name, into, add: into.masked_fill_(into == 0, 0.5))  # fmt: skip
