"""Experts with one wrong gradient each: each must fail a named test of the gradient kit."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from conformance_catches import killed_by, wrong

from moekit.backends.torch_training import TrainableTorch


class Trains(TrainableTorch):
    """The right control. Mutants change what it saves, sees, computes or writes."""

    BASE = "torch"

    def saves(self, saved):
        return saved

    def seen(self, tokens):
        return tokens

    def old(self, saved):
        return saved

    def made(self, found, grad_RH, tokens):
        return found

    def wrote(self, name, into, tokens, grad_RH):
        pass

    def forward(self, y_RH, tokens, weights):
        return self.saves(super().forward(y_RH, tokens, weights))

    def backward_input(self, grad_RH, tokens, weights, saved, wanted):
        given, tokens = tokens, self.seen(tokens)
        found = super().backward_input(grad_RH, tokens, weights, self.old(saved), wanted)
        return self.made(found, grad_RH, given)

    def backward_weight(self, grad_RH, tokens, saved, kept, into, add):
        super().backward_weight(grad_RH, tokens, saved, kept, into, add)
        for name, written in into.items():
            self.wrote(name, written, tokens, grad_RH)

    def used(self, tokens):
        experts = torch.arange(self.problem.num_local_experts)
        return torch.isin(experts, tokens.topk_ids)


def gradients(name, says="relative error too large", **of):
    return killed_by("test_gradients", name, says=says, **of)


def of_x(change):
    return lambda self, found, grad_RH, tokens: replace(found, x=change(self, found.x, tokens))


def of_router(change):
    def made(self, found, grad_RH, tokens):
        return replace(found, topk_weights=change(self, found.topk_weights, tokens))

    return made


# -- gradients of x and of the router weights --------------------------------------------------

wrong("RouterGradientDropped", "Returns zeros for the router weights",
      gradients("random", "topk_weights"), of=Trains,
      made=of_router(lambda self, dp, tokens: torch.zeros_like(dp)))  # fmt: skip
wrong("RouterGradientOfDeadIds", "Leaves the router gradients of ids of -1 unwritten",
      gradients("ids_of_-1", "topk_weights.*(NaN|id is -1)"), of=Trains,
      made=of_router(lambda self, dp, ids: dp.masked_fill(ids.topk_ids < 0, 0.1)))  # fmt: skip
wrong("RouterGradientIn16Bits", "Rounds the gradients of router weights to bfloat16",
      gradients("random", "topk_weights"), of=Trains,
      made=of_router(lambda self, dp, tokens: dp.bfloat16().float()))  # fmt: skip
wrong("RouterGradientTimesWeight", "Weights the gradient of a router weight by the weight itself",
      gradients("random", "topk_weights"), of=Trains,
      made=of_router(lambda self, dp, tokens: dp * tokens.topk_weights))  # fmt: skip
wrong("RouterGradientDivides", "Divides by the router weight, which may be 0",
      gradients("router_weights_of_zero", "topk_weights.*NaN"), of=Trains,
      made=of_router(lambda self, dp, tokens: torch.where(
          tokens.topk_ids < 0, 0, dp * tokens.topk_weights / tokens.topk_weights)))  # fmt: skip
wrong("UnweightedDh", "Forgets the router weight in the gradient of h",
      gradients("random", "gradient of x"), of=Trains,
      seen=lambda self, tokens: replace(
          tokens, topk_weights=torch.ones_like(tokens.topk_weights)))  # fmt: skip
wrong("TimesK", "Counts the gradient of x K times",
      gradients("random", "gradient of x"), of=Trains,
      made=of_x(lambda self, dx, tokens: dx * self.problem.top_k))  # fmt: skip
wrong("FromOneK", "Takes the gradient of x from the first k alone",
      gradients("top_8", "gradient of x"), of=Trains,
      seen=lambda self, tokens: replace(tokens, topk_ids=_first_only(tokens.topk_ids)))  # fmt: skip
wrong("DeadRowsLeak", "Multiplies the gradients of rows without an expert by zero",
      gradients("tokens_without_experts", "gradient of x.*NaN"), of=Trains,
      made=lambda self, found, grad_RH, tokens: replace(
          found, x=found.x + 0 * grad_RH))  # fmt: skip
wrong("RowsFromThe129thOn", "Leaves the gradients of an expert's rows from the 129th on at zero",
      killed_by("test_gradients_of_rows_per_expert", 128, says="gradient of x"), of=Trains,
      made=of_x(lambda self, dx, tokens: dx.masked_fill(_late(tokens.topk_ids), 0)))  # fmt: skip
wrong("SingleRowsSkipped", "Skips experts with a single row, as too small a tile",
      killed_by("test_gradients_of_rows_per_expert", 16, says="gradient of x"), of=Trains,
      made=of_x(lambda self, dx, tokens: dx.masked_fill(_alone(tokens.topk_ids), 0)))  # fmt: skip
wrong("NotTheSameTwice", "Adds rounding errors that differ from call to call, as atomics do",
      gradients("random", "made twice.*other bits"), of=Trains,
      made=of_x(lambda self, dx, _: dx + 2**-8 * dx * (torch.rand_like(dx) < 0.01)))  # fmt: skip
wrong("QuantizedExpertsStopGradients", "Passes no gradient through quantized experts",
      killed_by("test_gradients_through_frozen_experts", "int8_w8a16", says="gradient of x"),
      killed_by("test_gradients_through_frozen_experts", "mxfp4_w4a16", says="gradient of x"),
      of=Trains, made=of_x(lambda self, dx, tokens: (
          dx if self.problem.quant.weight is None else dx * 0)))  # fmt: skip


def _first_only(ids):
    first = torch.full_like(ids, -1)
    first[:, 0] = ids[:, 0]
    return first


def _late(ids):
    """Return which rows (R, 1) of top-1 calls are behind the first 128 of their expert."""
    return (ids == ids.T).tril().sum(dim=1, keepdim=True) > 128


def _alone(ids):
    return (ids == ids.T).sum(dim=1, keepdim=True) == 1


@gradients("random", "modified the caller's grad", made=Trains)
def GradientModified(self, found, grad_RH, tokens):
    """Modifies the incoming gradient."""
    grad_RH.data.mul_(2)
    return found


@killed_by("test_wanted_gradients", says="topk_weights", backward_input=Trains)
def RouterGradientNeedsWeights(self, grad_RH, tokens, weights, saved, wanted):
    """Computes the gradient of router weights only where weights want one."""
    found = Trains.backward_input(self, grad_RH, tokens, weights, saved, wanted)
    if wanted.weights or found.topk_weights is None:
        return found
    return replace(found, topk_weights=torch.zeros_like(found.topk_weights))


@killed_by("test_gradient_of_activation", "silu", says="relative error")
@killed_by("test_gradient_of_activation", "swigluoai", says="relative error", old=Trains)
def PassesBeyondTheLimit(self, saved):
    """Lets gradients of clamped numbers pass."""
    limit = self.problem.activation.limit
    if limit is None:
        return saved
    return [saved[0].clamp(max=limit), *saved[1:]]


@killed_by("test_gradient_of_activation", "silu", says="relative error", old=Trains)
def StopsAtTheLimit(self, saved):
    """Takes the slope at the limit for zero, where torch.clamp has one."""
    limit = self.problem.activation.limit
    if limit is None:
        return saved
    h = saved[0]
    return [torch.where(h == limit, h + 1, h), *saved[1:]]


@killed_by("test_gradient_of_activation", "gelu", says="relative error", backward_input=Trains)
def SiluForEveryActivation(self, *args):
    """Has the backward of silu alone."""
    other = copy(self)
    kind = replace(self.problem.activation, name="silu", alpha=None, limit=None)
    if self.problem.activation.gated:
        other.problem = self.problem.replace(activation=kind)
    return TrainableTorch.backward_input(other, *args)


# -- gradients of the weights ------------------------------------------------------------------


@gradients("idle_experts", "NaN", wrote=Trains)
def EmptyExpertsUnwritten(self, name, into, tokens, grad_RH):
    """Leaves the gradients of experts without rows unwritten, as torch's grouped GEMM does."""
    into[~self.used(tokens)] = torch.empty_like(into[~self.used(tokens)])


@killed_by("test_accumulation", "grad", says="relative error|experts without tokens")
class EmptyExpertsStale(Trains):
    """Leaves the gradients of the call before in experts without rows."""

    last: dict | None = None

    def wrote(self, name, into, tokens, grad_RH):
        self.last = self.last or {}
        before = self.last.get(name)
        if before is not None:
            into[~self.used(tokens)] = before[~self.used(tokens)]
        self.last[name] = into.clone()


@gradients("random", "gradient of w2 ", wrote=Trains)
def BlockTransposed(self, name, into, tokens, grad_RH):
    """Writes one block of w2's gradient transposed."""
    if name == "w2":
        into[:, :16, :16] = into[:, :16, :16].mT.clone()


@gradients("random", "gradient of w13 ", wrote=Trains)
def GateAndUpSwapped(self, name, into, tokens, grad_RH):
    """Exchanges the gradients of gate and up."""
    if name == "w13":
        into.copy_(into.roll(into.shape[1] // 2, dims=1))


@gradients("random", "gradient of w13_bias", wrote=Trains)
def BiasZeros(self, name, into, tokens, grad_RH):
    """Returns zeros for biases."""
    if "bias" in name:
        into.zero_()


@gradients("random", "gradient of w2_bias", backward_weight=Trains)
def BiasUnweighted(self, grad_RH, tokens, saved, kept, into, add):
    """Sums the gradients of w2's bias without the router weights."""
    ones = replace(tokens, topk_weights=torch.ones_like(tokens.topk_weights))
    Trains.backward_weight(self, grad_RH, ones, saved, kept, into, add)


@gradients("tokens_without_experts", "gradient of w2_bias.*NaN", wrote=Trains)
def DeadRowsInTheBias(self, name, into, tokens, grad_RH):
    """Sums the gradients of all rows for w2's bias, those without an expert times zero."""
    if name == "w2_bias":
        into += 0 * grad_RH.sum(dim=0)


@gradients("random", "gradient of w13 ", wrote=Trains)
def ExpertsShifted(self, name, into, tokens, grad_RH):
    """Gives each expert the gradient of the one before."""
    if name == "w13":
        into.copy_(into.roll(1, dims=0))


@gradients("replicas", "relative error|experts without tokens", wrote=Trains)
def ReplicasMerged(self, name, into, tokens, grad_RH):
    """Adds the gradient of a replica to the first copy of its expert."""
    for replica in range(self.problem.num_experts, self.problem.num_physical_experts):
        into[self.problem.logical_expert(replica)] += into[replica]
        into[replica] = 0


@gradients("many_rows", "gradient of w2 ", backward_weight=Trains)
def Accumulates16Bits(self, grad_RH, tokens, saved, kept, into, add):
    """Accumulates the gradient of w2 over rows in the problem's dtype."""
    Trains.backward_weight(self, grad_RH, tokens, saved, kept, into, add)
    rows, pa_SI = self._rows(saved, tokens.topk_ids), kept[1]
    for expert, run in rows.runs():
        if "w2" in into and not add:
            into["w2"][expert] = 0
            for first in range(run.start, run.stop, 4):
                part = slice(first, min(first + 4, run.stop))
                into["w2"][expert] += grad_RH[rows.token_S][part].T @ pa_SI[part]


@killed_by("test_accumulation", "buffer")
@killed_by("test_accumulation", "float32_buffer", backward_weight=Trains)
def AddOverwrites(self, grad_RH, tokens, saved, kept, into, add):
    """Overwrites the buffer that it is to add to."""
    Trains.backward_weight(self, grad_RH, tokens, saved, kept, into, False)


@killed_by("test_accumulation", "buffer", backward_weight=Trains)
def AddIgnored(self, grad_RH, tokens, saved, kept, into, add):
    """Leaves a given buffer as it is."""
    if not add:
        Trains.backward_weight(self, grad_RH, tokens, saved, kept, into, add)


@killed_by("test_accumulation", "float32_buffer", wrote=Trains)
def EmptyExpertsOverwritten(self, name, into, tokens, grad_RH):
    """Writes zeros for experts without rows, also into a buffer that it is to add to."""
    into[~self.used(tokens)] = 0


@gradients("random", "gradient of", wrote=Trains)
def OneExpertStays(self, name, into, tokens, grad_RH):
    """Leaves out the gradient of expert 2."""
    into[2] = 0


# -- what is saved ------------------------------------------------------------------------------


@killed_by("test_backwards", "first_first", says="gradient of")
class SavesInScratch(Trains):
    """Saves h in a buffer that the next call overwrites."""

    buffer = None

    def saves(self, saved):
        h = saved[0]
        if self.buffer is None:
            self.buffer = h.new_empty(4 * h.numel() + 4096)
        self.buffer.data[: h.numel()] = h.flatten()
        return [self.buffer.data[: h.numel()].view_as(h), *saved[1:]]


@killed_by("test_memory_of_calls_without_backward", says="bytes are left")
@killed_by("test_backwards", "last_first", says=".")
class OnlyTheLastCall(Trains):
    """Keeps what it saves on itself, and so knows the last call only."""

    def saves(self, saved):
        self.last = saved
        return saved

    def old(self, saved):
        return self.last


@killed_by("test_backwards", "twice", says="gradient of", backward_weight=Trains)
def BackwardOverwrites(self, grad_RH, tokens, saved, kept, into, add):
    """Uses the memory of the saved h again in the backward."""
    Trains.backward_weight(self, grad_RH, tokens, saved, kept, into, add)
    saved[0].data.zero_()


@killed_by("test_memory_of_calls_without_backward", says="bytes are left")
class KeepsCalls(Trains):
    """Keeps what it saved until a backward comes."""

    kept: list | None = None

    def saves(self, saved):
        self.kept = [*(self.kept or []), saved[0]]
        return saved


@killed_by("test_memory_of_calls_without_backward", says="by saved_bytes", saves=Trains)
def SavesMore(self, saved):
    """Saves more than it says."""
    return [*saved, saved[0].clone()]


@killed_by("test_memory_of_calls_without_backward", says="by saved_bytes", saved_bytes=Trains)
def StatesListsOnly(self, rows):
    """Understates what it saves: the lists, and not h."""
    return 8 * rows * self.problem.top_k + 4 * self.problem.num_local_experts


@killed_by("test_memory_of_calls_without_backward", says="h and lists have")
class SavesY(Trains):
    """Saves the experts' outputs as well, and says so."""

    def saves(self, saved):
        return [*saved, saved[0].new_empty(len(saved[0]), self.problem.hidden_size)]

    def saved_bytes(self, rows):
        p = self.problem
        return super().saved_bytes(rows) + rows * p.top_k * p.hidden_size * p.dtype.itemsize


@killed_by("test_memory_of_steps", says="state the rest in", backward_weight=Trains)
def OuterProductsOfRows(self, grad_RH, tokens, saved, kept, into, add):
    """Computes a gradient of w13 for each row before it sums, and does not state that memory."""
    Trains.backward_weight(self, grad_RH, tokens, saved, kept, into, add)
    token_S = saved[1] // self.problem.top_k
    of_rows = kept[0].float()[:, :, None] * tokens.x[token_S, None].float()
    for out, rows in zip(into["w13"], of_rows.tensor_split(saved[2].tolist()), strict=False):
        out.copy_(rows.sum(dim=0))
