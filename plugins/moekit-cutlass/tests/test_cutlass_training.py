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


@pytest.mark.parametrize("name", ["silu", "relu2"])
def test_what_a_call_saves(name):
    """h in the order of experts, gate and up in turns, and three lists."""
    step = Step(activation=name)
    h, order, places, offsets = step.saved
    w13, x, ids = step.weights["w13"].float(), step.tokens.x.float(), step.tokens.topk_ids.view(-1)
    counts = torch.bincount(ids[ids >= 0], minlength=5)
    assert offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    live = int(offsets[-1])
    assert torch.equal(order[:live].long(), ids.where(ids >= 0, 5).argsort(stable=True)[:live])
    assert not order[live:].any() and bool((places[ids < 0] == -1).all())
    want = torch.stack([w13[ids[a]] @ x[a // 2] for a in order[:live].tolist()])
    if name == "silu":
        want = want.unflatten(1, (2, -1)).mT.flatten(1)
    assert relative(h[:live], want) < 4e-3
    assert step.experts.saved_bytes(40) == sum(t.nbytes for t in step.saved)


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


@pytest.mark.parametrize("into", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_added_to_buffers(into, transposed):
    step = Step()
    made = step.gradients()
    begin = {n: torch.randn(t.shape).to(into) for n, t in made.items()}
    if transposed:
        begin = {n: t.mT.contiguous().mT for n, t in begin.items()}
    found = step.gradients({n: t.clone() for n, t in begin.items()})
    for name, t in found.items():
        assert t.dtype is into and relative(t, begin[name].float() + made[name].float()) < 4e-3
        assert torch.equal(t[0], begin[name][0]) and not made[name][0].any()


def test_tiles_of_the_plan_arrive(monkeypatch):
    """Products without a gather may take their tiles from a counter."""
    want = Step().gradients()
    tile = Tile(128, 160, False, (1, 2), 4, dynamic=True)
    monkeypatch.setattr(training, "choose_tiles", lambda *_: Tiles(down=tile, back=tile))
    assert all(torch.equal(t, want[name]) for name, t in Step().gradients().items())


def test_router_gradient_alone():
    step = Step()
    only = step.inputs(Wanted(False, True, frozenset()))
    assert only.x is None and not only.kept
    assert torch.equal(only.topk_weights, step.inputs().topk_weights)
    assert step.inputs(Wanted(True, False, frozenset())).topk_weights is None


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
