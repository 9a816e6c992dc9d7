"""Shared experts run while tokens travel, on a side stream, in the right order."""

from __future__ import annotations

import pytest
import torch
from fake_streams import FakeStream, Streams
from layer_cases import check_logits, loaded_layer

from moekit.runtime import overlap
from moekit.runtime.overlap import ConcurrentExperts


@pytest.fixture
def streams(monkeypatch):
    fake = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(overlap, "_idle", {})
    return fake


def test_the_order_of_streams(streams) -> None:
    x = torch.randn(3, 4, device="meta")
    concurrent = ConcurrentExperts(lambda x: streams.say("shared experts") or x * 2, x)
    streams.say("dispatch")
    assert concurrent.run().shape == (3, 4)
    streams.say("experts")
    assert concurrent.join().shape == (3, 4)
    assert streams.log == [
        "1 waits for 0",  # forked before the dispatch, which it overlaps
        "0: dispatch",
        "1: shared experts",
        "0: experts",
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
