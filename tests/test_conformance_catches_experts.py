"""Deliberately wrong experts: each must fail a named test of the kit that a right one passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance_catches import caught, suite

from moekit.kernel import BufferSpec, PackedWeights, PermuteExpertsUnpermute
from moekit.reference import ReferenceExperts, dequantized_input, expert_mlp
from moekit.weights import ExpertWeights


def caught_experts(wrong: type, test: str, *args: Any, says: str, **declared: Any) -> None:
    caught(wrong, "torch", test, *args, says=says, right=Plain, **declared)


class Plain(PermuteExpertsUnpermute):
    """The right control: STANDARD, reducing, unquantized arithmetic in fp32."""

    def pack(self, weights):
        named = weights.tensors()
        shared = {
            short: named.pop(name)
            for name, short in (("w13_input_scale", "a1_scale"), ("w2_input_scale", "a2_scale"))
            if name in named
        }
        return PackedWeights(self.spec.name, named, shared)

    def workspace(self, rows):
        return (BufferSpec((rows, self.problem.hidden_size), torch.float32),)

    def transient_bytes(self, rows):
        p = self.problem
        weights = p.num_local_experts * p.hidden_size * (p.w13_rows + p.local_intermediate_size)
        return 4 * (3 * weights + rows * (8 * p.hidden_size + 8 * p.w13_rows)) + rows * p.top_k * 32

    def apply(self, y, tokens, weights, workspace):
        p, total = self.problem, workspace[0][: len(y)].zero_()
        matrices = ExpertWeights(**weights.experts).dequantize(p.quant)
        x = dequantized_input(tokens, p)
        for expert in range(p.num_local_experts):
            row, slot = (tokens.topk_ids == expert).nonzero(as_tuple=True)
            result = expert_mlp(x[row], matrices, expert, p)
            total.index_add_(0, row, result * tokens.topk_weights[row, slot, None])
        y.copy_(total)


class Reference_(ReferenceExperts):
    """The right control."""


class WeightsTwice(Plain):
    def apply(self, y, tokens, weights, workspace):
        tokens = replace(tokens, topk_weights=tokens.topk_weights.square())
        super().apply(y, tokens, weights, workspace)


class WeightsNever(Plain):
    def apply(self, y, tokens, weights, workspace):
        tokens = replace(tokens, topk_weights=torch.ones_like(tokens.topk_weights))
        super().apply(y, tokens, weights, workspace)


@pytest.mark.parametrize("wrong", [WeightsTwice, WeightsNever])
def test_router_weights_applied_twice_or_never(wrong):
    caught_experts(wrong, "test_dtype", "float32", says="relative error too large")


class FirstWeights(Plain):
    """Keeps the weights of its first call."""

    kept = None

    def apply(self, y, tokens, weights, workspace):
        self.kept = self.kept or weights
        super().apply(y, tokens, self.kept, workspace)


def test_weights_of_an_earlier_call():
    caught_experts(FirstWeights, "test_weights_in_turns", says="call 1, weights 1")


class FirstExperts(Plain):
    """Skips experts from 64 on."""

    def apply(self, y, tokens, weights, workspace):
        ids = torch.where(tokens.topk_ids < 64, tokens.topk_ids, -1)
        super().apply(y, replace(tokens, topk_ids=ids), weights, workspace)


class FirstRows(Plain):
    """Skips what an expert has besides its first 128 rows."""

    def apply(self, y, tokens, weights, workspace):
        ids = tokens.topk_ids.flatten()
        one_hot = ids[:, None] == torch.arange(self.problem.num_local_experts)
        rank = (one_hot.cumsum(0) * one_hot).sum(1)
        ids = torch.where(rank <= 128, ids, -1).view_as(tokens.topk_ids)
        super().apply(y, replace(tokens, topk_ids=ids), weights, workspace)


@pytest.mark.parametrize("wrong", [FirstExperts, FirstRows])
def test_what_is_beyond_a_tile(wrong):
    caught_experts(wrong, "test_many_experts", says="relative error too large")


class OtherActivation(Plain):
    """Computes what ``_instead`` makes of the problem's activation."""

    def _instead(self, activation):
        return activation

    def apply(self, y, tokens, weights, workspace):
        asked = self.problem
        self.problem = asked.replace(activation=self._instead(asked.activation))
        super().apply(y, tokens, weights, workspace)
        self.problem = asked


class ClampDropped(OtherActivation):
    def _instead(self, activation):
        return replace(activation, limit=None if activation.name == "silu" else 1e6)


@pytest.mark.parametrize("name", ["silu", "swigluoai"])
def test_clamp_dropped(name):
    caught_experts(ClampDropped, "test_clamp", name, says="relative error too large")


class TanhForErf(OtherActivation):
    def _instead(self, activation):
        return replace(activation, name=activation.name.replace("gelu", "gelu_tanh"))


def test_declares_an_activation_that_it_replaces_by_a_similar_one():
    caught_experts(TanhForErf, "test_activation", "gelu", says="relative error too large")


class BiasDropped(Plain):
    def pack(self, weights):
        return super().pack(replace(weights, w13_bias=None, w2_bias=None))


def test_bias_dropped():
    caught_experts(BiasDropped, "test_bias", True, says="relative error too large")


class ScalesIgnored(Plain):
    """Takes one scale of the block scheme for all blocks."""

    def pack(self, weights):
        packed = super().pack(weights)
        experts = {
            n: t[:, :1, :1].expand_as(t).contiguous() if n.endswith("_scale") else t
            for n, t in packed.experts.items()
        }
        return replace(packed, experts=experts)


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel_token", "int8_w8a16"])
def test_declares_a_scheme_that_it_cannot_do(scheme):
    caught_experts(ScalesIgnored, "test_scheme", scheme, says="relative error too large")


class OrderIgnored(Plain):
    """Takes groups for runs of columns."""

    def pack(self, weights):
        return super().pack(replace(weights, w13_g_idx=None, w2_g_idx=None))


class OneOrderForAll(Plain):
    """Takes the first expert's order for all experts'."""

    def pack(self, weights):
        first = {
            name: t[:1].expand_as(t).contiguous()
            for name, t in weights.tensors().items()
            if name.endswith("g_idx")
        }
        return super().pack(replace(weights, **first))


@pytest.mark.parametrize("wrong", [OrderIgnored, OneOrderForAll])
@pytest.mark.parametrize("scheme", ["int4_w4a16_g32_act_order", "int4_w4a16_g128_zp_act_order"])
def test_declares_act_order_that_it_cannot_do(wrong, scheme):
    caught_experts(wrong, "test_scheme", scheme, says="relative error too large")


class OrderNeeded(Plain):
    def pack(self, weights):
        assert weights.w2_g_idx is not None, "w2_g_idx is missing"
        return super().pack(weights)


def test_takes_act_order_for_granted():
    caught_experts(OrderNeeded, "test_columns_in_order", says="w2_g_idx is missing")


class ForeignRows(Plain):
    """Computes -1 as if it were expert 0."""

    def apply(self, y, tokens, weights, workspace):
        ids = tokens.topk_ids.clamp(min=0)
        super().apply(y, replace(tokens, topk_ids=ids), weights, workspace)


class ForeignRowsOnly(Plain):
    """Computes -1 as if it were expert 0, but weighs it with 0: NaN * 0 is not 0."""

    def apply(self, y, tokens, weights, workspace):
        zero = tokens.topk_weights.masked_fill(tokens.topk_ids < 0, 0.0)
        ids = tokens.topk_ids.clamp(min=0)
        tokens = replace(tokens, topk_ids=ids, topk_weights=zero)
        super().apply(y, tokens, weights, workspace)


def test_row_of_a_foreign_expert_leaked():
    caught_experts(ForeignRows, "test_routing", "slots", says="NaN")
    caught_experts(ForeignRows, "test_expert_parallel_slices", "random", says="exact zeros")


def test_padding_multiplied_by_zero():
    caught_experts(ForeignRowsOnly, "test_routing", "rows", says="NaN")


class InputModified(Plain):
    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        tokens.x.nan_to_num_().neg_()


class RoutingModified(Plain):
    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        tokens.topk_ids.clamp_(min=0)


class PackedModified(Plain):
    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        weights["w2"].neg_()


def test_input_modified():
    caught_experts(InputModified, "test_dtype", "float32", says="modified the caller's x")
    caught_experts(RoutingModified, "test_routing", "slots", says="modified the caller's topk_ids")
    caught_experts(PackedModified, "test_dtype", "float32", says="modified the caller's w2")


class PackInPlace(Plain):
    def pack(self, weights):
        weights.w13.mul_(2)
        return super().pack(weights)


def test_pack_modifies_the_weights():
    caught_experts(PackInPlace, "test_pack_is_pure", "none", says="pack modified the caller's w13")


class NothingWritten(Plain):
    """Returns early when no row is for its experts, as if there were no output then."""

    def apply(self, y, tokens, weights, workspace):
        if bool((tokens.topk_ids >= 0).any()):
            super().apply(y, tokens, weights, workspace)


def test_garbage_when_no_row_is_local():
    caught_experts(NothingWritten, "test_routing", "none", says="NaN")
    caught_experts(NothingWritten, "test_expert_parallel_slices", "one_expert", says="NaN")


class FailsOnNoTokens(Plain):
    def quantize(self, x_RH, weights, valid_rows):
        assert x_RH.shape[0], "quantize got no rows"
        return super().quantize(x_RH, weights, valid_rows)


def test_fails_on_no_tokens():
    caught_experts(
        FailsOnNoTokens, "test_input_form", "fp8_block", "kit_quantized_wire", says="got no rows"
    )


class PaddingInScale(Plain):
    def quantize(self, x_RH, weights, valid_rows):
        return super().quantize(x_RH, weights, None)


def test_padding_reaches_a_shared_scale():
    caught_experts(
        PaddingInScale, "test_input_form", "fp8_tensor", "kit_quantized_wire", says="NaN"
    )


class OneScaleForAll(Plain):
    def apply(self, y, tokens, weights, workspace):
        if tokens.x_scale is not None:
            tokens = replace(tokens, x_scale=tokens.x_scale[:1])
        super().apply(y, tokens, weights, workspace)


def test_per_tensor_scale_assumed_to_be_one():
    caught_experts(
        OneScaleForAll, "test_input_form", "fp8_tensor", "kit_row_scales", says="relative error"
    )


class Noise(Plain):
    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        y.mul_(1 + 0.02 * torch.rand(()))


def test_declares_deterministic_wrongly():
    caught_experts(Noise, "test_deterministic", says="different bits")


def test_declares_reduces_wrongly():
    args = ("test_dtype", "float32")
    caught(Reference_, "reference", *args, says="shape mismatch", reduces=True, right=Reference_)
    caught_experts(Plain, *args, says="relative error|size of tensor", reduces=False)


def test_unsupported_refuses_what_it_declares():
    def refuse(problem):
        return ["fp8_block is for another day"] if problem.quant.name == "fp8_block" else []

    says = "scheme fp8_block is declared, but always refused"
    caught_experts(Plain, "test_declared_is_reachable", says=says, check=refuse)


def test_unsupported_changes_its_mind():
    answers = iter(range(10**6))

    def fickle(problem):
        return [f"reason {next(answers)}"] if problem.device.type == "xpu" else []

    caught_experts(Plain, "test_unsupported_answers_for_any_device", says=".", check=fickle)


class StaleWorkspace(Plain):
    """Adds to what the arena holds instead of clearing it."""

    def apply(self, y, tokens, weights, workspace):
        stale = workspace[0][: len(y)].clone()
        super().apply(y, tokens, weights, workspace)
        y.add_(stale.mul_(0.5).to(y.dtype))


class Accumulates(Plain):
    """Relies on what its own last call left behind."""

    _last: torch.Tensor | None = None

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        if self._last is not None and len(self._last) < len(y):
            y[: len(self._last)] += self._last
        self._last = y.clone()


def test_stale_memory_read():
    caught_experts(StaleWorkspace, "test_dtype", "float32", says="NaN")
    caught_experts(Accumulates, "test_repeated_calls", says="relative error|exact zeros")


class IntermediateMajor(Plain):
    """Right numbers, but experts are in dim 1 of w13."""

    def pack(self, weights):
        packed = super().pack(weights)
        turned = {**packed.experts, "w13": packed["w13"].transpose(0, 1).contiguous()}
        return PackedWeights(packed.backend, turned, packed.shared)

    def apply(self, y, tokens, weights, workspace):
        turned = {**weights.experts, "w13": weights["w13"].transpose(0, 1).contiguous()}
        super().apply(y, tokens, replace(weights, experts=turned), workspace)


class SharedByOrder(Plain):
    """Keeps w2's bias as shared, though it belongs to the experts."""

    def pack(self, weights):
        packed = super().pack(weights)
        experts = {n: t for n, t in packed.experts.items() if n != "w2_bias"}
        return replace(packed, experts=experts, shared={"w2_bias": packed["w2_bias"]})


def test_pack_not_expert_major():
    test = "test_pack_is_expert_major"
    caught_experts(IntermediateMajor, test, "none", says="dim 0 is not L")
    caught_experts(SharedByOrder, test, "none", says="depends on the order")
    suite(IntermediateMajor, "torch").test_dtype("bfloat16")  # nothing else sees it


class MemoryUnderstated(Plain):
    def transient_bytes(self, rows):
        return 0


def test_memory_understated():
    caught_experts(MemoryUnderstated, "test_memory_is_stated", "local", says="stated are")


class AliasesInput(Plain):
    """Keeps its result where a later call overwrites it."""

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        self._kept = getattr(self, "_kept", None)
        if self._kept is not None:
            self._kept.zero_()
        self._kept = y


def test_earlier_output_overwritten():
    caught_experts(AliasesInput, "test_fresh_output", says="changed an earlier output")
