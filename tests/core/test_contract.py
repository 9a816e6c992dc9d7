"""The contract of dispatchers: who makes which tensor, and who runs where nothing moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moekit
from moekit.backends.local import LocalBatchedDispatcher, LocalDispatcher
from moekit.problem import ActivationFormat
from moekit.testing import assert_close
from moekit.testing.cases import make_case

PROBLEM = moekit.MoEProblem(
    num_experts=4, top_k=2, hidden_size=64, intermediate_size=48, dtype=torch.float32, device="cpu"
)


class OwnOutput(LocalDispatcher):
    """Makes both the tensor that experts write to and the output of the layer."""

    makes_output = True

    def output(self, dispatched):
        self.place = torch.empty_like(dispatched.x)
        return self.place

    def finalize(self, y, dispatched, out_TH):
        assert y is self.place
        self.given = out_TH
        return moekit.Pending.ready(y.clone() if out_TH is None else out_TH.copy_(y))


def moving(format: ActivationFormat = ActivationFormat.STANDARD) -> moekit.Registry:
    backends = moekit.Registry.discover({"MOEKIT_PLUGINS": ""})
    spec = moekit.DispatcherSpec(
        name="mover", target="nowhere:Mover", format=format, moves_tokens=True
    )
    backends.register(spec)
    return backends


def test_a_dispatcher_may_make_both_tensors() -> None:
    local = moekit.registry().dispatcher("local")
    spec = replace(local, name="own", moves_tokens=True)
    experts = moekit.compose(PROBLEM, experts="torch").experts
    kernel = moekit.ModularKernel(OwnOutput(spec, PROBLEM), experts)
    case = make_case(PROBLEM, 5)
    packed, out = kernel.pack(case.weights), torch.empty_like(case.x)
    assert_close(kernel(case.x, packed, case.routing), case.reference(), PROBLEM)
    assert kernel.dispatcher.given is None
    assert kernel(case.x, packed, case.routing, out=out) is out
    assert kernel.dispatcher.given is out
    assert_close(out, case.reference(), PROBLEM)
    assert kernel.memory(5).intermediate == experts.transient_bytes(5)


@pytest.mark.parametrize(
    ("format", "kind"),
    [
        (ActivationFormat.STANDARD, LocalDispatcher),
        (ActivationFormat.BATCHED, LocalBatchedDispatcher),
    ],
)
def test_where_nothing_moves_a_local_dispatcher_takes_the_place_of_a_moving_one(
    format: ActivationFormat, kind: type
) -> None:
    kernel = moekit.compose(PROBLEM, "mover", "torch", backends=moving(format))
    assert type(kernel.dispatcher) is kind and kernel.dispatcher.spec.name == "mover"
    assert not kernel.dispatcher.spec.moves_tokens
    case = make_case(PROBLEM, 9)
    out = kernel(case.x, kernel.pack(case.weights), case.routing)
    assert_close(out, case.reference(), PROBLEM)
