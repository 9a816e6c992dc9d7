"""The time that each method of running an expert takes on this CPU.

The fastest method depends on the instruction sets that torch and oneDNN use, the number of threads,
the dtype, the size of an expert and its rows. So a short calibration times the methods themselves,
and the user's cache folder keeps the times. If calibration is switched off
(``MOEKIT_CALIBRATE=0``), or other work disturbs it, the shipped table of the nearest capability is
used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from moekit.errors import MoekitError
from moekit.untrusted.files import cache_folder, read_json, replace_file
from moekit.untrusted.switches import switch

logger = logging.getLogger("moekit")

# Numbers of rows that an expert is timed with; costs in between are interpolated. They are not
# multiples of a tile, because the rows that a router gives an expert rarely are.
ROWS = (1, 2, 3, 6, 13, 27, 53, 107, 213)
CALIBRATE, CACHE_VERSION = "MOEKIT_CALIBRATE", 2
_TURNS, _CELL_SECONDS = 6, 0.04  # most timed rounds; the seconds after which two are enough
_BURST = 3  # calls of one expert in a row, as a layer makes them
BUSY = 0.1  # share of the time for which threads may wait for cores
_LEAST_SECONDS = 0.1  # of which that is a share
_HOPELESS = 3.0  # a method this many times slower than the fastest is not timed with more rows

Points = Sequence[tuple[int, float]]


class Disturbed(Exception):
    """Other work took the cores while methods were timed."""


@dataclass(frozen=True)
class Costs:
    """Seconds per expert and number of rows, for each method.

    seconds: method -> [(rows, seconds), ...], rows ascending. A method without an entry for the
    last of `ROWS` is never chosen beyond its own last entry.
    source: where the numbers come from, for `explain`.
    """

    seconds: Mapping[str, Points]
    source: str

    def of(self, method: str, rows: int) -> float:
        """Return the seconds of ``method`` for an expert of ``rows`` rows, infinity if unknown."""
        points = self.seconds.get(method, ())
        if not points or rows > points[-1][0] < ROWS[-1]:
            return math.inf
        at = bisect_left(points, (rows, 0.0))
        if at == 0:
            return points[0][1]
        if at == len(points):  # beyond the last entry, time grows with the rows
            return points[-1][1] * rows / points[-1][0]
        (n0, t0), (n1, t1) = points[at - 1], points[at]
        return t0 + (t1 - t0) * (rows - n0) / (n1 - n0)


def capability() -> str:
    """Return the instruction sets that torch's own kernels and oneDNN's use here.

    `ATEN_CPU_CAPABILITY`, `ONEDNN_MAX_CPU_ISA` and `torch.backends.mkldnn.flags` change them.
    """
    aten = torch.backends.cpu.get_cpu_capability()
    return f"{aten}, oneDNN {_onednn() if onednn_enabled() else 'off'}"


def onednn_enabled() -> bool:
    """Return whether torch may call oneDNN now."""
    return bool(torch._C._has_mkldnn and torch._C._get_mkldnn_enabled())


def settle_onednn(dtype: torch.dtype) -> None:
    """Let torch switch oneDNN off now, if it ever does.

    On ARM without products of bf16 (Graviton2), the first x @ W.T of several rows fails in oneDNN,
    and torch 2.13 then switches oneDNN off for the whole process: not between measurements.
    """
    if dtype == torch.bfloat16:
        square = torch.ones(64, 64, dtype=dtype, device="cpu")
        torch.mm(square, square.T)


@cache
def _onednn() -> str:
    """Return the newest instruction set for 16-bit products that oneDNN may use."""
    flags, limit = _cpu_flags(), os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    levels = [  # name in ONEDNN_MAX_CPU_ISA, the flag that shows it
        ("AVX2", "avx2"),
        ("AVX512_CORE", "avx512bw"),
        ("AVX512_CORE_BF16", "avx512_bf16"),
        ("AVX512_CORE_FP16", "avx512_fp16"),
        ("AVX512_CORE_AMX", "amx_bf16"),
    ]
    if "asimd" in flags:  # moekit's names: the variable does not limit Arm Compute Library
        return "ARM_BF16" if "bf16" in flags else "ARM"
    found = "SSE41"
    for name, flag in levels:
        if flag in flags:
            found = name
        if limit.startswith(name) and limit in (name, f"{name}_VNNI"):
            break
    return found


@cache
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return frozenset(lines[0].partition(":")[2].split()) if lines else frozenset()


@cache
def cpu_name() -> str:
    """Return the processor's name, family and model, which identify a machine's calibration."""
    with contextlib.suppress(OSError):
        wanted = ("model name", "cpu family", "model", "stepping", "CPU implementer", "CPU part")
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        parts = [line.partition(":") for line in lines]
        found = [value.strip() for name, _, value in parts if name.strip() in wanted]
        if found:
            return " ".join(found)
    return platform.processor() or platform.machine()


def calibrates() -> bool:
    """Return whether this process may time products; ``MOEKIT_CALIBRATE=0`` forbids it."""
    return switch(CALIBRATE, True)


# -- the store ----------------------------------------------------------------------------------


def find(
    key: tuple[object, ...],
    dtype: str,
    elements: int,
    timed: Callable[[], Mapping[str, Points]] | None,
) -> Costs | None:
    """Return the costs of one kind of expert on this machine with the current number of threads.

    Args:
        key: the sizes, dtype and activation that the costs depend on.
        elements: the number of elements of an expert's weights.
        timed: times the methods by `measure`; it runs if the cache folder has no times yet.

    Returns:
        The costs, or None if the cache folder has none and ``timed`` is None. Where other work
        disturbs the measurement, shipped costs, which are not kept: the next process tries again.
    """
    where = f"{capability()}, {torch.get_num_threads()} thread(s)"
    if not calibrates():
        return shipped(dtype, elements, f"{CALIBRATE}=0 asks for them")
    path, name = _file(), f"{where}: {key!r}"
    entry = _read(path).get(name)
    if entry is None:
        if timed is None:
            return None
        begin = time.perf_counter()
        try:
            entry = {method: [[n, t] for n, t in points] for method, points in timed().items()}
        except Disturbed:
            return shipped(dtype, elements, "other work disturbed this process's calibration")
        logger.info("moekit: timed the methods for %s in %.1f s", name, time.perf_counter() - begin)
        _write(path, name, entry)
    seconds = {method: [(int(n), float(t)) for n, t in points] for method, points in entry.items()}
    return Costs(seconds, f"calibrated on this machine ({where})")


def _file() -> Path:
    machine = f"{cpu_name()} {torch.__version__} {CACHE_VERSION}"
    digest = hashlib.sha256(machine.encode()).hexdigest()[:16]
    return cache_folder() / "moekit" / f"cpu-{digest}.json"


def _read(path: Path) -> dict[str, Any]:
    """Return the entries of the cache file, none if it is missing or damaged."""
    try:
        found = read_json(path)
        return {name: entry for name, entry in found.items() if _is_entry(entry)}
    except (OSError, ValueError, AttributeError):
        return {}


def waited_for_cores() -> float:
    """Return the seconds for which this process's threads were ready but had no core, 0 where the
    system does not tell. Format: the kernel's Documentation/scheduler/sched-stats.rst."""
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may end meanwhile
            total += int(file.read_text().split()[1])
    return total * 1e-9


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(points, list)
        and all(
            isinstance(point, list)
            and len(point) == 2
            and isinstance(point[0], int)
            and isinstance(point[1], float)
            and 0 < point[1] < math.inf
            for point in points
        )
        for points in entry.values()
    )


def _write(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Add an entry. If the folder cannot be written, the next process calibrates again."""
    try:
        text = json.dumps({**_read(path), name: entry}, indent=1)
        replace_file(path, text, "name a folder of yours in XDG_CACHE_HOME")
    except MoekitError as error:
        logger.warning("moekit: the CPU's calibration was not kept: %s", error)


# -- measuring ----------------------------------------------------------------------------------


def measure(
    calls: Mapping[str, Callable[[int], Callable[[], object]]],
    experts: int = 1,
    against: Sequence[float] = (math.inf,) * len(ROWS),
) -> dict[str, list[tuple[int, float]]]:
    """Time every method with every number of rows, in rounds of one call of each method.

    Args:
        calls: method -> (rows -> a call of ``experts`` experts of that many rows).
        against: the seconds of the fastest method known, for each of `ROWS`.

    Returns:
        method -> [(rows, least seconds an expert)].

    Raises:
        Disturbed: Several threads waited for cores, which makes times wrong by factors.
    """
    # A thread's own clock does not count the time of other processes.
    threads = torch.get_num_threads()
    clock = time.thread_time if threads == 1 else time.perf_counter
    start_of_all, waited = time.perf_counter(), waited_for_cores()
    burst = 1 if experts > 1 else _BURST
    points: dict[str, list[tuple[int, float]]] = {method: [] for method in calls}
    alive = dict(calls)
    for rows, known in zip(ROWS, against, strict=True):
        ready = {method: make(rows) for method, make in alive.items()}
        for call in ready.values():
            call()
        times, fastest, begin = dict.fromkeys(ready, math.inf), known * experts, time.perf_counter()
        for turn in range(_TURNS):
            for method, call in ready.items():
                if turn and times[method] > _HOPELESS * fastest:
                    continue
                start = clock()
                for _ in range(burst):
                    call()
                times[method] = min(times[method], (clock() - start) / burst)
                fastest = min(fastest, times[method])
            if turn and time.perf_counter() - begin > _CELL_SECONDS:
                break
        for method, seconds in times.items():
            points[method].append((rows, seconds / experts))
            if seconds > _HOPELESS * fastest and rows > ROWS[0]:
                del alive[method]
        took = time.perf_counter() - start_of_all
        if threads > 1 and waited_for_cores() - waited > BUSY * threads * max(took, _LEAST_SECONDS):
            raise Disturbed
    return points


# -- shipped ------------------------------------------------------------------------------------


def shipped(dtype: str, elements: int, why: str) -> Costs:
    """Return the shipped costs of the nearest capability and size, scaled by ``elements``.

    why: the reason for them, a clause for `explain`.
    """
    aten, _, onednn = capability().partition(", oneDNN ")
    if not aten.startswith("AVX512") or onednn in ("off", "AVX2", "SSE41"):
        name = "AVX2"
    else:
        name = "AVX512" if onednn == "AVX512_CORE" else "AVX512_BF16"
    tables = [t for t in _shipped() if t["capability"] == name and t["dtype"] == dtype]
    nearest = min(tables, key=lambda t: abs(math.log(t["elements"] / elements)))
    scale = elements / nearest["elements"]
    seconds = {
        method: [(n, t * scale) for n, t in found] for method, found in nearest["seconds"].items()
    }
    return Costs(seconds, f"shipped costs for {name}: {why}")


@cache
def _shipped() -> list[dict[str, Any]]:
    file = resources.files(__package__) / "cpu_costs.json"  # the package may be in a zip file
    tables: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return tables
