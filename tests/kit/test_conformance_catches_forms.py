"""Wrong experts that are right in the main scheme, layout and shape, and wrong in another one."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import contextmanager
from dataclasses import replace

import torch
from conformance_catches import killed_by, wrong
from right_experts import Batched, Plain, Skips, Unreduced
from test_conformance_catches_calls import in_whole_tiles
from test_conformance_catches_sizes import (
    DropsTheLast,
    FullTile,
    OtherProblem,
)

from moekit.problem.activation import Activation

# -- weights --------------------------------------------------------------------------------------


class Packs(Plain):
    """Packs what `changed` makes of some of the packed tensors."""

    NAMES = ()

    def pack(self, weights):
        packed = super().pack(weights)
        held = {n: self.changed(packed[n]) for n in self.NAMES if n in packed.experts}
        return replace(packed, experts={**packed.experts, **held})

    @abstractmethod
    def changed(self, tensor): ...


@killed_by("test_scheme", "int4_w4a16_g32_zp")
@killed_by("test_scheme", "int4_w4a16_channel_zp")
class ZeroPointOfZero(Packs):
    """Takes a zero point of 0 for no zero point, which is 8."""

    NAMES = ("w13_zero_points", "w2_zero_points")

    def changed(self, tensor):
        return torch.where(tensor == 0, 8, tensor).to(tensor.dtype)


@killed_by("test_scheme", "int4_w4a16_channel_zp", changed=ZeroPointOfZero)
def ZeroPointsPlusOne(self, tensor):
    """Stores zero points plus one in four bits, where 15 becomes 0 and means -1."""
    return torch.where(tensor == 15, 255, tensor).to(tensor.dtype)


# -- layouts --------------------------------------------------------------------------------------


@killed_by("test_fewer_columns", says="relative error|exact zeros|NaN")
def RouterStridesOfIds(self, tokens):
    """Reads router weights with the strides of ids."""
    ids, router = tokens.topk_ids, tokens.topk_weights
    room = router.untyped_storage().nbytes() // router.itemsize - router.storage_offset()
    if sum((n - 1) * step for n, step in zip(ids.shape, ids.stride(), strict=True)) < room:
        router = torch.as_strided(router, ids.shape, ids.stride(), router.storage_offset())
    return replace(tokens, topk_weights=router)


@killed_by("test_fewer_columns", says="view size is not compatible|relative error|NaN")
def IdsInARow(self, tokens):
    """Takes a call's ids for a vector with one stride."""
    shape = tokens.topk_ids.shape
    ids, router = (t.view(-1).view(shape) for t in (tokens.topk_ids, tokens.topk_weights))
    return replace(tokens, topk_ids=ids, topk_weights=router)


# -- many scales, and biases of wide experts ------------------------------------------------------


@killed_by("test_cases", "int4_w4a16_g32")
class EightGroups(Packs):
    """Reads a row's first eight scales, and the eighth for the groups behind."""

    NAMES = ("w13_scale", "w2_scale")

    def changed(self, tensor):
        return tensor[..., torch.arange(tensor.shape[2]).clamp(max=7)]


@killed_by("test_cases", "int4_w4a16_g32", changed=EightGroups)
def ThirtyTwoGroups(self, tensor):
    """Reads the scale of a row's first group for those from the 33rd on."""
    group = torch.arange(tensor.shape[2])
    return tensor[..., torch.where(group < 32, group, 0)]


@killed_by("test_cases", "fp8_w8a16_block", changed=EightGroups)
def EightBlocksOfRows(self, tensor):
    """Reads the scales of a weight's first eight blocks of rows, and the eighth's behind."""
    if self.problem.quant.weight.group[0] <= 1:
        return tensor
    return EightGroups.changed(self, tensor.mT).mT.contiguous()


wrong("GroupsInSevenBits", "Keeps the group of a column in seven bits",
      killed_by("test_cases", "int4_w4a16_g32_act_order"), of=Packs,
      NAMES=("w13_g_idx", "w2_g_idx"), changed=lambda self, tensor: tensor % 128)  # fmt: skip


@killed_by("test_cases", "none")
class BiasOfEverySplit(Packs):
    """Adds w2's bias in both programs that share an expert's wide sum."""

    NAMES = ("w2_bias",)

    def changed(self, tensor):
        return tensor * (2 if self.problem.local_intermediate_size > 512 else 1)


# -- ranks with shares of quantized experts -------------------------------------------------------


@killed_by("test_cases", "int4_w4a16_g32")
@killed_by("test_cases", "mxfp4_w4a16")
class ScalesOfAllSlices(Packs):
    """Takes a row of w2 to have the scales of all tensor-parallel ranks."""

    NAMES = ("w2_scale",)

    def changed(self, tensor):
        L, N, groups = tensor.shape
        p, columns = self.problem, self.problem.quant.weight.group[1]
        each = -(-p.intermediate_size // columns) if p.parallel.tp_size > 1 else groups
        row, group = torch.arange(N, device="cpu"), torch.arange(groups, device="cpu")
        return tensor.view(L, -1)[:, (row[:, None] * each + group) % (N * groups)]


@killed_by("test_cases", "int8_w8a16")
@killed_by("test_cases", "mxfp4_w4a16")
def ShareSubtractedTwice(self, ids, tokens):
    """Subtracts the first expert of a rank's share from local ids, in quantized schemes."""
    first = self.problem.local_experts.start
    return ids >= (first if self.problem.quant.weight is not None else 0)


# -- activations of quantized experts -------------------------------------------------------------


class OtherActivation(OtherProblem):
    """Computes another activation in quantized schemes."""

    def instead(self, problem, num_tokens):
        if problem.quant.weight is None:
            return problem
        return problem.replace(activation=self.activation(problem.activation))

    @abstractmethod
    def activation(self, asked): ...


@killed_by("test_cases", "int4_w4a16_g32_zp")
@killed_by("test_cases", "int8_w8a16", activation=OtherActivation)
def SiluWhereQuantized(self, asked):
    """Has silu only in its kernels for quantized schemes."""
    return Activation("silu") if asked.gated and asked.limit is None else asked


wrong("AlphaWhereQuantized", "Uses the usual alpha in quantized schemes",
      killed_by("test_cases", "mxfp4_w4a16"), killed_by("test_cases", "int4_w4a16_channel"),
      of=OtherActivation,
      activation=lambda self, asked: Activation(asked.name, limit=asked.limit))  # fmt: skip


@killed_by("test_cases", "mxfp4_w4a16", activation=OtherActivation)
def LimitWhereQuantized(self, asked):
    """Clamps in quantized schemes as silu does, whatever the activation is."""
    return asked if asked.limit is None else Activation("silu", limit=asked.limit)


# -- sizes ----------------------------------------------------------------------------------------


@killed_by("test_many_assignments")
def TokensUnsigned16Bit(self, ids, tokens):
    """Drops tokens from 65535 on, the most that a grid has in its second dimension."""
    return (torch.arange(len(ids)) < 65535)[:, None]


wrong("OneTokenBeyondAChunk", "Drops the last chunk of 4096 tokens if it has a single one",
      killed_by("test_many_assignments"), of=DropsTheLast,
      wrong=lambda self, tokens: len(tokens.x) > 4096 and len(tokens.x) % 4096 == 1)  # fmt: skip
wrong("FullTileOf384", "Drops the last row of an expert whose rows fill tiles of 384",
      killed_by("test_rows_per_expert"), of=FullTile, TILE=384)  # fmt: skip


@killed_by("test_rows_per_expert")
class FullBlockOfRows(FullTile):
    """Drops the last row of an expert with as many as a block has threads: 1024."""

    TILE = 1024


wrong("FullBlockOfTokens", "Drops the last of 512 tokens, as many as its block has threads",
      killed_by("test_num_tokens", "hot"), of=DropsTheLast,
      wrong=lambda self, tokens: len(tokens.x) == 512)  # fmt: skip


@killed_by("test_many_experts")
def FullBlockOfExperts(self, ids, tokens):
    """Drops the last expert if experts fill blocks of 256."""
    L = self.problem.num_local_experts
    return ids < L - (L % 256 == 0)


# -- calls ----------------------------------------------------------------------------------------


@killed_by("test_autocast", says="relative error")
class ProductsOfAutocast(Plain):
    """Multiplies in the dtype that torch.autocast chooses."""

    def wrong(self):
        return True

    def apply(self, y, tokens, weights, workspace):
        if torch.is_autocast_enabled(y.device.type) and self.wrong():
            dtype = torch.get_autocast_dtype(y.device.type)
            tokens = replace(tokens, x=tokens.x.to(dtype).to(tokens.x.dtype))
        super().apply(y, tokens, weights, workspace)


@killed_by("test_autocast", says="batch_invariant", batch_invariant=True, wrong=ProductsOfAutocast)
def InvariantProductsOfAutocast(self):
    """Multiplies in autocast's dtype where sums are not to depend on other rows."""
    return self.problem.batch_invariant


@killed_by("test_autocast", says="quant", wrong=ProductsOfAutocast)
def QuantizedProductsOfAutocast(self):
    """Multiplies in autocast's dtype where weights are dequantized first."""
    return self.problem.quant.weight is not None


@killed_by("test_autocast")
def PackedInAutocast(self, weights):
    """Packs weights by a product, whose dtype torch.autocast chooses."""
    if weights.w2.dtype == torch.float32:
        weights = replace(weights, w2=(weights.w2 @ torch.eye(weights.w2.shape[2])).float())
    return weights


@killed_by("test_repeated_calls", says="wrote behind its output")
class GridOfTheLargestCall(Plain):
    """Writes as many rows as its largest call had."""

    most = 0

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        self.most = max(self.most, len(y))
        room = y.untyped_storage().nbytes() // y.itemsize - y.storage_offset()
        shape = min(self.most, room // y.shape[1]), y.shape[1]
        torch.as_strided(y, shape, (shape[1], 1), y.storage_offset())[len(y) :] = 0


@killed_by("test_many_calls")
class RoomOfTheWarmUp(Skips):
    """Drops the tokens for which its warm-up made no room."""

    tuned, most = False, 1 << 20

    def tuning(self):
        self.tuned = True
        return super().tuning()

    def kept(self, ids, tokens):
        if self.tuned:
            self.tuned, self.most = False, len(ids)
        return (torch.arange(len(ids)) < self.most)[:, None]


@killed_by("test_cases", "none", says="relative error|exact zeros", wrong=DropsTheLast)
def ManyIdsOf32Bits(self, tokens):
    """Drops the last of more than 64 tokens whose ids have 32 bits."""
    return tokens.topk_ids.dtype == torch.int32 and len(tokens.x) > 64


@killed_by("test_deterministic", says="different bits")
class AtomicsWhereQuantized(Plain):
    """Adds up parts of K by atomic additions, in quantized schemes."""

    calls = 0

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        if self.problem.quant.weight is not None and len(y):
            self.calls += 1
            y[0, 0] *= 1 + 2 * torch.finfo(y.dtype).eps * (self.calls % 2)


@killed_by("test_batch_invariant_scheme", "int8_w8a16")
@killed_by("test_batch_invariant_scheme", "mxfp4_w4a16", pack=Unreduced)
def InvariantWithoutBiasWhereQuantized(self, weights):
    """Drops biases in batch-invariant problems with a quantized scheme."""
    if self.problem.batch_invariant and self.problem.quant.weight is not None:
        weights = replace(weights, w13_bias=None, w2_bias=None)
    return Unreduced.pack(self, weights)


# -- calls in quantized schemes, and what only some calls show ------------------------------------


@killed_by("test_layers_in_turn", says="call 1, weights 1")
class FirstWeightsWhereQuantized(Plain):
    """Dequantizes the weights of its first call, and keeps them."""

    kept = None

    def apply(self, y, tokens, weights, workspace):
        if self.problem.quant.weight is not None:
            weights = self.kept = self.kept or weights
        super().apply(y, tokens, weights, workspace)


@killed_by("test_repack", says="new weights of")
class DequantizedOnce(Plain):
    """Dequantizes weights once, although experts move into them later."""

    of, made = None, None

    def apply(self, y, tokens, weights, workspace):
        if self.problem.quant.weight is not None and self.of is not weights:
            copies = {name: t.clone() for name, t in weights.experts.items()}
            self.of, self.made = weights, replace(weights, experts=copies)
        super().apply(y, tokens, weights if self.of is None else self.made, workspace)


@killed_by("test_nothing_is_kept", says="bytes are left", apply=Plain)
def KeepsWeightsWhereQuantized(self, y, tokens, weights, workspace):
    """Keeps all weights that it has dequantized."""
    if self.problem.quant.weight is not None:
        self.__dict__.setdefault("kept", []).append(weights)
    Plain.apply(self, y, tokens, weights, workspace)


@killed_by("test_scheme", "fp8_block", says="meta")
@killed_by("test_scheme", "mxfp4_w4a16", says="meta", apply=Plain)
def TableOfTheDefaultDevice(self, y, tokens, weights, workspace):
    """Dequantizes by a table on torch's default device."""
    codes = weights["w13"].view(torch.uint8)
    if self.problem.quant.weight is not None:
        assert (torch.arange(256, dtype=torch.uint8)[codes.long()] == codes).all()
    Plain.apply(self, y, tokens, weights, workspace)


@killed_by("test_scheme", "int8_w8a16", says="behind its output")
@killed_by("test_scheme", "mxfp4_w4a16", says="behind its output")
def WritesWholeTilesWhereQuantized(self, y, tokens, weights):
    """Writes the output's last tile of 16 rows whole, in quantized schemes."""
    if self.problem.quant.weight is not None:
        in_whole_tiles(y)


@killed_by("test_memory_is_stated", "local", says="a call of 1 tokens", apply=Plain)
def GathersWeightsOfFewTokens(self, y, tokens, weights, workspace):
    """Gathers the weights of each assignment of at most four tokens, and does not state it."""
    few = tokens.topk_ids[:4] if len(y) <= 4 else tokens.topk_ids[:0]
    gathered = [weights["w13"][few.clamp(min=0)].double() for _ in range(8)]
    Plain.apply(self, y, tokens, weights, workspace)
    del gathered


@killed_by("test_spare_capacity", says="the experts modified the dispatcher's x", apply=Batched)
def PaddingMadeZero(self, y, tokens, weights, workspace):
    """Sets padding rows to zero in the dispatcher's memory."""
    row = torch.arange(tokens.x.shape[1])
    tokens.x[row >= tokens.expert_num_tokens[:, None]] = 0
    Batched.apply(self, y, tokens, weights, workspace)


@killed_by("test_input_form", "fp8_block", says="the dispatcher's x_scale")
def ScalesMultiplied(self, y, tokens, weights):
    """Multiplies the scales that arrive by another factor, in place."""
    if tokens.x_scale is not None:
        tokens.x_scale.mul_(2)


@killed_by("test_constructor_keeps_spec_and_problem", says="a warm-up for", largest_calls=Plain)
def WarmsUpWholeTiles(self, num_tokens):
    """Names calls of whole tiles for a warm-up, more than max_num_tokens may allow."""
    return (num_tokens, -(-num_tokens // 64) * 64)


@contextmanager
def tuning():
    yield


@killed_by("test_constructor_keeps_spec_and_problem", says="generator|args")
class TunedOnce(Plain):
    """Keeps a context for tuning that can be entered once."""

    def __init__(self, spec, problem):
        super().__init__(spec, problem)
        once = tuning()
        self.tuning = lambda: once


@killed_by("test_dtype", "float32", says="rounding of small numbers to zero")
def FlushesSmallNumbers(self, tokens):
    """Makes the process round small numbers to zero."""
    torch.set_flush_denormal(True)
    return tokens


@killed_by("test_dtype", "float32", says="allow_bf16_reduced_precision_reduction")
class SumsOfAllInFloat32(Plain):
    """Makes all of the process's products sum in float32."""

    def __init__(self, spec, problem):
        super().__init__(spec, problem)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
