"""One rank's expert weights as a checkpoint holds them, and their conversion to one form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moekit.errors import WeightsError
from moekit.problem.problem import DTYPES, MoEProblem
from moekit.problem.quant import OperandQuant, QuantScheme
from moekit.untrusted.arguments import shown

_QUANTIZED = (torch.float8_e4m3fn, torch.int8, torch.uint8)


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of this rank's L experts, expert-major.

    w13: (L, 2I, H), gate rows then up rows (alternating with ``interleaved=True``); (L, I, H) for
        activations without a gate.
    w2: (L, H, I). Both have the problem's dtype or the scheme's (fp8, int8). int4 and mxfp4 are
        uint8 with half as many columns, see `moekit.problem.quant`.
    w13_bias, w2_bias: (L, 2I or I), (L, H).
    w13_scale, w2_scale: fp32, (L, N or N/group or 1, K/group or 1) for an (L, N, K) weight;
        trailing dimensions of size 1 may be left out. Blocks count from row 0 of w13, so one block
        spans gate and up if I is not a multiple of the block. If tensor parallelism would cut
        blocks, a rank has whole blocks and zeros behind them, see `MoEProblem.local_neurons`. A
        per-tensor w13 scale may also be (L, 2), one for gate and one for up.
    w13_input_scale, w2_input_scale: static activation scales, a scalar or one per expert; experts
        share the largest.
    w13_zero_points, w2_zero_points: uint8 below 16, shaped as the scales (all three dimensions),
        for int4 with zero points.
    w13_g_idx, w2_g_idx: (L, H), (L, I), int: the scale group of each column, for act-order schemes.
        A group has as many columns as a run of columns would. None if groups are runs of columns.

    Raises WeightsError for a quantized weight without a scale, or a scale without one.
    """

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_input_scale: Tensor | None = None
    w2_input_scale: Tensor | None = None
    w13_zero_points: Tensor | None = None
    w2_zero_points: Tensor | None = None
    w13_g_idx: Tensor | None = None
    w2_g_idx: Tensor | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        problems = []
        for name in ("w13", "w2"):
            weight, scale = getattr(self, name), getattr(self, f"{name}_scale")
            if weight.dtype in _QUANTIZED and scale is None:
                problems.append(f"{name} is {weight.dtype} but {name}_scale is missing")
            if weight.dtype not in _QUANTIZED and scale is not None:
                problems.append(f"{name}_scale is given but {name} is {weight.dtype}")
        if problems:
            raise WeightsError("expert weights do not fit: " + "; ".join(problems))

    @property
    def num_experts(self) -> int:
        """L, the number of experts in these tensors."""
        return self.w13.shape[0]

    def select(self, experts: Sequence[int] | Tensor) -> ExpertWeights:
        """Return these experts in this order, for expert parallelism, replicas or permutation."""
        index = torch.as_tensor(experts, device="cpu").long()
        if any(not 0 <= e < self.num_experts for e in index.tolist()):  # torch counts from the end
            raise WeightsError(
                f"experts={shown(experts)}: expected integers in 0..{self.num_experts - 1}"
            )
        index = index.to(self.w13.device)
        return self._map(lambda t: t[index] if t.dim() else t)

    def detach(self) -> ExpertWeights:
        """Return the same memory without autograd, so that parameters can be packed."""
        return self._map(Tensor.detach)

    def to(self, device: torch.device | str) -> ExpertWeights:
        """Return the weights on ``device``."""
        return self._map(lambda t: t.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by name."""
        # `fields` takes ten times as long.
        return {n: t for n in self.__dataclass_fields__ if torch.is_tensor(t := getattr(self, n))}

    def by_expert(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Split canonical weights for PackedWeights: (per-expert tensors, shared tensors).

        All are contiguous. Shared are the static activation scales, as a1_scale and a2_scale.
        """
        experts = {name: t.contiguous() for name, t in self.tensors().items()}
        inputs = {"w13_input_scale": "a1_scale", "w2_input_scale": "a2_scale"}
        shared = {inputs[name]: experts.pop(name) for name in list(experts) if name in inputs}
        return experts, shared

    def _map(self, function: Callable[[Tensor], Tensor]) -> ExpertWeights:
        changes: dict[str, Any] = {name: function(t) for name, t in self.tensors().items()}
        return replace(self, **changes)

    def checksum(self) -> str:
        """Return 16 digits that are the same for equal tensors on any device; wait for it."""
        from moekit.problem.checksum import checksum

        return checksum(self.tensors(), "interleaved" * self.interleaved)

    def check(self, problem: MoEProblem, num_experts: int | None = None) -> None:
        """Raise WeightsError listing everything that does not fit ``problem``.

        num_experts: the number of experts in these weights; default: the problem's L.
        """
        from moekit.problem.weight_faults import check

        check(self, problem, num_experts)

    def canonical(self, problem: MoEProblem) -> ExpertWeights:
        """Return the weights in the form that backends see.

        Gate and up are in halves. Under tensor parallelism only rank 0 has w2_bias, as ranks are
        summed. Biases have the problem's dtype. Scales are fp32 with all three dimensions. Gate and
        up share one per-tensor scale, the larger, and the other half is requantized. Static input
        scales are (1, 1).
        """
        made = _deinterleave(self, problem.quant) if self.interleaved else self
        changes: dict[str, Any] = {}
        for name in ("w13_bias", "w2_bias"):
            if (bias := getattr(made, name)) is not None:
                changes[name] = bias.to(problem.dtype)
        if made.w2_bias is not None and problem.parallel.tp_rank > 0:
            changes["w2_bias"] = torch.zeros_like(changes["w2_bias"])
        for name in ("w13_input_scale", "w2_input_scale"):
            static = getattr(made, name) if problem.quant.static else None
            changes[name] = None if static is None else static.float().max().view(1, 1)
        if (operand := problem.quant.weight) is not None:
            changes["w13"], changes["w13_scale"] = _merge_gate_up(made, operand)
            changes["w2_scale"] = _three_dims(made.w2_scale, made.w2, operand)
        same = all(t is getattr(made, name) for name, t in changes.items())
        return made if same else replace(made, **changes)

    def quantize(self, scheme: QuantScheme) -> ExpertWeights:
        """Quantize these 16-bit or fp32 weights to ``scheme`` by the reference arithmetic.

        Weights do not determine static activation scales: set those with dataclasses.replace.
        Groups are runs of columns, also for act-order schemes.
        """
        from moekit.problem.convert import quantized
        from moekit.problem.weight_faults import odd_columns, raise_faults

        if scheme.weight is None:
            return self
        made: dict[str, Any] = {}
        for name, weight in (("w13", self.w13), ("w2", self.w2)):
            if weight.dim() != 3 or weight.dtype not in DTYPES.values():
                wanted = f"(L, N, K) of {', '.join(DTYPES)}"
                raise WeightsError(f"{name} is {shown(weight)}, expected {wanted}")
            raise_faults(odd_columns(name, weight.shape[2], scheme.weight))
            results = quantized(weight, scheme.weight)
            made |= dict(zip((name, f"{name}_scale", f"{name}_zero_points"), results, strict=False))
        return replace(self, **made)

    def dequantize(self, scheme: QuantScheme, dtype: torch.dtype = torch.float32) -> ExpertWeights:
        """Return canonical weights with both matrices in ``dtype`` and without scales."""
        from moekit.problem.convert import dequantized

        if (operand := scheme.weight) is None:
            return replace(self, w13=self.w13.to(dtype), w2=self.w2.to(dtype))
        changes: dict[str, Any] = {}
        for name in ("w13", "w2"):
            parts = {part: getattr(self, f"{name}_{part}") for part in _OF_QUANTIZED}
            changes[name] = dequantized(getattr(self, name), operand, dtype, **parts)
            changes |= {f"{name}_{part}": None for part in parts}
        return replace(self, **changes)


# Parts that only quantized matrices have.
_OF_QUANTIZED = ("scale", "zero_points", "g_idx")
_TINY = torch.finfo(torch.float32).tiny


def _three_dims(scale: Tensor | None, weight: Tensor, operand: OperandQuant) -> Tensor:
    assert scale is not None
    L, rows, columns = weight.shape
    shape = operand.scale_shape(rows, columns * operand.codes.per_byte)
    return scale.float().reshape(L, *shape)


def _merge_gate_up(weights: ExpertWeights, operand: OperandQuant) -> tuple[Tensor, Tensor]:
    """Return w13 under one scale per tensor if gate and up have one each, else w13 as it is."""
    w13, scale = weights.w13, weights.w13_scale
    assert scale is not None
    if not (operand.per_tensor and tuple(scale.shape) == (w13.shape[0], 2)):
        return w13, _three_dims(scale, w13, operand)
    halves = torch.unflatten(w13.float(), 1, (2, -1)) * scale.float()[:, :, None, None]
    merged = scale.float().abs().amax(dim=1).clamp(min=_TINY).view(-1, 1, 1)
    from moekit.problem.quantize import quantize

    requantized, _ = quantize(halves.flatten(1, 2), operand, merged)
    return requantized, merged


def gate_before_up(t: Tensor) -> Tensor:
    """Reorder rows gate0, up0, gate1, up1, ... (L, 2I, ...) to all gate rows, then all up rows."""
    # Not by cat, which has no fp8 under autocast.
    return torch.unflatten(t, 1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _deinterleave(weights: ExpertWeights, scheme: QuantScheme) -> ExpertWeights:
    """Reorder w13's rows, their scales and their biases as `gate_before_up` does."""
    changes: dict[str, Any] = {"w13": gate_before_up(weights.w13)}
    if weights.w13_bias is not None:
        changes["w13_bias"] = gate_before_up(weights.w13_bias)
    if weights.w13_scale is not None and scheme.weight is not None:
        group = scheme.weight.group[0]
        if group == 1:
            changes["w13_scale"] = gate_before_up(weights.w13_scale)
            if weights.w13_zero_points is not None:
                changes["w13_zero_points"] = gate_before_up(weights.w13_zero_points)
        elif group > 1:
            raise WeightsError(
                f"interleaved w13 with scales over blocks of {group} rows mixes gate and up in a "
                "block; dequantize, or store gate and up in halves"
            )
    return replace(weights, **changes, interleaved=False)
