"""Right experts in a few lines each, from which the mutants derive, and bases of mutants."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch

from moekit import contract
from moekit.backends.reference import ReferenceExperts, dequantized_input, expert_mlp
from moekit.contract import BufferSpec, PackedWeights, PermuteExpertsUnpermute
from moekit.problem import ActivationFormat
from moekit.problem.weights import ExpertWeights
from moekit.testing.calls import by_assignment


class Plain(PermuteExpertsUnpermute):
    """STANDARD, reducing, unquantized arithmetic in fp32.

    Mutants change what it is given, packs, takes or has done.
    """

    BASE = "torch"
    DECLARED = {"batch_invariant": False}

    def given(self, weights):
        return weights

    def stored(self, packed):
        return packed

    def taken(self, tokens):
        return tokens

    def done(self, y, tokens, weights):
        pass

    def quantized(self, x, scale):
        return x, scale

    def quantize(self, x_RH, weights, valid_rows):
        return self.quantized(*super().quantize(x_RH, weights, valid_rows))

    def pack(self, weights):
        named = self.given(weights).tensors()
        shared = {
            short: named.pop(name)
            for name, short in (("w13_input_scale", "a1_scale"), ("w2_input_scale", "a2_scale"))
            if name in named
        }
        return self.stored(PackedWeights(self.spec.name, named, shared))

    def workspace(self, rows):
        return (BufferSpec((rows, self.problem.hidden_size), torch.float32),)

    def transient_bytes(self, rows):
        p = self.problem
        weights = p.num_local_experts * p.hidden_size * (p.w13_rows + p.local_intermediate_size)
        return 4 * (3 * weights + rows * (8 * p.hidden_size + 8 * p.w13_rows)) + rows * p.top_k * 32

    def apply(self, y, tokens, weights, workspace):
        given, tokens = tokens, self.taken(tokens)
        p, total = self.problem, workspace[0][: len(y)].zero_()
        matrices = ExpertWeights(**weights.experts).dequantize(p.quant)
        x = dequantized_input(tokens, p)
        for expert in tokens.topk_ids.unique().tolist():
            if expert < 0:
                continue
            row, k = (tokens.topk_ids == expert).nonzero(as_tuple=True)
            result = expert_mlp(x[row], matrices, expert, p)
            weighted = self.weighted(result, tokens.topk_weights[row, k, None])
            total.index_add_(0, row, weighted)
        y.copy_(total)
        self.done(y, given, weights)

    def weighted(self, result, weights):
        return result * weights


class LeavesSums(Plain):
    """Leaves the sum over K to a dispatcher that takes rows anywhere."""

    BASE = "torch"
    DECLARED = Plain.DECLARED

    def apply_unreduced(self, tokens, weights, workspace):
        ids = tokens.topk_ids
        count, hidden = ids.numel(), self.problem.hidden_size
        y = torch.empty(count, hidden, dtype=self.problem.dtype)
        self.apply(y, by_assignment(tokens), weights, [torch.empty(count, hidden)])
        order = ids.flatten().argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(count)
        return self.leaves(y[order], places.int().view(ids.shape), order, tokens)

    def leaves(self, rows, places, order, tokens):
        return contract.Unreduced(rows, places)


class Skips(Plain):
    """Computes the assignments that `kept` keeps, and drops the others."""

    @abstractmethod
    def kept(self, ids, tokens): ...

    def taken(self, tokens):
        ids = torch.where(self.kept(tokens.topk_ids, tokens), tokens.topk_ids, -1)
        return replace(tokens, topk_ids=ids)


class Values(Plain):
    """Computes with what `x` and `router` make of tokens and router weights."""

    def x(self, x):
        return x

    def router(self, weights):
        return weights

    def taken(self, tokens):
        if tokens.x_scale is None:
            tokens = replace(tokens, x=self.x(tokens.x))
        return replace(tokens, topk_weights=self.router(tokens.topk_weights))


class Batched(PermuteExpertsUnpermute):
    """BATCHED, unquantized arithmetic in fp32."""

    BASE = "torch"
    DECLARED = {
        "format": ActivationFormat.BATCHED,
        "reduces": False,
        "batch_invariant": False,
    }

    def pack(self, weights):
        return PackedWeights(self.spec.name, *weights.by_expert())

    def workspace(self, rows):
        return ()

    def transient_bytes(self, rows):
        p = self.problem
        weights = p.num_local_experts * p.hidden_size * (p.w13_rows + p.local_intermediate_size)
        return 4 * (3 * weights + 8 * rows * p.num_local_experts * (p.hidden_size + p.w13_rows))

    def apply(self, y, tokens, weights, workspace):
        p = self.problem
        matrices = ExpertWeights(**weights.experts).dequantize(p.quant)
        x = dequantized_input(tokens, p)
        for expert, count in enumerate(self.counts(tokens)):
            y[expert, :count] = expert_mlp(x[expert, :count], matrices, expert, p).to(y.dtype)

    def counts(self, tokens):
        return tokens.expert_num_tokens.tolist()


class Unreduced(ReferenceExperts):
    """STANDARD, not reducing."""

    BASE = "reference"
