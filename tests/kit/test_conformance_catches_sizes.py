"""Wrong experts that are right for the usual sizes, and forms of problems."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from conformance_catches import killed_by, wrong
from right_experts import Plain, Skips


def rank_in_expert(ids):
    """Return the position of each assignment in its expert's rows, from 1."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = flat[order].unique_consecutive(return_counts=True)[1]
    rank = torch.cat([torch.arange(1, int(n) + 1) for n in counts])
    return torch.empty_like(order).scatter_(0, order, rank).view_as(ids)


def rows_of_expert(ids):
    """Return how many assignments each one's expert has."""
    return torch.bincount(ids.flatten() + 1)[ids + 1]


class OfEight(Plain):
    """Right experts for sizes that are multiples of eight."""

    BASE = "torch"
    DECLARED = {"batch_invariant": False, "multiples": lambda problem: (8, 8)}


@killed_by("test_cases", "none", apply=OfEight)
def NeedsSixteen(self, y, tokens, weights, workspace):
    """Ignores the columns behind the last whole tile of 16, and declares multiples of 8."""
    x = tokens.x.clone()
    x[..., x.shape[-1] // 16 * 16 :] = 0
    OfEight.apply(self, y, replace(tokens, x=x), weights, workspace)


# -- sizes ----------------------------------------------------------------------------------------


@killed_by("test_many_experts")
class EightAssignments(Skips):
    """Drops a token's assignments from the ninth on."""

    LIMIT = 8

    def kept(self, ids, tokens):
        return torch.arange(ids.shape[1]) < self.LIMIT


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
def ExpertsInBlocks(self, ids, tokens):
    """Drops experts beyond the last whole block of 128, if there are more than 512."""
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


wrong("SingleRows", "Skips experts with exactly one row",
      lambda self, ids, tokens: (rows_of_expert(ids) != 1) | (len(ids) < 2),
      killed_by("test_rows_per_expert"))  # fmt: skip


@killed_by("test_many_assignments")
class Assignments16Bit(Skips):
    """Drops assignments from 32768 on: their index is an int16."""

    LIMIT = 32768

    def kept(self, ids, tokens):
        return (torch.arange(ids.numel()) < self.LIMIT).view_as(ids)


wrong("Rows4096", "Drops tokens from 4096 on",
      lambda self, ids, tokens: torch.arange(len(ids))[:, None] < 4096,
      killed_by("test_many_assignments"))  # fmt: skip
wrong("TailOfFour", "Drops the tokens beyond a multiple of four",
      lambda self, ids, tokens: torch.arange(len(ids))[:, None] < max(len(ids) // 4 * 4, 3),
      killed_by("test_num_tokens", "random"))  # fmt: skip


@killed_by("test_cases", "none")
def WideHidden(self, tokens):
    """Reads the first 4096 columns of x."""
    x = tokens.x.clone()
    x[:, 4096:] = 0
    return replace(tokens, x=x)


@killed_by("test_cases", "none")
def WideOutput(self, y, tokens, weights):
    """Writes the first 4096 columns of y, and zeros to the others."""
    y[:, 4096:] = 0


@killed_by("test_cases", "none")
def WideIntermediate(self, weights):
    """Sums over the first 4096 columns of w2."""
    w2 = weights.w2.clone()
    w2[..., 4096:] = 0
    return replace(weights, w2=w2)


@killed_by("test_cases", "none")
def LayoutFromShape(self, weights):
    """Treats a square w2 as transposed."""
    if weights.w2.shape[1] == weights.w2.shape[2]:
        weights = replace(weights, w2=weights.w2.mT.contiguous())
    return weights


@killed_by("test_many_experts")
def LayoutOfW13FromShape(self, weights):
    """Treats a square w13 (2I = H) as transposed."""
    if weights.w13.shape[1] == weights.w13.shape[2]:
        weights = replace(weights, w13=weights.w13.mT.contiguous())
    return weights


@killed_by("test_one_expert")
def OneExpertSqueezed(self, y, tokens, weights):
    """Treats the weights of a single expert as no weights."""
    if self.problem.num_local_experts == 1:
        y.zero_()


# -- more sizes, and forms of problems ------------------------------------------------------------


wrong("SixteenAssignments", "Drops a token's assignments from the 17th on",
      killed_by("test_many_experts"), of=EightAssignments, LIMIT=16)  # fmt: skip


@killed_by("test_many_experts")
def AssignmentsInTwos(self, ids, tokens):
    """Takes a token's assignments two at a time, and drops the last of an odd number."""
    K = ids.shape[1]
    return torch.arange(K) < max(K // 2 * 2, 1)


wrong("Experts1024", "Drops experts from 1024 on",
      killed_by("test_many_experts"), of=Experts256, LIMIT=1024)  # fmt: skip
wrong("ExpertsInTwos", "Drops the last of an odd number of experts",
      lambda self, ids, tokens: ids < max(self.problem.num_local_experts // 2 * 2, 1),
      killed_by("test_many_experts"))  # fmt: skip


@killed_by("test_num_tokens", "random")
class FullTileOfTokens(Skips):
    """Drops the last token if tokens fill tiles of 128."""

    MORE = 0

    def kept(self, ids, tokens):
        T = len(ids)
        return (torch.arange(T) < T - (T > 1 and T % 128 == self.MORE))[:, None]


wrong("OneTokenBeyondATile", "Drops the last token if there is one more than tiles of 128 hold",
      killed_by("test_num_tokens", "random"), of=FullTileOfTokens, MORE=1)  # fmt: skip


@killed_by("test_num_tokens", "hot")
class OneTileOfTokens(Skips):
    """Drops the last token of a call that fills its tile of 8."""

    TILE = 8

    def kept(self, ids, tokens):
        T = len(ids)
        return (torch.arange(T) < T - (T == self.TILE))[:, None]


@killed_by("test_num_tokens", "hot")
class MostTokensOfDecoding(OneTileOfTokens):
    """Drops the last of 64 tokens, the most that its kernel for decoding takes."""

    TILE = 64


@killed_by("test_num_tokens", "hot")
def RowsOfATileOfEight(self, ids, tokens):
    """Drops the last row of an expert that has nine, one more than tiles of 8 hold."""
    rows = rows_of_expert(ids)
    return ~((rank_in_expert(ids) == 9) & (rows == 9))


wrong("AssignmentsUnsigned16Bit", "Drops assignments from 65536 on: their index is a uint16",
      killed_by("test_many_assignments"), of=Assignments16Bit, LIMIT=65536)  # fmt: skip


@killed_by("test_padded_slices", "fp8_block")
def HiddenInTilesOf256(self, y, tokens, weights):
    """Writes no columns behind the last whole tile of 256 if H is a multiple of 128."""
    H = y.shape[1]
    if H % 256 == 128:
        y[:, H - 128 :] = 0


@killed_by("test_cases", "none", says="NaN|exact zeros|relative error")
def RowsOfOwnTokens(self, ids, tokens):
    """Computes max_num_tokens rows at most, although other ranks also send rows."""
    most = self.problem.max_num_tokens or len(ids)
    return torch.arange(len(ids))[:, None] < most


@killed_by("test_cases", "none", says="relative error|exact zeros")
def TopOneUnweighted(self, tokens):
    """Takes the weight of a token's only expert to be 1."""
    if self.problem.top_k == 1:
        tokens = replace(tokens, topk_weights=torch.ones_like(tokens.topk_weights))
    return tokens


@killed_by("test_cases", "none")
def EveryExpertInOrder(self, tokens):
    """Takes weights in the order of the experts if each token has all of them."""
    ids = tokens.topk_ids
    if ids.shape[1] == self.problem.num_local_experts:
        ids = torch.where(ids < 0, -1, torch.arange(ids.shape[1])).to(ids)
    return replace(tokens, topk_ids=ids)


wrong("LogicalExperts", "Drops the assignments of replicas",
      lambda self, ids, tokens: ids < self.problem.num_experts,
      killed_by("test_cases", "none"))  # fmt: skip


@killed_by("test_cases", "none")
def GateOfAllSlices(self, weights):
    """Looks for the up projection behind the gates of all tensor-parallel ranks."""
    p = self.problem
    more = p.intermediate_size - p.local_intermediate_size
    return replace(weights, w13=weights.w13.roll(more, dims=1))


class DropsBiases(Plain):
    """Drops biases where `dropped`."""

    @abstractmethod
    def dropped(self): ...

    def pack(self, weights):
        if self.dropped():
            weights = replace(weights, w13_bias=None, w2_bias=None)
        return super().pack(weights)


wrong("BiasDroppedInBlocks", "Drops biases in fp8_block alone",
      killed_by("test_cases", "fp8_block"), of=DropsBiases,
      dropped=lambda self: self.problem.quant.name == "fp8_block")  # fmt: skip
wrong("BiasDroppedWithClamp", "Drops biases if there is a clamp",
      killed_by("test_activation", "silu"), of=DropsBiases,
      dropped=lambda self: self.problem.activation.limit is not None)  # fmt: skip


@killed_by("test_cases", "int8_w8a16")
def ScalesOfTwoHalves(self, packed):
    """Takes w13's scales of the first half of its rows for the second, where there is no gate."""
    if self.problem.activation.gated or "w13_scale" not in packed.experts:
        return packed
    scale = packed["w13_scale"].clone()
    half = scale.shape[1] // 2
    scale[:, half : 2 * half] = scale[:, :half]
    return replace(packed, experts={**packed.experts, "w13_scale": scale})


# -- kernels that are chosen by sizes and forms ----------------------------------------------------


@killed_by("test_num_tokens", "random", says="relative error|exact zeros")
class TailOfOneKernel(Skips):
    """Drops the last token of calls of 301 to 320 tokens, for which it has a kernel."""

    LEAST, MOST = 301, 320

    def kept(self, ids, tokens):
        T = len(ids)
        last = T - (self.LEAST <= T <= self.MOST and bool((ids[-1] >= 0).any()))
        return (torch.arange(T) < last)[:, None]


wrong("FullTileOf192", "Drops the last row of an expert whose rows fill tiles of 192",
      killed_by("test_rows_per_expert"), of=FullTile, TILE=192)  # fmt: skip
wrong("OneRowBeyond112", "Drops the last row of an expert that has one more than tiles of 112 hold",
      killed_by("test_rows_per_expert"), of=OneRowBeyondATile, TILE=112)  # fmt: skip
wrong("Tokens16Bit", "Drops tokens from 32768 on: their index is an int16",
      lambda self, ids, tokens: (torch.arange(len(ids)) < 32768)[:, None],
      killed_by("test_many_assignments"))  # fmt: skip


@killed_by("test_many_assignments")
def CapacityFactor(self, ids, tokens):
    """Drops an expert's rows beyond seven times the rows of a balanced routing."""
    fair = ids.numel() / self.problem.num_local_experts
    return rank_in_expert(ids) <= max(64, 7 * fair)


class DropsTheLast(Skips):
    """Drops the last token that has an expert in calls where `wrong`."""

    @abstractmethod
    def wrong(self, tokens): ...

    def kept(self, ids, tokens):
        used = (ids >= 0).any(dim=1)
        last = used & (used.flip(0).cumsum(0).flip(0) == 1)
        return ~(last & self.wrong(tokens))[:, None]


@killed_by("test_scheme", "int8_w8a16")
@killed_by("test_scheme", "fp8_block", wrong=DropsTheLast)
def ManyTokensQuantized(self, tokens):
    """Drops the last of more than 64 tokens in quantized schemes, for which it has a kernel."""
    return self.problem.quant.weight is not None and len(tokens.x) > 64


@killed_by("test_scheme", "int4_w4a16_g128", says="relative error|exact zeros", wrong=DropsTheLast)
def OneTokenQuantized(self, tokens):
    """Has a kernel for one token that is wrong for weights of 4 bits."""
    operand = self.problem.quant.weight
    return operand is not None and operand.packed and len(tokens.x) == 1


wrong("ManyQuantizedRows", "Drops the last of more than 64 rows that arrive quantized",
      killed_by("test_input_form", "fp8_block"), of=DropsTheLast,
      wrong=lambda self, tokens: tokens.x_scale is not None and len(tokens.x) > 64)  # fmt: skip


@killed_by("test_dtype", "float16", says="relative error|exact zeros", wrong=DropsTheLast)
def ManyTokensInFloat16(self, tokens):
    """Drops the last of more than 64 tokens in float16."""
    return self.problem.dtype == torch.float16 and len(tokens.x) > 64


wrong("OneAssignment", "Squeezes the ids of a call with a single assignment, and finds none",
      killed_by("test_cases", "none", says="relative error|exact zeros"), of=DropsTheLast,
      wrong=lambda self, tokens: tokens.topk_ids.numel() == 1)  # fmt: skip


class OtherProblem(Plain):
    """Computes another problem, which `instead` makes of the given one."""

    @abstractmethod
    def instead(self, problem, num_tokens): ...

    def apply(self, y, tokens, weights, workspace):
        asked = self.problem
        self.problem = self.instead(asked, len(y))
        super().apply(y, tokens, weights, workspace)
        self.problem = asked


@killed_by("test_activation", "gelu", instead=OtherProblem)
def SiluForManyTokens(self, problem, num_tokens):
    """Has silu only in its kernel for more than 64 tokens."""
    gelu = problem.activation.name == "gelu" and num_tokens > 64
    return problem.replace(activation="silu") if gelu else problem


@killed_by("test_activation", "silu", instead=OtherProblem)
def ClampDroppedForOneToken(self, problem, num_tokens):
    """Has no clamp in its kernel for one token."""
    clamped = problem.activation.clamped and num_tokens == 1
    return problem.replace(activation="silu") if clamped else problem


@killed_by("test_cases", "mxfp4_w4a16")
@killed_by("test_cases", "fp8_channel_token", instead=OtherProblem)
def ClampDroppedWhereQuantized(self, problem, num_tokens):
    """Drops the clamp in quantized schemes."""
    activation = problem.activation
    if problem.quant.weight is None or activation.limit is None:
        return problem
    return problem.replace(activation=replace(activation, limit=1e6))


@killed_by("test_cases", "none", apply=Plain)
def BiasDroppedForManyTokens(self, y, tokens, weights, workspace):
    """Drops biases in its kernel for more than 64 tokens."""
    if len(y) > 64:
        kept = {n: t for n, t in weights.experts.items() if not n.endswith("bias")}
        weights = replace(weights, experts=kept)
    Plain.apply(self, y, tokens, weights, workspace)


@killed_by("test_cases", "int8_w8a16")
@killed_by("test_cases", "int4_w4a16_g32")
def NeedsSixteenUnstated(self, tokens):
    """Ignores the columns behind the last whole tile of 16 in quantized schemes, unstated."""
    if self.problem.quant.weight is not None and tokens.x_scale is None:
        x = tokens.x.clone()
        x[..., x.shape[-1] // 16 * 16 :] = 0
        tokens = replace(tokens, x=x)
    return tokens
