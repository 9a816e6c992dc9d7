"""Wrong experts that are right in single calls with small, contiguous, moderate inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance_catches import killed_by, mutants_of
from right_experts import Batched, Plain

from moekit.problem.activation import apply_activation


class Skips(Plain):
    """Computes the assignments that `kept` keeps, and drops the others."""

    def kept(self, ids, tokens):
        raise NotImplementedError

    def apply(self, y, tokens, weights, workspace):
        ids = torch.where(self.kept(tokens.topk_ids, tokens), tokens.topk_ids, -1)
        super().apply(y, replace(tokens, topk_ids=ids), weights, workspace)


def rank_in_expert(ids):
    """Return the place of each assignment among those of its expert, from 1."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = flat[order].unique_consecutive(return_counts=True)[1]
    rank = torch.cat([torch.arange(1, int(n) + 1) for n in counts])
    return torch.empty_like(flat).scatter_(0, order, rank).view_as(ids)


def rows_of_expert(ids):
    """Return how many assignments each one's expert has."""
    return torch.bincount(ids.flatten() + 1)[ids + 1]


class OfEight(Plain):
    """Right experts for sizes that are multiples of eight."""

    BASE = "torch"
    DECLARED = {"multiples": lambda problem: (8, 8)}


@killed_by("test_padded_sizes", "none")
class NeedsSixteen(OfEight):
    """Ignores the columns behind the last whole tile of 16, and declares multiples of 8."""

    def apply(self, y, tokens, weights, workspace):
        x = tokens.x.clone()
        x[..., x.shape[-1] // 16 * 16 :] = 0
        super().apply(y, replace(tokens, x=x), weights, workspace)


# -- sizes ----------------------------------------------------------------------------------------


@killed_by("test_many_experts")
class EightAssignments(Skips):
    """Drops a token's assignments from the ninth on."""

    def kept(self, ids, tokens):
        return torch.arange(ids.shape[1]) < 8


@killed_by("test_many_experts")
class Experts256(Skips):
    """Drops experts from 256 on: ids in uint8."""

    LIMIT = 256

    def kept(self, ids, tokens):
        return ids < self.LIMIT


@killed_by("test_many_experts")
class Experts512(Experts256):
    """Drops experts from 512 on: a block of threads counts one expert in each thread."""

    LIMIT = 512


@killed_by("test_many_experts")
class ExpertsInBlocks(Skips):
    """Drops experts beyond the last whole block of 128, if there are more than 512."""

    def kept(self, ids, tokens):
        L = self.problem.num_local_experts
        return ids < (L // 128 * 128 if L > 512 else L)


@killed_by("test_rows_per_expert")
class Rows256(Skips):
    """Drops an expert's rows beyond 256."""

    LIMIT = 256

    def kept(self, ids, tokens):
        return rank_in_expert(ids) <= self.LIMIT


@killed_by("test_rows_per_expert")
class Rows1024(Rows256):
    """Drops an expert's rows beyond 1024."""

    LIMIT = 1024


@killed_by("test_rows_per_expert")
class OneRowBeyondATile(Skips):
    """Drops the last row of an expert that has one more than tiles of 64 hold."""

    TILE, MORE = 64, 1

    def kept(self, ids, tokens):
        rows = rows_of_expert(ids)
        last = rank_in_expert(ids) == rows
        return ~(last & (rows > self.TILE) & (rows % self.TILE == self.MORE))


@killed_by("test_rows_per_expert")
class FullTile(OneRowBeyondATile):
    """Drops the last row of an expert whose rows fill tiles of 128."""

    TILE, MORE = 128, 0

    def kept(self, ids, tokens):
        rows = rows_of_expert(ids)
        return ~((rank_in_expert(ids) == rows) & (rows > 0) & (rows % self.TILE == 0))


@killed_by("test_num_tokens", 2)
class SingleRows(Skips):
    """Skips experts with exactly one row."""

    def kept(self, ids, tokens):
        return (rows_of_expert(ids) != 1) | (len(ids) < 2)


@killed_by("test_many_assignments")
class Assignments16Bit(Skips):
    """Drops assignments from 32768 on: their index is an int16."""

    def kept(self, ids, tokens):
        return (torch.arange(ids.numel()) < 32768).view_as(ids)


@killed_by("test_many_assignments")
class Rows4096(Skips):
    """Drops tokens from 4096 on."""

    def kept(self, ids, tokens):
        return torch.arange(len(ids))[:, None] < 4096


@killed_by("test_num_tokens", 33)
class TailOfFour(Skips):
    """Drops the tokens beyond a multiple of four."""

    def kept(self, ids, tokens):
        return torch.arange(len(ids))[:, None] < max(len(ids) // 4 * 4, 3)


@killed_by("test_wide", "hidden")
class WideHidden(Plain):
    """Reads the first 4096 columns of x."""

    def apply(self, y, tokens, weights, workspace):
        x = tokens.x.clone()
        x[:, 4096:] = 0
        super().apply(y, replace(tokens, x=x), weights, workspace)


@killed_by("test_wide", "hidden")
class WideOutput(Plain):
    """Writes the first 4096 columns of y, and zeros to the others."""

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        y[:, 4096:] = 0


@killed_by("test_wide", "intermediate")
class WideIntermediate(Plain):
    """Sums over the first 4096 columns of w2."""

    def pack(self, weights):
        w2 = weights.w2.clone()
        w2[..., 4096:] = 0
        return super().pack(replace(weights, w2=w2))


@killed_by("test_published_sizes", "gpt-oss-120b")
class LayoutFromShape(Plain):
    """Treats a square w2 as transposed."""

    def pack(self, weights):
        if weights.w2.shape[1] == weights.w2.shape[2]:
            weights = replace(weights, w2=weights.w2.mT.contiguous())
        return super().pack(weights)


@killed_by("test_published_sizes", "olmoe")
class LayoutOfW13FromShape(Plain):
    """Treats a square w13 (2I = H) as transposed."""

    def pack(self, weights):
        if weights.w13.shape[1] == weights.w13.shape[2]:
            weights = replace(weights, w13=weights.w13.mT.contiguous())
        return super().pack(weights)


@killed_by("test_one_expert")
class OneExpertSqueezed(Plain):
    """Treats the weights of a single expert as no weights."""

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        if self.problem.num_local_experts == 1:
            y.zero_()


# -- values ---------------------------------------------------------------------------------------


class Values(Plain):
    """Computes with what `x` and `router` make of tokens and router weights."""

    def x(self, x):
        return x

    def router(self, weights):
        return weights

    def apply(self, y, tokens, weights, workspace):
        if tokens.x_scale is None:
            tokens = replace(tokens, x=self.x(tokens.x))
        tokens = replace(tokens, topk_weights=self.router(tokens.topk_weights))
        super().apply(y, tokens, weights, workspace)


@killed_by("test_magnitude", 64.0)
class Clamp8(Values):
    """Clamps x to +-8."""

    def x(self, x):
        return x.clamp(-8, 8)


@killed_by("test_magnitude", 64.0)
class Clamp100(Values):
    """Clamps x to +-100."""

    def x(self, x):
        return x.clamp(-100, 100)


@killed_by("test_magnitude", 2.0**-20)
class SmallFlushed(Values):
    """Rounds values below 1e-4 to zero."""

    def x(self, x):
        return torch.where(x.abs() < 1e-4, 0.0, x)


@killed_by("test_magnitude", 64.0, says="NaN or infinite|relative error")
class InFloat16(Plain):
    """Keeps activations of a bfloat16 problem in float16, whose range ends at 65504."""

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        if y.dtype != torch.bfloat16 or not weights["w13"].is_floating_point():
            return
        w13 = weights["w13"].float()
        h = torch.einsum("th,lnh->ltn", tokens.x.float(), w13)
        act = apply_activation(h, self.problem.activation)
        if bool((act.nan_to_num(0.0).abs() > 65504).any()):
            y.fill_(float("inf"))


@killed_by("test_dtype", "bfloat16")
class RouterClamped(Values):
    """Clamps router weights to 2."""

    def router(self, weights):
        return weights.clamp(max=2)


@killed_by("test_routing", "signed")
class RouterMadePositive(Values):
    """Takes the absolute value of router weights."""

    def router(self, weights):
        return weights.abs()


@killed_by("test_routing", "signed", says="NaN")
class RouterDivides(Values):
    """Turns a weight of zero into NaN."""

    def router(self, weights):
        return weights * weights / weights


@killed_by("test_routing", "signed")
class NegativeWeightsDropped(Skips):
    """Drops assignments with negative weights."""

    def kept(self, ids, tokens):
        return tokens.topk_weights >= 0


@killed_by("test_dtype", "float32")
class RouterNormalized(Values):
    """Normalizes the router weights of each token."""

    def router(self, weights):
        return weights / weights.nan_to_num(0.0).sum(dim=1, keepdim=True)


@killed_by("test_tokens_are_independent", says="other tokens")
class NanSpreads(Plain):
    """Computes a scale that tokens share over all of them, including NaN."""

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        used = (tokens.topk_ids >= 0).any(dim=1)
        y += tokens.x.float()[used].sum() * 0


@killed_by("test_tokens_are_independent", says="other tokens")
class InfSpreads(Plain):
    """Adds every token's output to its neighbour's, times zero."""

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        used = (tokens.topk_ids >= 0).any(dim=1)
        y[used] += y[used].roll(1, dims=0) * 0


@killed_by("test_dtype", "bfloat16", says=r"scale 0\.00[3-7]")
class HalfAPercent(Plain):
    """Is 0.5 % too large in bfloat16."""

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        if y.dtype == torch.bfloat16:
            y.copy_(y.float() * 1.005)


class Rounds(Plain):
    """Rounds to bfloat16 as `rounded` does."""

    def apply(self, y, tokens, weights, workspace):
        if y.dtype != torch.bfloat16:
            return super().apply(y, tokens, weights, workspace)
        wide = torch.empty(y.shape)
        super().apply(wide, tokens, weights, workspace)
        y.copy_(self.rounded(wide))

    def rounded(self, wide):
        raise NotImplementedError


@killed_by("test_rows_per_expert", says="scale -0.00")
class Truncates(Rounds):
    """Truncates to bfloat16 instead of rounding."""

    def rounded(self, wide):
        return (wide.view(torch.int32) & -65536).view(torch.float32)


@killed_by("test_rows_per_expert", says="mean 0.00")
class Offset(Rounds):
    """Is too large by 0.2 % of the RMS."""

    def rounded(self, wide):
        used = (wide != 0).any(dim=1, keepdim=True)
        return wide + 0.002 * wide[used[:, 0]].square().mean().sqrt() * used


@killed_by("test_dtype", "float32")
class TensorFloat32(Values):
    """Rounds fp32 to TF32 (11 bits)."""

    def x(self, x):
        return ((x.float().view(torch.int32) + 4096) & -8192).view(torch.float32).to(x.dtype)


@killed_by("test_dtype", "float32")
class RouterIn16Bits(Values):
    """Rounds router weights to bfloat16, also in fp32 problems."""

    def router(self, weights):
        return weights.bfloat16().float()


# -- weights --------------------------------------------------------------------------------------


@killed_by("test_strided_input")
class StridesIgnored(Plain):
    """Reads weights as if they were contiguous."""

    def pack(self, weights):
        def misread(t):
            flat = t.contiguous().shape
            strides = torch.empty(flat).stride()
            return torch.as_strided(t, flat, strides, t.storage_offset())

        return super().pack(
            replace(weights, **{n: misread(t) for n, t in weights.tensors().items()})
        )


@killed_by("test_weights_change_in_place")
class WeightsCachedByAddress(Plain):
    """Caches converted weights by their address."""

    def apply(self, y, tokens, weights, workspace):
        kept = self.__dict__.setdefault("kept", {})
        key = tuple(t.data_ptr() for t in weights.experts.values())
        copies = {n: t.clone() for n, t in weights.experts.items()}
        weights = replace(weights, experts=kept.setdefault(key, copies))
        super().apply(y, tokens, weights, workspace)


@killed_by("test_scheme", "none")
class LastExpertSwapped(Plain):
    """Swaps gate and up of the last expert."""

    def pack(self, weights):
        w13 = weights.w13.clone()
        w13[-1] = w13[-1].roll(w13.shape[1] // 2, dims=0)
        return super().pack(replace(weights, w13=w13))


@killed_by("test_clamp", "silu")
class GateAloneClamped(Plain):
    """Clamps the gate, but not the up projection."""

    def apply(self, y, tokens, weights, workspace):
        asked = self.problem
        limit = asked.activation.limit
        if limit is not None and asked.activation.name == "silu":
            rows = asked.local_intermediate_size
            w13, w2 = weights["w13"].clone(), weights["w2"]
            w13[:, rows:] /= 1024
            experts = {**weights.experts, "w13": w13, "w2": w2 * 1024}
            weights = replace(weights, experts=experts)
        super().apply(y, tokens, weights, workspace)


# -- calls ----------------------------------------------------------------------------------------


@killed_by("test_repeated_calls", says="relative error|exact zeros|NaN")
class ResultCachedByAddress(Plain):
    """Returns an earlier result for tokens at the same address."""

    def apply(self, y, tokens, weights, workspace):
        kept = self.__dict__.setdefault("kept", {})
        key = (tokens.x.data_ptr(), tokens.x.shape)
        if key not in kept:
            super().apply(y, tokens, weights, workspace)
            kept[key] = y.clone()
        y.copy_(kept[key])


@killed_by("test_repeated_calls", says="relative error|exact zeros|NaN")
class RoutingCachedByAddress(Plain):
    """Sorts ids once for each address and shape."""

    def apply(self, y, tokens, weights, workspace):
        kept = self.__dict__.setdefault("kept", {})
        key = (tokens.topk_ids.data_ptr(), tokens.topk_ids.shape)
        ids = kept.setdefault(key, tokens.topk_ids.clone())
        super().apply(y, replace(tokens, topk_ids=ids), weights, workspace)


@killed_by("test_many_calls", says="call 19 of one shape")
class Stale20(Plain):
    """Returns the previous output at every 20th call of a shape."""

    EVERY = 20

    def apply(self, y, tokens, weights, workspace):
        counts, kept = self.__dict__.setdefault("counts", ({}, {}))
        counts[y.shape] = counts.get(y.shape, 0) + 1
        if counts[y.shape] % self.EVERY:
            super().apply(y, tokens, weights, workspace)
            kept[y.shape] = y.clone()
        else:
            y.copy_(kept[y.shape])


@killed_by("test_many_calls", says="call 59 of one shape")
class Stale60(Stale20):
    """Returns the previous output at every 60th call of a shape."""

    EVERY = 60


@killed_by("test_nothing_is_kept", says="bytes are left")
class KeepsInputs(Plain):
    """Keeps the tokens of every call."""

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        self.__dict__.setdefault("kept", []).append(tokens)


@killed_by("test_nothing_is_kept", says="bytes are left")
class KeepsOutputs(Plain):
    """Keeps a copy of every result."""

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        self.__dict__.setdefault("kept", []).append(y.clone())


@killed_by("test_kernels_in_turns")
class SharedByClass(Plain):
    """Uses the first kernel's activation in all kernels of the same sizes."""

    COMPILED = {}

    def apply(self, y, tokens, weights, workspace):
        asked = self.problem
        key = (asked.num_experts, asked.hidden_size, asked.local_intermediate_size, len(y))
        self.problem = asked.replace(activation=self.COMPILED.setdefault(key, asked.activation))
        super().apply(y, tokens, weights, workspace)
        self.problem = asked


@killed_by("test_dtype", "float32", says="default dtype")
class DefaultDtypeChanged(Plain):
    """Changes the process's default dtype."""

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        torch.set_default_dtype(torch.float64)


@killed_by("test_dtype", "float32", says="random numbers")
class Reseeded(Plain):
    """Seeds the process's random numbers."""

    def apply(self, y, tokens, weights, workspace):
        torch.manual_seed(0)
        super().apply(y, tokens, weights, workspace)


@killed_by("test_routing", "masked")
class StopsAtTheFirstMaskedId(Skips):
    """Drops a token's assignments behind its first id of -1."""

    def kept(self, ids, tokens):
        return (ids >= 0).cumprod(dim=1).bool()


@killed_by("test_dtype", "float32")
class IdsAscend(Values):
    """Sorts a token's ids, but not its weights."""

    def apply(self, y, tokens, weights, workspace):
        ids = tokens.topk_ids.sort(dim=1).values
        super().apply(y, replace(tokens, topk_ids=ids), weights, workspace)


@killed_by("test_repeated_calls", says="relative error|NaN|exact zeros")
class CountsOfTheFirstCall(Batched):
    """Reads the experts' counts on the host once for each shape."""

    def counts(self, tokens):
        kept = self.__dict__.setdefault("kept", {})
        return kept.setdefault(tokens.x.shape, super().counts(tokens))


@killed_by("test_rows_per_expert", says="relative error|NaN|exact zeros")
class First64Rows(Batched):
    """Computes an expert's first 64 rows, if its capacity is at least 128."""

    def counts(self, tokens):
        counts = super().counts(tokens)
        return [min(n, 64) for n in counts] if tokens.x.shape[1] >= 128 else counts


@pytest.mark.parametrize("mutant", mutants_of(__name__))
def test_killed(mutant):
    mutant.check()
