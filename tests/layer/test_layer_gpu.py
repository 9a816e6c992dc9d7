"""FusedMoE on GPUs: CUDA graphs of the whole layer, streams, inductor, NCCL ranks."""

from __future__ import annotations

import pytest
import torch
from layer_cases import E, H, I, K, expected, logits_for, make_layer
from layer_ranks import Case, begin, run_case
from torch import Tensor, nn

import moekit
from moekit import FusedMoE, MoEProblem
from moekit.testing import assert_close, relative_error
from moekit.testing.cases import random_weights, random_x, seed
from moekit.testing.distributed import RankPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

EXPERTS = sorted(moekit.registry().experts)
COMPOSITES = ["triton:32|cutlass", "triton:32|deepgemm"]
SIZES = {"num_experts": 16, "top_k": 4, "hidden_size": 1024, "intermediate_size": 512}
BF16 = {"params_dtype": torch.bfloat16, "device": "cuda"}


class Shared(nn.Module):
    """Shared experts that start late, so a layer that does not wait for them is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(SIZES["hidden_size"], 256, device="cuda", dtype=torch.bfloat16)
        self.down = nn.Linear(256, SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)
        self.streams: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.streams.add(torch.cuda.current_stream().cuda_stream)
        torch.cuda._sleep(2_000_000)
        return self.down(torch.nn.functional.silu(self.up(x)))


def layer_of(experts: str, quant: str, **knobs) -> FusedMoE:
    """Return a loaded layer, or skip with the reasons why these experts are not supported."""
    problem = MoEProblem(**SIZES, quant=quant, device="cuda")
    for member in experts.split("|"):
        if reasons := moekit.registry().expert(member.split(":")[0]).unsupported(problem):
            pytest.skip(f"{member}: {'; '.join(reasons)}")
    layer = FusedMoE(**SIZES, quant=quant, experts=experts, **BF16, **knobs)
    layer.load_weights(random_weights(problem))
    return layer


@pytest.mark.parametrize("quant", ["none", "fp8_block", "fp8_channel_token", "int4_w4a16_g128"])
@pytest.mark.parametrize("experts", EXPERTS)
@torch.inference_mode()
def test_the_whole_layer_in_a_graph(experts, quant) -> None:
    shared = Shared()
    layer = layer_of(experts, quant, shared_experts=shared, zero_expert_num=2, max_num_tokens=48)
    if not layer.graph_safe:
        pytest.skip(f"{layer.kernel.explanation.chosen} does not declare graph_safe")
    layer.warmup(48)
    weights = random_weights(layer.problem)
    for tokens in (1, 48, 100):  # the last in chunks
        x = random_x(layer.problem, tokens)
        logits = logits_for(layer, tokens).cuda()
        layer(x, logits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, logits)
        for key in range(3):
            x.copy_(random_x(layer.problem, tokens, key))
            logits.copy_(logits_for(layer, tokens, key))
            out.fill_(float("nan"))
            graph.replay()
            routing = moekit.route(logits, SIZES["top_k"], renormalize=True)
            want = expected(layer.problem, weights, x, routing, shared)
            assert_close(out, want, layer.problem, f"replay {key} of {tokens} tokens")


@torch.inference_mode()
def test_shared_experts_run_on_a_side_stream() -> None:
    shared = Shared()
    layer = layer_of("torch", "none", shared_experts=shared)
    weights = random_weights(layer.problem)
    x, logits = torch.empty(9, 1024, **BF16_TENSOR), logits_for(layer, 9).cuda()
    layer(torch.zeros_like(x), logits)
    for key in range(3):
        torch.cuda._sleep(5_000_000)  # x is late, so the side stream must wait for it
        fresh = random_x(layer.problem, 9, key)
        x.copy_(fresh)
        out = layer(x, logits)
        x.fill_(float("nan"))  # x may be overwritten when the layer returns
        routing = moekit.route(logits, SIZES["top_k"], renormalize=True)
        want = expected(layer.problem, weights, fresh, routing, shared)
        assert_close(out, want, layer.problem)
    mine = torch.cuda.current_stream().cuda_stream
    assert shared.streams - {mine}, "the shared experts ran on the caller's stream"


BF16_TENSOR = {"dtype": torch.bfloat16, "device": "cuda"}


@torch.inference_mode()
def test_two_streams_at_once() -> None:
    """Layers on different streams must not share a side stream's memory."""
    shared = Shared()
    layers = [layer_of("torch", "none", shared_experts=shared) for _ in range(2)]
    logits = logits_for(layers[0], 33).cuda()
    xs = [random_x(layers[0].problem, 33, key) for key in range(2)]
    wants = [layer(x, logits) for layer, x in zip(layers, xs, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(5):
        for layer, x, stream in zip(layers, xs, streams, strict=True):
            with torch.cuda.stream(stream):
                outs.append(layer(x, logits))
    torch.cuda.synchronize()
    for number, out in enumerate(outs):
        assert_close(out, wants[number % 2].float(), layers[0].problem)


class Block(nn.Module):
    def __init__(self, layer: FusedMoE) -> None:
        super().__init__()
        self.experts = layer

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        return x + self.experts(x, logits * 2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("experts", EXPERTS + COMPOSITES)
@torch.inference_mode()
def test_inductor(experts, mode) -> None:
    """Same numbers, with CUDA graphs if the layer allows them, and one compilation for all T."""
    torch.compiler.reset()
    layer = layer_of(experts, "none")
    layer.warmup(64)
    model = Block(layer)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, mode=mode)
    counters = torch._dynamo.utils.counters
    counters.clear()
    for tokens in (7, 33, 64, 7, 12):
        x, logits = torch.randn(tokens, 1024, **BF16_TENSOR), logits_for(layer, tokens).cuda()
        for _ in range(3):  # CUDA graphs record at the second call and replay at the third
            torch.compiler.cudagraph_mark_step_begin()
            # Inductor rounds less often around the layer than eager mode does.
            assert relative_error(compiled(x, logits), model(x, logits)) < 1.5e-2
    assert counters["stats"]["unique_graphs"] == 1


SPREADS = [
    {"tp": 2},
    {"tp": 2, "ep": True},
    {"dp": 2, "ep": True},
    {"dp": 2},
    {"tp": 2, "dp": 2, "ep": True},
    {"dp": 4, "ep": True},
    {"parallel": (2, 2, 2)},
    {"tp": 8, "ep": True},
    {"dp": 8, "ep": True},
    {"tp": 2, "dp": 4, "ep": True},
]
VARIANTS = [
    {"shared": "complete", "knobs": {"has_bias": True, "zero_expert_num": 2}},
    {
        "shared": "partial",
        "tokens": ((9, 0, 4, 1), (0, 0, 0, 0), (0, 5, 3, 2)),
        "knobs": {"max_num_tokens": 2},
    },
    {"tokens": ((7, 5), (1, 1), (0, 3)), "knobs": {"is_sequence_parallel": True}},
    {"knobs": {"params_dtype": torch.bfloat16}},
]


@pytest.fixture(scope="module")
def ranks():
    with RankPool(torch.cuda.device_count(), "cuda", timeout=120.0) as pool:
        pool.run(begin, seed())
        yield pool


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_ranks_over_nccl(request, spread, variant) -> None:
    case = Case(**spread, **variant)
    if torch.cuda.device_count() < case.ranks:
        pytest.skip(f"needs {case.ranks} CUDA devices")
    pool = request.getfixturevalue("ranks")
    assert set(pool.run(run_case, case, "cuda")) == {""}


def test_a_cpu_layer_runs_on_a_machine_with_a_gpu() -> None:
    """device="cpu" means the CPU."""
    layer = make_layer()
    layer.load_weights(random_weights(layer.problem))
    assert layer(torch.randn(3, H), torch.randn(3, E)).device.type == "cpu"
    assert (layer.problem.top_k, layer.problem.intermediate_size) == (K, I)
