"""Replayed calls on a GPU: the numbers of eager ones, on whatever stream, with whatever weights."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from graph_stand_in import graphed_kernel
from torch import Tensor, nn

import moekit
from moekit import ModularKernel, MoEProblem, PackedWeights, Routing
from moekit.runtime import graphs
from moekit.testing import relative_error
from moekit.testing.cases import random_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = {"num_experts": 16, "top_k": 4, "hidden_size": 1024, "intermediate_size": 512}
EXPERTS = sorted(moekit.registry().experts)
SIZES_T = (1, 4, 16)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def kernel_of(experts: str = "triton", quant: str = "none") -> ModularKernel:
    """A kernel that can be captured, or a skip with the reasons why there is none."""
    problem = MoEProblem(**SIZES, quant=quant, device="cuda")
    if reasons := moekit.registry().expert(experts).unsupported(problem):
        pytest.skip(f"{experts}: {'; '.join(reasons)}")
    kernel = moekit.compose(problem, experts=experts)
    if reasons := graphs.unsupported(kernel):
        pytest.skip("; ".join(reasons))
    return kernel


def packed_for(kernel: ModularKernel, key: int = 0) -> PackedWeights:
    return kernel.pack(random_weights(kernel.problem, key))


def tokens(kernel: ModularKernel, rows: int) -> tuple[Tensor, Routing]:
    p = kernel.problem
    x = torch.randn(rows, p.hidden_size, dtype=p.dtype, device="cuda")
    return x, moekit.route(torch.randn(rows, p.num_experts, device="cuda"), p.top_k)


def same(got: Tensor, want: Tensor) -> None:
    """Atomic sums aside, a replay launches what the eager call does."""
    assert want.abs().max() > 1e-2 and relative_error(got, want) < 5e-3


def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the rows of each replay."""
    seen: list[int] = []
    original = graphs._Graph.replay

    def replay(self: graphs._Graph, inputs: tuple[Tensor, ...]) -> Tensor:
        seen.append(len(inputs[0]))
        return original(self, inputs)

    monkeypatch.setattr(graphs._Graph, "replay", replay)
    return seen


@pytest.mark.parametrize("quant", ["none", "fp8_block", "fp8_channel_token", "int4_w4a16_g128"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_replays_equal_eager_calls(
    experts: str, quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of(experts, quant)
    packed = packed_for(kernel)
    graphed = graphed_kernel(kernel, packed)
    seen = replays(monkeypatch)
    for _ in range(5):
        for rows in SIZES_T:
            x, routing = tokens(kernel, rows)
            same(graphed(x, routing), kernel(x, packed, routing))
    assert sorted(seen) == sorted(4 * SIZES_T)
    x, routing = tokens(kernel, 17)
    same(graphed(x, routing), kernel(x, packed, routing))
    assert len(seen) == 4 * len(SIZES_T)


def test_the_arena_may_grow_after_the_capture() -> None:
    kernel = kernel_of()
    packed = packed_for(kernel)
    graphed = graphed_kernel(kernel, packed)
    for rows in (1, 1, 1, 16, 16, 2048, 1, 16):
        x, routing = tokens(kernel, rows)
        same(graphed(x, routing), kernel(x, packed, routing))


def test_other_streams_wait_for_each_other() -> None:
    """Each call is on another stream, behind work that takes long."""
    kernel = kernel_of()
    packed = packed_for(kernel)
    graphed = graphed_kernel(kernel, packed)
    for _ in range(3):
        x, routing = tokens(kernel, 4)
        graphed(x, routing)
    given = [tokens(kernel, 4) for _ in range(6)]
    want = [kernel(x, packed, routing) for x, routing in given]
    streams = [torch.cuda.Stream() for _ in given]
    copies = []
    torch.cuda.synchronize()
    for stream, (x, routing) in zip(streams, given, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)
            copies.append(graphed(x, routing).clone())
    torch.cuda.synchronize()
    for got, wanted in zip(copies, want, strict=True):
        same(got, wanted)


def test_inside_a_capture_of_the_caller() -> None:
    kernel = kernel_of()
    packed = packed_for(kernel)
    graphed = graphed_kernel(kernel, packed)
    x, routing = tokens(kernel, 2)
    for _ in range(3):
        graphed(x, routing)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = graphed(x, routing)
    for _ in range(3):
        fresh, other = tokens(kernel, 2)
        graphed(*tokens(kernel, 2))
        x.copy_(fresh)
        routing.topk_ids.copy_(other.topk_ids)
        routing.topk_weights.copy_(other.topk_weights)
        graph.replay()
        same(out, kernel(x, packed, routing))


def test_while_another_thread_captures_the_last_stream() -> None:
    """A wait for that stream would make this thread's stream a part of the capture."""
    kernel = kernel_of()
    packed = packed_for(kernel)
    graphed = graphed_kernel(kernel, packed)
    captured, (x, routing) = tokens(kernel, 2), tokens(kernel, 2)  # no random numbers in a capture
    begun, done = threading.Event(), threading.Event()
    stream, outs = torch.cuda.Stream(), []

    def capture() -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(3):
                graphed(*captured)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            begun.set()
            assert done.wait(60)
            outs.append(graphed(*captured))
            graph.capture_end()
            outs.append(graph)

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(60)
    try:
        got = graphed(x, routing).clone()
        torch.cuda.current_stream().synchronize()
    finally:
        done.set()
        thread.join()
    same(got, kernel(x, packed, routing))
    out, graph = outs
    graph.replay()
    torch.cuda.synchronize()
    same(out, kernel(captured[0], packed, captured[1]))


# -- transformers ---------------------------------------------------------------------------


@pytest.fixture
def installed() -> Iterator[None]:
    pytest.importorskip("transformers", reason="transformers is not installed")
    import moekit.integrations.transformers as integration

    integration.install()
    yield
    integration.uninstall()


def experts_module(seed: int) -> nn.Module:
    config = SimpleNamespace(
        num_experts=16, hidden_size=1024, moe_intermediate_size=512, hidden_act="silu",
        _experts_implementation="moekit",
    )  # fmt: skip
    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    torch.manual_seed(seed)
    with torch.inference_mode(False), torch.device("cuda"):
        module: nn.Module = modeling.Qwen3MoeExperts(config).to(torch.bfloat16)
    module.requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=0.05)
    return module


def call_both(module: nn.Module, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 1024, dtype=torch.bfloat16, device="cuda")
    weights, ids = torch.rand(rows, 16, device="cuda").topk(4)
    ours = module(x, ids, weights.bfloat16())
    module.config._experts_implementation = "grouped_mm"
    theirs = module(x, ids, weights.bfloat16())
    module.config._experts_implementation = "moekit"
    return ours, theirs


def test_modules_in_transformers(installed: None) -> None:
    from moekit.integrations.packed_layer import Layer

    modules = [experts_module(seed) for seed in range(2)]
    for round in range(6):
        for rows in (1, 3, 64):
            for module in modules:
                ours, theirs = call_both(module, rows)
                torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2 * float(theirs.std()))
                del ours
        if round == 2:  # the graphs' weights are no longer the module's
            modules[0].down_proj.mul_(-3.0)
            held = modules[1].gate_up_proj.flip(0)
            with torch.inference_mode(False):
                modules[1].gate_up_proj = nn.Parameter(held.clone(), requires_grad=False)
    graphed = Layer.of(modules[0]).packed.graphed
    if graphed is None:
        pytest.skip("the chosen backends cannot be captured")
    assert sorted(graphed._graphs) == [1, 3]
