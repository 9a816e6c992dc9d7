"""Wrong experts: each must fail a named kit test that a right one passes. See `killed_by`."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from conformance_catches import killed_by, suite, wrong
from right_experts import LeavesSums, Plain, Unreduced

from moekit.contract import PackedWeights

wrong("WeightsTwice", "Applies the router weights twice",
      lambda self, tokens: replace(tokens, topk_weights=tokens.topk_weights.square()),
      killed_by("test_dtype", "float32"))  # fmt: skip


@killed_by("test_sums_left_to_the_dispatcher", leaves=LeavesSums)
def WeightsRowsItLeaves(self, rows, places, order, tokens):
    """Weights the rows whose weights it leaves to the dispatcher."""
    weights = tokens.topk_weights.flatten()[order][:, None]
    return LeavesSums.leaves(self, (rows * weights).to(rows.dtype), places, order, tokens)


@killed_by("test_sums_left_to_the_dispatcher", says="relative error too large|exact zeros")
class PlacesTheOtherWay(LeavesSums):
    """Names the assignment of each row it leaves, not the row of each assignment."""

    def leaves(self, rows, places, order, tokens):
        return super().leaves(rows, order.int().view_as(places), order, tokens)


@killed_by("test_sums_left_to_the_dispatcher", says="rows_NH is torch.float32", leaves=LeavesSums)
def LeavesRowsInFloat32(self, rows, places, order, tokens):
    """Leaves rows in float32 to the dispatcher."""
    return LeavesSums.leaves(self, rows.float(), places, order, tokens)


@killed_by("test_sums_left_to_the_dispatcher", says="places_RK is torch.int64", leaves=LeavesSums)
def LongPlaces(self, rows, places, order, tokens):
    """Names the rows it leaves in int64."""
    return LeavesSums.leaves(self, rows, places.long(), order, tokens)


@killed_by("test_sums_left_to_the_dispatcher", apply_unreduced=LeavesSums)
def LeavesTheBias(self, tokens, weights, workspace):
    """Leaves rows to the dispatcher without w2's bias, which its own sum adds."""
    if "w2_bias" in weights.experts:
        without = {**weights.experts, "w2_bias": torch.zeros_like(weights["w2_bias"])}
        weights = PackedWeights(self.spec.name, without, weights.shared)
    return LeavesSums.apply_unreduced(self, tokens, weights, workspace)


@killed_by("test_scheme", "none", says="same scalar type", apply=Plain)
def ScratchOfTheDefaultDtype(self, y, tokens, weights, workspace):
    """Sums in a tensor of torch's default dtype."""
    total = torch.empty(workspace[0].shape, device=y.device).fill_(0.0)
    Plain.apply(self, y, tokens, weights, (total,))


wrong("WeightsNever", "Does not apply the router weights",
      lambda self, tokens: replace(tokens, topk_weights=torch.ones_like(tokens.topk_weights)),
      killed_by("test_dtype", "float32"))  # fmt: skip


@killed_by("test_layers_in_turn", says="call 1, weights 1")
class FirstWeights(Plain):
    """Keeps the weights of its first call."""

    kept = None

    def apply(self, y, tokens, weights, workspace):
        self.kept = self.kept or weights
        super().apply(y, tokens, self.kept, workspace)


@killed_by("test_many_experts")
def FirstExperts(self, tokens):
    """Skips experts from 64 on."""
    ids = torch.where(tokens.topk_ids < 64, tokens.topk_ids, -1)
    return replace(tokens, topk_ids=ids)


@killed_by("test_rows_per_expert")
def FirstRows(self, tokens):
    """Skips an expert's rows from the 129th on."""
    ids = tokens.topk_ids.flatten()
    one_hot = ids[:, None] == torch.arange(self.problem.num_local_experts)
    rank = (one_hot.cumsum(0) * one_hot).sum(1)
    ids = torch.where(rank <= 128, ids, -1).view_as(tokens.topk_ids)
    return replace(tokens, topk_ids=ids)


class OtherActivation(Plain):
    """Computes what ``_instead`` makes of the problem's activation."""

    def _instead(self, activation):
        return activation

    def apply(self, y, tokens, weights, workspace):
        asked = self.problem
        self.problem = asked.replace(activation=self._instead(asked.activation))
        super().apply(y, tokens, weights, workspace)
        self.problem = asked


@killed_by("test_activation", "silu")
@killed_by("test_activation", "swigluoai", _instead=OtherActivation)
def ClampDropped(self, activation):
    """Drops the clamp."""
    return replace(activation, limit=None if activation.name == "silu" else 1e6)


wrong("ClampBeforeSilu", "Clamps the gate before silu instead of after it",
      killed_by("test_activation", "swiglustep"), of=OtherActivation,
      _instead=lambda self, activation: replace(activation, name="silu"))  # fmt: skip
wrong("LimitOfSeven", "Uses the usual limit in place of the one in the problem",
      killed_by("test_activation", "swiglustep"), killed_by("test_activation", "situ"),
      of=OtherActivation,
      _instead=lambda self, activation: replace(activation, limit=7.0))  # fmt: skip
wrong("SituWithoutTanh", "Leaves the gate unbounded",
      killed_by("test_activation", "situ"), of=OtherActivation,
      _instead=lambda self, activation: replace(activation, name="silu", alpha=None))  # fmt: skip
wrong("AlphaOfOne", "Ignores alpha",
      killed_by("test_activation", "situ"), of=OtherActivation,
      _instead=lambda self, activation: replace(activation, alpha=1.0))  # fmt: skip
wrong("SiluForRelu2", "Computes another gate",
      killed_by("test_activation", "relu2_and_mul"), of=OtherActivation,
      _instead=lambda self, activation: replace(activation, name="silu"))  # fmt: skip


@killed_by("test_activation", "gelu", _instead=OtherActivation)
def TanhForErf(self, activation):
    """Computes gelu by tanh."""
    return replace(activation, name=activation.name.replace("gelu", "gelu_tanh"))


wrong("BiasDropped", "Drops both biases",
      lambda self, weights: replace(weights, w13_bias=None, w2_bias=None),
      killed_by("test_cases", "none"))  # fmt: skip


@killed_by("test_scheme", "fp8_block")
@killed_by("test_scheme", "fp8_channel_token")
@killed_by("test_scheme", "int8_w8a16")
@killed_by("test_scheme", "nvfp4_w4a16")
def ScalesIgnored(self, packed):
    """Uses the first scale of a weight for the whole weight."""
    experts = {
        n: t[:, :1, :1].expand_as(t).contiguous() if n.endswith("_scale") else t
        for n, t in packed.experts.items()
    }
    return replace(packed, experts=experts)


wrong("OrderIgnored", "Treats groups as runs of columns",
      lambda self, weights: replace(weights, w13_g_idx=None, w2_g_idx=None),
      killed_by("test_scheme", "int4_w4a16_g32_act_order"),
      killed_by("test_scheme", "int4_w4a16_g128_zp_act_order"))  # fmt: skip


@killed_by("test_scheme", "int4_w4a16_g32_act_order")
@killed_by("test_scheme", "int4_w4a16_g128_zp_act_order")
def OneOrderForAll(self, weights):
    """Uses the first expert's order for all experts."""
    first = {
        name: t[:1].expand_as(t).contiguous()
        for name, t in weights.tensors().items()
        if name.endswith("g_idx")
    }
    return replace(weights, **first)


@killed_by("test_padded_slices", "fp8_block")
def EqualShares(self, weights):
    """Uses I / tp_size of a rank's share, where whole blocks make it larger."""
    p = self.problem
    share = p.intermediate_size // p.parallel.tp_size
    w2_scale = weights.w2_scale
    if p.parallel.tp_size > 1 and w2_scale is not None and w2_scale.dim() == 3:
        w2 = weights.w2.clone()
        w2[..., share:] = 0
        weights = replace(weights, w2=w2)
    return weights


@killed_by("test_columns_in_order", "int4_w4a16_g32_act_order", says="w2_g_idx is missing")
def OrderNeeded(self, weights):
    """Fails without g_idx."""
    assert weights.w2_g_idx is not None, "w2_g_idx is missing"
    return weights


@killed_by("test_routing", "masked", says="NaN")
def ForeignRows(self, tokens):
    """Computes ids of -1 as expert 0."""
    ids = tokens.topk_ids.clamp(min=0)
    return replace(tokens, topk_ids=ids)


@killed_by("test_routing", "rows", says="NaN")
def ForeignRowsOnly(self, tokens):
    """Computes ids of -1 as expert 0 with weight 0, but NaN * 0 is not 0."""
    zero = tokens.topk_weights.masked_fill(tokens.topk_ids < 0, 0.0)
    ids = tokens.topk_ids.clamp(min=0)
    return replace(tokens, topk_ids=ids, topk_weights=zero)


@killed_by("test_dtype", "float32", says="modified the caller's x")
def InputModified(self, y, tokens, weights):
    """Modifies x."""
    tokens.x.nan_to_num_().neg_()


@killed_by("test_routing", "masked", says="modified the caller's topk_ids")
def RoutingModified(self, y, tokens, weights):
    """Modifies the ids."""
    tokens.topk_ids.clamp_(min=0)


@killed_by("test_dtype", "float32", says="modified the caller's w2")
def PackedModified(self, y, tokens, weights):
    """Modifies the packed weights."""
    weights["w2"].neg_()


@killed_by("test_pack", "none", says="pack modified the caller's w13")
def PackInPlace(self, weights):
    """Modifies the weights when it packs them."""
    weights.w13.mul_(2)
    return weights


@killed_by("test_routing", "none", says="NaN", apply=Plain)
def NothingWritten(self, y, tokens, weights, workspace):
    """Writes no output if no row has a local expert."""
    if bool((tokens.topk_ids >= 0).any()):
        Plain.apply(self, y, tokens, weights, workspace)


@killed_by("test_input_form", "fp8_block", says="got no rows", quantize=Plain)
def FailsOnNoTokens(self, x_RH, weights, valid_rows):
    """Fails when it quantizes an empty batch."""
    assert x_RH.shape[0], "quantize got no rows"
    return Plain.quantize(self, x_RH, weights, valid_rows)


@killed_by("test_input_form", "fp8_tensor", says="NaN", quantize=Plain)
def PaddingInScale(self, x_RH, weights, valid_rows):
    """Includes padding in the scale that tokens share."""
    return Plain.quantize(self, x_RH, weights, None)


@killed_by("test_input_form", "fp8_tensor", says="relative error")
def OneScaleForAll(self, tokens):
    """Uses the first token's scale for all tokens."""
    if tokens.x_scale is not None:
        tokens = replace(tokens, x_scale=tokens.x_scale[:1])
    return tokens


@killed_by("test_deterministic", says="different bits")
class Noise(Plain):
    """Gives other bits every time, as atomic additions do."""

    calls = 0

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        self.calls += 1
        y.mul_(1 + 0.01 * self.calls)


@killed_by("test_dtype", "float32", says="NaN", apply=Plain)
def StaleWorkspace(self, y, tokens, weights, workspace):
    """Adds to what the arena holds instead of clearing it."""
    stale = workspace[0][: len(y)].clone()
    Plain.apply(self, y, tokens, weights, workspace)
    y.add_(stale.mul_(0.5).to(y.dtype))


@killed_by("test_repeated_calls", says="relative error|exact zeros")
class Accumulates(Plain):
    """Adds the output of the last call."""

    _last: torch.Tensor | None = None

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        if self._last is not None and len(self._last) < len(y):
            y[: len(self._last)] += self._last
        self._last = y.clone()


@killed_by("test_pack", "none", says="dim 0 is not L")
class IntermediateMajor(Plain):
    """Packs w13 with experts in dim 1."""

    def pack(self, weights):
        packed = super().pack(weights)
        turned = {**packed.experts, "w13": packed["w13"].transpose(0, 1).contiguous()}
        return PackedWeights(packed.backend, turned, packed.shared)

    def apply(self, y, tokens, weights, workspace):
        turned = {**weights.experts, "w13": weights["w13"].transpose(0, 1).contiguous()}
        super().apply(y, tokens, replace(weights, experts=turned), workspace)


@killed_by("test_pack", "none", says="experts in another order")
def SharedByOrder(self, packed):
    """Packs w2's bias as shared, although it differs between experts."""
    experts = {n: t for n, t in packed.experts.items() if n != "w2_bias"}
    return replace(packed, experts=experts, shared={"w2_bias": packed["w2_bias"]})


wrong("MemoryUnderstated", "States no transient memory, and allocates some",
      killed_by("test_memory_is_stated", "local", says="stated are"), of=Plain,
      transient_bytes=lambda self, rows: 0)  # fmt: skip


@killed_by("test_two_calls_in_flight", says="call [01]")
def OverwritesEarlierOutput(self, y, tokens, weights):
    """Overwrites the output of an earlier call."""
    self._kept = getattr(self, "_kept", None)
    if self._kept is not None:
        self._kept.zero_()
    self._kept = y


@killed_by("test_dtype", "float32", says="shape mismatch", reduces=True)
class DeclaredReduced(Unreduced):
    """Declares that it sums over K, and does not."""


@killed_by("test_dtype", "float32", says="relative error|size of tensor", reduces=False)
class DeclaredUnreduced(Plain):
    """Declares that it does not sum over K, and does."""


def refuse(problem):
    return ["fp8_block is not implemented"] if problem.quant.name == "fp8_block" else []


@killed_by("test_declared_is_reachable", says="always refused", check=refuse)
class RefusesWhatItDeclares(Plain):
    """Refuses a scheme that its spec declares, everywhere."""


ANSWERS = itertools.count()


def fickle(problem):
    return [f"reason {next(ANSWERS)}"] if problem.device.type == "xpu" else []


@killed_by("test_unsupported_answers_for_any_device", says="answers differ", check=fickle)
class ChangesItsMind(Plain):
    """Gives different reasons each time."""


@killed_by("test_range_of_float16", says=".", weighted=Plain)
def RoundsBeforeWeighting(self, result, weights):
    """Declares weights_in_fp32 and rounds an expert's output before it is weighted."""
    return result.to(self.problem.dtype).float() * weights


def careless(problem):
    return [] if problem.device.capability else [problem.device.capability[0]]


@killed_by(
    "test_unsupported_answers_for_any_device", says="its check failed: TypeError", check=careless
)
class CannotBeAsked(Plain):
    """Raises when it is asked about a CPU."""


def test_other_tests_miss_experts_in_another_dimension():
    suite(IntermediateMajor, "torch", **Plain.DECLARED).test_dtype("bfloat16")
