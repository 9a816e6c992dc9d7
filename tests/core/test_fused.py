"""Fused kernels: selection, the kernel interface, layers and faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_plugins import Fakes, installed, offers, state
from right_fused import acme_moe
from tuned_tables import make_table, no_tables, write_table

import moekit
from moekit import FusedMoE, ModularKernel, MoEProblem, ParallelConfig, Registry, registry
from moekit.errors import (
    BackendBroken,
    InvalidInput,
    InvalidProblem,
    NameClash,
    NoBackend,
    UnknownBackend,
    Unsupported,
    WeightsError,
)
from moekit.plugin import FusedSpec, RouterLogits
from moekit.testing.calls import check_call
from moekit.testing.cases import make_case
from moekit.testing.experts_base import sizes_of

SPEC = acme_moe.moekit_fused()[0]
PROBLEM = MoEProblem(**sizes_of(4, 2, 64, 48), dtype=torch.float32, device="cpu")


def known(**facts) -> Registry:
    found = registry().copy()
    found.register(replace(SPEC, **facts))
    return found


fakes = pytest.fixture(installed)
tuned = pytest.fixture(no_tables)


# -- selection -------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [{"experts": "acme_fused"}, {"dispatcher": "acme_fused"}])
def test_either_name_composes_it(names: dict[str, str]) -> None:
    kernel = moekit.compose(PROBLEM, **names, backends=known())
    assert str(kernel.explanation.chosen) == "acme_fused (fused)"
    assert repr(kernel).startswith("ModularKernel(acme_fused (fused): 4 experts")
    assert kernel.dispatcher is kernel.experts and not kernel.experts.spec.moves_tokens
    for tokens in (0, 1, 9):
        check_call(kernel, make_case(PROBLEM, tokens, "masked"))
    found = moekit.explain(PROBLEM, **names, backends=known())
    assert found.chosen.fused and found.as_dict()["chosen"]["fused"]


def test_priority_counts_once() -> None:
    assert not moekit.explain(PROBLEM, backends=known(priority=99)).chosen.fused
    chosen = moekit.explain(PROBLEM, backends=known(priority=101)).chosen
    assert chosen.fused and chosen.experts == chosen.dispatcher == "acme_fused"


def test_measurements_choose_it(tuned: Path) -> None:
    times = {"torch": {1: 5.0, 64: 9.0}, "acme_fused+acme_fused": {1: 4.0, 64: 7.0}}
    write_table(tuned / "a.json", make_table(times, PROBLEM))
    assert moekit.explain(PROBLEM, backends=known(priority=0)).chosen.fused
    times["acme_fused+acme_fused"] = {1: 6.0, 64: 10.0}
    write_table(tuned / "a.json", make_table(times, PROBLEM))
    assert moekit.explain(PROBLEM, backends=known(priority=0)).chosen.experts == "torch"


@pytest.mark.parametrize("names", [("local", "acme_fused"), ("acme_fused", "torch")])
def test_it_has_no_partner(names: tuple[str, str]) -> None:
    says = "acme_fused is a fused kernel, which is dispatcher and experts"
    with pytest.raises(Unsupported, match=says):
        moekit.compose(PROBLEM, *names, backends=known())


def test_reasons_against_it() -> None:
    backends = known()
    with pytest.raises(Unsupported, match="'acme_fused' cannot do this problem: has no bias"):
        moekit.compose(PROBLEM.replace(has_bias=True), "acme_fused", backends=backends)
    for changes, says in (
        ({"quant": "fp8_block"}, "quant scheme fp8_block is not supported"),
        ({"dtype": torch.float16}, "dtype float16 is not supported"),
        ({"training": True}, "has no backward"),
        ({"batch_invariant": True}, "is not batch-invariant"),
        ({"parallel": ParallelConfig(ep_size=2, tp_size=2, dp_size=2)}, "every rank must have"),
    ):
        problem, few = PROBLEM.replace(**changes), known(dtypes=frozenset({"float32"}))
        assert says in str(moekit.explain(problem, experts="acme_fused", backends=few))
    still = known(moves_tokens=False)
    parallel = ParallelConfig(ep_size=2)
    found = moekit.explain(PROBLEM.replace(parallel=parallel), "acme_fused", backends=still)
    assert "tokens must move between 2 ranks, and it moves none" in str(found)
    with pytest.raises(UnknownBackend, match="acme_fused is a fused kernel"):
        moekit.compose(PROBLEM, experts="acme_fused:8|torch", backends=backends)


def test_one_that_cannot_be_made_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    broken = known(target="acme_moe.fused:Nothing", priority=1000)
    assert moekit.compose(PROBLEM, backends=broken).experts.spec.name == "torch"
    assert "passing over acme_fused" in caplog.text
    with pytest.raises(BackendBroken, match="fused kernel 'acme_fused'"):
        moekit.compose(PROBLEM, "acme_fused", backends=broken)
    experts = known(target="moekit.backends.torch_experts:TorchExperts")
    with pytest.raises(BackendBroken, match="does not derive from FusedKernel"):
        moekit.compose(PROBLEM, "acme_fused", backends=experts)


def test_its_name_is_a_dispatchers_and_an_experts(fakes: Fakes) -> None:
    for name in ("torch", "local"):
        with pytest.raises(NameClash, match=f"fused kernel '{name}' is already offered by moekit"):
            registry().copy().register(replace(SPEC, name=name))
    source = f"""
import moekit
from moekit.plugin import FusedSpec

@moekit.hookimpl
def moekit_fused():
    return [FusedSpec(name=n, target={SPEC.target!r}) for n in ("torch", "shared", "own")]
"""
    fakes.install("alpha", source)
    fakes.install("beta", source.replace('"torch", ', "").replace('"own"', '"other"'))
    found = fakes.discover()
    alpha, beta = state(found, "alpha"), state(found, "beta")
    assert alpha.state == beta.state == "clash"
    assert "experts backend 'torch' is a name of moekit's own backend" in alpha.reason
    assert [spec.name for spec in alpha.fused] == ["shared", "own"]
    assert "own" in found.experts and "own" in found.dispatchers and "shared" not in found.experts
    with pytest.raises(NameClash, match="'shared' is offered by alpha-dist 1.0 and beta-dist 1.0"):
        moekit.compose(PROBLEM, experts="shared", backends=found)


def test_a_plugin_names_it_once(fakes: Fakes) -> None:
    fused = "\n@moekit.hookimpl\ndef moekit_fused():\n    import moekit.plugin\n"
    made = f"    return [moekit.plugin.FusedSpec(name='mine', target={SPEC.target!r})]\n"
    fakes.install("twice", offers("mine") + fused + made)
    found = state(fakes.discover(), "twice")
    assert (found.state, found.experts) == ("broken", ())
    assert "it offers the experts backend 'mine' twice" in found.reason


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"format": moekit.ActivationFormat.BATCHED, "reduces": False}, "format="),
        ({"reduces": False}, "reduces=False: a fused kernel has True"),
        ({"takes_quantized": True}, "takes_quantized=True"),
        ({"training": "a.b:C"}, "training='a.b:C': a fused kernel has None"),
        ({"multiples": lambda problem: (8, 8)}, "multiples="),
        ({"wire_schemes": frozenset({"fp8_block"})}, "wire_schemes="),
        ({"routes": "softmax"}, "routes='softmax': it must be a function, or None"),
    ],
)
def test_wrong_facts(facts: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        FusedSpec(name="x", target="a.b:C", **facts)


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        (None, "it takes ids, and chooses no experts"),
        (lambda how: 1 / 0, "its check failed: ZeroDivisionError: division by zero"),
        (lambda how: None, "its check failed: TypeError: routes returned None, expected a list"),
    ],
)
def test_routes_that_do_not_answer(routes, says: str) -> None:
    how = FusedMoE(4, 2, 64, 48, device="cpu").router.config
    (why,) = replace(SPEC, routes=routes).unsupported_routing(how)
    assert why.startswith(says)
    assert replace(SPEC).unsupported_routing(how) == []


# -- the kernel ------------------------------------------------------------------------------------


def test_the_kernel_interface() -> None:
    kernel = moekit.compose(PROBLEM, "acme_fused", backends=known())
    case, packed = make_case(PROBLEM, 9), kernel.pack(make_case(PROBLEM, 9).weights)
    kernel.warmup(packed, 8)
    report = kernel.memory(64)
    assert report.intermediate == kernel.experts.transient_bytes(64) and not report.buffers
    flights = [kernel.start(case.x, packed, case.routing) for _ in range(2)]
    for flight in flights:
        torch.testing.assert_close(flight.result(), case.reference(), rtol=1e-4, atol=1e-4)
    wide = torch.empty(9, 128)
    out = kernel(case.x, packed, case.routing, out=wide[:, ::2])
    assert out.data_ptr() == wide.data_ptr()
    torch.testing.assert_close(out, case.reference(), rtol=1e-4, atol=1e-4)
    kernel.destroy()
    kernel.destroy()


def test_it_is_both_parts() -> None:
    kernel = moekit.compose(PROBLEM, "acme_fused", backends=known())
    local = moekit.compose(PROBLEM, "local", "torch")
    for parts in ((local.dispatcher, kernel.experts), (kernel.dispatcher, local.experts)):
        with pytest.raises(InvalidProblem, match="pass it for both"):
            ModularKernel(*parts)


def test_wrong_router_logits() -> None:
    kernel = moekit.compose(PROBLEM, "acme_fused", backends=known())
    case, how = make_case(PROBLEM, 5), FusedMoE(4, 2, 64, 48, device="cpu").router.config
    packed = kernel.pack(case.weights)
    for logits in (torch.randn(4, 4), torch.randn(5, 3), torch.randn(5, 4, device="meta")):
        with pytest.raises(InvalidInput):
            kernel(case.x, packed, RouterLogits.of(logits, how, 2))
    for value in (float("nan"), float("inf"), -float("inf")):
        logits = torch.randn(5, 4)
        logits[2] = value
        with pytest.raises(InvalidInput, match="router logits of a token hold NaN"):
            kernel(case.x, packed, RouterLogits.of(logits, how, 2))
    plain = moekit.compose(PROBLEM, "local", "torch")
    with pytest.raises(InvalidInput, match="torch takes no router logits here: pass moekit.route"):
        given = RouterLogits.of(torch.randn(5, 4), how, 2)
        plain(case.x, plain.pack(case.weights), given)


# -- layers ----------------------------------------------------------------------------------------


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Register the kernel, and note of each of its calls whether it got logits."""
    routed: list[bool] = []
    run = SPEC.load().run

    def noted(self, out, x, weights, routing, workspace):
        routed.append(isinstance(routing, RouterLogits))
        run(self, out, x, weights, routing, workspace)

    monkeypatch.setattr(SPEC.load(), "run", noted)
    registry().register(SPEC)
    yield routed
    registry().unregister(SPEC)


@pytest.mark.parametrize(
    ("options", "call", "logits"),
    [
        ({}, {}, True),
        ({"renormalize": False}, {}, True),
        ({"max_num_tokens": 4}, {}, True),
        ({"scoring_func": "sigmoid"}, {}, False),
        ({"zero_expert_num": 1}, {}, False),
        ({}, {"is_padding": torch.tensor([False, True] * 5)}, False),
    ],
)
def test_a_layer_lets_it_route(layers: list[bool], options, call, logits: bool) -> None:
    made = [
        FusedMoE(4, 2, 64, 48, params_dtype=torch.float32, device="cpu", **options, experts=experts)
        for experts in ("acme_fused", "torch")
    ]
    weights = make_case(PROBLEM, 1).weights
    x, scores = torch.randn(10, 64), torch.randn(10, 4 + options.get("zero_expert_num", 0))
    outs = []
    for layer in made:
        layer.load_weights(weights)
        outs.append(layer(x, scores, **call))
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)
    assert set(layers) == {logits} and len(layers) == (3 if "max_num_tokens" in options else 1)


@pytest.mark.usefixtures("layers")
def test_a_layer_does_not_drop_ids_of_adapters() -> None:
    layer = FusedMoE(4, 2, 64, 48, params_dtype=torch.float32, device="cpu", experts="acme_fused")
    layer.load_weights(make_case(PROBLEM, 1).weights)
    ids = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(WeightsError, match="pass adapters=AdapterSlots"):
        layer(torch.randn(3, 64), torch.randn(3, 4), adapter_ids=ids)


def test_no_backend_is_left() -> None:
    alone = Registry()
    alone.register(SPEC)
    assert moekit.compose(PROBLEM, backends=alone).experts.spec.name == "acme_fused"
    with pytest.raises(NoBackend, match="acme_fused: has no bias support"):
        moekit.compose(PROBLEM.replace(has_bias=True), backends=alone)
