"""Shared experts run while tokens travel, on a side stream, in the right order."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from layer_cases import check_logits, loaded_layer

from moekit.runtime import overlap
from moekit.runtime.overlap import ConcurrentExperts


class FakeStreams:
    """A device module whose streams record their calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made = 0
        self.current = self.Stream("meta", 0)

    def Stream(self, device, stream_id=None):
        if stream_id is None:
            self.made += 1
            stream_id = self.made
        return FakeStream(self, stream_id)

    def current_stream(self, device):
        return self.current

    @contextmanager
    def stream(self, side):
        self.log.append(f"on {side.stream_id}")
        before, self.current = self.current, side
        yield
        self.current = before
        self.log.append(f"off {side.stream_id}")


class FakeStream:
    def __init__(self, module, stream_id) -> None:
        self.module, self.stream_id = module, stream_id

    def __eq__(self, other) -> bool:
        return self.stream_id == other.stream_id

    def wait_stream(self, other) -> None:
        self.module.log.append(f"{self.stream_id} waits for {other.stream_id}")


@pytest.fixture
def streams(monkeypatch):
    fake = FakeStreams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(overlap, "_idle", {})
    return fake


def test_the_order_of_streams(streams) -> None:
    x = torch.randn(3, 4, device="meta")
    concurrent = ConcurrentExperts(lambda x: x * 2, x)
    streams.log.append("dispatch")
    assert concurrent.run().shape == (3, 4)
    streams.log.append("experts")
    assert concurrent.join().shape == (3, 4)
    assert streams.log == [
        "1 waits for 0",  # forked before the dispatch, which it overlaps
        "dispatch",
        "on 1",
        "off 1",
        "experts",
        "0 waits for 1",
    ]


def test_every_stream_has_its_own_side_stream(streams) -> None:
    x = torch.randn(2, 2, device="meta")
    sides = []
    for current in (0, 7, 0, 1, 7):  # 1 is also the number of the first stream in the pool
        streams.current = FakeStream(streams, current)
        sides.append(ConcurrentExperts(torch.sin, x)._side.stream_id)
    assert sides[0] == sides[2] and sides[1] == sides[4]
    assert all(side != current for side, current in zip(sides, (0, 7, 0, 1, 7), strict=True))


def test_devices_without_streams(streams, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: torch.nn)
    concurrent = ConcurrentExperts(lambda x: x * 2, torch.randn(3, 4, device="meta"))
    assert concurrent.run() is concurrent.join() and not streams.log


def test_shared_experts_run_while_tokens_travel(monkeypatch) -> None:
    log = []

    def shared(x):
        log.append("shared")
        return 2 * x

    layer, weights = loaded_layer(shared_experts=shared)
    for owner, name in ((layer.kernel.dispatcher, "prepare"), (layer.kernel.experts, "apply")):
        inner = getattr(owner, name)

        def logging(*args, inner=inner, name=name):
            log.append(name)
            return inner(*args)

        monkeypatch.setattr(owner, name, logging)
    check_logits(layer, weights, shared=lambda x: 2 * x, renormalize=True)
    assert log == ["prepare", "shared", "apply"]
