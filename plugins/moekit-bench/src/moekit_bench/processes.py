"""`tune --gpus N`: a process on each device, for one shape and scheme at a time."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .records import Cell
from .sweep import Progress


def on_devices(
    devices: int, kind: str, cells: Sequence[Cell], file: Path, argv: Sequence[str]
) -> bool:
    """Measure the cells and return whether all went well.

    A process that loses its device loses only the rest of its shape and scheme.

    Args:
        kind: The device type; processes use the first ``devices`` of it.
        file: The table that all of them fill.
        argv: The arguments of `tune`.
    """
    groups = Counter((c.shape, c.scheme) for c in cells)
    progress, lock, free = Progress(len(cells)), threading.Lock(), queue.SimpleQueue[str]()
    for index in range(devices):
        free.put(kind if kind == "cpu" else f"{kind}:{index}")

    def measure(group: tuple[str, str], count: int) -> int:
        (shape, scheme), device = group, free.get()
        more = ["--shapes", shape, "--quant", scheme, "--device", device, "--gpus", "1"]
        more += ["--output", str(file), "--markdown", os.devnull]
        again = [sys.executable, "-m", "moekit", "tune", *argv, *more]
        with subprocess.Popen(again, stderr=subprocess.PIPE, text=True) as child:
            for line in child.stderr or ():
                progress.say(f"{device}: {line.rstrip()}")
        free.put(device)
        with lock:
            progress.done(f"{shape} {scheme}: exit code {child.returncode}", count)
        return child.returncode

    with ThreadPoolExecutor(devices) as pool:
        try:
            codes = list(pool.map(measure, groups.keys(), groups.values()))
        except KeyboardInterrupt:  # the processes also got it, and end
            pool.shutdown(wait=False, cancel_futures=True)
            codes = [1]
    return not any(codes)
