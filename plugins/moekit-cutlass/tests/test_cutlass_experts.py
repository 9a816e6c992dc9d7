"""The experts with stand-ins for the libraries, through moekit.compose, on the CPU."""

from dataclasses import replace

import cutlass_standins
import pytest
import torch
from moekit_cutlass import providers, w4a8
from moekit_cutlass.providers import Quack, QuackPlan, Tile, bands, quack_config

import moekit
from moekit.errors import WeightsError
from moekit.testing import ExpertsConformance
from moekit.testing.calls import check_call
from moekit.testing.cases import make_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins are for the CPU")

SIZES = dict(num_experts=5, top_k=2, hidden_size=96, intermediate_size=80, device="cpu")
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True, scope="module")
def standins():
    with cutlass_standins.installed():
        yield


class TestStandard(ExpertsConformance):
    backend = "cutlass"
    backends = cutlass_standins.registry()


class TestBatched(ExpertsConformance):
    backend = "cutlass_batched"
    backends = cutlass_standins.registry()


def check(dispatcher: str, experts: str, kinds=("masked", "none"), tokens: int = 9, **changes):
    problem = moekit.MoEProblem(**{**SIZES, **changes})
    backends = cutlass_standins.registry()
    kernel = moekit.compose(problem, dispatcher, experts, backends=backends)
    for kind in kinds:
        check_call(kernel, make_case(problem, tokens, kind))


PAIRS = [("local", "cutlass"), ("batched_reference", "cutlass_batched")]


W4A8 = dict(quant="int4_w4a8_g128", hidden_size=256, intermediate_size=512)


def test_w4a8_all_codes_and_wide_scales():
    """-8 too, which quantizing never gives, and groups whose scales lie a factor 1000 apart."""
    problem = moekit.MoEProblem(**{**SIZES, **W4A8})
    kernel = moekit.compose(problem, "local", "cutlass", backends=cutlass_standins.registry())
    case = make_case(problem, 9)
    changes = {}
    for name in ("w13", "w2"):
        w, scale = getattr(case.weights, name), getattr(case.weights, f"{name}_scale")
        changes[name] = torch.randint(256, w.shape, dtype=torch.uint8)
        changes[f"{name}_scale"] = scale * torch.logspace(-3, 0, scale.shape[2])
    check_call(kernel, replace(case, weights=replace(case.weights, **changes)))


def test_w4a8_tables():
    torch.manual_seed(0)
    scale = torch.rand(300, 8) * 0.5 + 0.75
    steps = torch.arange(-8.0, 0.0)
    table, channel = w4a8.tables(scale)
    assert table.shape == (300, 8, 8) and table.dtype == torch.float8_e4m3fn
    assert bool(torch.isfinite(table.float()).all())

    def error(values: torch.Tensor) -> float:
        exact = scale[:, :, None] * steps
        return float((values - exact).norm() / exact.norm())

    eighth = (scale / scale.amax(1, keepdim=True) * 448).to(FP8).float() / 8
    packed = (eighth.to(FP8).float()[:, :, None] * steps).to(FP8).float()
    library = error(packed * scale.amax(1)[:, None, None] / 56)
    ours = error(table.float() * channel[:, None, None])
    assert ours < 0.8 * library and ours < 0.027
    table, channel = w4a8.tables(torch.exp2(torch.randint(-5, 5, (300, 8)).float()) * 0.3)
    assert torch.equal(table.float() / table.float()[:, :, 7:], (-steps).expand(300, 8, 8))


def test_w4a8_refuses():
    sizes = {**SIZES, **W4A8}
    spec = cutlass_standins.registry().expert("cutlass")
    assert spec.unsupported(moekit.MoEProblem(**sizes)) == []
    for change, words in (
        ({"dtype": torch.float16}, "returns bfloat16, not float16"),
        ({"quant": "int4_w4a16_g128_act_order"}, "int4_w4a16_g128_act_order is not supported"),
    ):
        (reason,) = spec.unsupported(moekit.MoEProblem(**{**sizes, **change}))
        assert words in reason
    for change in ({"hidden_size": 384}, {"intermediate_size": 128}):
        problem = moekit.MoEProblem(**{**sizes, **change})
        made = spec.padded(problem)
        assert spec.unsupported(problem) == [] and spec.padding(problem)
        assert made.hidden_size % 256 == made.intermediate_size % 256 == 0
    problem = moekit.MoEProblem(**sizes)
    kernel = moekit.compose(problem, "local", "cutlass", backends=cutlass_standins.registry())
    weights = make_case(problem, 1).weights
    ordered = torch.arange(512).expand(5, -1) // 128
    with pytest.raises(WeightsError, match="w2_g_idx is given, but scheme int4_w4a8_g128 has no"):
        kernel.pack(replace(weights, w2_g_idx=ordered))
    with pytest.raises(WeightsError, match=r"w13 is on cpu.*pack weights.to\('cuda'\)"):
        w4a8.pack(weights, problem.replace(device="sm90"), "cutlass")


@pytest.mark.parametrize(("dispatcher", "experts"), PAIRS)
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2", "swigluoai"])
def test_quack(dispatcher, experts, gather, activation, monkeypatch):
    plan = QuackPlan(gather, Tile(dynamic=not gather), Tile(dynamic=True))
    monkeypatch.setattr("moekit_cutlass.providers.quack_plans", lambda problem: ((0, plan),))
    with cutlass_standins.installed(none="quack"):
        for has_bias in (False, True):
            check(dispatcher, experts, activation=activation, has_bias=has_bias)


def test_quack_is_told_of_a_tile(monkeypatch):
    made = {("quack.gemm_config", "GemmConfig"): lambda **given: given}
    monkeypatch.setattr(providers, "quack_entry", lambda *names: made[names])
    for dynamic in (False, True):
        tile = Tile(64, 256, False, (1, 2), 4, dynamic)
        assert quack_config.__wrapped__(tile) == {
            "tile_m": 64, "tile_n": 256, "pingpong": False, "cluster_m": 1, "cluster_n": 2,
            "max_swizzle_size": 4, "is_dynamic_persistent": dynamic, "device_capacity": 9,
        }  # fmt: skip
        with cutlass_standins.installed(none="quack"):
            quack = Quack(moekit.MoEProblem(**SIZES), QuackPlan(False, Tile(), tile))
        assert (quack.scratch > 0) == dynamic


def test_what_is_fused():
    def fuses(**changes) -> bool:
        return Quack(moekit.MoEProblem(**{**SIZES, **changes})).activates

    assert fuses() and fuses(activation="relu2") and fuses(activation="gelu_tanh")
    assert not fuses(activation="gelu") and not fuses(activation="swigluoai")
    assert not fuses(activation=moekit.Activation("silu", limit=2.0)) and not fuses(has_bias=True)


@pytest.mark.parametrize("scheme", ["none", "fp8_channel_token"])
def test_more_experts_than_a_library_takes(monkeypatch, scheme):
    """torch's grouped GEMM takes fewer than 1024, and vLLM's has a thread for each of them."""

    def problem(experts: int) -> moekit.MoEProblem:
        return moekit.MoEProblem(**{**SIZES, "num_experts": experts}, quant=scheme)

    def providers(experts: int) -> set[str]:
        return {band.provider.name for band in bands(problem(experts))}

    quantized = scheme != "none"
    assert providers(1023) == {"torch", "vllm" if quantized else "quack"}
    spec = cutlass_standins.registry().experts["cutlass"]
    if quantized:
        assert providers(1024) == {"vllm"}
        (reason,) = spec.unsupported(problem(1025))
        assert "at most 1023 experts, and a rank has 1025" in reason and "at most 1024" in reason
    else:
        assert providers(1024) == {"quack"}
        check("local", "cutlass", num_experts=1024)
        monkeypatch.setenv("MOEKIT_CUTLASS_PROVIDER", "torch")
        (reason,) = spec.unsupported(problem(1024))
        assert "at most 1023 experts, and a rank has 1024" in reason


def test_provider_by_size():
    """Workspaces for many rows hold what the provider of fewer rows needs."""
    problem = moekit.MoEProblem(**SIZES)
    backends = cutlass_standins.registry()
    kernel = moekit.compose(problem, "local", "cutlass", backends=backends)
    names = [(b.low, b.provider.name) for b in bands(problem)]
    assert names == [(0, "torch"), (128, "quack"), (512, "quack")]
    wide = bands(problem.replace(intermediate_size=8192))
    assert [b.low for b in wide] == [0, 128, 512, 2048]
    assert all(a.high == b.low for a, b in zip(wide, wide[1:], strict=False))
    experts = kernel.experts
    assert experts._provider(1, 2).name == "torch"
    assert experts._provider(512 * 5, 1).name == experts._provider(256 * 5, 2).name == "quack"
    for fewer, more in ((1, 100), (100, 319), (319, 320), (1279, 1280), (1280, 5000)):
        small, large = experts.workspace(fewer), experts.workspace(more)
        assert all(a.nbytes <= b.nbytes for a, b in zip(small, large, strict=True))
    assert experts.transient_bytes(10) > 0
    case = make_case(problem, 1300, "masked")
    check_call(kernel, case)
