"""Both backends through moekit.compose against the fp32 oracle: on a GPU with the real operator,
on a CPU with its stand-in."""

import dataclasses

import marlin_stand_in as stand_in
import pytest
import torch
from moekit_marlin import sizes
from weight_forms import interleaved

import moekit
from moekit.backends.reference import oracle
from moekit.errors import WeightsError
from moekit.problem.quant import unpack_int4
from moekit.runtime.workspace import Workspace
from moekit.testing.calls import SUMS_ITSELF, check_call, kit_registry
from moekit.testing.cases import make_case

LIMITS = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3}  # relative RMS error
PAIRS = [
    ("local", "marlin"),
    ("batched_reference", "marlin_batched"),
    ("local", "marlin_batched"),
    ("batched_reference", "marlin"),
]
EIGHT_BITS = ["fp8_w8a16_tensor", "fp8_w8a16_channel", "fp8_w8a16_block", "int8_w8a16"]
FOUR_BITS = sorted(name for name in moekit.SCHEMES if name.startswith("int4_w4a16"))
ACT_ORDER = [name for name in FOUR_BITS if moekit.SCHEMES[name].weight.act_order]
FOUR_BITS = [name for name in FOUR_BITS if name not in ACT_ORDER]
MXFP4 = "mxfp4_w4a16"
NVFP4 = "nvfp4_w4a16"


class NaNWorkspace(Workspace):
    """Scratch filled with NaN (all ones): what is read before it is written shows."""

    def take(self, specs, device):
        views = super().take(specs, device)
        for view in views:
            view.view(-1).view(torch.uint8).fill_(255)
        return views


def make_problem(device: torch.device, **changes) -> moekit.MoEProblem:
    given = dict(num_experts=4, top_k=2, hidden_size=256, intermediate_size=192, quant="int8_w8a16")
    return moekit.MoEProblem(**{**given, "device": device, **changes})


def make_weights(problem: moekit.MoEProblem) -> moekit.ExpertWeights:
    p = problem
    experts, inner = p.num_local_experts, p.local_intermediate_size

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape) * scale).to(p.dtype)

    weights = moekit.ExpertWeights(
        randn(experts, p.w13_rows, p.hidden_size, scale=p.hidden_size**-0.5),
        randn(experts, p.hidden_size, inner, scale=inner**-0.5),
        w13_bias=randn(experts, p.w13_rows) if p.has_bias else None,
        w2_bias=randn(experts, p.hidden_size) if p.has_bias else None,
    )
    return weights.quantize(p.quant).to(p.device.type)


def in_act_order(weights: moekit.ExpertWeights, group: int) -> moekit.ExpertWeights:
    """Other weights: the same groups' scales, on shuffled columns."""
    changes = {}
    for name, columns in (("w13", 2 * weights.w13.shape[2]), ("w2", 2 * weights.w2.shape[2])):
        orders = [torch.randperm(columns) for _ in range(weights.num_experts)]
        changes[f"{name}_g_idx"] = (torch.stack(orders) // group).int().to(weights.w13.device)
    return dataclasses.replace(weights, **changes)


def make_inputs(problem, tokens: int) -> tuple[torch.Tensor, moekit.Routing]:
    x = torch.randn(tokens, problem.hidden_size).to(problem.dtype)
    ids = torch.stack([torch.randperm(problem.num_experts)[: problem.top_k] for _ in range(tokens)])
    ids[torch.rand(ids.shape) < 0.2] = -1
    ids[-1] = -1
    weights = torch.rand(ids.shape) * 2 + 0.1
    weights[ids < 0] = float("nan")
    device = problem.device.type
    return x.to(device), moekit.Routing(weights.to(device), ids.to(device))


def check(backends, problem, dispatcher: str, experts: str, tokens: int = 9, weights=None) -> None:
    torch.manual_seed(0)
    kernel = moekit.compose(
        problem, dispatcher, experts, workspace=NaNWorkspace(), backends=backends
    )
    weights = weights or make_weights(problem)
    x, routing = make_inputs(problem, tokens)
    x[-1] = float("nan")  # a token without experts: padding
    packed = kernel.pack(weights)
    out = kernel(x, packed, routing)
    assert (out[-1] == 0).all() and torch.isfinite(out).all()
    want = oracle(x[:-1], weights, moekit.Routing(*(t[:-1] for t in parts(routing))), problem)
    error = float((out[:-1].float() - want).norm() / want.norm())
    assert error < LIMITS[problem.dtype]
    assert torch.equal(out, kernel(x, packed, routing)), "not deterministic"


def parts(routing: moekit.Routing) -> tuple[torch.Tensor, torch.Tensor]:
    return routing.topk_weights, routing.topk_ids


@pytest.mark.parametrize(("dispatcher", "experts"), PAIRS[:2])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("scheme", EIGHT_BITS + FOUR_BITS)
def test_schemes(operator_device, backends, dispatcher, experts, dtype, scheme):
    problem = make_problem(operator_device, quant=scheme, dtype=dtype)
    check(backends, problem, dispatcher, experts)


@pytest.mark.parametrize(("dispatcher", "experts"), PAIRS[:2])
def test_mxfp4(operator_device, backends, dispatcher, experts):
    """Layers are like gpt-oss's: biases, its clamped activation, gate and up rows alternating."""
    problem = make_problem(operator_device, quant=MXFP4, activation="swigluoai", has_bias=True)
    torch.manual_seed(1)
    weights = make_weights(problem)
    check(backends, problem, dispatcher, experts, weights=weights)
    kernel = moekit.compose(problem, dispatcher, experts, backends=backends)
    plain, mixed = kernel.pack(weights), kernel.pack(interleaved(weights))
    for name, tensor in plain.experts.items():
        assert torch.equal(tensor, mixed[name]), name


def test_mxfp4_scales_far_apart(operator_device, backends):
    """Every code, and scales from one end of e8m0 to the other: exact, but 2**-127 counts as 0."""
    problem = make_problem(operator_device, quant=MXFP4, activation="relu2", num_experts=1, top_k=1)
    kernel = moekit.compose(problem, "local", "marlin", backends=backends)
    weights = make_weights(problem)
    exponents = torch.linspace(-127, 60, weights.w13_scale.numel()).round()
    w13_scale = torch.exp2(exponents).view(weights.w13_scale.shape).to(operator_device)
    w13 = torch.randint(256, weights.w13.shape, dtype=torch.uint8, device=operator_device)
    packed = kernel.pack(dataclasses.replace(weights, w13=w13, w13_scale=w13_scale))
    got = stand_in.exponents_of(packed["w13_scale"].cpu())[:, :, : problem.w13_rows]
    want = w13_scale.where(w13_scale > 2.0**-127, 0.0)
    assert torch.equal(got.transpose(1, 2), want.cpu())
    codes = stand_in.weights_of(packed["w13"].cpu(), 4)[:, : problem.w13_rows]
    assert torch.equal(codes, unpack_int4(w13).cpu().long())


@pytest.mark.parametrize(("dispatcher", "experts"), PAIRS[:2])
@pytest.mark.parametrize("dtype", LIMITS)
def test_nvfp4(operator_device, backends, dispatcher, experts, dtype):
    problem = make_problem(operator_device, quant=NVFP4, dtype=dtype, has_bias=True)
    check(backends, problem, dispatcher, experts)


def e4m3(*shape: int) -> torch.Tensor:
    """Return e4m3 numbers of every mantissa in fp32, from 1 / 64, the least normal one."""
    codes = torch.randint(0x08, 0x7F, shape, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("largest", [448.0, 416.0, 104.0])
def test_nvfp4_keeps_every_number(operator_device, backends, dtype, largest):
    """Every code, and any global scale: no factor is known from the largest scale alone."""
    problem = make_problem(operator_device, quant=NVFP4, dtype=dtype)
    kernel = moekit.compose(problem, "local", "marlin", backends=backends)
    weights, changes = make_weights(problem), {}
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
    weights = make_weights(problem)
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
    weights = make_weights(problem)
    scale = weights.w13_scale.clone()
    scale[2, scale.shape[1] // 2 :] *= 0.7
    with pytest.raises(WeightsError, match="the w13 scales of local expert 2 .* one global scale"):
        kernel.pack(dataclasses.replace(weights, w13_scale=scale))


def test_mxfp4_in_float16_is_refused(backends):
    problem = make_problem(torch.device("cpu"), quant=MXFP4, dtype=torch.float16)
    for experts in ("marlin", "marlin_batched"):
        reasons = backends.expert(experts).unsupported(problem)
        assert any("bfloat16 only" in reason for reason in reasons)


@pytest.mark.parametrize(("dispatcher", "experts"), PAIRS[:2])
@pytest.mark.parametrize("scheme", ACT_ORDER)
def test_act_order(operator_device, backends, dispatcher, experts, scheme):
    problem = make_problem(operator_device, quant=scheme, intermediate_size=256, has_bias=True)
    torch.manual_seed(1)
    group = problem.quant.weight.group[1]
    weights = in_act_order(make_weights(problem), group)
    check(backends, problem, dispatcher, experts, weights=weights)
    assert moekit.explain(problem, backends=backends).chosen.experts == "marlin"


@pytest.mark.parametrize("in_order", ["w13_g_idx", "w2_g_idx"])
def test_act_order_of_one_matrix(operator_device, backends, in_order):
    """Tensor parallelism leaves w2 so; 192 columns are a group of 128 and a half."""
    problem = make_problem(operator_device, quant="int4_w4a16_g128_zp_act_order")
    torch.manual_seed(1)
    weights = in_act_order(make_weights(problem), 128)
    weights = dataclasses.replace(weights, **{in_order: None})
    check(backends, problem, *PAIRS[0], weights=weights)


@pytest.mark.parametrize(("dispatcher", "experts"), PAIRS[2:])
def test_bridged(operator_device, backends, dispatcher, experts):
    check(backends, make_problem(operator_device), dispatcher, experts)


@pytest.mark.parametrize(("dispatcher", "experts"), PAIRS[:2])
@pytest.mark.parametrize(
    "activation",
    [
        "gelu",
        "gelu_tanh",
        moekit.Activation("swigluoai", limit=1.0),
        moekit.Activation("silu", limit=0.5),
        "silu_no_mul",
        "gelu_no_mul",
        "gelu_tanh_no_mul",
        "relu2",
    ],
    ids=str,
)
def test_activations_with_bias(operator_device, backends, dispatcher, experts, activation):
    problem = make_problem(operator_device, activation=activation, has_bias=True)
    check(backends, problem, dispatcher, experts)


@pytest.mark.parametrize(("dispatcher", "experts"), PAIRS[:2])
@pytest.mark.parametrize("scheme", [*EIGHT_BITS, *FOUR_BITS, MXFP4, NVFP4])
@pytest.mark.parametrize(("hidden", "inner"), [(192, 48), (192, 272), (128, 100), (256, 36)])
def test_padded_intermediate(operator_device, backends, dispatcher, experts, scheme, hidden, inner):
    problem = make_problem(
        operator_device, hidden_size=hidden, intermediate_size=inner, quant=scheme, has_bias=True
    )
    if backends.expert(experts).unsupported(problem):
        pytest.skip("the operator has no tile for it")
    check(backends, problem, dispatcher, experts)


@pytest.mark.parametrize(("dispatcher", "experts"), PAIRS[:2])
@pytest.mark.parametrize("tokens", [1, 2, 63, 90])
def test_token_counts(operator_device, backends, dispatcher, experts, tokens):
    problem = make_problem(operator_device, hidden_size=128, intermediate_size=64)
    check(backends, problem, dispatcher, experts, tokens=tokens + 1)


@pytest.mark.parametrize(("dispatcher", "experts"), PAIRS[:2])
def test_every_expert_one_expert_and_weight_on_input(
    operator_device, backends, dispatcher, experts
):
    check(backends, make_problem(operator_device, top_k=4), dispatcher, experts, tokens=4)
    one = make_problem(operator_device, num_experts=1, top_k=1)
    check(backends, one, dispatcher, experts, tokens=20)
    on_input = make_problem(operator_device, top_k=1, apply_router_weight_on_input=True)
    check(backends, on_input, dispatcher, experts, tokens=20)


def test_local_experts_only(operator_device, backends):
    parallel = moekit.ParallelConfig(ep_size=2, ep_rank=1, dp_size=1)
    check(backends, make_problem(operator_device, parallel=parallel), "local", "marlin")


def test_workspace_for_more_rows_serves_fewer(operator_device, backends):
    problem = make_problem(operator_device, hidden_size=128, intermediate_size=64)
    kernel = moekit.compose(problem, "local", "marlin", backends=backends)
    experts, many = kernel.experts, 200
    packed = kernel.pack(make_weights(problem))
    for rows in (1, 30, 130):
        scratch = NaNWorkspace().take(experts.workspace(many), operator_device)
        x, routing = make_inputs(problem, rows)
        tokens = moekit.Dispatched(x, None, routing.topk_ids, routing.topk_weights)
        y = torch.empty_like(x)
        experts.apply(y, tokens, packed, scratch)
        assert torch.equal(y, kernel(x, packed, routing))


def test_packed_tensors_move_with_their_experts(operator_device, backends):
    for scheme in [*EIGHT_BITS[:1], *ACT_ORDER, MXFP4]:
        problem = make_problem(operator_device, quant=scheme, intermediate_size=256, has_bias=True)
        kernel = moekit.compose(problem, "local", "marlin", backends=backends)
        weights = make_weights(problem)
        if scheme in ACT_ORDER:
            weights = in_act_order(weights, problem.quant.weight.group[1])
        order = torch.tensor([2, 0, 3, 1], device=operator_device)
        packed, moved = kernel.pack(weights), kernel.pack(weights.select(order))
        assert not packed.shared
        for name, tensor in packed.experts.items():
            assert torch.equal(tensor[order], moved.experts[name]), name


def test_scales_that_overflow_are_refused(operator_device, backends):
    problem = make_problem(operator_device, quant="fp8_w8a16_channel", dtype=torch.float16)
    kernel = moekit.compose(problem, "local", "marlin", backends=backends)
    weights = make_weights(problem)
    with pytest.raises(WeightsError, match="w2_scale reaches 300"):
        kernel.pack(dataclasses.replace(weights, w2_scale=torch.full_like(weights.w2_scale, 300.0)))


def test_blocks_follow_the_load(operator_device, backends):
    if operator_device.type != "cpu":
        pytest.skip("the stand-in keeps a record")
    problem = make_problem(operator_device, hidden_size=128, intermediate_size=64)
    kernel = moekit.compose(problem, "local", "marlin", backends=backends)
    packed = kernel.pack(make_weights(problem))
    for tokens, block in ((1, 8), (14, 8), (15, 16), (40, 32), (100, 64)):
        stand_in.calls.clear()
        x, routing = make_inputs(problem, tokens)
        kernel(x, packed, routing)
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


def test_captured_graph_replays_with_new_routing(operator_device, backends):
    if operator_device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    for scheme in [*EIGHT_BITS, MXFP4]:
        problem = make_problem(operator_device, quant=scheme)
        kernel = moekit.compose(problem, "local", "marlin", backends=backends, checked=False)
        packed = kernel.pack(make_weights(problem))
        x, routing = make_inputs(problem, 90)
        kernel.warmup(packed, 90)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernel(x, packed, routing)
        for _ in range(3):
            new_x, new_routing = make_inputs(problem, 90)
            x.copy_(new_x)
            routing.topk_ids.copy_(new_routing.topk_ids)
            routing.topk_weights.copy_(new_routing.topk_weights)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, kernel(x, packed, routing))


@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_left_to_a_dispatcher_that_sums(operator_device, backends, bias):
    """Biases included: GEMM 2 adds them."""
    problem = make_problem(operator_device, has_bias=bias)
    kernel = moekit.compose(
        problem, SUMS_ITSELF, "marlin", workspace=NaNWorkspace(), backends=kit_registry(backends)
    )
    check_call(kernel, make_case(problem, 17, "masked"))
    assert kernel.dispatcher.taken == 1
