"""Memory of several groups in one process: the library keeps its ranks and addresses in a class."""

from __future__ import annotations

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flashinfer_standins
import pytest
import torch
from flashinfer_standins import Driver
from moekit_flashinfer import library
from moekit_flashinfer.buffers import SharedMemory

from moekit.errors import BackendError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the library itself is tested")

SIZES = (2, 3)


class Alone:
    """Rank 0 of a group whose other ranks do what it does. ``meet`` is called in every exchange."""

    def __init__(self, size: int, meet: Any = lambda: None) -> None:
        self.rank, self.size, self._meet = 0, size, meet

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def allgather(self, value: Any) -> list[Any]:
        self._meet()
        return [value] * self.size


@pytest.fixture(autouse=True, params=flashinfer_standins.VERSIONS)
def _standin(request, monkeypatch):
    flashinfer_standins.install(monkeypatch.setattr)
    monkeypatch.setattr(Driver, "mapped", {})
    monkeypatch.setattr(Driver, "reserved", {})
    with flashinfer_standins.using(request.param):
        yield
    assert not Driver.mapped and not Driver.reserved


def check(memory: SharedMemory, ranks: Alone) -> None:
    assert memory.tensor.shape == (ranks.size, 100)
    assert Driver.comms[memory.tensor.data_ptr()] is ranks
    memory.free()


def test_two_threads_share_memory_in_two_groups():
    """Both threads are inside every exchange at once, with memory and when they free it."""
    meeting = threading.Barrier(len(SIZES))

    def serve(size: int) -> None:
        ranks = Alone(size, lambda: meeting.wait(timeout=20.0))
        try:
            for _ in range(2):
                memory = SharedMemory(ranks, 100, torch.uint8)
                meeting.wait(timeout=20.0)
                check(memory, ranks)
        except BaseException:
            meeting.abort()  # the other thread need not wait
            raise

    with ThreadPoolExecutor(len(SIZES)) as threads:
        for done in [threads.submit(serve, size) for size in SIZES]:
            done.result()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_groups_of_two_sizes_free_in_any_order(order):
    groups = [Alone(size) for size in SIZES]
    memories = [SharedMemory(ranks, 100, torch.uint8) for ranks in groups]
    for which in order:
        check(memories[which], groups[which])


def test_other_users_of_the_library_keep_their_ranks():
    module = importlib.import_module(library.MEMORY_MODULE)
    theirs, before = module.MnnvlMemory, dict(vars(module.MnnvlMemory))
    ranks = Alone(2)
    check(SharedMemory(ranks, 100, torch.uint8), ranks)
    assert sys.modules[library.MEMORY_MODULE] is module and module.MnnvlMemory is theirs
    assert dict(vars(theirs)) == before


def test_a_long_temporary_directory_is_named(monkeypatch, tmp_path):
    """The later version's sockets have paths of at most 107 bytes."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    ranks = Alone(2)
    if not flashinfer_standins.is_later():
        check(SharedMemory(ranks, 100, torch.uint8), ranks)
        return
    with pytest.raises(BackendError, match="AF_UNIX path too long; .*set TMPDIR to a short path"):
        SharedMemory(ranks, 100, torch.uint8)
    Driver.reserved.clear()  # the library keeps addresses that it reserved in vain
