"""`tune --gpus N`: a process on each device, for one shape and scheme at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from .sweep import Cell, Progress


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
    left = list(Counter((c.shape, c.scheme) for c in cells).items())
    progress, codes, lock = Progress(len(cells)), [0], threading.Lock()

    def work(index: int) -> None:
        device = kind if kind == "cpu" else f"{kind}:{index}"
        while True:
            with lock:
                if not left:
                    return
                (shape, scheme), count = left.pop(0)
            more = ["--shapes", shape, "--quant", scheme, "--device", device, "--gpus", "0"]
            more += ["--output", str(file), "--markdown", os.devnull]
            again = [sys.executable, "-m", "moekit", "tune", *argv, *more]
            with subprocess.Popen(again, stderr=subprocess.PIPE, text=True) as child:
                for line in child.stderr or ():
                    progress.say(f"{device}: {line.rstrip()}")
            with lock:
                codes.append(child.returncode)
                progress.done(f"{shape} {scheme}: exit code {child.returncode}", count)

    with ThreadPoolExecutor(devices) as pool:
        workers = [pool.submit(work, index) for index in range(devices)]
        try:
            wait(workers)
        except KeyboardInterrupt:  # the processes got it, too, and end
            left.clear()
            codes.append(1)
    progress.close()
    for worker in workers:
        worker.result()
    return not any(codes)
