"""The end of memory that the ranks of a group share: it is freed by all of them, or left."""

from __future__ import annotations

import time
from weakref import WeakSet

import torch
import torch.distributed as dist

from moekit.errors import PeerFailed
from moekit.runtime.agreement import Agreement

_lost: WeakSet[dist.ProcessGroup] = WeakSet()  # no later call waits for their ranks again


def farewell(group: dist.ProcessGroup, what: str, fault: str = "", timeout: float = 20.0) -> str:
    """Return why some rank does not free ``what`` now, or "" if all do. Collective.

    fault: why this rank does not, or "". timeout: seconds to wait for the other ranks.
    """
    if group in _lost:
        return "a rank did not answer before"
    try:
        dist.get_process_group_ranks(group)
        Agreement(group, timeout).agree(f"free {what}", fault or None)
    except PeerFailed as error:
        fault = str(error)
    except (KeyError, ValueError):
        return "the process group was destroyed first; destroy kernels before their group"
    if fault:
        _lost.add(group)
    return fault


def gpu_fault(last: torch.cuda.Stream | None, timeout: float = 20.0) -> str:
    """Return why the GPU does not end the work of the current stream and of ``last`` in time."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    now, end = torch.cuda.current_stream(), time.monotonic() + timeout
    try:
        while not (now.query() and (last or now).query()):
            if time.monotonic() > end:
                return "its GPU still waits for another rank"
            time.sleep(0.001)
    except RuntimeError as error:
        return f"its GPU has failed: {error}"
    return ""
