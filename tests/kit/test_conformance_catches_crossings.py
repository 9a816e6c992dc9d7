"""Wrong experts that are right as long as one dimension of a call is unusual at a time."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from conformance_catches import killed_by, wrong
from right_experts import Plain
from test_conformance_catches_sizes import (
    DropsTheLast,
    EightAssignments,
    OtherProblem,
    Rows256,
    rank_in_expert,
    rows_of_expert,
)


class OtherScales(Plain):
    """Changes w13's scales where there are any."""

    def pack(self, weights):
        packed = super().pack(weights)
        if "w13_scale" not in packed.experts:
            return packed
        scale = self.scales(packed["w13_scale"].clone())
        return replace(packed, experts={**packed.experts, "w13_scale": scale})


@killed_by("test_cases", "int8_w8a16")
@killed_by("test_cases", "fp8_block", scales=OtherScales)
def ScaleOfTheReplicaBefore(self, scale):
    """Takes the scale of the expert before it for each replica, in quantized schemes."""
    first = self.problem.num_experts
    if scale.shape[0] > first:
        scale[first:] = scale[first - 1 : -1].clone()
    return scale


class WhereQuantized(Plain):
    """Changes router weights in quantized schemes."""

    def apply(self, y, tokens, weights, workspace):
        if self.problem.quant.weight is not None:
            tokens = replace(tokens, topk_weights=self.router(tokens.topk_weights))
        super().apply(y, tokens, weights, workspace)


wrong("UnsignedWhereQuantized", "Takes the absolute value of router weights in quantized schemes",
      killed_by("test_cases", "int4_w4a16_g32"), killed_by("test_cases", "fp8_tensor"),
      of=WhereQuantized, router=lambda self, weights: weights.abs())  # fmt: skip


@killed_by("test_cases", "int8_w8a16")
@killed_by("test_cases", "mxfp4_w4a16", router=WhereQuantized)
def PositiveWhereQuantized(self, weights):
    """Drops assignments with negative router weights in quantized schemes."""
    return weights.clamp(min=0)


@killed_by("test_cases", "int8_w8a16")
@killed_by("test_cases", "fp8_block")
@killed_by("test_cases", "int4_w4a16_g32", kept=Rows256)
def Rows256WhereQuantized(self, ids, tokens):
    """Drops an expert's rows from the 257th on in quantized schemes."""
    kept = Rows256.kept(self, ids, tokens)
    return kept if self.problem.quant.weight is not None else torch.ones_like(kept)


class WithoutBiasOf(Plain):
    """Computes some tokens without the biases."""

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        without = self.without(tokens)
        if self.problem.has_bias and bool(without.any()):
            kept = {n: t for n, t in weights.experts.items() if not n.endswith("bias")}
            wrong = torch.empty_like(y)
            weights = replace(weights, experts=kept)
            super().apply(wrong, tokens, weights, workspace)
            y[without] = wrong[without]


wrong("BiasOf256Tokens", "Adds biases to the first 256 tokens",
      killed_by("test_cases", "none"), of=WithoutBiasOf,
      without=lambda self, tokens: torch.arange(len(tokens.x)) >= 256)  # fmt: skip
wrong("BiasOf128Rows", "Adds biases to an expert's first 128 rows",
      killed_by("test_cases", "none"), of=WithoutBiasOf,
      without=lambda self, tokens: (rank_in_expert(tokens.topk_ids) > 128).any(dim=1))  # fmt: skip
wrong("BiasOfPositiveWeights", "Adds biases where router weights are positive",
      killed_by("test_cases", "none"), of=WithoutBiasOf,
      without=lambda self, tokens: (tokens.topk_weights < 0).any(dim=1))  # fmt: skip


@killed_by("test_cases", "none")
class TanhForManyRows(OtherProblem):
    """Computes gelu by silu where an expert has more than 128 rows."""

    def apply(self, y, tokens, weights, workspace):
        self._most = int(rows_of_expert(tokens.topk_ids).max()) if tokens.topk_ids.numel() else 0
        super().apply(y, tokens, weights, workspace)

    def instead(self, problem, num_tokens):
        gelu = problem.activation.name == "gelu" and self._most > 128
        return problem.replace(activation="silu") if gelu else problem


@killed_by("test_cases", "int8_w8a16")
@killed_by("test_cases", "fp8_channel_token")
@killed_by("test_cases", "int4_w4a16_g32_zp", without=WithoutBiasOf)
def BiasOf64QuantizedTokens(self, tokens):
    """Adds biases to the first 64 tokens in quantized schemes."""
    late = torch.arange(len(tokens.x)) >= 64
    return late & (self.problem.quant.weight is not None)


@killed_by("test_cases", "none")
def Hidden8192(self, tokens):
    """Reads the first 8192 columns of x."""
    x = tokens.x.clone()
    x[:, 8192:] = 0
    return replace(tokens, x=x)


@killed_by("test_cases", "none")
def Output8192(self, y, tokens, weights):
    """Writes the first 8192 columns of y, and zeros to the others."""
    y[:, 8192:] = 0


@killed_by("test_cases", "none")
def Intermediate8192(self, weights):
    """Sums over the first 8192 columns of w2."""
    w2 = weights.w2.clone()
    w2[..., 8192:] = 0
    return replace(weights, w2=w2)


wrong("AtLeast32", "Drops the last token if H is smaller than a tile of 32",
      killed_by("test_cases", "none"), of=DropsTheLast,
      wrong=lambda self, tokens: self.problem.hidden_size < 32)  # fmt: skip
wrong("ThirtyTwoAssignments", "Drops a token's assignments from the 33rd on",
      killed_by("test_cases", "none"), of=EightAssignments, LIMIT=32)  # fmt: skip


class Prints(Plain):
    """Prints the sizes of each call."""

    WHERE = "stdout"

    def apply(self, y, tokens, weights, workspace):
        print(f"apply {tuple(y.shape)}", file=getattr(sys, self.WHERE))
        super().apply(y, tokens, weights, workspace)


killed_by("test_prints_nothing", says="printed 'apply ")(Prints)


wrong("PrintsErrors", "Prints the sizes of each call to stderr",
      killed_by("test_prints_nothing", says="printed 'apply "), of=Prints,
      WHERE="stderr")  # fmt: skip


@killed_by("test_prints_nothing", says="printed 'packed")
def PrintsWhenItPacks(self, weights):
    """Prints when it packs weights."""
    print("packed")
    return weights


@killed_by("test_cases", "none")
def IdsOf32BitsWithReplicas(self, ids, tokens):
    """Drops the assignments of replicas whose ids have 32 bits."""
    narrow = ids.dtype == torch.int32
    return (ids < self.problem.num_experts) | (not narrow)


@killed_by("test_cases", "none", instead=OtherProblem)
def ClampDroppedForTopOne(self, problem, num_tokens):
    """Has no clamp in its kernel for top-1."""
    if problem.activation.limit is None or problem.top_k > 1:
        return problem
    return problem.replace(activation=replace(problem.activation, limit=1e6))


@killed_by("test_cases", "int8_w8a16")
@killed_by("test_cases", "fp8_block")
def ScalesMadePositive(self, weights):
    """Takes the magnitude of a weight's scale."""
    scales = {name: t.abs() for name, t in weights.tensors().items() if name.endswith("scale")}
    return replace(weights, **scales)
