"""Wrong experts that are right for small, moderate numbers, and for contiguous weights."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from conformance_catches import killed_by, wrong
from right_experts import Plain

from moekit.problem.activation import apply_activation

wrong("Clamp8", "Clamps x to +-8",
      lambda self, x: x.clamp(-8, 8), killed_by("test_magnitude", 2.0**12))  # fmt: skip
wrong("Clamp100", "Clamps x to +-100",
      lambda self, x: x.clamp(-100, 100), killed_by("test_magnitude", 2.0**12))  # fmt: skip
wrong("ClampOfFp8", "Clamps x to +-448, the range of e4m3",
      lambda self, x: x.clamp(-448, 448), killed_by("test_magnitude", 2.0**12))  # fmt: skip
wrong("SmallFlushed", "Rounds values below 1e-4 to zero",
      lambda self, x: torch.where(x.abs() < 1e-4, 0.0, x),
      killed_by("test_magnitude", 2.0**-20))  # fmt: skip


@killed_by("test_magnitude", 2.0**12, says="NaN or infinite|relative error")
def InFloat16(self, y, tokens, weights):
    """Keeps activations of a bfloat16 problem in float16, whose range ends at 65504."""
    if y.dtype != torch.bfloat16 or not weights["w13"].is_floating_point():
        return
    w13 = weights["w13"].float()
    h = torch.einsum("th,lnh->ltn", tokens.x.float(), w13)
    act = apply_activation(h, self.problem.activation)
    if bool((act.nan_to_num(0.0).abs() > 65504).any()):
        y.fill_(float("inf"))


@killed_by("test_range_of_float16", says="relative error")
def ActivationClampedInFloat16(self, y, tokens, weights):
    """Clamps float16 activations to 2048."""
    w13 = weights["w13"]
    if y.dtype == torch.float16 and w13.is_floating_point():
        h = torch.einsum("th,lnh->ltn", tokens.x.float(), w13.float())
        act = apply_activation(h, self.problem.activation)
        if bool((act.nan_to_num(0.0).abs() > 2048).any()):
            y.mul_(0.9)


wrong("RouterClamped", "Clamps router weights to 2",
      lambda self, router: router.clamp(max=2), killed_by("test_dtype", "bfloat16"))  # fmt: skip
wrong("RouterClamped100", "Clamps router weights to 100",
      lambda self, router: router.clamp(max=100), killed_by("test_cases", "none"))  # fmt: skip
wrong("RouterInFloat16", "Keeps router weights in float16, which flushes small ones to zero",
      lambda self, router: router.half().float(), killed_by("test_cases", "none"))  # fmt: skip
wrong("SmallWeightsDropped", "Drops assignments with router weights below 1e-3",
      lambda self, ids, tokens: tokens.topk_weights.abs() >= 1e-3,
      killed_by("test_cases", "none", says="exact zeros|relative error"))  # fmt: skip
wrong("RouterMadePositive", "Takes the absolute value of router weights",
      lambda self, router: router.abs(), killed_by("test_routing", "signed"))  # fmt: skip
wrong("RouterDivides", "Turns a weight of zero into NaN",
      lambda self, router: router * router / router,
      killed_by("test_routing", "signed", says="NaN"))  # fmt: skip
wrong("NegativeWeightsDropped", "Drops assignments with negative weights",
      lambda self, ids, tokens: tokens.topk_weights >= 0,
      killed_by("test_routing", "signed"))  # fmt: skip
wrong("RouterNormalized", "Normalizes the router weights of each token",
      lambda self, router: router / router.nan_to_num(0.0).sum(dim=1, keepdim=True),
      killed_by("test_dtype", "float32"))  # fmt: skip


@killed_by("test_tokens_are_independent", says="other tokens")
def NanSpreads(self, y, tokens, weights):
    """Computes a scale that tokens share over all of them, including NaN."""
    used = (tokens.topk_ids >= 0).any(dim=1)
    y += tokens.x.float()[used].sum() * 0


@killed_by("test_tokens_are_independent", says="other tokens")
def InfSpreads(self, y, tokens, weights):
    """Adds every token's output to its neighbour's, times zero."""
    used = (tokens.topk_ids >= 0).any(dim=1)
    y[used] += y[used].roll(1, dims=0) * 0


@killed_by("test_dtype", "bfloat16", says=r"scale 0\.00[3-7]")
def HalfAPercent(self, y, tokens, weights):
    """Is 0.5 % too large in bfloat16."""
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

    @abstractmethod
    def rounded(self, wide): ...


wrong("Truncates", "Truncates to bfloat16 instead of rounding",
      killed_by("test_rows_per_expert", says="scale -0.00"), of=Rounds,
      rounded=lambda self, wide: (wide.view(torch.int32) & -65536).view(torch.float32))  # fmt: skip


@killed_by("test_rows_per_expert", says="mean 0.00", rounded=Rounds)
def Offset(self, wide):
    """Is too large by 0.2 % of the RMS."""
    used = (wide != 0).any(dim=1, keepdim=True)
    return wide + 0.002 * wide[used[:, 0]].square().mean().sqrt() * used


@killed_by("test_dtype", "float32")
def TensorFloat32(self, x):
    """Rounds fp32 to TF32 (11 bits)."""
    return ((x.float().view(torch.int32) + 4096) & -8192).view(torch.float32).to(x.dtype)


wrong("RouterIn16Bits", "Rounds router weights to bfloat16, also in fp32 problems",
      lambda self, router: router.bfloat16().float(),
      killed_by("test_dtype", "float32"))  # fmt: skip


@killed_by("test_scheme", "none", says="NaN")
@killed_by("test_routing", "rows", says="NaN")
def ZeroTokenIsNaN(self, x):
    """Scales a token by its largest value, which may be 0."""
    most = x.abs().amax(dim=1, keepdim=True)
    return torch.where(most == 0, float("nan"), x)


wrong("ScaleOfZerosIsZero", "Divides by a scale of 0 when it quantizes tokens of zeros",
      lambda self, x, scale: (x, torch.where(scale < 1e-12, float("nan"), scale)),
      killed_by("test_input_form", "fp8_tensor", says="NaN"),
      killed_by("test_input_form", "fp8_block", says="NaN"))  # fmt: skip


@killed_by("test_tokens_are_independent", says="large numbers became NaN")
def OverflowsStaticScale(self, y, tokens, weights):
    """Converts values beyond a static scale to NaN instead of the largest fp8 number."""
    operand = self.problem.quant.activation
    if operand is not None and operand.static and tokens.x_scale is None:
        largest = operand.qmax * weights.shared["a1_scale"].max()
        y[(tokens.x.float().abs() > largest * 1.01).any(dim=1)] = float("nan")


@killed_by("test_activation", "gelu_tanh", says="NaN")
def TanhOfInfinity(self, y, tokens, weights):
    """Computes tanh as (e - 1) / (e + 1) with an e that becomes infinite."""
    if self.problem.activation.name == "gelu_tanh" and weights["w13"].is_floating_point():
        x = tokens.x.float().nan_to_num(0.0)
        h = torch.einsum("th,lnh->tln", x, weights["w13"].float())
        y[(h > 60).flatten(1).any(dim=1)] = float("nan")


# -- weights --------------------------------------------------------------------------------------


@killed_by("test_routing", "idle", says="NaN")
def EveryExpertTimesZero(self, y, tokens, weights):
    """Computes all experts for every token, and weights by zero those that it does not have."""
    if tokens.x_scale is None and weights["w2"].is_floating_point():
        y += 0 * weights["w2"].float().sum()


class Codes(Plain):
    """Changes the codes of weights when it packs them."""

    def pack(self, weights):
        packed = super().pack(weights)
        changed = {n: self.codes(packed[n]) for n in ("w13", "w2")}
        return replace(packed, experts={**packed.experts, **changed})

    @abstractmethod
    def codes(self, codes): ...


@killed_by("test_scheme", "int8_w8a16", codes=Codes)
def Minus128(self, codes):
    """Negates int8 codes twice, which makes 128 of -128."""
    return codes.where(codes != -128, 127) if codes.dtype == torch.int8 else codes


@killed_by("test_scheme", "int4_w4a16_g32", codes=Codes)
def Minus8(self, codes):
    """Takes codes of -8 for zero."""
    if codes.dtype != torch.uint8 or self.problem.quant.weight.dtype != "int4":
        return codes
    low, high = codes & 15, codes >> 4
    return low.where(low != 0, 8) | high.where(high != 0, 8) << 4


@killed_by("test_cases", "none")
def StridesIgnored(self, weights):
    """Reads weights as if they were contiguous."""

    def misread(t):
        flat = t.contiguous().shape
        strides = torch.empty(flat).stride()
        return torch.as_strided(t, flat, strides, t.storage_offset())

    return replace(weights, **{n: misread(t) for n, t in weights.tensors().items()})


@killed_by("test_repack", apply=Plain)
def WeightsCachedByAddress(self, y, tokens, weights, workspace):
    """Caches converted weights by their address."""
    kept = self.__dict__.setdefault("kept", {})
    key = tuple(t.data_ptr() for t in weights.experts.values())
    copies = {n: t.clone() for n, t in weights.experts.items()}
    weights = replace(weights, experts=kept.setdefault(key, copies))
    Plain.apply(self, y, tokens, weights, workspace)


@killed_by("test_repack", says="invalid for input of size")
class PacksWholeStacks(Plain):
    """Takes the number of experts to pack from the problem."""

    def given(self, weights):
        w13 = weights.w13
        return replace(weights, w13=w13.view(self.problem.num_local_experts, *w13.shape[1:]))


@killed_by("test_repack", says="which all experts share, would change")
class SharesAStatistic(Plain):
    """Packs a number that depends on all experts, as one that they share."""

    def stored(self, packed):
        largest = packed["w2"].float().abs().amax()
        return replace(packed, shared={**packed.shared, "largest": largest})


@killed_by("test_scheme", "none")
def LastExpertSwapped(self, weights):
    """Swaps gate and up of the last expert."""
    w13 = weights.w13.clone()
    w13[-1] = w13[-1].roll(w13.shape[1] // 2, dims=0)
    return replace(weights, w13=w13)


@killed_by("test_activation", "silu", apply=Plain)
def GateAloneClamped(self, y, tokens, weights, workspace):
    """Clamps the gate, but not the up projection."""
    asked = self.problem
    limit = asked.activation.limit
    if limit is not None and asked.activation.name == "silu":
        rows = asked.local_intermediate_size
        w13, w2 = weights["w13"].clone(), weights["w2"]
        w13[:, rows:] /= 1024
        experts = {**weights.experts, "w13": w13, "w2": w2 * 1024}
        weights = replace(weights, experts=experts)
    Plain.apply(self, y, tokens, weights, workspace)


@killed_by("test_scheme", "fp8_channel_token", takes_unquantized=False, quantize=Plain)
def ScaleOfOne(self, x_RH, weights, valid_rows):
    """Converts tokens to fp8 without a scale: small numbers hardly differ."""
    x, scale = Plain.quantize(self, x_RH, weights, valid_rows)
    operand = self.problem.quant.activation
    if operand.dtype != "float8_e4m3fn" or operand.static:
        return x, scale
    return x_RH.float().clamp(-448, 448).to(x.dtype), torch.ones_like(scale)


@killed_by("test_activation", "silu", apply=Plain)
def LimitIn16Bits(self, y, tokens, weights, workspace):
    """Rounds the limit to bfloat16, also in fp32 problems."""
    asked = self.problem
    if (limit := asked.activation.limit) is not None:
        rounded = float(torch.tensor(limit).bfloat16())
        self.problem = asked.replace(activation=replace(asked.activation, limit=rounded))
    Plain.apply(self, y, tokens, weights, workspace)
    self.problem = asked
