"""Functions that ranks run to test failures, groups and threads.

`moekit.testing.ranks` says how the functions are called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from moekit.errors import GroupMismatch, InvalidInput, MoekitError, PeerFailed, Unsupported
from moekit.problem import MoEProblem
from moekit.testing.calls import call
from moekit.testing.distributed import wait_until_connected
from moekit.testing.ranks import (
    Call,
    Job,
    Members,
    Rank,
    Refused,
    calls,
    run,
)
from moekit.testing.threads import alternately

# Seconds by which the first thread of a rank is ahead of the second one.
_HEAD_START = 0.1


def _culprit(r: Rank, round_: int) -> int:
    """Return the rank that fails in a round: the last one, then the one before it, and so on."""
    return (r.world_size - 1 - round_) % r.world_size


def _check_next(r: Rank, key: object) -> None:
    case, right = r.case(Call((5, 3)), key)
    out = call(r.kernel, r.packed, case)
    r.compare(out, right, "the call after the failed one")


def unchecked_rank_fails(r: Rank) -> None:
    """Let ranks of an unchecked kernel fail before `prepare`: `abort` tells the others.

    One rank fails, then two, more often than a library has buffers.
    """
    r.checked = False
    for round_ in range(4):
        culprits = [_culprit(r, round_ + n) for n in range(1 + round_ % 2)]
        whose = " and ".join(f"rank {culprit}" for culprit in culprits)
        case, _ = r.case(Call((5, 3)), round_)
        x = case.x[:, :-1] if r.rank in culprits else case.x
        try:
            r.kernel(x, r.packed, case.routing)
        except MoekitError as error:
            r.expect(
                r.rank in culprits or any(f"rank {each}" in str(error) for each in culprits),
                f"rank {r.rank} learns of a failure, but not that it is {whose}'s: {error}",
            )
            r.expect(
                r.rank in culprits or isinstance(error, PeerFailed),
                f"rank {r.rank} learns of a failure by {type(error).__name__}, expected PeerFailed",
            )
        else:
            raise AssertionError(
                f"rank {r.rank} got no error although {whose} failed before prepare: abort() "
                "did not tell it"
            )
        _check_next(r, (round_, "after"))


def fails_after_dispatch(r: Rank) -> None:
    """Let one rank raise while its tokens are in flight: all raise, and other calls are right.

    One of them is in flight at that time, one is the next.
    """

    def broken() -> None:
        raise InvalidInput("shared experts that fail on purpose")

    for round_ in range(4):  # more often than a library has buffers
        culprit = _culprit(r, round_)
        mine = r.alone or r.rank == culprit
        (case, _), (other, right) = (r.case(Call((5, 3)), (round_, n)) for n in range(2))
        flying = r.kernel.start(other.x, r.packed, other.routing)
        meanwhile = broken if mine else None
        failing = r.kernel.start(case.x, r.packed, case.routing, meanwhile=meanwhile)
        flying.run()
        try:
            failing.run()
        except MoekitError as error:
            r.expect(mine or f"rank {culprit} failed" in str(error), str(error))
        else:
            raise AssertionError(f"rank {r.rank} got no error although rank {culprit} fails")
        r.compare(flying.result(), right, "the call in flight while another failed")
        _check_next(r, (round_, "after"))


def resolves(r: Rank) -> None:
    """Assert that the dispatcher keeps its group, and that ranks that differ are refused."""
    kept = r.kernel.dispatcher.group
    assert kept is not None, (
        "tokens move, but the dispatcher's `group` is None, so checked calls check nothing: "
        "pass moekit.plugin.resolve(problem, group) to super().__init__()"
    )
    given = None if r.job.members is None else r.job.members.group
    wanted = dist.get_process_group_ranks(given)
    assert dist.get_process_group_ranks(kept) == wanted, (
        f"the dispatcher was given the group of ranks {wanted}, and keeps the group of ranks "
        f"{dist.get_process_group_ranks(kept)}"
    )
    last = r.rank == r.world_size - 1
    other = r.problem.replace(intermediate_size=2 * r.problem.intermediate_size)
    assert _refuses(r, other if last else r.problem), (
        f"rank {r.rank}: ranks compose for different layers, and get no GroupMismatch: call "
        "moekit.plugin.resolve(problem, group) in the constructor"
    )
    _check_next(r, "after")


def _refuses(r: Rank, problem: MoEProblem) -> bool:
    try:
        r.compose(problem)
    except GroupMismatch:
        return True
    return False


def after_some(r: Rank, problem: MoEProblem, sequence: Sequence[Call]) -> None:
    """Serve a layer of the first two ranks, and then one of all ranks."""
    job = r.job
    assert job.members is not None
    some = Members((0, 1), job.members.generation)
    _ = some.group  # every rank takes part in making a group
    if r.rank in some.ranks:
        with suppress(Unsupported):  # a library may need all ranks
            part = replace(job, problem=problem, members=some)
            run(r.rank, len(some.ranks), calls, part, sequence)
    # The others wait here, and not in moekit, which gives up before some backends have compiled.
    dist.all_reduce(torch.zeros(1), group=job.members.group)
    calls(r, sequence)


def groups_of_one_name(rank: int, world_size: int, job: Job, wanted: Call) -> Refused | None:
    """Serve a layer in each default group of two of three ranks. Destroy only the groups.

    Rank 0 has the same place in two groups, and rank 1 has not. Return why a rank was refused.
    """
    store, kept, refused = dist.distributed_c10d._get_default_store(), [], None
    for number, members in enumerate(((0, 1), (0, 2), (1, 2))):
        if dist.is_initialized():
            dist.destroy_process_group()
        if rank not in members:
            continue
        place, mine = members.index(rank), PrefixStore(f"group {number}", store)
        seconds = timedelta(seconds=300)
        dist.init_process_group("gloo", store=mine, rank=place, world_size=2, timeout=seconds)
        wait_until_connected()
        try:
            r = Rank(place, 2, job)
            kept.append(r.kernel)
        except (Unsupported, GroupMismatch) as error:
            refused = Refused(str(error))
            continue
        case, right = r.case(wanted, number)
        r.compare(call(r.kernel, r.packed, case), right, f"group {number} of one name")
        r.raise_first_fault()
    return refused


def in_opposite_orders(r: Rank, wanted: Call, seconds: float) -> None:
    """Serve two layers from two threads. Even ranks begin each step in one group, odd in the other.

    If a dispatcher waits for other ranks while it holds a lock that groups share, every rank waits
    in one group for ranks that wait for their lock.

    Args:
        seconds: how long a step may take.
    """
    assert r.job.members is not None
    groups = r.job.members, replace(r.job.members, copy=1)  # `in_groups` has made both
    layers = [r, Rank(r.rank, r.world_size, replace(r.job, members=groups[1]))]
    for each in layers:
        each.checked = False
    kernels = [each.kernel for each in layers]

    def at_once(what: str, step: Callable[[int], Any]) -> list[Any]:
        return _at_once(r.rank, what, step, seconds)

    def make(which: int) -> None:
        spec, problem = layers[which].spec, layers[which].problem
        spec.load()(spec, problem, groups[which].group).destroy()

    at_once("make dispatchers", make)
    made = [
        [each.case(wanted, (index, which)) for index in range(4)]
        for which, each in enumerate(layers)
    ]
    packed = [each.packed for each in layers]

    def arguments(which: int, index: int) -> tuple[Any, ...]:
        case = made[which][index][0]
        return case.x, packed[which], case.routing

    flights = at_once("start calls", lambda n: kernels[n].start(*arguments(n, 0)))
    at_once("run experts and combine", lambda n: flights[n].run())
    first = at_once("wait for results", lambda n: flights[n].result())
    more = at_once(
        "make calls", lambda n: [kernels[n](*arguments(n, index)) for index in range(1, 4)]
    )
    for which, each in enumerate(layers):
        for index, out in enumerate([first[which], *more[which]]):
            each.compare(out, made[which][index][1], f"call {index} of thread {which} of two")
    at_once("end", lambda n: layers[n].finish())


def of_one_kernel(r: Rank, *wanted: Call) -> None:
    """Make two calls of one kernel at once, switching threads after every torch operator."""
    r.checked = False
    packed, made = r.packed, [r.case(each, which) for which, each in enumerate(wanted)]
    outs: dict[int, Tensor] = {}

    def run(which: int) -> None:
        case = made[which][0]
        outs[which] = r.kernel(case.x, packed, case.routing)

    alternately(lambda: run(0), lambda: run(1))
    for which, (_, right) in enumerate(made):
        r.compare(outs[which], right, f"the call of thread {which} of two")


def _at_once(rank: int, what: str, step: Callable[[int], Any], seconds: float) -> list[Any]:
    """Return step(0) and step(1), each from a thread. Raises what they raise, or a deadlock."""

    def run(which: int) -> Any:
        time.sleep(_HEAD_START * (which != rank % 2))
        return step(which)

    pool = ThreadPoolExecutor(2)
    running = [pool.submit(run, which) for which in range(2)]
    pool.shutdown(wait=False)
    _, stuck = wait(running, seconds, FIRST_EXCEPTION)
    if not stuck or any(each.done() and each.exception() for each in running):
        for each in running:
            if each.done():
                each.result()
        return [each.result() for each in running]
    raise AssertionError(
        f"rank {rank}: to {what} in two groups, from a thread for each, was not finished after "
        f"{seconds:g} s. The other ranks begin with the other group, so a lock that groups share "
        "must not be held while a rank waits for others: use a lock for each group"
    )
