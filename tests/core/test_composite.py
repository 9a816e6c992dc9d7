"""Composites of experts backends: the kit's calls and memory, names, weights, warm-up.

The whole kit tests the members, which compute the numbers.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

import pytest
import torch

import moekit
from moekit.backends.reference import oracle
from moekit.backends.torch_experts import TorchExperts
from moekit.contract import PackedWeights
from moekit.contract.specs import ExpertsSpec
from moekit.discovery.registry import Registry, registry
from moekit.errors import BackendBroken, UnknownBackend, Unsupported
from moekit.plugin import weight_and_reduce
from moekit.problem import ActivationFormat, AdapterSlots
from moekit.runtime.workspace import Workspace
from moekit.selection.composite import composite
from moekit.selection.composite_experts import CompositeExperts
from moekit.testing.adapters import random_adapters
from moekit.testing.calls import QUANTIZED_WIRE, check_call, kit_registry
from moekit.testing.cases import make_case, random_weights
from moekit.testing.compare import complain
from moekit.testing.experts import ExpertsCalls

PROBLEM = moekit.MoEProblem(
    num_experts=4, top_k=2, hidden_size=64, intermediate_size=48, dtype=torch.float32, device="cpu"
)


# Away from GPUs only: with one, triton is compiled for it, and does not run on the CPU.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")


class Copying(TorchExperts):
    """Copies all weights in a call."""

    def transient_bytes(self, rows):
        p = self.problem
        columns = p.num_local_experts * (p.w13_rows + p.local_intermediate_size)
        return super().transient_bytes(rows) + columns * p.hidden_size * p.dtype.itemsize


class Turned(Copying):
    """Packs transposed copies of the weights."""

    def pack(self, weights):
        packed = super().pack(weights)
        turned = {n: t.transpose(1, -1).contiguous() for n, t in packed.experts.items()}
        return PackedWeights(self.spec.name, turned, packed.shared)

    def apply(self, y, tokens, weights, workspace):
        back = {n: t.transpose(1, -1).contiguous() for n, t in weights.experts.items()}
        super().apply(y, tokens, replace(weights, experts=back), workspace)


class Halved(Copying):
    """Packs gate and up as two views, and refuses tokens that its spec does not declare."""

    def pack(self, weights):
        packed = super().pack(weights)
        gate, up = packed["w13"].chunk(2, dim=1)
        rest = {n: t for n, t in packed.experts.items() if n != "w13"}
        return PackedWeights(self.spec.name, {**rest, "gate": gate, "up": up}, packed.shared)

    def quantize(self, x_RH, weights, valid_rows):
        assert "gate" in weights.experts, "another's weights"
        return super().quantize(x_RH, weights, valid_rows)

    def apply(self, y, tokens, weights, workspace):
        if self.problem.quant.activation is not None:
            accepted = {True: self.spec.takes_quantized, False: self.spec.takes_unquantized}
            assert accepted[tokens.x_scale is not None]
        whole = {n: t for n, t in weights.experts.items() if n not in ("gate", "up")}
        whole["w13"] = torch.cat([weights["gate"], weights["up"]], dim=1)
        super().apply(y, tokens, replace(weights, experts=whole), workspace)


def spec(name: str, target: str, **facts) -> ExpertsSpec:
    values = {
        "format": ActivationFormat.STANDARD,
        "reduces": True,
        "deterministic": True,
        "schemes": registry().expert("torch").schemes,
        **facts,
    }
    return ExpertsSpec(name=name, target=target, **values)


def backends(*composites: str) -> Registry:
    base = registry()
    made = Registry(plugins=base.plugins)
    gated = frozenset(a for a in moekit.problem.activation.ACTIVATIONS if not a.endswith("_no_mul"))
    made.register(spec("turned", f"{__name__}:Turned"))
    made.register(spec("halved", f"{__name__}:Halved", takes_unquantized=False, activations=gated))
    made.register(spec("other", f"{__name__}:Halved", takes_quantized=False, bias=False))
    made.register(spec("broken", "no_such_module:X"))
    for name in composites:
        made.register(composite(name, made.expert))
    return made


@pytest.mark.full  # in the interpreter, and the next class shows the same
class TestTorchAndTriton(ExpertsCalls):
    """The kit's calls have from 0 to 51 tokens: both serve."""

    backend = "torch:8|triton"
    backends = backends(backend)


class TestThreeTurns(ExpertsCalls):
    """Other layouts, a member that wants quantized tokens, and one that serves twice."""

    backend = "turned:2|halved:16|turned"
    backends = backends(backend)


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["torch|", "|torch", "torch:4|", "torch|triton:4", "torch:4|triton:8", "torch:8|triton:8|torch",
     "torch:9|triton:8|torch", "torch:0|triton", "torch:x|triton", "torch:-1|triton", "a b|torch",
     "torch:8|triton|torch", "torch:1.5|triton", "|", "torch|torch", "torch|triton", "triton:64"],
)  # fmt: skip
def test_names_that_are_no_composite(name: str) -> None:
    with pytest.raises(UnknownBackend, match="example 'triton:64|deepgemm'"):
        moekit.compose(PROBLEM, experts=name)


def test_members_must_exist_and_agree(monkeypatch) -> None:
    with pytest.raises(UnknownBackend, match="no experts backend named 'tritn'"):
        moekit.compose(PROBLEM, experts="torch:4|tritn")
    with pytest.raises(Unsupported, match="some of its members sum over top-k, and some do not"):
        moekit.compose(PROBLEM, experts="torch:4|reference")
    with pytest.raises(Unsupported) as caught:
        moekit.compose(PROBLEM.replace(has_bias=True), experts="torch:4|other", backends=backends())
    assert caught.value.reasons == ("has no bias support (other)",)
    monkeypatch.setenv("MOEKIT_EXPERTS", "torch:4|tritn")
    with pytest.raises(UnknownBackend, match="chosen by MOEKIT_EXPERTS"):
        moekit.explain(PROBLEM)
    monkeypatch.setenv("MOEKIT_EXPERTS", "torch:4|turned")
    assert moekit.compose(PROBLEM, backends=backends()).experts.spec.name == "torch:4|turned"


def test_members_that_fit_only_in_another_format() -> None:
    """Batched experts that are bridged to STANDARD sum over top-k; `reference` does not."""
    found = backends()
    found.register(
        spec("slabs", f"{__name__}:Turned", format=ActivationFormat.BATCHED, reduces=False)
    )
    explained = moekit.explain(PROBLEM, experts="slabs:4|reference", backends=found)
    assert {each.dispatcher for each in explained.combinations} == {"batched_reference"}
    with pytest.raises(Unsupported, match="some of its members sum over top-k"):
        moekit.compose(PROBLEM, "local", "slabs:4|reference", backends=found)


def test_a_member_that_does_not_load() -> None:
    with pytest.raises(BackendBroken, match="'broken'.*does not load"):
        moekit.compose(PROBLEM, experts="torch:4|broken", backends=backends())


def test_a_composite_declares_what_all_members_can_do() -> None:
    found = backends()
    made = composite("torch:4|other:8|triton", found.expert)
    triton = found.expert("triton")
    assert made.schemes == triton.schemes and "bfloat16" in made.dtypes
    assert not made.bias and not made.takes_quantized and made.takes_unquantized and made.movable
    assert made.requires == triton.requires and made.reduces
    fixed = replace(found.expert("turned"), name="fixed", movable=False, graph_safe=True)
    found.register(fixed)
    assert not composite("torch:4|fixed", found.expert).movable
    assert not composite("torch:4|fixed", found.expert).graph_safe
    slabs = made.native_to(ActivationFormat.BATCHED)
    assert slabs.format is ActivationFormat.BATCHED and not slabs.reduces


# -- calls -------------------------------------------------------------------------------------


def served(kernel, *tokens: int) -> list[str]:
    """Return the members that ran calls of these sizes; compare every result with the oracle."""
    found, experts = [], kernel.experts
    for member in experts.members:

        def apply(*args, member=member, run=member.apply):
            found.append(member.spec.name)
            run(*args)

        member.apply = apply
    packed = kernel.pack(random_weights(kernel.problem))
    for count in tokens:
        check_call(kernel, make_case(kernel.problem, count), packed)
    return found


def test_every_size_is_served_by_its_member() -> None:
    kernel = moekit.compose(PROBLEM, experts="torch:4|turned:9|torch", backends=backends())
    names = served(kernel, 1, 4, 5, 9, 10, 40)
    assert names == ["torch", "torch", "turned", "turned", "torch", "torch"]
    assert len(kernel.experts.members) == 2
    assert str(kernel.explanation.chosen) == "local + torch:4|turned:9|torch"


@interpreted
def test_members_take_adapters() -> None:
    """Each member gets its calls with the adapters; a member that takes none gives the reason."""
    p = PROBLEM.replace(adapters=AdapterSlots(2, 4))
    kernel = moekit.compose(p, "local", "torch:4|triton")
    adapters = random_adapters(p)
    for tokens in (3, 9):
        case = make_case(p, tokens)
        ids = torch.arange(tokens, dtype=torch.int32) % 3 - 1
        routing = replace(case.routing, adapter_ids=ids)
        packed = replace(kernel.pack(case.weights), adapters=adapters)
        out = kernel(case.x, packed, routing)
        assert not complain(out, oracle(case.x, case.weights, routing, p, adapters), p)
    spec = composite("torch:4|triton", registry().expert)
    without = replace(spec.members[1], adapters=None)
    made = replace(spec, members=(spec.members[0], without))
    assert made.unsupported(p) == ["does not take adapters (LoRA) (triton)"]


def test_sizes_are_tokens_of_one_rank() -> None:
    """Both ranks hold all rows, and each does half of their work."""
    shared = moekit.ParallelConfig(ep_size=2, ep_rank=1, dp_size=1)
    kernel = moekit.compose(
        PROBLEM.replace(parallel=shared), experts="torch:4|turned", backends=backends()
    )
    assert served(kernel, 7, 8, 9) == ["torch", "torch", "turned"]
    assert kernel.experts.largest_calls(20) == [20, 8]


def test_warmup_includes_the_calls_that_members_name(monkeypatch) -> None:
    """A member's kernels may change within the sizes that it serves."""

    def halves(self, num_tokens: int) -> list[int]:
        return [num_tokens >> n for n in range(num_tokens.bit_length())]

    monkeypatch.setattr(Turned, "largest_calls", halves, raising=False)
    kernel = moekit.compose(PROBLEM, experts="turned:10|torch:30|turned", backends=backends())
    assert kernel.experts.largest_calls(100) == [100, 50, 30, 10, 5, 2, 1]
    assert kernel.experts.largest_calls(20) == [20, 10, 5, 2, 1]
    assert kernel.experts.largest_calls(7) == [7, 3, 1]
    assert kernel.experts.largest_calls(0) == [0]


@pytest.mark.parametrize("name", ["turned", "torch:4|turned"])
def test_the_members_sum_is_that_of_the_dispatcher(name, monkeypatch) -> None:
    """Also behind a bridge."""

    def faster(*args):
        return weight_and_reduce(*args)

    monkeypatch.setattr(Turned, "weight_and_reduce", staticmethod(faster))
    kernel = moekit.compose(PROBLEM, "batched_reference", name, backends=backends())
    assert kernel.explanation.chosen.bridged
    assert kernel.dispatcher.weight_and_reduce is faster


@pytest.mark.parametrize("dispatcher", ["local", "batched_reference", QUANTIZED_WIRE])
@pytest.mark.parametrize("scheme", ["fp8_tensor", "int8_channel_token", "fp8_block"])
def test_members_get_quantized_tokens_if_they_take_them(dispatcher: str, scheme: str) -> None:
    """`Halved` asserts that its tokens are as declared, and that it got its own weights."""
    sizes = {"hidden_size": 160, "intermediate_size": 144, "quant": scheme}
    for name, facts in (("torch:4|halved", True), ("halved:4|other", False)):
        kernel = moekit.compose(
            PROBLEM.replace(**sizes), dispatcher, name, backends=kit_registry(backends())
        )
        assert kernel.experts.spec.takes_quantized is facts
        served(kernel, 3, 11)


# -- weights and memory ------------------------------------------------------------------------


def packed(name: str, problem=PROBLEM, weights=None):
    kernel = moekit.compose(problem, experts=name, backends=backends())
    return kernel, kernel.pack(weights or random_weights(problem))


@interpreted
@pytest.mark.parametrize("scheme", ["none", "fp8_tensor", "fp8_block", "int8_w8a16"])
def test_equal_layouts_are_held_once(scheme: str, caplog) -> None:
    caplog.set_level(logging.INFO, "moekit")
    problem = PROBLEM.replace(hidden_size=128, intermediate_size=128, quant=scheme)
    weights = random_weights(problem)
    strided = replace(weights, w13=weights.w13.transpose(1, 2).contiguous().transpose(1, 2))
    for given in (weights, strided):  # a copy that is made anyway is made once
        _, both = packed("torch:4|triton", problem, given)
        _, alone = packed("torch", problem, given)
        assert both.nbytes == alone.nbytes and both.extra_bytes == 0
        assert all(name.startswith("torch.") for name in (*both.experts, *both.shared))
    assert "packed weights take" not in caplog.text


def test_other_layouts_cost_memory_and_the_cost_is_logged(caplog) -> None:
    caplog.set_level(logging.INFO, "moekit")
    _, alone = packed("torch")
    kernel, both = packed("torch:4|turned:8|torch")
    assert both.nbytes == 2 * alone.nbytes and both.extra_bytes == alone.nbytes
    assert "weights take" in caplog.text and "more than one backend's" in caplog.text
    note = kernel.explanation.note
    assert "known when they are packed" in note and "emulates" not in note
    kernel, _ = packed("torch:4|turned", PROBLEM.replace(quant="int8_channel_token"))
    assert kernel.explanation.note.startswith(
        "activations stay exact (float32) in torch, which emulates int8_channel_token; turned "
        "quantizes activations to int8_channel_token; "
    )


def test_repack_writes_the_weights_of_every_member() -> None:
    old, new = random_weights(PROBLEM), random_weights(PROBLEM, "new")
    kernel, both = packed("torch:4|turned", PROBLEM, old._map(torch.clone))
    kernel.repack_(both, new)
    assert both.checksum() == packed("torch:4|turned", PROBLEM, new)[1].checksum()


def test_weights_of_another_division_are_refused() -> None:
    kernel, _ = packed("torch:4|turned")
    _, other = packed("torch:5|turned")
    case = make_case(PROBLEM, 3)
    with pytest.raises(moekit.errors.WeightsError, match="packed for 'torch:5|turned'"):
        kernel(case.x, other, case.routing)


def test_the_workspace_is_that_of_the_largest_member() -> None:
    class Sized(TorchExperts):
        def workspace(self, rows):
            each = {"small": 10, "large": 1000}[self.spec.name]
            return (moekit.contract.BufferSpec((rows * each,), torch.uint8),)

        def transient_bytes(self, rows):
            return {"small": 7000, "large": 1}[self.spec.name] * rows

    found = backends()
    for name in ("small", "large"):
        found.register(spec(name, f"{__name__}:Turned"))
    made = composite("large:100|small", found.expert)
    experts = CompositeExperts(made, PROBLEM)
    experts.members = [Sized(m, PROBLEM) for m in made.members[::-1]]
    experts.members.sort(key=lambda m: m.spec.name != made.members[0].name)

    def need(rows: int) -> tuple[int, int]:
        wanted = experts.workspace(rows)
        assert list(wanted[:-1]) == list(experts.member(rows).workspace(rows))
        return Workspace.nbytes_for(wanted), experts.transient_bytes(rows)

    assert need(50) == (50176, 50)  # `small` never serves up to 50 rows
    assert need(100) == (100096, 100)
    assert need(101) == (100096, 101 * 7000)
    assert need(9000) == (100096, 9000 * 7000)
    assert need(20000)[0] == 200192


def test_tuning_reaches_every_member() -> None:
    kernel, _ = packed("torch:5|turned")
    entered = []

    @contextlib.contextmanager
    def tuning(name):
        entered.append(name)
        yield
        entered.append(f"not {name}")

    for member in kernel.experts.members:
        member.tuning = lambda name=member.spec.name: tuning(name)
    with kernel.experts.tuning():
        assert entered == ["torch", "turned"]
    assert sorted(entered[2:]) == ["not torch", "not turned"]


def test_check_knows_composites(monkeypatch) -> None:
    from moekit.__main__ import main

    asked = []
    monkeypatch.setattr("moekit.testing.run", lambda name, args, **_: asked.append(name) or 0)
    assert main(["check", "torch:4|triton"]) == 0 and asked == ["torch:4|triton"]
    made = registry().expert("torch:4|triton")
    registry().unregister(made)
    assert main(["check", "torch:4|tritn"]) == 2
