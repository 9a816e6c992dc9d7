"""A race detector for the kernels: which accesses does the memory model order?

All ranks run in Triton's interpreter, a thread each, and a scheduler with a seed decides which of
them goes on. The interpreter runs one thing at a time, so a run by itself would hide most faults.
`World` therefore keeps vector clocks, and takes only what PTX promises as an order: kernels of one
rank follow each other where one waits for the other (PDL); programs of a kernel do not;
`tl.debug_barrier` joins the threads of a program; a release at a scope that covers both sides
orders what its thread knows before whatever acquires the value. Two accesses of one word, at least
one of them a write, that are not ordered are a race, in whatever order this run made them. A run in
which every rank waits is a deadlock; since programs run one after another, it is also one where a
GPU holds a single program at a time.

A program has two threads here: one makes all scalar stores and atomics, as thread 0 does in
compiled kernels, and one stands for all others, which also make the accesses of several values.
"""

from __future__ import annotations

import random
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from moekit_nvlink import transfer
from moekit_nvlink.buffers import Buffer
from moekit_nvlink.layout import Layout
from triton.language.extra import cuda
from triton.runtime import interpreter

_WORD = 4
_LAUNCHERS = [
    name for name, found in vars(transfer).items() if isinstance(found, transfer.Launcher)
]


class Race(AssertionError):
    """Two accesses, or two kernels, without an order."""


class Deadlock(AssertionError):
    """Every rank waits for another one."""


class Thread(NamedTuple):
    rank: int
    kernel: int
    program: int
    first: bool


class Clock:
    """A vector clock: all kernels of each rank up to some number, and times of threads."""

    def __init__(self, ended: Sequence[int], seen: dict[Thread, int] | None = None) -> None:
        self.ended, self.seen = list(ended), dict(seen or {})

    def copy(self) -> Clock:
        return Clock(self.ended, self.seen)

    def join(self, other: Clock) -> None:
        self.ended = [max(pair) for pair in zip(self.ended, other.ended, strict=True)]
        for thread, time in other.seen.items():
            self.seen[thread] = max(time, self.seen.get(thread, 0))
        self.seen = {t: time for t, time in self.seen.items() if t.kernel >= self.ended[t.rank]}

    def has(self, thread: Thread, time: int) -> bool:
        return thread.kernel < self.ended[thread.rank] or self.seen.get(thread, 0) >= time


@dataclass
class _Word:
    """The last write of a word, the reads since, and whether both are atomic."""

    writer: tuple[Thread, int] | None = None
    atomic: bool = False
    readers: dict[Thread, int] = field(default_factory=dict)


class _Program:
    """A running program: its first thread, and the others."""

    def __init__(self, rank: int, kernel: int, program: int, start: Clock) -> None:
        self.threads = [Thread(rank, kernel, program, first) for first in (True, False)]
        self.clocks = [start.copy() for _ in self.threads]
        for thread, clock in zip(self.threads, self.clocks, strict=True):
            clock.seen[thread] = 1
        self.waited = self.launched_early = False

    def tick(self, index: int) -> None:
        self.clocks[index].seen[self.threads[index]] += 1

    def barrier(self) -> None:
        self.clocks[0].join(self.clocks[1])
        self.clocks[1].join(self.clocks[0])
        self.tick(0)
        self.tick(1)


class World:
    """The ranks, their memory, and the order of what they do."""

    def __init__(self, ranks: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._streams = [Clock([0] * ranks) for _ in range(ranks)]
        self._early = [Clock([0] * ranks) for _ in range(ranks)]  # of a kernel that has not waited
        self._kernels = [0] * ranks
        self._words: dict[int, _Word] = {}
        self._released: dict[int, list[tuple[Clock, int, bool]]] = {}
        self._places: list[tuple[int, int, str]] = []
        self._constants: set[int] = set()  # addresses that no kernel writes
        self._main = threading.Semaphore(0)
        self._batons = [threading.Semaphore(0) for _ in range(ranks)]
        # None if a rank can go on; else the number of changes when it looked at a flag in vain.
        self._looked: list[int | None] = [None] * ranks
        self._ended = [False] * ranks
        self._changes, self._fault = 0, None
        self._mine = threading.local()

    # -- what is watched ---------------------------------------------------------------------------

    def watch(self, rank: int, at: Layout, buffer: Buffer) -> None:
        """Watch a rank's buffer and the state that its kernels share."""
        peers = buffer.peers
        self._constants |= set(range(peers.data_ptr(), peers.data_ptr() + peers.nbytes, _WORD))
        names = ("x", "scale", "ids", "weights", "y", "grads", "counts", "places",
                 "received", "flags")  # fmt: skip
        regions = [(name, getattr(at, name)) for name in names]
        base, ends = buffer.bytes.data_ptr(), [offset for _, offset in regions[1:]] + [at.nbytes]
        for (name, start), end in zip(regions, ends, strict=True):
            self._places.append((base + start, base + end, f"{name} of rank {rank}"))
        for name in ("counters", "epoch", "used", "rows", "refused"):
            tensor = getattr(buffer, name)
            start = tensor.data_ptr()
            self._places.append((start, start + tensor.nbytes, f"{name} of rank {rank}"))
        self._places.sort()

    def _place(self, address: int) -> str:
        index = bisect_right(self._places, address, key=lambda place: place[0]) - 1
        start, end, what = self._places[index]
        return what if start <= address < end else ""

    # -- running -----------------------------------------------------------------------------------

    def run(self, flows: Sequence[Callable[[], None]]) -> None:
        """Run a function of each rank, each until it waits for others, in a random order."""
        with self._patched():
            threads = [threading.Thread(target=self._rank, args=item, daemon=True)
                       for item in enumerate(flows)]  # fmt: skip
            for thread in threads:
                thread.start()
            while not all(self._ended) and self._fault is None:
                able = [rank for rank, ended in enumerate(self._ended)
                        if not ended and self._looked[rank] != self._changes]  # fmt: skip
                if not able:
                    waiting = [rank for rank, ended in enumerate(self._ended) if not ended]
                    self._fault = Deadlock(f"ranks {waiting} wait, and nobody goes on")
                    break
                self._batons[self._random.choice(able)].release()
                self._main.acquire()
            for baton in self._batons:
                baton.release()
            for thread in threads:
                thread.join(30)
        if self._fault is not None:
            raise self._fault

    def _rank(self, rank: int, flow: Callable[[], None]) -> None:
        self._mine.rank = rank
        self._batons[rank].acquire()
        try:
            if self._fault is None:
                flow()
        except BaseException as error:
            self._fault = self._fault or error
        self._ended[rank] = True
        self._main.release()

    def _give_way(self, looked: int | None = None) -> None:
        rank, builder = self._mine.rank, interpreter.interpreter_builder
        grid = getattr(builder, "grid_dim", None), getattr(builder, "grid_idx", None)
        self._looked[rank] = looked
        self._main.release()
        self._batons[rank].acquire()
        builder.grid_dim, builder.grid_idx = grid
        if self._fault is not None:
            raise SystemExit

    def _look(self, flags: list[int]) -> None:
        """Let other ranks go on; at a second look at flags, wait until one of them changed one."""
        again = getattr(self._mine, "look", ([], 0))
        self._give_way(again[1] if again[0] == flags else None)
        self._mine.look = flags, self._changes

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict) -> None:
        """Run a kernel of this thread's rank, one program after another."""
        values = dict(zip(kernel.arg_names, map(interpreter._implicit_cvt, args), strict=False))
        function, builder = kernel.rewrite(), interpreter.interpreter_builder

        def work(program: int) -> None:
            builder.set_grid_dim(grid[0], 1, 1)
            builder.set_grid_idx(program, 0, 0)
            function(**values, **constants)

        self._kernel(grid[0], work)

    def touch(self, work: Callable[[], None], reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Run ``work`` like a kernel that reads and writes all of these tensors."""

        def program(_: int) -> None:
            self._wait()
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    start = tensor.data_ptr()
                    words = np.arange(start, start + tensor.nbytes, _WORD, dtype=np.uint64)
                    self._access(words, None, _WORD, write)
            work()

        self._kernel(1, program)

    def _kernel(self, programs: int, work: Callable[[int], None]) -> None:
        """Run a kernel, which may start when every program of the one before lets it."""
        rank = self._mine.rank
        number, before, start = self._kernels[rank], self._streams[rank], self._early[rank]
        end, early = before.copy(), before
        for index in range(programs):
            self._give_way()
            self._mine.look = [], 0
            self._mine.program = program = _Program(rank, number, index, start)
            work(index)
            if not program.waited:
                raise Race(f"{program.threads[0]} did not wait for the kernel before")
            if program.launched_early:
                early = start
            for clock in program.clocks:
                end.join(clock)
        end.ended[rank] = self._kernels[rank] = number + 1
        self._streams[rank], self._early[rank] = end, early

    def _wait(self) -> None:
        program: _Program = self._mine.program
        program.waited = True
        for clock in program.clocks:
            clock.join(self._streams[self._mine.rank])

    def _check_wait(self, addresses: Any, mask: Any) -> None:
        """Find what is touched while the previous kernel may still write it, or hold it cached."""
        program: _Program = self._mine.program
        if not program.waited and not self._constants.issuperset(addresses[mask].ravel().tolist()):
            self._fault = self._fault or Race(f"{program.threads[0]} did not wait for memory")
            raise SystemExit  # the interpreter would wrap another exception

    def _launch_dependents(self) -> None:
        program: _Program = self._mine.program
        program.launched_early |= not program.waited

    # -- accesses ----------------------------------------------------------------------------------

    def _access(
        self, addresses: Any, mask: Any, size: int, write: bool, atomic: bool = False
    ) -> None:
        program: _Program = self._mine.program
        first = np.size(addresses) == 1 and (write or atomic)
        thread, clock = program.threads[not first], program.clocks[not first]
        time = clock.seen[thread]
        if mask is not None:
            addresses = np.broadcast_to(addresses, np.broadcast_shapes(addresses.shape, mask.shape))
            addresses = addresses[np.broadcast_to(mask, addresses.shape)]
        for start in addresses.ravel().tolist():
            if not self._place(start):
                continue
            for address in range(start, start + size, _WORD):
                word = self._words.setdefault(address // _WORD, _Word())
                self._check(word, thread, clock, address, write, atomic)
                if write:
                    word.writer, word.atomic, word.readers = (thread, time), atomic, {}
                else:
                    word.readers[thread] = time

    def _check(
        self, word: _Word, thread: Thread, clock: Clock, address: int, write: bool, atomic: bool
    ) -> None:
        earlier = []
        if word.writer is not None and not (atomic and word.atomic):
            earlier.append(("wrote", word.writer))
        if write:
            earlier += [("read", each) for each in word.readers.items()]
        for did, (other, time) in earlier:
            if other != thread and not clock.has(other, time):
                does = "writes" if write else "reads"
                what = f"{thread} {does} {self._place(address)}, which {other} {did}"
                self._fault = self._fault or Race(what)
                raise SystemExit  # the interpreter would wrap another exception

    def _atomic(self, ptr: Any, val: Any, mask: Any, sem: str, scope: str, change: bool) -> None:
        """Order what an atomic orders."""
        addresses, size = ptr.data, val.data.itemsize
        watched = [a for a in addresses[mask.data].ravel().tolist() if self._place(a)]
        if not watched:
            return
        if change:
            self._changes += 1
        program: _Program = self._mine.program
        scalar, system = np.size(addresses) == 1, "SYS" in scope
        index = 0 if scalar else 1
        thread, clock = program.threads[index], program.clocks[index]
        self._access(addresses, mask.data, size, True, atomic=True)
        for address in watched:
            left = self._released.setdefault(address, [])
            if "ACQUIRE" in sem:
                for known, rank, wide in left:
                    if rank == thread.rank or (wide and system):
                        clock.join(known)
            if "RELEASE" in sem:
                left.append((clock.copy(), thread.rank, system))
        if "RELEASE" in sem:
            program.tick(index)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Run launches here, and see every access of the interpreter."""
        builder = interpreter.interpreter_builder
        load, store = builder.create_masked_load, builder.create_masked_store
        rmw = builder.create_atomic_rmw
        language = {"tl": interpreter.tl, "core": interpreter.tl.core}

        def sees_load(ptrs: Any, mask: Any, *more: Any) -> Any:
            volatile = more[-1]
            if not volatile:
                self._check_wait(ptrs.data, mask.data)
            self._access(ptrs.data, mask.data, _size(ptrs), False)
            return load(ptrs, mask, *more)

        def sees_store(ptrs: Any, value: Any, mask: Any, *more: Any, **named: Any) -> Any:
            self._check_wait(ptrs.data, mask.data)
            self._access(ptrs.data, mask.data, _size(ptrs), True)
            return store(ptrs, value, mask, *more, **named)

        def sees_rmw(op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
            look = "ADD" in str(op) and not val.data.any()
            if look:
                self._look(ptr.data[mask.data].tolist())
            elif "XCHG" in str(op):  # others may go on after each flag
                self._give_way()
            self._atomic(ptr, val, mask, str(sem), str(scope), change=not look)
            return rmw(op, ptr, val, mask, sem, scope)

        def launched(name: str) -> Callable[..., None]:
            kernel = getattr(transfer, name)._kernel

            def launch(grid: Any, *args: Any, num_warps: int = 4, num_stages: int = 3,
                       maxnreg: int | None = None, enable_fp_fusion: bool = True,
                       **constants: Any) -> None:  # fmt: skip
                self.launch(kernel, grid, args, constants | {"PDL": True})

            return launch

        every_time = getattr(interpreter._patch_lang, "every_time", interpreter._patch_lang)
        language_patch = every_time(FunctionType((lambda: None).__code__, language))
        nothing = SimpleNamespace(restore=lambda: None)
        try:
            with (
                mock.patch.multiple(transfer, **{n: launched(n) for n in _LAUNCHERS}),
                mock.patch.object(interpreter, "_patch_lang", lambda _: nothing),
                mock.patch.multiple(
                    cuda, gdc_wait=self._wait, gdc_launch_dependents=self._launch_dependents
                ),
                mock.patch.multiple(
                    builder, create_masked_load=sees_load, create_masked_store=sees_store,
                    create_atomic_rmw=sees_rmw,
                    create_barrier=lambda: self._mine.program.barrier(),
                ),
            ):  # fmt: skip
                yield
        finally:
            language_patch.restore()


def _size(ptrs: Any) -> int:
    return ptrs.get_element_ty().primitive_bitwidth // 8
