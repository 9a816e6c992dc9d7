"""Expert activation functions, by their usual names.

Gated kinds take ``h_R2I`` whose first half is the gate and second half the up projection; the
others take ``h_RI``. Everything is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.errors import InvalidProblem
from moekit.untrusted.arguments import Kind, accept_fields, optional, real, shown

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}

GATED = frozenset({"silu", "gelu", "gelu_tanh", "swigluoai"})
NON_GATED = frozenset({"silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2"})
ACTIVATIONS = GATED | NON_GATED

# Kinds that accept ``limit`` (gate <= limit, |up| <= limit).
CLAMPABLE = frozenset({"silu", "swigluoai"})


def _name(value: Any) -> str:
    if not isinstance(value, str) or value not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise InvalidProblem(f"activation {shown(value)} is unknown; choose one of: {known}")
    return value


_KINDS = {
    "name": Kind("", _name),
    "alpha": optional(real()),
    "limit": optional(real(above=0.0)),
}


@dataclass(frozen=True)
class Activation:
    """An expert's activation.

    ``silu``, ``gelu``, ``gelu_tanh``: ``act(gate) * up``; ``silu`` with a ``limit`` first clamps
    gate to at most ``limit`` and up to ``[-limit, limit]`` ("swiglu with clamp").
    ``swigluoai`` (gpt-oss): the same clamp, then ``gate * sigmoid(alpha * gate) * (up + 1)``;
    alpha defaults to 1.702 and limit to 7.0.
    ``silu_no_mul``, ``gelu_no_mul``, ``gelu_tanh_no_mul``, ``relu2``: without a gate.

    Raises InvalidProblem for an unknown name or a parameter that the kind does not have.
    """

    name: str
    alpha: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        accept_fields(self, _KINDS)
        if self.name == "swigluoai":
            object.__setattr__(self, "alpha", 1.702 if self.alpha is None else self.alpha)
            object.__setattr__(self, "limit", 7.0 if self.limit is None else self.limit)
        elif self.alpha is not None:
            raise InvalidProblem(
                f"activation {self.name!r} has no alpha (got {self.alpha}); only swigluoai has"
            )
        if self.limit is not None:
            if self.name not in CLAMPABLE:
                raise InvalidProblem(
                    f"activation {self.name!r} has no clamp (got limit={self.limit}); "
                    f"kinds with one: {', '.join(sorted(CLAMPABLE))}"
                )

    @property
    def gated(self) -> bool:
        return self.name in GATED

    @property
    def clamped(self) -> bool:
        """Whether silu is clamped. swigluoai does not count: it always clamps."""
        return self.name == "silu" and self.limit is not None


def apply_activation(h: Tensor, activation: Activation, dim: int = -1) -> Tensor:
    """Apply the activation along ``dim``: 2I entries if gated, else I -> I, in ``h``'s dtype."""
    x = h.float()
    if not activation.gated:
        y = _UNARY[activation.name.removesuffix("_no_mul")](x)
    else:
        gate, up = x.chunk(2, dim=dim)
        if activation.limit is not None:
            gate = gate.clamp(max=activation.limit)
            up = up.clamp(-activation.limit, activation.limit)
        if activation.name == "swigluoai":
            assert activation.alpha is not None
            y = gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
        else:
            y = _UNARY[activation.name](gate) * up
    return y.to(h.dtype)
