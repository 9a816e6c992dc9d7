"""The backward with stand-ins for quack, on the CPU; autograd of the oracle decides."""

import cutlass_standins
import pytest
import torch
from moekit_cutlass import library, moekit_experts, training
from moekit_cutlass.providers import Tile
from moekit_cutlass.training import Tiles, TrainableCutlass

import moekit
from moekit import Activation, ExpertWeights
from moekit.plugin import Dispatched, Wanted
from moekit.testing import GradientConformance
from moekit.testing.cases import make_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins are for the CPU")

SIZES = dict(num_experts=5, top_k=2, hidden_size=32, intermediate_size=24, device="cpu")
NAMES = ("w13", "w2")
EVERYTHING = Wanted(True, True, frozenset(NAMES))


@pytest.fixture(autouse=True, scope="module")
def standins():
    with cutlass_standins.installed():
        yield


class TestGradients(GradientConformance):
    backend = "cutlass"
    backends = cutlass_standins.registry()


class Step:
    """The methods of the experts, called one after another; expert 0 has no rows."""

    def __init__(self, transposed: bool = False, **changes) -> None:
        p = moekit.MoEProblem(**SIZES | changes, training=True)
        kernel = moekit.compose(p, "local", "cutlass", backends=cutlass_standins.registry())
        assert type(kernel.experts) is TrainableCutlass
        self.experts, case = kernel.experts, make_case(p, 40)
        ids, held = case.routing.topk_ids, {n: getattr(case.weights, n) for n in NAMES}
        ids[ids == 0] = -1
        if transposed:
            held = {n: t.mT.contiguous().mT for n, t in held.items()}
        self.weights = self.experts.pack(ExpertWeights(**held))
        assert all(self.weights[n].data_ptr() == t.data_ptr() for n, t in held.items())
        self.tokens = Dispatched(case.x, None, ids, case.routing.topk_weights)
        torch.manual_seed(0)
        self.grad, self.y = torch.randn(case.x.shape).to(case.x), torch.empty_like(case.x)
        self.saved = self.experts.forward(self.y, self.tokens, self.weights)

    def inputs(self, wanted: Wanted = EVERYTHING):
        return self.experts.backward_input(self.grad, self.tokens, self.weights, self.saved, wanted)

    def gradients(self, into=None) -> dict[str, torch.Tensor]:
        add, kept = into is not None, self.inputs().kept
        into = into or {n: torch.empty_like(self.weights[n]) for n in NAMES}
        self.experts.backward_weight(self.grad, self.tokens, self.saved, kept, into, add)
        return into


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def test_parameters_and_buffers_in_any_strides():
    """Transposed matrices are copied, and rows that do not begin at 16 bytes."""
    plain, other = Step(), Step(transposed=True)
    assert torch.equal(plain.y, other.y)
    assert torch.equal(plain.inputs().x, other.inputs().x)
    made = plain.gradients()
    for name, t in other.gradients().items():
        assert t.stride(-1) != 1 and torch.equal(t, made[name]), name
    wide = torch.randn(40, 33).to(plain.grad)
    wide[:, 1:] = plain.grad
    plain.grad = wide[:, 1:]
    again = plain.gradients()
    assert all(torch.equal(again[name], t) for name, t in made.items())


def test_tiles_of_the_plan_arrive(monkeypatch):
    """Products without a gather may take their tiles from a counter."""
    want = Step().gradients()
    tile = Tile(128, 160, False, (1, 2), 4, dynamic=True)
    monkeypatch.setattr(training, "choose_tiles", lambda *_: Tiles(down=tile, back=tile))
    assert all(torch.equal(t, want[name]) for name, t in Step().gradients().items())


def test_reasons(monkeypatch):
    def reasons(**changes) -> str:
        (spec, batched) = moekit_experts()
        p = moekit.MoEProblem(**{**SIZES, "device": "sm90", **changes}, training=True)
        assert "has no backward: it computes no gradients" in " ".join(batched.unsupported(p))
        return " ".join(spec.unsupported(p))

    assert reasons() == reasons(activation="relu2") == ""
    assert "quack has a backward of gelu_no_mul, gelu_tanh" in reasons(activation="gelu")
    assert "not of swigluoai" in reasons(activation="swigluoai")
    assert "no clamp (limit=2)" in reasons(activation=Activation("silu", limit=2.0))
    assert "quack's backward has no biases" in reasons(has_bias=True)
    assert "hidden size 20 padded to 24, which has no backward" in reasons(hidden_size=20)
    quantized = reasons(quant="fp8_channel_token", hidden_size=256, intermediate_size=128)
    assert quantized == "its backward takes unquantized experts, not fp8_channel_token"
    monkeypatch.setattr(library, "missing", lambda name: "gone" if name == "quack" else "")
    assert reasons() == "only quack has a backward: gone"
