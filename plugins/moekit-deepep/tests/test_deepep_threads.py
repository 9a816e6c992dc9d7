"""Threads make dispatchers at once, and the library's settings belong to its class and process."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the library itself is tested", allow_module_level=True)

import deepep_standin  # noqa: E402
from moekit_deepep import buffers  # noqa: E402

from moekit.errors import GroupMismatch  # noqa: E402

# How long a thread waits for another one, which a lock may keep from coming.
PATIENCE = 0.5


def test_two_threads_take_configurations(monkeypatch):
    """The first thread ends while the second one is between its setting and its reading."""
    monkeypatch.setattr(deepep_standin.Buffer, "num_sms", 12)
    read, inside, ended = deepep_standin.Buffer.get_dispatch_config, [], threading.Event()
    both = threading.Event()

    def get_dispatch_config(ranks):
        inside.append(None)
        if len(inside) == 1:
            both.wait(PATIENCE)
        else:
            both.set()
            ended.wait(PATIENCE)
        return read(ranks)

    def configs(_):
        try:
            return [config.num_sms for config in buffers.normal_configs(2)]
        finally:
            ended.set()

    monkeypatch.setattr(deepep_standin.Buffer, "get_dispatch_config", get_dispatch_config)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(configs, range(2))) == [[buffers.NUM_SMS] * 2] * 2
    assert deepep_standin.Buffer.num_sms == 12


def test_two_threads_connect_other_ranks(monkeypatch):
    """The second thread comes while the first one makes its buffer, and again afterwards."""
    making, refused = threading.Event(), threading.Event()

    def make(buffer, group, **sizes):
        making.set()
        assert refused.wait(20.0)

    def first():
        return buffers.low_latency([0, 1], 16, 512, 8)

    monkeypatch.setattr(buffers.dist, "get_process_group_ranks", list)
    monkeypatch.setattr(buffers, "_lease", lambda group, kind, make: make())
    monkeypatch.setattr(deepep_standin.Buffer, "__init__", make)
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(first)
        assert making.wait(20.0)
        try:
            with pytest.raises(GroupMismatch, match=r"connect ranks \[1, 2\].*ranks \[0, 1\]"):
                buffers.low_latency([1, 2], 16, 512, 8)
        finally:
            refused.set()
        held, _ = made.result()
    try:
        with pytest.raises(GroupMismatch):
            buffers.low_latency([1, 2], 16, 512, 8)
    finally:
        buffers._connected.pop(held)


@pytest.mark.parametrize("before", [None, "0"])
def test_two_threads_make_elastic_buffers(monkeypatch, before):
    """The first thread ends while the second one is about to make its buffer."""
    monkeypatch.delenv("EP_DISABLE_GIN", raising=False)
    if before is not None:
        monkeypatch.setenv("EP_DISABLE_GIN", before)
    inside = {group: threading.Event() for group in ("one", "other")}
    ended, seen = threading.Event(), []

    def make(group, **sizes):
        inside[group].set()
        assert (inside["other"] if group == "one" else ended).wait(20.0)
        seen.append(os.environ.get("EP_DISABLE_GIN"))
        return SimpleNamespace(num_bytes=0)

    def use(group):
        if group == "other":
            assert inside["one"].wait(20.0)
        buffers.elastic(group, 16, 512, 2, "cpu")
        ended.set()

    monkeypatch.setattr(buffers.deep_ep, "ElasticBuffer", make)
    monkeypatch.setattr(buffers, "_lease", lambda group, kind, make: make())
    monkeypatch.setattr(buffers.dist, "all_reduce", lambda *args, **kwargs: None)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(use, ("one", "other")))
    assert seen == ["1", "1"]
    assert os.environ.get("EP_DISABLE_GIN") == before
