"""Small records that the ranks of one host exchange through shared memory, in microseconds.

A gloo all-gather of three numbers takes hundreds of microseconds, and one over NCCL makes the host
wait for the GPU. The board is a page of memory that all ranks map: each rank writes its record and
reads the others' records as soon as they are there.
"""

from __future__ import annotations

import json
import mmap
import os
import time
import uuid
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

import torch.distributed as dist

from moekit.plugin import exchange

_FOLDER = Path("/dev/shm")
_WORDS = 3
# A slot holds the step's number, a record, and a checksum of both.
_SLOT = _WORDS + 2
_YIELD_EVERY, _LOOK_EVERY = 64, 0.05
# A rank that waits longer than _SPIN leaves the core to others, for a part of the time waited.
_SPIN, _NAP_PART, _LONGEST_NAP = 0.001, 1 / 16, 0.001

_boards: WeakKeyDictionary[dist.ProcessGroup, HostBoard | None] = WeakKeyDictionary()
# A lock for each group: another thread may make another group's board first on other ranks.
_making: WeakKeyDictionary[dist.ProcessGroup, Lock] = WeakKeyDictionary()
_lock = Lock()


class HostBoard:
    """A page that the ranks of a group share.

    Each rank has two slots, for odd and even steps. A rank begins step n + 1 after it has read all
    records of step n, so nobody still reads a slot when its rank writes it again.
    """

    def __init__(self, memory: mmap.mmap, rank: int, pids: Sequence[int], timeout: float) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._rank, self._pids, self._timeout = rank, tuple(pids), timeout
        self._step = 0

    def exchange(self, record: Sequence[int], timeout: float | None = None) -> list[list[int]]:
        """Return the records of all ranks, three integers of 64 bits each, in rank order.

        Collective. timeout: seconds to wait for a rank, if these are fewer than the group's. Raises
        RuntimeError if a rank died, or did not come in time.
        """
        assert len(record) == _WORDS
        self._step += 1
        words, at = self._words, self._slot(self._rank)
        words[at + 1 : at + _SLOT] = array("q", [*record, _checksum(self._step, record)])
        words[at] = self._step
        seconds = self._timeout if timeout is None else min(timeout, self._timeout)
        return [self._read(rank, seconds) for rank in range(len(self._pids))]

    def _slot(self, rank: int) -> int:
        return (2 * rank + self._step % 2) * _SLOT

    def _read(self, rank: int, seconds: float) -> list[int]:
        words, at, step, spins = self._words, self._slot(rank), self._step, 0
        begin = look = time.monotonic()
        while True:
            if words[at] == step:
                record = words[at + 1 : at + 1 + _WORDS].tolist()
                # Stores may become visible in another order than they were made.
                if words[at + 1 + _WORDS] == _checksum(step, record):
                    return record
            spins += 1
            if spins % _YIELD_EVERY:
                continue
            now = time.monotonic()
            if now - begin < _SPIN:
                os.sched_yield()
            else:
                time.sleep(min(_NAP_PART * (now - begin), _LONGEST_NAP))
            if now - look > _LOOK_EVERY:
                look = now
                self._check_alive(rank)
                if now - begin > seconds:
                    raise RuntimeError(f"rank {rank} did not send its sizes within {seconds:g} s")

    def _check_alive(self, rank: int) -> None:
        try:
            os.kill(self._pids[rank], 0)
        except ProcessLookupError:
            raise RuntimeError(f"rank {rank} (process {self._pids[rank]}) has ended") from None
        except PermissionError:  # it lives, as another user
            pass


def board_of(group: dist.ProcessGroup, timeout: float) -> HostBoard | None:
    """Return the board of a group, or None if its ranks do not share one host's memory.

    Collective at its first call for a group. timeout: seconds to wait for a rank in a step.
    """
    with _lock:
        making = _making.setdefault(group, Lock())
    with making:
        if group not in _boards:
            _boards[group] = _make(group, timeout)
        return _boards[group]


def _make(group: dist.ProcessGroup, timeout: float) -> HostBoard | None:
    size = 2 * group.size() * _SLOT * 8
    path = _FOLDER / f"moekit-{uuid.uuid4().hex}"
    if group.rank() == 0:
        with suppress(OSError):
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            os.ftruncate(file, size)
            os.close(file)
    try:
        said = exchange("share a page", json.dumps([_place(), os.getpid(), str(path)]), group)
        places, pids, paths = zip(*map(json.loads, said), strict=True)
        memory = _mapped(Path(paths[0]), size) if len(set(places)) == 1 and places[0] else None
        everyone = exchange("map the page", "yes" if memory else "no", group)
    finally:
        if group.rank() == 0:
            path.unlink(missing_ok=True)
    if memory is None or "no" in everyone:
        return None
    return HostBoard(memory, group.rank(), pids, timeout)


def _place() -> str:
    """Return a name that processes share if they see each other's memory files and process ids."""
    try:
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt")]
        return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])
    except OSError:
        return ""


def _mapped(path: Path, size: int) -> mmap.mmap | None:
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except (OSError, ValueError):
        return None


def _checksum(step: int, record: Sequence[int]) -> int:
    total = 0x5EED
    for word in (step, *record):
        total = (total * 1_000_003 + word) & 0x7FFF_FFFF_FFFF_FFFF
    return total
