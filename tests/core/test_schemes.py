"""Quantization schemes that plugins declare: every part of moekit takes them."""

from __future__ import annotations

import importlib
import pickle
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from fake_plugins import Fakes, installed, state

import moekit
from moekit import MoEProblem, OperandQuant, ParallelConfig, QuantScheme, registry
from moekit.checkpoint.schemes import scheme_for
from moekit.discovery import registry as plugins
from moekit.errors import InvalidProblem
from moekit.formats.methods import format_of_scheme
from moekit.plugin import SCHEMES, WIRE_SCHEMES, Codes
from moekit.problem.quantize import dequantize, quantize
from moekit.selection.composite import composite
from moekit.testing import ExpertsConformance
from moekit.testing.calls import check_call
from moekit.testing.cases import make_case
from moekit.testing.experts_base import sizes_of

# Ternary numbers, four in a byte; the last code is not used.
TERNARY = OperandQuant("ternary", (1, 32), codes=Codes(bits=2, codebook=(0.0, 1.0, -1.0, 1.0)))
UINT8 = OperandQuant("uint8", (1, 32), zero_points=True, codes=Codes(largest=127.0, zero=128))


# Activations in powers of two, by a function.
def encode(x: torch.Tensor) -> torch.Tensor:
    power = (x.abs().log2() * 8).round().clamp(-100, 0) + 101
    return torch.where(x == 0, 0, x.sign() * power).to(torch.int8)


def decode(q: torch.Tensor) -> torch.Tensor:
    return torch.where(q == 0, 0.0, q.sign() * 2.0 ** ((q.float().abs() - 101) / 8))


LOG8 = Codes(torch_dtype=torch.int8, largest=1.0, encode=encode, decode=decode, error=0.1)
ADDED = {
    "ternary": QuantScheme(name="ternary", weight=TERNARY),
    "uint8_zp": QuantScheme(name="uint8_zp", weight=UINT8),
    "log8": QuantScheme(
        name="log8",
        weight=OperandQuant("int8", (1, -1)),
        activation=OperandQuant("log8", (1, -1), codes=LOG8),
    ),
}


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    for scheme in ADDED.values():
        registry().register(scheme)
    yield
    for scheme in ADDED.values():
        registry().unregister(scheme)


fakes = pytest.fixture(installed)


def problem(scheme: str, **changes) -> MoEProblem:
    return MoEProblem(
        **{**sizes_of(6, 2, 96, 80), "dtype": torch.float32, "device": "cpu", **changes},
        quant=scheme,
    )


@pytest.mark.parametrize("scheme", ADDED)
@pytest.mark.parametrize("experts", ["torch", "reference"])
def test_backends_of_every_scheme_serve_it(scheme: str, experts: str) -> None:
    layer = problem(scheme)
    kernel = moekit.compose(layer, experts=experts)
    for tokens in (0, 1, 33):
        check_call(kernel, make_case(layer, tokens, "masked"))
    assert eval(repr(layer), {**vars(moekit), "torch": torch}) == layer
    spec = registry().expert("torch")
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec and "schemes=SCHEMES," in repr(again) and again.schemes is SCHEMES


@pytest.mark.parametrize("scheme", ["ternary", "uint8_zp"])
def test_shares_of_a_rank(scheme: str) -> None:
    for rank in range(2):
        parallel = ParallelConfig(tp_size=2, tp_rank=rank, dp_size=1)
        layer = problem(scheme, intermediate_size=160, parallel=parallel)
        check_call(moekit.compose(layer), make_case(layer, 9))


def test_codes_of_zero_pad() -> None:
    backends = registry().copy()
    spec = moekit.ExpertsSpec(
        name="of_64", target=registry().expert("torch").target, reduces=True,
        format=moekit.ActivationFormat.STANDARD, schemes=SCHEMES, multiples=lambda p: (64, 64),
    )  # fmt: skip
    backends.register(spec)
    for scheme in ("ternary", "uint8_zp"):
        layer = problem(scheme)
        kernel = moekit.compose(layer, experts="of_64", backends=backends)
        check_call(kernel, make_case(layer, 9, "masked"))
    without = OperandQuant("no_zero", (1, 32), codes=Codes(bits=1, codebook=(-1.0, 1.0)))
    registry().register(scheme := QuantScheme(name="no_zero", weight=without))
    try:
        assert "no_zero has no code of 0" in str(spec.unsupported(problem("no_zero")))
        check_call(moekit.compose(problem("no_zero")), make_case(problem("no_zero"), 9))
    finally:
        registry().unregister(scheme)


def test_quantized_activations_of_a_plugin_travel() -> None:
    assert "log8" in WIRE_SCHEMES and "ternary" not in WIRE_SCHEMES
    assert "log8" in registry().dispatchers["naive"].wire_schemes
    assert {"log8", "fp8_block"} <= WIRE_SCHEMES & registry().expert("torch").schemes


def test_composites_do_what_all_members_do() -> None:
    made = composite("torch:8|reference", registry().expert)
    assert made.schemes == set(SCHEMES) >= set(ADDED)
    wires = composite("naive:8|naive", registry().dispatcher)
    assert wires.wire_schemes == set(WIRE_SCHEMES)


def test_a_plugin_may_list_schemes_when_it_is_imported(fakes: Fakes, monkeypatch) -> None:
    """The listing has moekit's schemes then, and also the plugin's after discovery."""
    lists = "from moekit.plugin import SCHEMES, WIRE_SCHEMES\nALL = {*SCHEMES} | WIRE_SCHEMES\n"
    fakes.install("early", lists + source("early"))
    monkeypatch.setattr(plugins, "_registry", None)
    monkeypatch.setenv("MOEKIT_PLUGINS", "early")
    importlib.invalidate_caches()
    assert "fp8_block" in importlib.import_module("fake_early_dist").ALL
    assert problem("early").quant.name == "early"
    assert state(registry(), "early").state == "ok" and "early" in {*SCHEMES}


def test_rounding_is_to_the_nearest_and_ties_go_to_even_codes() -> None:
    x = torch.tensor([[0.5, -0.5, 0.51, -0.51, 1.0, -1.0, 0.1, 0.0] * 4])
    q, scale = quantize(x, TERNARY)
    assert q.shape == (1, 8) and q.dtype == torch.uint8
    assert dequantize(q, scale, TERNARY)[0, :8].tolist() == [0, 0, 1, -1, 1, -1, 0, 0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"decode": lambda q: -decode(q)}, "differs from x by 2 of its size"),
        ({"decode": lambda q: 2 * decode(q)}, "of its size"),
        ({"decode": lambda q: decode(q).flip(-1)}, "differs from x by 1"),
        ({"decode": lambda q: decode(q)[..., :1]}, "decode returned (2, 8, 1) torch.float32"),
        ({"decode": lambda q: decode(q).half()}, "decode returned (2, 8, 64) torch.float16"),
        ({"encode": lambda x: encode(x).float()}, "encode returned (2, 8, 64) torch.float32"),
        ({"zero": 1}, "encode stores zeros as {0}, and zero is 1"),
    ],
)
def test_the_kit_finds_functions_that_are_wrong(change, says: str) -> None:
    """The oracle decodes with them too."""
    operand = replace(ADDED["log8"].activation, codes=replace(LOG8, **change))
    scheme = replace(ADDED["log8"], activation=operand)
    registry().unregister(ADDED["log8"])
    registry().register(scheme)
    kit = type("Kit", (ExpertsConformance,), {"backend": "torch", "device": "cpu"})()
    try:
        with pytest.raises(AssertionError, match=re.escape(says)) if says else nullcontext():
            kit.test_scheme("log8")
    finally:
        registry().unregister(scheme)
        registry().register(ADDED["log8"])


def test_checkpoint_formats_name_its_codes() -> None:
    format = format_of_scheme(ADDED["ternary"])
    assert scheme_for(format, 512) == "ternary" and format.per_byte == 4
    q, _ = quantize(torch.randn(8, 64), TERNARY)
    assert torch.equal(format.values(q, None), dequantize(q, torch.ones(8, 2), TERNARY))


def test_a_layer_of_it() -> None:
    layer = moekit.FusedMoE(6, 2, 96, 80, params_dtype=torch.float32, quant="ternary", device="cpu")
    case = make_case(layer.problem, 7)
    layer.load_weights(case.weights)
    out = layer(case.x, torch.randn(7, 6))
    assert layer.kernel.explanation.chosen.experts == "torch" and bool(out.isfinite().all())


BOOK = "bits=2, codebook=(0.0, 1.0, -1.0, 0.5)"


def source(scheme: str, codes: str = BOOK, more: str = "") -> str:
    return f"""
import moekit, torch
from moekit.plugin import Codes, OperandQuant, QuantScheme

@moekit.hookimpl
def moekit_schemes():
    weight = OperandQuant("two_bits", (1, 32), codes=Codes({codes}))
    return [QuantScheme(name={scheme!r}, weight=weight{more})]
"""


def test_a_plugin_offers_a_scheme(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install("good", source("two_bits_g32"))
    found = fakes.discover()
    assert [s.name for s in state(found, "good").schemes] == ["two_bits_g32"]
    monkeypatch.setattr(plugins, "_registry", found)
    layer = problem("two_bits_g32")
    check_call(moekit.compose(layer), make_case(layer, 5))
    assert MoEProblem(**sizes_of(4, 2, 64, 32), quant=found.schemes["two_bits_g32"]).quant.weight


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (source("x", "bits=3"), "bits=3: it must be 1, 2, 4 or 8"),
        (source("x", "bits=4, codebook=(0.0, 1.0)"), "codebook has 2 values, expected 16"),
        (source("x", "bits=1, codebook=(0.0, float('nan'))"), "it must be a tuple of floats"),
        (source("x", "bits=4"), "largest=0.0: it must be"),
        (source("x", "largest=1.0, encode=abs"), "encode and decode must be given together"),
        (source("x", "largest=1.0, bits=4, torch_dtype=torch.int8"), "are stored in torch.uint8"),
        (source("Bad Name"), "name='Bad Name': it must be lower-case"),
        (source("x", more=", activation=weight"), "its codes declare no error"),
        (source("x").replace("(1, 32)", "(0, 32)"), "group=(0, 32): it must be"),
        (source("x").replace('"two_bits"', '"int4"'), "other codes need another name"),
        (source("x").replace(f", codes=Codes({BOOK})", ""), "codes=None: it must be Codes"),
        (source("x").replace("return [", "return ['x'] or ["), "returned 'x'"),
        (source("x"), ""),
    ],
)  # fmt: skip
def test_faults_are_the_plugins_state(fakes: Fakes, text: str, says: str) -> None:
    fakes.install("bad", text)
    found = fakes.discover()
    assert state(found, "bad").state == ("broken" if says else "ok")
    assert says in state(found, "bad").reason
    assert "fp8_block" in found.schemes and ("x" in found.schemes) == (not says)


def test_clashes(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install("alpha", source("shared"))
    fakes.install("beta", source("shared"))
    fakes.install("gamma", source("fp8_block"))
    fakes.install("broken", "raise OSError('no nf4 today')")
    found = fakes.discover()
    reason = "quantization scheme 'shared' is also offered by beta-dist 1.0"
    assert (state(found, "alpha").state, state(found, "alpha").reason) == ("clash", reason)
    assert "'fp8_block' is a name of moekit's own scheme" in state(found, "gamma").reason
    assert not state(found, "gamma").schemes and "shared" not in found.schemes
    monkeypatch.setattr(plugins, "_registry", found)
    assert SCHEMES["fp8_block"].activation is not None
    with pytest.raises(InvalidProblem, match=re.escape("plugin broken (broken): OSError: no nf4")):
        problem("nf4")
