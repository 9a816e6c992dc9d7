"""Two threads of a rank: each with a layer in its own process group, or both with one kernel."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from moekit.testing.ranks import Call, Job, Rank
from moekit.testing.threads import alternately

# Seconds by which the first thread of a rank is ahead of the second one.
_HEAD_START = 0.1


def in_opposite_orders(rank: int, world_size: int, job: Job, wanted: Call, seconds: float) -> None:
    """Serve two layers from two threads. Even ranks begin each step in one group, odd in the other.

    If a dispatcher waits for other ranks while it holds a lock that groups share, every rank waits
    in one group for ranks that wait for their lock.

    Args:
        seconds: how long a step may take.
    """
    assert job.members is not None
    groups = job.members, replace(job.members, copy=1)  # `in_groups` has made both
    layers = [Rank(rank, world_size, replace(job, members=g), checked=False) for g in groups]

    def at_once(what: str, step: Callable[[int], Any]) -> list[Any]:
        return _at_once(rank, what, step, seconds)

    def make(which: int) -> None:
        spec, problem = layers[which].spec, layers[which].problem
        spec.load()(spec, problem, groups[which].group).destroy()

    at_once("make dispatchers", make)
    made = [
        [r.case(wanted, (index, which)) for index in range(4)] for which, r in enumerate(layers)
    ]
    packed = [r.packed for r in layers]

    def arguments(which: int, index: int) -> tuple[Any, ...]:
        case = made[which][index][0]
        return case.x, packed[which], case.routing

    flights = at_once("start calls", lambda n: layers[n].kernel.start(*arguments(n, 0)))
    at_once("run experts and combine", lambda n: flights[n].run())
    first = at_once("wait for results", lambda n: flights[n].result())
    more = at_once(
        "make calls", lambda n: [layers[n].kernel(*arguments(n, index)) for index in range(1, 4)]
    )
    for which, r in enumerate(layers):
        for index, out in enumerate([first[which], *more[which]]):
            r.compare(out, made[which][index][1], f"call {index} of thread {which} of two")
    at_once("end", lambda n: layers[n].finish())


def of_one_kernel(rank: int, world_size: int, job: Job, *wanted: Call) -> None:
    """Make two calls of one kernel at once, switching threads after every torch operator."""
    r = Rank(rank, world_size, job, checked=False)
    packed, made = r.packed, [r.case(each, which) for which, each in enumerate(wanted)]
    outs: dict[int, Tensor] = {}

    def run(which: int) -> None:
        case = made[which][0]
        outs[which] = r.kernel(case.x, packed, case.routing)

    alternately(lambda: run(0), lambda: run(1))
    for which, (_, ref) in enumerate(made):
        r.compare(outs[which], ref, f"the call of thread {which} of two")
    r.finish()


def _at_once(rank: int, what: str, step: Callable[[int], Any], seconds: float) -> list[Any]:
    """Return step(0) and step(1), each from a thread. Raises what they raise, or a deadlock."""
    results: list[Any] = [None, None]
    errors: list[BaseException] = []

    def run(which: int) -> None:
        time.sleep(_HEAD_START * (which != rank % 2))
        try:
            results[which] = step(which)
        except BaseException as error:
            errors.append(error)

    # Daemons: threads that are blocked must not keep the process alive.
    threads = [threading.Thread(target=run, args=(which,), daemon=True) for which in range(2)]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    if stuck := [thread for thread in threads if thread.is_alive()]:
        raise AssertionError(
            f"rank {rank}: to {what} in two groups, from a thread for each, was not finished after "
            f"{seconds:g} s. The other ranks begin with the other group, so a lock that groups "
            f"share must not be held while a rank waits for others: use a lock for each group.\n"
            + "\n".join(map(_stack_of, stuck))
        )
    return results


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame else "it has ended meanwhile\n"
    return f"{thread.name} waits here:\n{stack}"
