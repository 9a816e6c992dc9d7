"""The activations, by formulas written out here and not taken from moekit."""

from __future__ import annotations

from math import erf, exp, sqrt, tanh

import pytest
import torch

from moekit import Activation, ExpertsSpec
from moekit.errors import InvalidProblem
from moekit.problem import ActivationFormat
from moekit.problem.activation import ACTIVATIONS, GATED, apply_activation


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


FORMULAS = {
    Activation("silu"): lambda g, u: g * sigmoid(g) * u,
    Activation("silu", limit=1.5): lambda g, u: (
        min(g, 1.5) * sigmoid(min(g, 1.5)) * clamp(u, -1.5, 1.5)
    ),
    Activation("gelu"): lambda g, u: 0.5 * g * (1 + erf(g / sqrt(2))) * u,
    Activation("gelu_tanh"): lambda g, u: (
        0.5 * g * (1 + tanh(sqrt(2 / 3.141592653589793) * (g + 0.044715 * g**3))) * u
    ),
    Activation("swigluoai"): lambda g, u: (
        min(g, 7.0) * sigmoid(1.702 * min(g, 7.0)) * (clamp(u, -7.0, 7.0) + 1)
    ),
    Activation("swiglustep"): lambda g, u: min(g * sigmoid(g), 7.0) * clamp(u, -7.0, 7.0),
    Activation("swiglustep", limit=1.5): lambda g, u: (
        min(g * sigmoid(g), 1.5) * clamp(u, -1.5, 1.5)
    ),
    Activation("situ"): lambda g, u: tanh(g) * sigmoid(g) * u,
    Activation("situ", alpha=2.5, limit=1.5): lambda g, u: (
        2.5 * tanh(g / 2.5) * sigmoid(g) * 1.5 * tanh(u / 1.5)
    ),
    Activation("relu2_and_mul"): lambda g, u: max(g, 0.0) ** 2 * u,
}


@pytest.mark.parametrize("activation", FORMULAS, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gated(activation: Activation, dim: int) -> None:
    gate, up = (torch.randn(12, 14, dtype=torch.float32) * 6 for _ in range(2))
    found = apply_activation(torch.cat([gate, up], dim), activation, dim)
    formula = FORMULAS[activation]
    want = [
        formula(*pair) for pair in zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)
    ]
    want = torch.tensor(want, dtype=torch.float32)
    torch.testing.assert_close(found.flatten(), want, rtol=1e-5, atol=1e-4)


def test_every_gated_kind_has_a_formula() -> None:
    assert {activation.name for activation in FORMULAS} == GATED


@pytest.mark.parametrize(
    ("other", "name"), [("gelu_pytorch_tanh", "gelu_tanh"), ("relu2_no_mul", "relu2")]
)
def test_other_names(other: str, name: str) -> None:
    assert Activation(other) == Activation(name) and Activation(other).name == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(name="relu"), "choose one of"),
        (dict(name="gelu_pytorch_tanh_no_mul"), "choose one of"),
        (dict(name="swiglustep", alpha=1.0), "has no alpha .* kinds with one: swigluoai, situ"),
        (dict(name="swiglustep", limit=0.0), "limit=0.0"),
        (dict(name="situ", alpha=0.0), "above 0"),
        (dict(name="situ", alpha=-1.0), "above 0"),
        (dict(name="situ", limit=-1.0), "limit=-1.0"),
        (dict(name="relu2_and_mul", limit=7.0), "has no clamp"),
    ],
)
def test_wrong_parameters(arguments: dict, said: str) -> None:
    with pytest.raises(InvalidProblem, match=said):
        Activation(**arguments)


def test_backends_declare_the_later_kinds() -> None:
    """A spec written before they existed does not claim them."""
    spec = ExpertsSpec(name="x", target="m:C", format=ActivationFormat.STANDARD, reduces=True)
    assert ACTIVATIONS - spec.activations == {"relu2_and_mul", "situ", "swiglustep"}
