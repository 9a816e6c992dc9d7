"""Reference quantization against its definition, and weights in every scheme."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moekit
from moekit import SCHEMES, ExpertWeights, MoEProblem, ParallelConfig
from moekit.errors import InvalidProblem, WeightsError
from moekit.problem import convert
from moekit.problem.quant import E2M1, OperandQuant
from moekit.problem.quantize import compute_scale, dequantize, quantize
from moekit.testing.calls import QUANTIZED_WIRE, kit_registry
from moekit.testing.memory import measure

QUANTIZED = [s for s in SCHEMES.values() if s.weight is not None]


def rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("group", [(-1, -1), (1, -1), (128, 128), (1, 128)])
@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (1, 128), (3, 7)])
def test_every_group_uses_its_own_amax(dtype: str, group: tuple[int, int], shape) -> None:
    quant = OperandQuant(dtype=dtype, group=group)
    x = torch.randn(2, *shape) * torch.logspace(-3, 3, shape[0])[:, None]
    q, scale = quantize(x, quant)
    assert q.dtype == quant.torch_dtype and scale.shape == (2, *quant.scale_shape(*shape))
    gr, gc = (n if g < 0 else g for g, n in zip(group, shape, strict=True))
    for b in range(2):
        for i in range(0, shape[0], gr):
            for j in range(0, shape[1], gc):
                block = x[b, i : i + gr, j : j + gc]
                want = block.abs().max() / quant.qmax
                assert scale[b, i // gr, j // gc] == pytest.approx(float(want), rel=1e-6)
                back = q[b, i : i + gr, j : j + gc].float() * want
                step = want if dtype == "int8" else block.abs() / 8 + want / 512
                assert ((back - block).abs() <= step / 2 + 2e-5 * want).all()
    assert torch.equal(dequantize(q, scale, quant).to(x.dtype), dequantize(q, scale, quant))


def test_zeros_padding_empty_and_static() -> None:
    quant = OperandQuant(dtype="float8_e4m3fn", group=(-1, -1))
    q, scale = quantize(torch.zeros(4, 8), quant)
    assert float(scale) > 0 and not q.float().any()
    x = torch.randn(4, 8)
    x[2] = float("nan")
    valid = torch.tensor([True, True, False, True])
    assert torch.equal(compute_scale(x, quant, valid), compute_scale(x[valid], quant))
    assert compute_scale(torch.empty(0, 8), quant).shape == (1, 1)
    q, _ = quantize(torch.tensor([[1e6, -1e6]]), quant, torch.tensor([[1.0]]))
    assert q.float().tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize("scheme", ["mxfp4_w4a8", "mxfp8"])
def test_scales_that_are_powers_of_two(scheme: str) -> None:
    """fp8: the smallest that no value exceeds. fp4: as OCP has it, values reach 4 to 8."""
    for operand in (SCHEMES[scheme].weight, SCHEMES[scheme].activation):
        x = torch.randn(40, 96) * torch.logspace(-9, 9, 40)[:, None]
        x[0, :32] = torch.tensor([operand.qmax] + [0.0] * 31)
        q, scale = quantize(x, operand)
        assert scale.shape == (40, 3) and (torch.frexp(scale).mantissa == 0.5).all()
        largest = torch.unflatten(x, 1, (3, 32)).abs().amax(-1) / scale
        low, high = (4, 8) if operand.packed else (operand.qmax / 2, operand.qmax)
        assert ((largest >= low) & (largest <= high)).all() and scale[0, 0] == 1.0
        assert rms(dequantize(q, scale, operand), x) < (0.15 if operand.packed else 4e-2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", ["mxfp4_w4a8", "mxfp8", "nvfp4", "fp8_block"])
def test_weights_that_are_no_numbers_are_refused(scheme: str, value: float) -> None:
    p = problem(scheme)
    inner = p.local_intermediate_size
    weights = ExpertWeights(torch.randn(3, 2 * inner, 200), torch.randn(3, 200, inner))
    weights.w2[1, 7, 9] = value
    with pytest.raises(WeightsError, match="w2_scale holds values that are .*not finite"):
        weights.quantize(p.quant).check(p)


def test_scales_of_zero_are_powers_of_no_exponent() -> None:
    weights = ExpertWeights(torch.randn(3, 160, 200), torch.randn(3, 200, 80))
    for scheme in ("nvfp4", "mxfp8"):
        p = problem(scheme)
        made = weights.quantize(p.quant)
        made.w2_scale[0, 0, 0] = 0.0
        if scheme == "nvfp4":
            made.check(p)
            columns = made.canonical(p).dequantize(p.quant).w2[0, 0, :16]
            assert not columns.any()
            continue
        with pytest.raises(WeightsError, match="not powers of two"):
            made.check(p)
    exponents = replace(made, w2_scale=made.w2_scale.to(torch.float8_e8m0fnu))
    with pytest.raises(WeightsError, match="w2_scale is torch.float8_e8m0fnu, expected fp32"):
        exponents.check(p)


def test_nvfp4_scales_are_e4m3_times_one_number() -> None:
    operand = SCHEMES["nvfp4"].activation
    x = torch.randn(2, 40, 96) * torch.logspace(-2, 2, 40)[:, None]
    x[0, 3, 16:32] = 0.0
    q, scale = quantize(x, operand)
    assert scale.shape == (2, 40, 6) and (scale > 0).all()
    whole = scale.amax((1, 2), keepdim=True) / 448
    assert torch.equal((scale / whole).to(torch.float8_e4m3fn).float() * whole, scale)
    torch.testing.assert_close(whole.flatten(), x.abs().amax((1, 2)) / 6 / 448)
    back = dequantize(q, scale, operand)
    assert rms(back, x) < 0.15 and not back[0, 3, 16:32].any()
    assert compute_scale(torch.empty(0, 32), operand).shape == (0, 2)


@pytest.mark.parametrize("scheme", QUANTIZED, ids=lambda s: s.name)
def test_weights_round_trip(scheme) -> None:
    weights = ExpertWeights(torch.randn(3, 160, 200), torch.randn(3, 200, 80))
    quantized = weights.quantize(scheme)
    assert quantized.w13.dtype == scheme.weight.torch_dtype
    back = quantized.dequantize(scheme)
    limit = {"int8": 1.5e-2, "int4": 1.5e-1, "float4_e2m1": 1.5e-1}.get(scheme.weight.dtype, 4e-2)
    assert rms(back.w13, weights.w13) < limit and rms(back.w2, weights.w2) < limit


def problem(scheme: str, **changes) -> MoEProblem:
    sizes = dict(num_experts=3, top_k=1, hidden_size=200, intermediate_size=80)
    return MoEProblem(**{**sizes, **changes}, quant=scheme, dtype=torch.float32, device="cpu")


def test_missing_and_superfluous_scales_fail_at_construction() -> None:
    w13, w2 = torch.randn(3, 160, 200), torch.randn(3, 200, 80)
    with pytest.raises(WeightsError, match="w13_scale is missing; .*w2_scale is missing"):
        ExpertWeights(w13.to(torch.float8_e4m3fn), w2.to(torch.int8))
    with pytest.raises(WeightsError, match="w2_scale is given but w2 is torch.float32"):
        ExpertWeights(w13, w2, w2_scale=torch.ones(3))


def test_check_lists_every_fault() -> None:
    weights = ExpertWeights(torch.randn(3, 161, 200), torch.randn(3, 200, 80).bfloat16())
    with pytest.raises(WeightsError) as caught:
        weights.check(problem("none", has_bias=True))
    text = str(caught.value)
    assert "w13 has shape (3, 161, 200), expected (3, 160, 200)" in text
    assert "w2 is torch.bfloat16, expected torch.float32" in text
    assert "w13_bias is missing" in text and "w2_bias is missing" in text
    whole = ExpertWeights(torch.randn(3, 160, 200), torch.randn(3, 200, 80))
    with pytest.raises(WeightsError, match=r"holds 2 of the 3 experts: pass weights\.select"):
        whole.check(problem("none", parallel=ParallelConfig(ep_size=2)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: dict(w13_scale=w.w13_scale[:, :1]), "w13_scale has shape"),
        (lambda w: dict(w2_scale=w.w2_scale * float("nan")), "values that are not finite"),
        (lambda w: dict(w2_scale=w.w2_scale / 0), "values that are not finite"),
    ],
)
def test_bad_scales_are_refused(change, said: str) -> None:
    p = problem("fp8_channel_token")
    weights = ExpertWeights(torch.randn(3, 160, 200), torch.randn(3, 200, 80)).quantize(p.quant)
    weights.check(p)
    with pytest.raises(WeightsError, match=said):
        replace(weights, **change(weights)).check(p)


def test_static_input_scales_are_required_and_shared() -> None:
    p = problem("fp8_tensor_static")
    weights = ExpertWeights(torch.randn(3, 160, 200), torch.randn(3, 200, 80)).quantize(p.quant)
    with pytest.raises(WeightsError, match="w13_input_scale is missing"):
        weights.check(p)
    scaled = replace(
        weights, w13_input_scale=torch.tensor([1.0, 3.0, 2.0]), w2_input_scale=torch.tensor(0.5)
    )
    scaled.check(p)
    canonical = scaled.canonical(p)
    assert canonical.w13_input_scale.tolist() == [[3.0]]
    assert canonical.w2_input_scale.tolist() == [[0.5]]


def test_gate_and_up_scales_merge_to_the_larger() -> None:
    p = problem("fp8_tensor")
    gate, up = torch.randn(3, 80, 200), torch.randn(3, 80, 200) * 5
    scales, halves = [], []
    for half in (gate, up):
        q, s = quantize(half, p.quant.weight)
        halves.append(q)
        scales.append(s.view(3))
    w2 = ExpertWeights(torch.randn(3, 160, 200), torch.randn(3, 200, 80)).quantize(p.quant)
    weights = replace(
        w2,
        w13=torch.cat([h.view(torch.uint8) for h in halves], 1).view(torch.float8_e4m3fn),
        w13_scale=torch.stack(scales, dim=1),
    )
    weights.check(p)
    merged = weights.canonical(p)
    assert torch.equal(merged.w13_scale.view(3), torch.stack(scales, 1).amax(1))
    assert rms(merged.dequantize(p.quant).w13, torch.cat([gate, up], 1)) < 4e-2


@pytest.mark.parametrize("scheme", ["none", "fp8_channel_token", "int8_channel_token"])
def test_interleaved_becomes_halves(scheme: str) -> None:
    p = problem(scheme)
    halves = ExpertWeights(torch.randn(3, 160, 200), torch.randn(3, 200, 80)).quantize(p.quant)
    order = torch.arange(160).view(2, 80).T.reshape(-1)
    raw = halves.w13.view(torch.uint8) if scheme != "none" else halves.w13
    scale = None if halves.w13_scale is None else halves.w13_scale[:, order]
    mixed = replace(
        halves, w13=raw[:, order].view(halves.w13.dtype), w13_scale=scale, interleaved=True
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):  # in which cat has no fp8
        back = mixed.canonical(p)
    assert torch.equal(back.w13.float(), halves.w13.float()) and not back.interleaved
    if scale is not None:
        assert torch.equal(back.w13_scale, halves.w13_scale)


def test_interleaved_blocks_are_refused_not_mixed_up() -> None:
    p = problem("fp8_block")
    weights = ExpertWeights(torch.randn(3, 160, 200), torch.randn(3, 200, 80)).quantize(p.quant)
    with pytest.raises(WeightsError, match="mixes gate and up"):
        replace(weights, interleaved=True).canonical(p)


def test_e2m1_rounds_to_the_nearest_value():
    """Every value comes back, ties go to the even code, and nothing between is misplaced."""
    operand = SCHEMES["mxfp4_w4a16"].weight
    one = torch.ones(1, 1)
    values = torch.tensor([*E2M1, *(-v for v in E2M1)])

    def rounded(x):
        x = torch.nn.functional.pad(x, (0, -len(x) % 32))[None]
        packed, _ = quantize(x, operand, one.expand(1, x.shape[1] // 32))
        return dequantize(packed, one.expand(1, x.shape[1] // 32), operand)[0]

    assert torch.equal(rounded(values)[:16], values)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 7.0, -100.0])
    assert rounded(ties)[:10].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0, 6.0, -6.0]
    x = torch.empty(1024).uniform_(-6, 6)
    nearest = (x[:, None] - values).abs().amin(1)
    assert torch.allclose((rounded(x) - x).abs(), nearest)


@pytest.mark.parametrize(
    "name",
    [
        "int4_w4a16_g32_zp", "nvfp4",
        *(pytest.param(name, marks=pytest.mark.full)
          for name in ("fp8_block", "int4_w4a16_g128", "mxfp4_w4a16")),
    ],
)  # fmt: skip
def test_weights_are_converted_a_few_experts_at_a_time(name, monkeypatch):
    """The same bits as at once, with the memory of a few experts beside the results."""
    scheme, E, H, N = SCHEMES[name], 24, 256, 512
    given = ExpertWeights(torch.randn(E, N, H).bfloat16(), torch.randn(E, H, N // 2).bfloat16())
    at_once = given.quantize(scheme)
    back = at_once.dequantize(scheme, torch.bfloat16)
    monkeypatch.setattr(convert, "_AT_ONCE", 5 * N * H)  # and 10 of w2
    made = given.quantize(scheme)
    for field, tensor in at_once.tensors().items():
        assert torch.equal(getattr(made, field).view(torch.uint8), tensor.view(torch.uint8)), field
    for field, tensor in made.dequantize(scheme, torch.bfloat16).tensors().items():
        assert torch.equal(tensor, getattr(back, field)), field

    device, of_five = torch.device("cpu"), 5 * N * H
    results = sum(t.nbytes for t in made.tensors().values())
    peak, _ = measure(device, lambda: given.quantize(scheme))
    assert peak < results + 32 * of_five, "temporaries of all experts"
    peak, _ = measure(device, lambda: made.dequantize(scheme, torch.bfloat16))
    assert peak < back.w13.nbytes + back.w2.nbytes + 25 * of_five, "temporaries of all experts"


@pytest.mark.parametrize(
    ("scheme", "exact"),
    [
        ("none", "none"), ("fp8_tensor", "fp8_w8a16_tensor"), ("int8_w8a16", "int8_w8a16"),
        ("fp8_tensor_static", "fp8_w8a16_tensor"), ("fp8_channel_token", "fp8_w8a16_channel"),
        ("fp8_block", "fp8_w8a16_block"), ("int8_channel_token", "int8_w8a16"),
        ("int4_w4a8_g128", "int4_w4a16_g128"), ("mxfp4_w4a8", "mxfp4_w4a16"),
        ("nvfp4", "nvfp4_w4a16"),
    ],
)  # fmt: skip
def test_weight_only_forms(scheme: str, exact: str) -> None:
    assert SCHEMES[scheme].weight_only.name == exact


def test_a_scheme_without_a_weight_only_form() -> None:
    with pytest.raises(InvalidProblem, match="mxfp8 has no weight-only form: load its weights"):
        _ = SCHEMES["mxfp8"].weight_only


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel_token", "int8_channel_token"])
def test_weight_only_problems_have_the_same_numbers_on_any_number_of_ranks(scheme: str) -> None:
    """Several ranks send tokens in the scheme's form, which `torch` does not use on one rank."""
    p = MoEProblem(
        num_experts=4, top_k=2, hidden_size=256, intermediate_size=128, quant=scheme, device="cpu"
    )  # fmt: skip
    w13, w2 = torch.randn(4, 256, 256) / 16, torch.randn(4, 256, 128) / 11
    w = ExpertWeights(w13.bfloat16(), w2.bfloat16()).quantize(p.quant)
    x, routing = torch.randn(9, 256).bfloat16(), moekit.route(torch.randn(9, 4), 2)

    def run(problem: MoEProblem, dispatcher: str) -> torch.Tensor:
        kernel = moekit.compose(problem, dispatcher, "torch", backends=kit_registry())
        return kernel(x, kernel.pack(w), routing)

    alone, sent = run(p, "local"), run(p, QUANTIZED_WIRE)
    exact = p.replace(quant=p.quant.weight_only)
    assert rms(sent, alone) > 5e-3
    for dispatcher in ("local", QUANTIZED_WIRE):
        assert torch.equal(run(exact, dispatcher), alone)
