"""The backwards of the core's own backends, judged by the same kit as a stranger's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moekit import MoEProblem
from moekit.errors import Unsupported
from moekit.problem.activation import ACTIVATIONS, CLAMPABLE, Activation
from moekit.testing import DispatcherGradientConformance, GradientConformance, oracle, run
from moekit.testing.cases import make_case
from moekit.testing.gradients import inputs_of, leaves


class TestTorch(GradientConformance):
    backend = "torch"


class TestReference(GradientConformance):
    backend = "reference"


class TestLocal(DispatcherGradientConformance):
    backend = "local"


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gradients_of_the_oracle_are_right(name: str, bias: bool, on_input: bool) -> None:
    """Autograd of the oracle agrees with differences of its outputs, in float64."""
    for limit in (None, 1.5) if name in CLAMPABLE else (None,):
        problem = MoEProblem(
            num_experts=3, top_k=1 if on_input else 2, hidden_size=4, intermediate_size=3,
            activation=Activation(name, limit=limit), has_bias=bias, device="cpu",
            dtype=torch.float32, apply_router_weight_on_input=on_input,
        )  # fmt: skip
        case = make_case(problem, 4, "masked")
        object.__setattr__(problem, "dtype", torch.float64)  # no backend has it
        # Differences cannot be taken at NaN. No other value of these rows or weights counts.
        weights = case.routing.topk_weights.nan_to_num(0.5)
        case = replace(case, x=case.x.nan_to_num(0.5).double(), weights=case.weights._map(_double),
                       routing=replace(case.routing, topk_weights=weights.double()))  # fmt: skip
        given = leaves(case)
        names = list(inputs_of(given))

        def output(*tensors, names=names, given=given, problem=problem):
            made = dict(zip(names, tensors, strict=True))
            x, topk_weights = made.pop("x"), made.pop("topk_weights")
            routing = replace(given.routing, topk_weights=topk_weights)
            return oracle(x, replace(given.weights, **made), routing, problem)

        assert output(*inputs_of(given).values()).dtype == torch.float64
        assert torch.autograd.gradcheck(output, tuple(inputs_of(given).values()))


def _double(t: torch.Tensor) -> torch.Tensor:
    return t.double()


def test_backends_without_a_backward_are_refused() -> None:
    with pytest.raises(Unsupported, match="'batched_reference' has no backward"):
        run("batched_reference", gradients=True)
