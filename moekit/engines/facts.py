"""Describe an engine's MoE layer in the same words for all engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moekit.errors import Unsupported
from moekit.problem import SCHEMES, ExpertWeights, MoEProblem, ParallelConfig


class Pair(NamedTuple):
    """A tensor of w13, and the corresponding tensor of w2."""

    w13: Tensor
    w2: Tensor

    def map(self, convert: Callable[[Tensor], Tensor]) -> Pair:
        """Apply ``convert`` to both tensors."""
        return Pair(convert(self.w13), convert(self.w2))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One MoE layer of an engine, on this rank.

    Attributes:
        layer: The engine's layer. It holds the loaded parameters, ``w13_<suffix>`` and
            ``w2_<suffix>``, with this rank's experts in dim 0, and gate and up in one parameter.
        method: What created the parameters: the engine's quantization method, or its scheme.
        num_experts: Logical experts of all ranks; each of ``num_redundant_experts`` repeats one.
        hidden, inner: H, and this rank's I, as the engine has rounded them up.
        activation: The engine's name of the activation.
        interleaved: The gate and up rows of w13 alternate.
        biases: The suffix of the biases, or None if there are none.
        ep_size, ep_rank: The ranks over which the engine spreads whole experts.
        dispatches: A dispatcher of moekit moves tokens between these ranks. If not, every rank
            passes the same tokens, and the engine adds up the ranks' partial sums.
    """

    layer: Any
    method: Any
    num_experts: int
    num_redundant_experts: int = 0
    top_k: int
    hidden: int
    inner: int
    dtype: torch.dtype
    activation: str
    interleaved: bool
    biases: str | None
    ep_size: int
    ep_rank: int
    dispatches: bool

    def has(self, name: str) -> bool:
        """Return whether the layer has a parameter or an attribute of this name."""
        return getattr(self.layer, name, None) is not None

    def pair(self, suffix: str) -> Pair:
        """Return the parameters ``w13_<suffix>`` and ``w2_<suffix>``."""
        return Pair(*(getattr(self.layer, f"{name}_{suffix}").detach() for name in ("w13", "w2")))

    def weights(self, codes: Pair | str, **more: Pair | None) -> ExpertWeights:
        """Return weights with the layer's biases.

        Args:
            codes: The matrices, or the suffix of their parameters.
            more: Both matrices' ``scale``, ``zero_points`` and so on, or None.
        """
        if self.biases is not None:
            more["bias"] = self.pair(self.biases).map(lambda bias: bias.to(self.dtype))
        pairs = {field: both._asdict() for field, both in more.items() if both is not None}
        named = {f"{m}_{field}": t for field, both in pairs.items() for m, t in both.items()}
        matrices = self.pair(codes) if isinstance(codes, str) else codes
        return ExpertWeights(*matrices, **named, interleaved=self.interleaved)

    def problem(self, quant: str, weights: ExpertWeights, **more: Any) -> MoEProblem:
        """Return the problem that the layer computes on this rank.

        Args:
            quant: The scheme of the weights that were read.
            more: The activation, and other fields of `MoEProblem`.
        """
        scheme = SCHEMES[quant].weight
        batches = self.ep_size if self.dispatches else 1
        return MoEProblem(
            num_experts=self.num_experts,
            num_redundant_experts=self.num_redundant_experts,
            top_k=self.top_k,
            hidden_size=weights.w2.shape[1],
            intermediate_size=weights.w2.shape[2] << (scheme is not None and scheme.packed),
            dtype=self.dtype,
            quant=quant,
            has_bias=weights.w13_bias is not None,
            parallel=ParallelConfig(ep_size=self.ep_size, ep_rank=self.ep_rank, dp_size=batches),
            device=weights.w2.device,
            **more,
        )

    def __str__(self) -> str:
        """Describe the layer for the log: layers that look the same are decided in the same way."""
        words = [
            f"{self.num_experts + self.num_redundant_experts} experts",
            f"top {self.top_k}",
            f"hidden {self.hidden}",
            f"intermediate {self.inner}",
            str(self.dtype).removeprefix("torch."),
            self.activation,
            type(self.method).__name__,
        ]
        words += [f"ep {self.ep_size}"] if self.ep_size > 1 else []
        return f"MoE layer ({', '.join(words)})"


def refusal(*reasons: str) -> Unsupported:
    """Return the error for a layer that stays with the engine."""
    return Unsupported("; ".join(reasons), reasons)


def refuse(against: Mapping[str, Any]) -> None:
    """Raise Unsupported with those reasons whose value is true."""
    if reasons := [reason for reason, holds in against.items() if holds]:
        raise refusal(*reasons)
