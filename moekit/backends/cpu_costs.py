"""The time that each method of running an expert takes on this CPU.

The fastest method depends on the instruction sets that torch and oneDNN use, the number of threads,
the dtype, the size of an expert and its rows. So a short calibration times the methods themselves,
and the user's cache folder keeps the times. With ``MOEKIT_CALIBRATE=0`` one method runs everything.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch

from moekit.errors import MoekitError
from moekit.untrusted.arguments import switch
from moekit.untrusted.files import read_json
from moekit.untrusted.folders import cache_folder
from moekit.untrusted.writing import replace_file

logger = logging.getLogger("moekit")

# Numbers of rows that an expert is timed with; costs in between are interpolated. They are not
# multiples of a tile, because the rows that a router gives an expert rarely are.
ROWS = (1, 2, 3, 6, 13, 27, 53, 107, 213)
MOST_ROWS = 1024  # beyond, time grows with the rows
CALIBRATE, CACHE_VERSION = "MOEKIT_CALIBRATE", 4
_TURNS, _CELL_SECONDS = 6, 0.06  # most timed rounds; the seconds after which two are enough
BUSY = 0.1  # share of the time for which threads may wait for cores
_LEAST_SECONDS = 0.1  # of which that is a share
_HOPELESS = 3.0  # a method this many times slower than the fastest is not timed with more rows

Points = Sequence[tuple[int, float]]  # (rows, seconds of an expert), rows ascending


@dataclass(frozen=True)
class Costs:
    """The times of each method, and where they come from, for `explain`."""

    points: Mapping[str, Points]
    source: str

    def by_rows(self, method: str) -> list[float]:
        """Return the seconds of an expert of 1, 2, ... `MOST_ROWS` rows, infinity if unknown.

        A method without a time for the last of `ROWS` was hopeless beyond its own last time.
        """
        points, seconds = self.points.get(method, ()), []
        for (n0, t0), (n1, t1) in pairwise(points):
            seconds += [t0 + (t1 - t0) * (n - n0) / (n1 - n0) for n in range(n0, n1)]
        for n, t in points[-1:]:
            more = t / n if n == ROWS[-1] else math.inf
            seconds += [t] + [more * rows for rows in range(n + 1, MOST_ROWS + 1)]
        return seconds or [math.inf] * MOST_ROWS


# -- the machine --------------------------------------------------------------------------------

_timing = threading.Lock()  # calibrations at the same time would disturb each other
_switch = threading.Lock()  # held while oneDNN is switched off, and to count `onednn_kept`
_off, _kept = False, 0


def capability() -> str:
    """Return what decides which kernels of torch and oneDNN run here.

    `ATEN_CPU_CAPABILITY`, `ONEDNN_MAX_CPU_ISA` and `torch.backends.mkldnn.flags` change them.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "on")
    aten = torch.backends.cpu.get_cpu_capability()
    return f"{aten}, oneDNN {limit if onednn_enabled() else 'off'}"


@cache
def cpu_name() -> str:
    """Return the processor's name, family and model, which identify a machine's calibration."""
    wanted = ("cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    said = {name.strip(): value.strip() for name, _, value in (s.partition(":") for s in lines)}
    found = [said[name] for name in wanted if name in said]
    return " ".join(found) or platform.processor() or platform.machine()


def onednn_enabled() -> bool:
    """Return whether torch may call oneDNN, not counting `without_onednn`."""
    return bool(torch._C._has_mkldnn and (torch._C._get_mkldnn_enabled() or _off))


def without_onednn(call: Callable[[], object]) -> None:
    """Make a call with oneDNN switched off in the whole process; with it if a thread needs it."""
    global _off
    if _kept or not _switch.acquire(blocking=False):
        call()
        return
    try:
        _off = not _kept
        torch._C._set_mkldnn_enabled(not _off)
        call()
    finally:
        torch._C._set_mkldnn_enabled(True)
        _off = False
        _switch.release()


@contextmanager
def onednn_kept() -> Iterator[None]:
    """Let no thread switch oneDNN off in this block, because that changes the bits of products."""
    global _kept
    with _switch:
        _kept += 1
    try:
        yield
    finally:
        with _switch:
            _kept -= 1


def _forget_threads() -> None:
    """Release what other threads held when this process was forked: they are not in it."""
    global _off, _kept
    if _off:
        torch._C._set_mkldnn_enabled(True)
    _off, _kept = False, 0
    for lock in (_switch, _timing):
        lock._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def waited_for_cores() -> float:
    """Return the seconds for which this process's threads were ready but had no core, 0 where the
    system does not tell. Format: the kernel's Documentation/scheduler/sched-stats.rst."""
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread may end
            total += int(file.read_text().split()[1])
    return total * 1e-9


# -- measuring ----------------------------------------------------------------------------------


def measure(
    methods: Sequence[str], call_of: Callable[[str, int], tuple[Callable[[], object], int]]
) -> tuple[dict[str, list[tuple[int, float]]], bool]:
    """Time every method with every number of rows, in rounds of one call of each method.

    Args:
        call_of: (method, rows) -> a call, and how many experts of that many rows it runs.

    Returns:
        method -> [(rows, least seconds of an expert)], and whether to keep them: if several threads
        waited for cores, they are wrong by factors.
    """
    # A thread's own clock does not count the time of other processes.
    threads = torch.get_num_threads()
    clock = time.thread_time if threads == 1 else time.perf_counter
    start_of_all, waited = time.perf_counter(), waited_for_cores()
    points: dict[str, list[tuple[int, float]]] = {method: [] for method in methods}
    alive = list(methods)
    for rows in ROWS:
        ready = {method: call_of(method, rows) for method in alive}
        for call, _ in ready.values():
            call()
        times, begin = dict.fromkeys(ready, math.inf), time.perf_counter()
        for turn in range(_TURNS):
            for method, (call, experts) in ready.items():
                if turn and times[method] > _HOPELESS * min(times.values()):
                    continue
                start = clock()
                call()
                times[method] = min(times[method], (clock() - start) / experts)
            if turn and time.perf_counter() - begin > _CELL_SECONDS:
                break
        for method, seconds in times.items():
            points[method].append((rows, seconds))
            if seconds > _HOPELESS * min(times.values()) and rows > ROWS[0]:
                alive.remove(method)
    took, waited = time.perf_counter() - start_of_all, waited_for_cores() - waited
    return points, threads == 1 or waited <= BUSY * threads * max(took, _LEAST_SECONDS)


# -- the stored times ---------------------------------------------------------------------------


def find(
    key: tuple[object, ...], timed: Callable[[], tuple[Mapping[str, Points], bool]] | None
) -> Costs | None:
    """Return the costs of one kind of expert on this machine with the current number of threads.

    Args:
        key: What the costs depend on.
        timed: Times the methods by `measure`, if the cache folder has no times yet. Without it the
            result is None then.
    """
    where = f"{capability()}, {torch.get_num_threads()} thread(s)"
    if not switch(CALIBRATE, True):
        return Costs({"right": [(1, 1.0), (ROWS[-1], 1.0)]}, f"{CALIBRATE}=0: nothing was timed")
    file = _file(f"{where}: {key!r}")
    with _timing:
        points = _read(file)
        if points is None:
            if timed is None:
                return None
            points, keep = timed()
            if not keep:  # the next process times again
                return Costs(points, "timed once, because other work disturbed the calibration")
            try:
                text = json.dumps(points, indent=1)
                replace_file(file, text, "name a folder of yours in XDG_CACHE_HOME")
            except MoekitError as error:
                logger.warning("moekit: the CPU's calibration was not kept: %s", error)
    return Costs(points, f"calibrated on this machine ({where})")


def _file(what: str) -> Path:
    machine = f"{cpu_name()} {torch.__version__} {CACHE_VERSION} {what}"
    digest = hashlib.sha256(machine.encode()).hexdigest()[:16]
    return cache_folder() / "moekit" / f"cpu-{digest}.json"


def _read(file: Path) -> Mapping[str, Points] | None:
    """Return the times in a file of the cache, None if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        points = {m: [(int(n), float(t)) for n, t in p] for m, p in read_json(file).items()}
        if all([n for n, _ in p] == list(ROWS[: len(p)]) for p in points.values()):
            return points
    return None
