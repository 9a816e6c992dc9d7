"""Some calls are replayed, others are not. The graphs are stand-ins that run on the CPU."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import graph_stand_in
import pytest
import torch
from fake_streams import FakeStream, Streams
from torch import Tensor

import moekit
from moekit.errors import InvalidInput
from moekit.runtime import graphs
from moekit.runtime.graphs import Graphed

Device, device = graph_stand_in.Device, graph_stand_in.device  # the latter is a fixture


class Counted:
    """x (T, 3) bf16, n (T, 2) int64 -> x * n.sum, and how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, n: Tensor) -> Tensor:
        self.calls += 1
        return want(x, n)

    @staticmethod
    def uncounted(x: Tensor, n: Tensor, out: Tensor | None = None) -> Tensor:
        return want(x, n) if out is None else out.copy_(want(x, n))


def want(x: Tensor, n: Tensor) -> Tensor:
    return x * n.sum(dim=1, keepdim=True).to(x.dtype)


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, dtype=torch.bfloat16), torch.randint(1, 9, (rows, 2))


def make(max_rows: int = 4) -> tuple[Graphed, Counted]:
    eager = Counted()
    return Graphed(eager, max_rows), eager


def test_the_third_call_of_a_size_is_a_replay_of_the_second(device: Device) -> None:
    graphed, eager = make()
    for rows in (2, 3, 2, 2, 3, 2):
        given = inputs(rows)
        assert torch.equal(graphed(*given), want(*given))
    assert eager.calls == 2 and device.captures == [2, 3] and device.replays == 4


def test_an_output_that_is_in_use_is_not_overwritten(device: Device) -> None:
    graphed, eager = make()
    graphed(*inputs(2))
    first = inputs(2)
    out = graphed(*first)
    view = out.reshape(-1)[1:]
    del out
    second = inputs(2)
    assert torch.equal(graphed(*second), want(*second))
    assert eager.calls == 2 and torch.equal(view, want(*first).reshape(-1)[1:])
    del view
    assert torch.equal(graphed(*second), want(*second))
    assert eager.calls == 2 and device.replays == 2


def test_outputs_of_two_graphs_are_apart(device: Device) -> None:
    (one, _), (two, _) = make(), make()
    for graphed in (one, two, one, two):
        graphed(*inputs(2))
    given = inputs(2), inputs(2)
    outs = one(*given[0]), two(*given[1])
    assert device.replays == 4
    for out, own in zip(outs, given, strict=True):
        assert torch.equal(out, want(*own))


def test_changing_an_output_changes_no_later_one(device: Device) -> None:
    graphed, _ = make()
    given = inputs(2)
    for _ in range(4):
        out = graphed(*given)
        assert torch.equal(out, want(*given))
        out.add_(7)
        del out
    assert device.replays == 3


@pytest.mark.parametrize("rows", [0, 5])
def test_sizes_that_are_not_captured(device: Device, rows: int) -> None:
    graphed, eager = make(max_rows=4)
    for _ in range(3):
        given = inputs(rows)
        assert torch.equal(graphed(*given), want(*given))
    assert eager.calls == 3 and not device.captures


@pytest.mark.parametrize(("whose", "replays"), [("capturing", 2), ("others_capture", 3)])
def test_calls_are_eager_while_a_thread_captures(device: Device, whose: str, replays: int) -> None:
    """Nothing is replayed into this thread's capture, nor while another captures its stream."""
    graphed, eager = make()
    setattr(device, whose, True)
    for _ in range(3):
        graphed(*inputs(2))
    assert eager.calls == 3 and not device.captures
    setattr(device, whose, False)
    for _ in range(3):
        graphed(*inputs(2))
    assert device.captures == [2] and device.replays == replays
    setattr(device, whose, True)
    given = inputs(2)
    assert torch.equal(graphed(*given), want(*given))
    assert eager.calls + replays == 7 and device.replays == replays


def test_other_dtypes_and_shapes_than_the_graphs(device: Device) -> None:
    graphed, eager = make()
    for _ in range(2):
        graphed(*inputs(2))
    x, n = inputs(2)
    assert torch.equal(graphed(x.float(), n), want(x.float(), n))
    assert torch.equal(graphed(x, n[:, :1]), want(x, n[:, :1]))
    assert device.replays == 1 and eager.calls == 3
    wide = torch.randn(2, 6, dtype=torch.bfloat16)[:, ::2]
    assert torch.equal(graphed(wide, n), want(wide, n)) and device.replays == 2


def test_a_capture_that_fails_leaves_calls_eager(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    graphed, eager = make()
    device.broken = True
    with caplog.at_level(logging.WARNING, "moekit"):
        for _ in range(4):
            given = inputs(2)
            assert torch.equal(graphed(*given), want(*given))
    assert eager.calls == 4
    (record,) = caplog.records
    assert "stay eager" in record.message and "not permitted" in record.message


def test_in_and_out_of_inference_mode(device: Device) -> None:
    graphed, eager = make()
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            for _ in range(2):
                given = inputs(2)
                out = graphed(*given)
                assert torch.equal(out, want(*given))
                out.mul_(2)
                del out
    assert eager.calls == 1 and device.replays == 5


PROBLEM = moekit.MoEProblem(
    num_experts=4, top_k=2, hidden_size=64, intermediate_size=48, dtype=torch.float32, device="cpu"
)


def small_weights() -> moekit.ExpertWeights:
    return moekit.ExpertWeights(torch.randn(4, 96, 64) / 8, torch.randn(4, 64, 48) / 8)


def test_a_kernel_on_weights_that_change(device: Device) -> None:
    kernel = moekit.compose(PROBLEM, experts="torch")
    packed = kernel.pack(small_weights())
    graphed = graph_stand_in.graphed_kernel(kernel, packed, max_tokens=3)
    for call in range(5):
        x, routing = torch.randn(3, 64), moekit.route(torch.randn(3, 4), 2)
        for tensor in packed.experts.values():
            tensor.mul_(1.25)
        torch.testing.assert_close(graphed(x, routing), kernel(x, packed, routing))
        assert device.replays == call
    with pytest.raises(InvalidInput, match="x has shape"):
        graphed(x[:, :5], routing)


def test_kernels_that_cannot_be_captured() -> None:
    kernel = moekit.compose(PROBLEM, experts="torch")
    assert graphs.unsupported(kernel) == [
        "torch does not declare graph_safe",
        "a checked call waits for the device",
        "cpu has no CUDA graphs",
    ]
    with pytest.raises(InvalidInput, match="at least 1 token"):
        Graphed(want, 0)


def test_graphs_go_with_their_owner(device: Device) -> None:
    graphed, _ = make()
    for _ in range(3):
        graphed(*inputs(2))
    held = weakref.ref(graphed._graphs[2].out)
    gc.disable()
    try:
        del graphed
        assert held() is None
    finally:
        gc.enable()


# -- how a graph is made ----------------------------------------------------------------------


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    fake = Streams()
    names = {
        "current_stream": fake.current_stream,
        "device": lambda device: nullcontext(),
        "graph_pool_handle": lambda: "pool",
        "Stream": fake.Stream,
        "stream": fake.stream,
        "CUDAGraph": fake.CUDAGraph,
        "is_current_stream_capturing": fake.is_current_stream_capturing,
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(graphs, "_last", {})
    graphs._pool.cache_clear()
    yield fake
    graphs._pool.cache_clear()


def test_a_capture_is_between_what_comes_before_and_after(streams: Streams) -> None:
    def function(x: Tensor, out: Tensor | None = None) -> Tensor:
        streams.say("call")
        assert gc.isenabled() == (streams.log[-2] != "9: begin pool")
        return x

    device = torch.device("cpu")
    streams.made = 8
    graphs.follow(device)
    streams.current = FakeStream(streams, 5)
    graphs.follow(device)
    replay, out = graphs.capture(function, [torch.zeros(1)])
    once = ["9 waits for 5", "9: call", "9: begin pool", "9: call", "9: end", "5 waits for 9"]
    kept = ["9: begin pool", "9: end"]  # the graph that keeps the pool
    assert streams.log == ["5 waits for 0", *kept, *once]
    replay()
    graphs.capture(function, [torch.zeros(1)])
    assert streams.log[9:] == ["5: replay", *once], "one pool and stream for all"
    assert gc.isenabled()


def test_no_stream_waits_for_one_that_is_captured(streams: Streams) -> None:
    device = torch.device("cpu")
    last, reader, streams.current = (FakeStream(streams, number) for number in (1, 2, 3))
    graphs._last[device] = last
    for streams.captured in ([1], [2], [1, 2]):
        assert graphs.follow(device, reader) is None
    assert not streams.log and graphs._last[device] == last
    streams.captured = [3]  # the caller looks at the current stream itself
    assert graphs.follow(device, reader) == streams.current
    assert streams.log == ["3 waits for 1", "3 waits for 2"]


def test_a_capture_that_fails_is_ended(streams: Streams) -> None:
    def function(x: Tensor, out: Tensor | None = None) -> Tensor:
        streams.say("call")
        if len(streams.log) > 5:
            raise RuntimeError("not while capturing")
        return x

    with pytest.raises(RuntimeError, match="not while capturing"):
        graphs.capture(function, [torch.zeros(1)])
    assert streams.log[-2:] == ["1: end", "0 waits for 1"] and gc.isenabled()
