"""Expert activation functions, by their usual names.

Gated kinds take ``h_R2I`` whose first half is the gate and second half the up projection; the
others take ``h_RI``. Everything is computed in fp32, and float64 input in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
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

# Kinds that backends compute unless they declare otherwise.
_GATED_BY_DEFAULT = frozenset({"silu", "gelu", "gelu_tanh", "swigluoai"})
NON_GATED = frozenset({"silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2"})
DEFAULT_ACTIVATIONS = _GATED_BY_DEFAULT | NON_GATED

GATED = _GATED_BY_DEFAULT | {"relu2_and_mul", "situ", "swiglustep"}
ACTIVATIONS = GATED | NON_GATED
"""The names of all kinds of activation."""

# Kinds that accept ``limit``.
CLAMPABLE = frozenset({"silu", "swigluoai", "situ", "swiglustep"})
# Kinds that have an ``alpha``, and its default.
ALPHAS = MappingProxyType({"swigluoai": 1.702, "situ": 1.0})
# Kinds that always have a ``limit``, and its default.
_LIMITS = {"swigluoai": 7.0, "swiglustep": 7.0}
# Other names of kinds, in models' configs and in vLLM. (vLLM's "relu2" has a gate.)
_ALIASES = {"gelu_pytorch_tanh": "gelu_tanh", "relu2_no_mul": "relu2"}


def _name(value: Any) -> str:
    if isinstance(value, str):
        value = _ALIASES.get(value, value)
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
    ``swiglustep`` (Step): ``min(silu(gate), limit) * clamp(up, -limit, limit)``; limit defaults to
    7.0. ``situ`` (Kimi): ``alpha * tanh(gate / alpha) * sigmoid(gate) * up``, and with a ``limit``
    up becomes ``limit * tanh(up / limit)``; alpha defaults to 1.0. vLLM calls these two numbers
    beta and linear_beta. ``relu2_and_mul``: ``relu(gate) ** 2 * up``, vLLM's relu2. (All as in
    vLLM 0.33, model_executor/layers/activation.py and layers/fused_moe/activation.py.)
    ``silu_no_mul``, ``gelu_no_mul``, ``gelu_tanh_no_mul``, ``relu2``: without a gate.
    ``gelu_pytorch_tanh`` is another name of gelu_tanh, and ``relu2_no_mul`` of relu2.

    Raises InvalidProblem for an unknown name or a parameter that the kind does not have.
    """

    name: str
    alpha: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        accept_fields(self, _KINDS)
        if self.name in ALPHAS:
            alpha = ALPHAS[self.name] if self.alpha is None else self.alpha
            if self.name == "situ" and alpha <= 0:
                raise InvalidProblem(f"alpha of activation 'situ' must be above 0 (got {alpha})")
            object.__setattr__(self, "alpha", alpha)
        elif self.alpha is not None:
            raise InvalidProblem(
                f"activation {self.name!r} has no alpha (got {self.alpha}); kinds with one: "
                f"{', '.join(ALPHAS)}"
            )
        if self.limit is None:
            object.__setattr__(self, "limit", _LIMITS.get(self.name))
        elif self.name not in CLAMPABLE:
            raise InvalidProblem(
                f"activation {self.name!r} has no clamp (got limit={self.limit}); "
                f"kinds with one: {', '.join(sorted(CLAMPABLE))}"
            )

    @property
    def gated(self) -> bool:
        """Return whether the kind has a gate, so that w13 has 2I rows."""
        return self.name in GATED

    @property
    def clamped(self) -> bool:
        """Return whether silu is clamped. Other kinds do not count: a limit is a part of them."""
        return self.name == "silu" and self.limit is not None


def apply_activation(h: Tensor, activation: Activation, dim: int = -1) -> Tensor:
    """Apply the activation along ``dim``: 2I entries -> I if gated, else I -> I, in ``h``'s dtype.

    Raises InvalidProblem for a gated activation of an odd number of entries.
    """
    if activation.gated and h.shape[dim] % 2:
        raise InvalidProblem(
            f"h has shape {tuple(h.shape)}, expected an even size in dim {dim}: {activation.name} "
            "takes gate and up, I entries each"
        )
    x = h if h.dtype == torch.float64 else h.float()
    if not activation.gated:
        y = _UNARY[activation.name.removesuffix("_no_mul")](x)
    else:
        gate, up = x.chunk(2, dim=dim)
        y = _gated(gate, up, activation)
    return y.to(h.dtype)


def _gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    name, alpha, limit = activation.name, activation.alpha, activation.limit
    if name == "situ":
        assert alpha is not None
        up = up if limit is None else limit * torch.tanh(up / limit)
        return alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * up
    if name == "swiglustep":
        assert limit is not None
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "swigluoai":
        assert alpha is not None
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return _UNARY[name.removesuffix("_and_mul")](gate) * up
