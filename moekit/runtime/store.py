"""The key-value store of the process group, accessed in bounded time.

The process that hosts the store may be stopped or dead. torch's client then blocks without a limit
and holds a lock, so one thread's wait blocks another thread's write. Every access
therefore goes through a thread with its own client, which serves one caller at a time.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore


class StoreLost(Exception):
    """The store did not answer in time, or the connection to it broke."""


class Job:
    """Work on the store, and the reply to its caller."""

    def __init__(self, work: Callable[[Any, Job], Any]) -> None:
        self.work = work
        self.reply: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.abandoned = False

    def read(self, client: Any, keys: list[str], seconds: float) -> list[bytes]:
        """Return the values of keys, waiting for other ranks to write them."""
        client.set_timeout(timedelta(seconds=max(seconds, 0.001)))  # zero would mean no limit
        values: list[bytes] = client.multi_get(keys)
        return values

    def go_on(self) -> None:
        """Raise StoreLost if the caller does not wait for this work any longer."""
        if self.abandoned:
            raise StoreLost("answered too late")


# A line is the queue of a thread that uses one client of the store, for one caller at a time.
_Line = queue.SimpleQueue[Job | None]
_idle: WeakKeyDictionary[Store, list[_Line]] = WeakKeyDictionary()
_opening = threading.Lock()
_threads: WeakKeyDictionary[threading.Thread, _Line] = WeakKeyDictionary()


def _line(store: Store) -> _Line:
    jobs: _Line = queue.SimpleQueue()
    # A daemon thread: one that waits for the store must not keep the process alive.
    thread = threading.Thread(target=_serve, args=(store, jobs), name="moekit-store", daemon=True)
    thread.start()
    _threads[thread] = jobs
    return jobs


@atexit.register
def _close() -> None:
    """End the threads: Python aborts if one returns from the store while it shuts down."""
    threads = dict(_threads)
    for jobs in threads.values():
        jobs.put(None)
    deadline = time.monotonic() + 1.0
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def access(
    store: Store,
    work: Callable[[Any, Job], Any],
    seconds: float,
    tidy: Callable[[Any, Any], None] | None = None,
) -> Any:
    """Return ``work(client, job)``, or raise StoreLost after ``seconds``.

    tidy: called with the client and the result after this function has returned the result.
    """
    with _opening:
        lines = _idle.setdefault(store, [])
    try:
        line = lines.pop()
    except IndexError:
        line = _line(store)
    job = Job(work)
    try:
        line.put(job)
        result, error = job.reply.get(timeout=seconds)
    except queue.Empty:
        lines.append(line)  # later jobs queue behind this one, so that threads do not pile up
        raise StoreLost(f"did not answer within {seconds:g} s") from None
    except BaseException:  # an interrupt: this thread may go on waiting for other ranks
        line.put(None)
        raise
    finally:
        job.abandoned = True
    lines.append(line)
    if isinstance(error, dist.DistNetworkError):
        raise StoreLost("is gone") from error
    if error is not None:
        raise error
    if tidy is not None:
        line.put(Job(lambda client, _: tidy(client, result)))
    return result


def host_of(store: Any) -> str:
    """Name the process that hosts the store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    at = f" at {store.host}:{store.port}" if isinstance(store, TCPStore) else ""
    return f"the process{at} that hosts it (torchrun's launcher or global rank 0)"


def _serve(store: Any, jobs: _Line) -> None:
    client: Any = None
    while (job := jobs.get()) is not None:
        if job.abandoned:
            continue
        result, error = None, None
        try:
            if client is None:
                client = store.clone()
            result = job.work(client, job)
        except BaseException as raised:
            error = raised
        job.reply.put((result, error))
        del job, result, error
