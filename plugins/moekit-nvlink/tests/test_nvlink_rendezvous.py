"""Ranks open memory in groups that not all of them belong to, and in threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from moekit_nvlink import buffers
from torch.distributed import distributed_c10d as c10d

from moekit.errors import PeerFailed
from moekit.testing.distributed import RankPool


class Torch:
    """Exchanges addresses as torch does: with one count and one socket for all groups.

    newer: as torch 2.13 and later do, with ``multi_get`` and ``barrier``, and not 2.11 and 2.12.
    """

    def __init__(self, newer: bool) -> None:
        self._newer, self._exchanges, self._socket = newer, 0, threading.Lock()

    def rendezvous(self, memory, name: str):
        assert self._socket.acquire(blocking=False), "Address already in use"
        try:
            time.sleep(0.1)
            group = c10d._resolve_process_group(name)
            # A store of torch's own calls the Python store as C++ does.
            store = dist.PrefixStore("torch", group.get_group_store())
            keys = [f"CUDASymmetricMemory/{self._exchanges}/{r}" for r in range(group.size())]
            self._exchanges += 1
            store.set(keys[group.rank()], str(memory.data_ptr()))
            if self._newer:
                found = store.multi_get(keys)
                store.barrier(f"CUDASymmetricMemory/{self._exchanges}", group.size(), _PATIENCE)
            else:
                store.wait(keys, _PATIENCE)
                found = [store.get(key) for key in keys]
            self._exchanges += 1
            return SimpleNamespace(buffer_ptrs=[int(each) for each in found])
        finally:
            self._socket.release()


_PATIENCE = timedelta(seconds=10)
_NEWER = [False, pytest.param(True, marks=pytest.mark.skipif(
    not hasattr(dist.PrefixStore, "barrier"), reason="this torch's stores have no barrier"
))]  # fmt: skip


def _mocked(newer: bool) -> ExitStack:
    import torch.distributed._symmetric_memory as symmetric

    stack = ExitStack()
    for target, name, fake in (
        (symmetric, "rendezvous", Torch(newer).rendezvous),
        (symmetric, "empty", lambda nbytes, **_: torch.empty(nbytes)),
        (buffers, "_check_reach", lambda *_: None),
    ):
        stack.enter_context(mock.patch.object(target, name, fake))
    return stack


def _open(group: dist.ProcessGroup) -> None:
    memory, addresses, _ = buffers.open_memory(64, group, torch.device("cpu"))
    want = buffers.exchange("compare addresses", str(memory.data_ptr()), group)
    assert addresses == [int(each) for each in want]


def open_in_groups(rank: int, world: int, newer: bool) -> None:
    groups = [dist.new_group(members) for members in ([0, 1], [1, 2], [0, 1, 2])]
    with _mocked(newer):
        for group in (groups[0], groups[0], groups[1], groups[2], groups[2]):
            if rank in dist.get_process_group_ranks(group):
                _open(group)


def open_in_threads(rank: int, world: int, newer: bool) -> None:
    """Begin with one group on one rank, and with the other group on the other."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]

    def use(turn: int) -> None:
        time.sleep(0.2 * turn)
        for _ in range(3):
            _open(groups[turn ^ rank])

    with _mocked(newer), ThreadPoolExecutor(2) as threads:
        list(threads.map(use, range(2)))


@pytest.mark.parametrize("newer", _NEWER)
def test_ranks_that_served_other_groups_before(newer: bool) -> None:
    with RankPool(3) as pool:
        pool.run(open_in_groups, newer)


def test_another_thread_that_does_not_end(monkeypatch) -> None:
    monkeypatch.setattr(buffers, "_TURNS", 2)
    monkeypatch.setattr(buffers, "exchange", lambda what, mine, group: ["locked", mine])
    with buffers._one_at_a_time, pytest.raises(PeerFailed, match="another thread of rank 1 has"):
        buffers._rendezvous(torch.empty(8), None)


@pytest.mark.parametrize("newer", _NEWER)
def test_threads_open_memory_in_opposite_orders(newer: bool) -> None:
    with RankPool(2) as pool:
        pool.run(open_in_threads, newer)
