"""Calls repeat the launches of an earlier call, in every buffer. Launches are only noted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from moekit_kernels.launch import Launches
from moekit_nvlink.buffers import Buffer, Lost
from moekit_nvlink.dispatcher import HighThroughputDispatcher, LowLatencyDispatcher
from moekit_nvlink.layout import REDUCED_FROM
from moekit_nvlink.settings import Settings
from noted_launches import Notes, python_calls
from nvlink_host import problems
from torch.utils._python_dispatch import TorchDispatchMode

from moekit.contract.shared_buffers import CallBuffers, Lease
from moekit.plugin import Routing, Unreduced

CPU = torch.device("cpu")


class Group:
    """A process group of which no method is called."""


class NoOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, *_):
        raise AssertionError(f"the call runs {func}")


def dispatcher(kind: type, capacity: int, **more):
    """Return the dispatcher of rank 0 of two, with buffers that only this rank maps."""
    problem = problems(2, 1, 8, 2, 64, capacity, **more)[0]
    held, lost, group = object.__new__(kind), Lost.of(2, CPU), Group()
    held.problem, held._transfer = problem, kind._transfers.of(problem, Settings())
    at = held._transfer.layout

    def make() -> Buffer:
        memory = torch.empty(at.nbytes, dtype=torch.uint8)
        return Buffer.of(memory, [memory.data_ptr()] * 2, lost, at.chunks)

    calls = CallBuffers(make, group)
    held.lease = Lease(SimpleNamespace(calls=calls, take=calls.take, group=group), bool)
    return held


@pytest.mark.parametrize("kind", [HighThroughputDispatcher, LowLatencyDispatcher])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("left", [None, "rows", "places"])
def test_calls_repeat_launches(monkeypatch, kind, quantized, left) -> None:
    """left: the weighting and sum that the experts leave to the combine."""
    rows = kind is HighThroughputDispatcher
    if left and not rows:
        pytest.skip("experts of the BATCHED format leave nothing")
    tokens = REDUCED_FROM if left else 5
    quant = {"quant": "fp8_block"} if quantized else {}
    held, notes, used = dispatcher(kind, tokens, **quant), Notes(monkeypatch), []

    def tensors() -> tuple:
        x, out, some = (torch.empty(n, 64, dtype=torch.bfloat16) for n in (*2 * [tokens], 9))
        routing = Routing(torch.empty(tokens, 2), torch.zeros(tokens, 2, dtype=torch.int32), tokens)
        places = torch.empty(2 * tokens, 2, dtype=torch.int32) if left == "places" else None
        sent = x.to(torch.float8_e4m3fn), torch.empty(tokens, 1)
        return x, routing, sent, Unreduced(some, places), out

    def run(x, routing, sent, unreduced, out) -> None:
        tokens = held.prepare(x, routing, (lambda *_: sent) if quantized else None).result()
        used.append(tokens.handle.buffer)
        y = unreduced if left else held.output(tokens)
        assert held.finalize(y, tokens, out).result() is out

    held._launches, first, other = Launches(), tensors(), tensors()
    run(*first)
    held.lease.value.calls.take()  # the other call has another buffer
    run(*other)
    notes.new()
    assert python_calls(lambda: run(*other)) <= 65
    repeated = notes.new()
    with NoOperators():
        run(*other)
    assert notes.new() == repeated
    recordings = held._launches._recordings.values()
    assert len(recordings) == 2 and None not in recordings, "the call cannot be repeated"
    assert used[0] is not used[1] and all(each is used[1] for each in used[1:])
    held._launches = Launches()
    run(*other)
    assert repeated == notes.new()
