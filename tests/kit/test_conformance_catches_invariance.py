"""Wrong batch-invariant experts: each must fail a named kit test that a right one passes."""

from __future__ import annotations

from dataclasses import replace

import torch
from conformance_catches import killed_by, wrong

from moekit.backends.torch_experts import TorchExperts
from moekit.contract import PackedWeights

OTHER = "not batch-invariant"


class Blocks(TorchExperts):
    """Right: fixed blocks of rows."""

    BASE = "torch"

    def also(self, y, tokens, weights, rows_RK):
        """Compute the assignments in ``rows_RK`` again, with sums over K in reverse order.

        Exact arithmetic would give the same result.
        """
        tokens = replace(tokens, topk_ids=torch.where(rows_RK, tokens.topk_ids, -1))
        flipped = {"w13": weights["w13"].flip(2), "w2": weights["w2"]}
        packed = PackedWeights(weights.backend, flipped)
        super().apply(y, replace(tokens, x=tokens.x.flip(1)), packed, ())

    def rows_in_reverse(self, tokens):
        """Return a bool (R, K): the assignments that another kernel computes."""
        return torch.zeros_like(tokens.topk_ids, dtype=torch.bool)

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        if self.problem.batch_invariant and bool((rows := self.rows_in_reverse(tokens)).any()):
            self.also(y, tokens, weights, rows)


def all_if(condition, tokens):
    return torch.full_like(tokens.topk_ids, condition, dtype=torch.bool)


wrong("KernelByTokens", "Computes calls of at most two tokens by another kernel",
      killed_by("test_batch_invariant_tokens", "float32", says=OTHER),
      killed_by("test_batch_invariant_tokens", "bfloat16", says=OTHER), of=Blocks,
      rows_in_reverse=lambda self, tokens: all_if(len(tokens.x) <= 2, tokens))  # fmt: skip


wrong("PlanByTokens", "Sums K in another order in calls of 65 to 127 tokens",
      killed_by("test_batch_invariant_tokens", "float32", says=OTHER),
      killed_by("test_batch_invariant_tokens", "bfloat16", says=OTHER), of=Blocks,
      rows_in_reverse=lambda self, tokens: all_if(64 < len(tokens.x) < 128, tokens))  # fmt: skip


@killed_by("test_batch_invariant_tokens", "float32", says=OTHER, rows_in_reverse=Blocks)
def TileByRows(self, tokens):
    """Computes experts with more than 256 rows in larger tiles, which sum in another order."""
    ids = tokens.topk_ids
    counts = torch.bincount(ids.flatten() + 1, minlength=self.problem.num_local_experts + 1)
    return (counts[1:] > 85)[ids.clamp(min=0)]


@killed_by("test_batch_invariant_neighbours", 1, says=OTHER)
@killed_by("test_batch_invariant_tokens", "float32", says=OTHER, rows_in_reverse=Blocks)
def OrderByPosition(self, tokens):
    """Sums odd rows in another order than even ones."""
    return torch.arange(len(tokens.x))[:, None].expand_as(tokens.topk_ids) % 2 == 1


@killed_by("test_batch_invariant_neighbours", 1, says="all routed to the same experts")
class HotExpertElsewhere(Blocks):
    """Computes an expert by another kernel if most tokens go there."""

    def rows_in_reverse(self, tokens):
        ids = tokens.topk_ids
        counts = torch.bincount(ids.flatten() + 1, minlength=self.problem.num_local_experts + 1)
        return (counts[1:] > len(ids) // 2)[ids.clamp(min=0)]


@killed_by("test_batch_invariant_tokens", "float32", says=OTHER)
@killed_by("test_batch_invariant_tokens", "bfloat16", says=OTHER)
class OrderOfAtomics(Blocks):
    """Adds up two parts of K in the order in which they finish."""

    def apply(self, y, tokens, weights, workspace):
        self.turn = not getattr(self, "turn", False)
        super().apply(y, tokens, weights, workspace)

    def rows_in_reverse(self, tokens):
        return all_if(self.turn, tokens)


@killed_by("test_batch_invariant_experts", 1, says=OTHER, rows_in_reverse=Blocks)
def SplitByExperts(self, tokens):
    """Divides K among programs if a rank holds few experts."""
    return all_if(self.problem.num_local_experts < 4, tokens)


@killed_by("test_batch_invariant_neighbours", 1, says=OTHER, rows_in_reverse=Blocks)
def OtherOrderWhenBatched(self, tokens):
    """Computes rows of one expert by another kernel than rows of several."""
    return all_if(tokens.topk_ids.shape[1] == 1, tokens)


@killed_by("test_batch_invariant_neighbours", 1, says="16 times as large", apply=Blocks)
def ScaleOfAllTokens(self, y, tokens, weights, workspace):
    """Rounds x to 8 bits by one scale for all tokens."""
    if self.problem.batch_invariant:
        scale = tokens.x.nan_to_num().abs().amax().float() / 127
        x = ((tokens.x.float() / scale).round() * scale).to(tokens.x.dtype)
        tokens = replace(tokens, x=x)
    Blocks.apply(self, y, tokens, weights, workspace)


@killed_by("test_batch_invariant_neighbours", 2, says="all routed to the same experts")
class SecondGemmByRows(Blocks):
    """Sums GEMM 2 of experts with many rows in another order."""

    def also(self, y, tokens, weights, rows_RK):
        inner = self.problem.local_intermediate_size
        w13 = weights["w13"].unflatten(1, (-1, inner)).flip(2).flatten(1, 2)
        packed = PackedWeights(weights.backend, {"w13": w13, "w2": weights["w2"].flip(2)})
        tokens = replace(tokens, topk_ids=torch.where(rows_RK, tokens.topk_ids, -1))
        TorchExperts.apply(self, y, tokens, packed, ())

    def rows_in_reverse(self, tokens):
        return HotExpertElsewhere.rows_in_reverse(self, tokens)


@killed_by("test_batch_invariant_scheme", "fp8_block", says=OTHER, apply=Blocks)
def QuantizedByTokens(self, y, tokens, weights, workspace):
    """Rounds the results of quantized schemes otherwise in calls of 129 to 399 tokens."""
    Blocks.apply(self, y, tokens, weights, workspace)
    if self.problem.quant.weight is not None and 128 < len(tokens.x) < 400:
        y.mul_(1 + 2**-7)


@killed_by("test_batch_invariant_scheme", "fp8_block", says=OTHER, apply=Blocks)
def QuantizedInOneTile(self, y, tokens, weights, workspace):
    """Rounds the results of quantized schemes otherwise in calls of 34 to 128 tokens."""
    Blocks.apply(self, y, tokens, weights, workspace)
    if self.problem.quant.weight is not None and 33 < len(tokens.x) < 129:
        y.mul_(1 + 2**-7)


@killed_by("test_memory_is_stated", "local", says="stated are", apply=Blocks)
def CopiesUnstated(self, y, tokens, weights, workspace):
    """Copies each token often in batch-invariant problems, and does not state it."""
    invariant = self.problem.batch_invariant
    copies = tokens.x.float().repeat_interleave(64, dim=0) if invariant else None
    Blocks.apply(self, y, tokens, weights, workspace)
    del copies


@killed_by("test_batch_invariant_scheme", "none", apply=Blocks)
def InvariantWithoutBias(self, y, tokens, weights, workspace):
    """Drops biases in batch-invariant problems."""
    if self.problem.batch_invariant:
        kept = {n: t for n, t in weights.experts.items() if not n.endswith("bias")}
        weights = replace(weights, experts=kept)
    Blocks.apply(self, y, tokens, weights, workspace)


@killed_by("test_activation", "gelu_tanh", apply=Blocks)
def InvariantInSilu(self, y, tokens, weights, workspace):
    """Computes batch-invariant problems with silu, whatever their activation is."""
    asked = self.problem
    if asked.batch_invariant and asked.activation.gated:
        self.problem = asked.replace(activation="silu")
    Blocks.apply(self, y, tokens, weights, workspace)
    self.problem = asked


wrong("TileBetweenPowersOfTwo", "Has another tile for calls of about 384 tokens",
      killed_by("test_batch_invariant_tokens", "bfloat16", says=OTHER), of=SecondGemmByRows,
      rows_in_reverse=lambda self, tokens: all_if(320 < len(tokens.x) < 448, tokens))  # fmt: skip


class Summing(Blocks):
    """Right: its weighted sum adds one product and one sum after the other."""

    BASE = "torch"

    @staticmethod
    def order(top_k):
        return range(top_k)

    @staticmethod
    def added(total, rows, weights):
        return total + rows * weights

    @classmethod
    def weight_and_reduce(cls, rows_NH, ids_RK, weights_RK, out_RH, places_RK=None):
        total = torch.zeros(out_RH.shape)
        places = torch.arange(ids_RK.numel()).view_as(ids_RK) if places_RK is None else places_RK
        for k in cls.order(ids_RK.shape[1]):
            used = ids_RK[:, k] >= 0
            rows = rows_NH[places[used, k]].float()
            total[used] = cls.added(total[used], rows, weights_RK[used, k, None])
        return out_RH.copy_(total)


@killed_by("test_weight_and_reduce", "float32", says=OTHER)
class FusedMultiplyAdd(Summing):
    """Does not round products: the bits differ from other backends' sums."""

    @staticmethod
    def added(total, rows, weights):
        return (total.double() + rows.double() * weights.double()).float()


@killed_by("test_weight_and_reduce", "float32", says=OTHER)
class SumsBackwards(Summing):
    """Sums from the last assignment to the first."""

    @staticmethod
    def order(top_k):
        return reversed(range(top_k))


@killed_by("test_weight_and_reduce", "bfloat16", says=OTHER)
class IgnoresPlaces(Summing):
    """Takes rows in the order of the assignments, wherever the dispatcher left them."""

    @classmethod
    def weight_and_reduce(cls, rows_NH, ids_RK, weights_RK, out_RH, places_RK=None):
        return super().weight_and_reduce(rows_NH, ids_RK, weights_RK, out_RH)
