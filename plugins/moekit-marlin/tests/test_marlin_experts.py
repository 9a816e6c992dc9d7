"""Tests beyond the kit: Marlin's scales, act-order, padding and blocks.

On a GPU with the real operator, on a CPU with its stand-in.
"""

import dataclasses

import marlin_stand_in as stand_in
import pytest
import torch
from moekit_marlin import sizes

import moekit
from moekit.errors import WeightsError
from moekit.problem.quantize import unpack_int4
from moekit.testing.calls import check_call, pack
from moekit.testing.cases import make_case, random_weights

COMBINATIONS = [("local", "marlin"), ("batched_reference", "marlin_batched")]
DTYPES = (torch.bfloat16, torch.float16)
MXFP4 = "mxfp4_w4a16"
NVFP4 = "nvfp4_w4a16"


def make_problem(device: torch.device, **changes) -> moekit.MoEProblem:
    given = dict(num_experts=4, top_k=2, hidden_size=256, intermediate_size=192, quant="int8_w8a16")
    return moekit.MoEProblem(**{**given, "device": device, **changes})


def test_mxfp4_scales_far_apart(operator_device, backends):
    """Every code, and scales from one end of e8m0 to the other: exact, but 2**-127 counts as 0."""
    problem = make_problem(operator_device, quant=MXFP4, activation="relu2", num_experts=1, top_k=1)
    kernel = moekit.compose(problem, "local", "marlin", backends=backends)
    weights = random_weights(problem)
    exponents = torch.linspace(-127, 60, weights.w13_scale.numel()).round()
    w13_scale = torch.exp2(exponents).view(weights.w13_scale.shape).to(operator_device)
    w13 = torch.randint(256, weights.w13.shape, dtype=torch.uint8, device=operator_device)
    packed = kernel.pack(dataclasses.replace(weights, w13=w13, w13_scale=w13_scale))
    got = stand_in.exponents_of(packed["w13_scale"].cpu())[:, :, : problem.w13_rows]
    want = w13_scale.where(w13_scale > 2.0**-127, 0.0)
    assert torch.equal(got.transpose(1, 2), want.cpu())
    codes = stand_in.weights_of(packed["w13"].cpu(), 4)[:, : problem.w13_rows]
    assert torch.equal(codes, unpack_int4(w13).cpu().long())


def e4m3(*shape: int) -> torch.Tensor:
    """Return e4m3 numbers of every mantissa in fp32, from 1 / 64, the least normal one."""
    codes = torch.randint(0x08, 0x7F, shape, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [448.0, 416.0, 104.0])
def test_nvfp4_keeps_every_number(operator_device, backends, dtype, largest):
    """Every code, and any global scale: no factor is known from the largest scale alone."""
    problem = make_problem(operator_device, quant=NVFP4, dtype=dtype)
    kernel = moekit.compose(problem, "local", "marlin", backends=backends)
    weights, changes = random_weights(problem), {}
    for name in ("w13", "w2"):
        scale = getattr(weights, f"{name}_scale")
        e = e4m3(*scale.shape).clamp(max=largest)
        e[:, 0, 0], e[:, 1, 1], e[:, 2, 2] = largest, 0.0, largest / 2**12
        factor = torch.rand(len(e), 1, 1) / 100 + 1e-4
        changes[f"{name}_scale"] = (e * factor).to(operator_device)
        random = torch.randint(256, getattr(weights, name).shape, dtype=torch.uint8)
        changes[name] = random.to(operator_device)
    weights = dataclasses.replace(weights, **changes)
    packed = kernel.pack(weights)
    want = weights.dequantize(problem.quant)
    for name, rows in (("w13", problem.w13_rows), ("w2", problem.hidden_size)):
        read = stand_in.dequantized(
            packed[name].cpu(), packed[f"{name}_scale"].cpu(), None, stand_in.FP4, dtype,
            packed[f"{name}_global"].cpu(),
        )  # fmt: skip
        matrix = getattr(want, name).cpu()
        torch.testing.assert_close(read[:, :rows, : matrix.shape[2]], matrix, rtol=1e-5, atol=0)
        assert not read[:, rows:].any() and not read[:, :, matrix.shape[2] :].any()


def test_nvfp4_drops_scales_far_below_the_largest(operator_device, backends):
    problem = make_problem(operator_device, quant=NVFP4, num_experts=1, top_k=1)
    kernel = moekit.compose(problem, "local", "marlin", backends=backends)
    weights = random_weights(problem)
    scale = torch.full_like(weights.w2_scale, 1.0)
    scale[0, 0, 1], scale[0, 0, 2] = 2.0**-13, 2.0**-15
    packed = kernel.pack(dataclasses.replace(weights, w2_scale=scale))
    found = stand_in.e5m3_of(packed["w2_scale"].cpu(), torch.float16)[0, :3, 0] / 2.0**15
    assert found.tolist() == [1.0, 2.0**-13, 0.0]
    zeros = kernel.pack(dataclasses.replace(weights, w2_scale=torch.zeros_like(scale)))
    assert not zeros["w2_scale"].any() and not zeros["w2_global"].any()


def test_nvfp4_with_two_global_scales_is_refused(operator_device, backends):
    problem = make_problem(operator_device, quant=NVFP4)
    kernel = moekit.compose(problem, "local", "marlin", backends=backends)
    weights = random_weights(problem)
    scale = weights.w13_scale.clone()
    scale[2, scale.shape[1] // 2 :] *= 0.7
    with pytest.raises(WeightsError, match="the w13 scales of local expert 2 .* one global scale"):
        kernel.pack(dataclasses.replace(weights, w13_scale=scale))


def test_mxfp4_in_float16_is_refused(backends):
    problem = make_problem(torch.device("cpu"), quant=MXFP4, dtype=torch.float16)
    for experts in ("marlin", "marlin_batched"):
        reasons = backends.expert(experts).unsupported(problem)
        assert any("bfloat16 only" in reason for reason in reasons)


def in_act_order(problem: moekit.MoEProblem) -> moekit.ExpertWeights:
    """The same groups' scales, on shuffled columns."""
    weights, group, changes = random_weights(problem), problem.quant.weight.group[1], {}
    for name in ("w13", "w2"):
        columns = unpack_int4(getattr(weights, name)).shape[2]
        orders = [torch.randperm(columns) for _ in range(weights.num_experts)]
        changes[f"{name}_g_idx"] = (torch.stack(orders) // group).int().to(weights.w13.device)
    return dataclasses.replace(weights, **changes)


@pytest.mark.parametrize(("dispatcher", "experts"), COMBINATIONS)
@pytest.mark.parametrize("sorted_already", ["neither", "w13_g_idx", "w2_g_idx"])
def test_act_order(operator_device, backends, dispatcher, experts, sorted_already):
    """Tensor parallelism sorts one matrix; 192 columns are a group of 128 and a half."""
    problem = make_problem(operator_device, quant="int4_w4a16_g128_zp_act_order", has_bias=True)
    weights = in_act_order(problem)
    if sorted_already != "neither":
        weights = dataclasses.replace(weights, **{sorted_already: None})
    kernel = moekit.compose(problem, dispatcher, experts, backends=backends)
    check_call(kernel, make_case(problem, 9, "masked", weights=weights))


@pytest.mark.parametrize(("dispatcher", "experts"), COMBINATIONS)
@pytest.mark.parametrize(
    ("hidden", "inner", "scheme"),
    [(192, 48, "int8_w8a16"), (192, 272, MXFP4), (128, 100, NVFP4), (256, 36, "int4_w4a16_g64")],
)
def test_padded_intermediate(operator_device, backends, dispatcher, experts, scheme, hidden, inner):
    problem = make_problem(
        operator_device, hidden_size=hidden, intermediate_size=inner, quant=scheme, has_bias=True
    )
    kernel = moekit.compose(problem, dispatcher, experts, backends=backends)
    check_call(kernel, make_case(problem, 9, "masked"))


def test_scales_that_overflow_are_refused(operator_device, backends):
    problem = make_problem(operator_device, quant="fp8_w8a16_channel", dtype=torch.float16)
    kernel = moekit.compose(problem, "local", "marlin", backends=backends)
    weights = random_weights(problem)
    with pytest.raises(WeightsError, match="w2_scale reaches 300"):
        kernel.pack(dataclasses.replace(weights, w2_scale=torch.full_like(weights.w2_scale, 300.0)))


@pytest.mark.parametrize("zeros", ["", "_zp"])
def test_unscaled_sums_that_could_overflow_are_refused(backends, zeros):
    """An element of the kit's cases was -inf on an H200, where -5842 was right."""
    spec = backends.expert("marlin")
    half = dict(dtype=torch.float16, device="sm90")
    channel, grouped = (
        spec.unsupported(make_problem("cpu", quant=f"int4_w4a16_{g}{zeros}").replace(**half))
        for g in ("channel", "g128")
    )
    assert any("before it scales channels" in reason for reason in channel), channel
    assert not any("channels" in reason for reason in grouped), grouped


def test_blocks_follow_the_load(operator_device, backends):
    if operator_device.type != "cpu":
        pytest.skip("the stand-in keeps a record")
    problem = make_problem(operator_device, hidden_size=128, intermediate_size=64)
    kernel = moekit.compose(problem, "local", "marlin", backends=backends)
    for tokens, block in ((1, 8), (14, 8), (15, 16), (40, 32), (100, 64)):
        stand_in.calls.clear()
        case = make_case(problem, tokens)
        kernel(case.x, pack(kernel, case.weights), case.routing)
        first, second = stand_in.calls
        assert first["block"] == second["block"] == block
        assert (first["size_m"], first["top_k"]) == (tokens, 2)
        assert (second["size_m"], second["top_k"]) == (2 * tokens, 1)


def test_padding_of_the_intermediate_size():
    def padded(hidden, inner, quant="int8_w8a16", **changes):
        problem = make_problem(
            "sm90", hidden_size=hidden, intermediate_size=inner, quant=quant, **changes
        )
        return sizes.padded_intermediate(problem)

    assert padded(4096, 14336) == 14336 and padded(2048, 768) == 768
    assert padded(2880, 2880, MXFP4) == 2944  # gpt-oss
    assert padded(320, 272) == 384
    assert padded(2048, 704) == 704 and padded(2048, 704, "fp8_w8a16_block") == 768
    assert padded(192, 64, activation="relu2") == 128
    assert padded(100, 64) == 0 and padded(192, 128, "fp8_w8a16_block") == 0
