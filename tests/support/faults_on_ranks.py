"""The functions that ranks run in test_faults_gpu.py and test_overlap_gpu.py."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor

from moekit import ParallelConfig
from moekit.discovery.registry import registry
from moekit.errors import PeerFailed
from moekit.kernel import ModularKernel
from moekit.problem import ActivationFormat, MoEProblem
from moekit.runtime.overlap import ConcurrentExperts
from moekit.testing import assert_close, cases
from moekit.testing.calls import call
from moekit.testing.diagnose import assert_right
from moekit.testing.ranks import Call, Job, Rank

CULPRIT = 1
# Of checked kernels here. RankPool gives others 5 s once a rank is gone.
TIMEOUT = 2.0


def _fail(how: str, *_: Any, **__: Any) -> Any:
    if how == "dies":
        os._exit(3)
    raise RuntimeError("planted")


def fault(rank: int, world_size: int, job: Job, how: str, where: str) -> None:
    """Let the culprit raise or die in its second call, and raise what the other ranks raise.

    They must raise in that call, or in the next one if the culprit dies before it.
    """
    r = Rank(rank, world_size, job)
    made = [
        r.case(Call((5, 9)), index) for index in range(3)
    ]  # before the fault: no copies to a GPU that hangs
    for index, (case, right) in enumerate(made):
        if index == 1:  # everything is compiled by now
            agreement = r.kernel._calls.agreement
            assert agreement is not None, "checked kernels agree"
            agreement._timeout = TIMEOUT
        if index == 1 and rank == CULPRIT:
            if where == "before":
                _fail(how)
            owner, name = {
                "dispatch": (r.kernel.dispatcher, "prepare"),
                "quantize": (r.kernel.experts, "quantize"),
                "experts": (r.kernel.experts, "apply"),
                "combine": (r.kernel.dispatcher, "finalize"),
            }[where]
            setattr(owner, name, lambda *a, **k: _fail(how, *a, **k))
        # No poison: it would read results, and a GPU that waits for a dead rank has none.
        out = torch.empty_like(case.x)
        start = time.monotonic()
        try:
            r.kernel(case.x, r.packed, case.routing, out=out)
        except Exception as error:
            seconds = time.monotonic() - start
            raise RuntimeError(f"after {seconds:.0f} s: {type(error).__name__}: {error}") from error
        if index == 0:
            assert_right(out, right, f"rank {rank}, before the fault")
    raise AssertionError(f"rank {rank} noticed nothing in three calls")


def after_a_fault(rank: int, world_size: int, job: Job) -> list[str]:
    """Let the culprit raise in the combine of its first call; return the errors of two calls."""
    r, said = Rank(rank, world_size, job), []
    finalize = r.kernel.dispatcher.finalize
    if rank == CULPRIT:
        r.kernel.dispatcher.finalize = lambda *a: _fail("raises")
    for index in range(2):
        case, _ = r.case(Call((5, 9)), index)
        try:
            r.kernel(case.x, r.packed, case.routing, out=torch.empty_like(case.x))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        r.kernel.dispatcher.finalize = finalize
    return said


def out_of_order(rank: int, world_size: int, job: Job) -> str:
    """The culprit runs the second of two calls first, then all make one more. What that raises."""
    r, said = Rank(rank, world_size, job), "no error"
    made = [r.case(Call((5, 9)), index) for index in range(3)]
    started = [r.kernel.start(c.x, r.packed, c.routing) for c, _ in made[:2]]
    for call_ in reversed(started) if rank == CULPRIT else started:
        try:
            call_.run()
        except PeerFailed as error:
            said = str(error)
            break
    case, right = made[2]
    assert_right(call(r.kernel, r.packed, case), right, f"rank {rank}, the next call")
    r.kernel.destroy()
    return said


_left: list[ModularKernel] = []


def leave(rank: int, world_size: int, job: Job, destroys: bool) -> None:
    """Calls a kernel, and keeps it to the end of the process unless it is destroyed (twice)."""
    r = Rank(rank, world_size, job)
    case, right = r.case(Call((5, 9)))
    assert_right(call(r.kernel, r.packed, case), right, f"rank {rank}")
    _left.append(r.kernel)
    if destroys:
        r.kernel.destroy()
        r.kernel.destroy()


def side_by_side(rank: int, world_size: int, jobs: list[Job]) -> None:
    """Kernels of different dispatchers in turns and in flight together; one outlives the other."""
    ranks = [Rank(rank, world_size, job) for job in jobs]
    for index in range(3):
        made = [r.case(Call((7, 4)), (number, index)) for number, r in enumerate(ranks)]
        pairs = list(zip(ranks, made, strict=True))
        if index == 1:
            pairs.reverse()
        started = [(r, right, r.kernel.start(c.x, r.packed, c.routing)) for r, (c, right) in pairs]
        for r, right, pending in started:
            what = f"rank {rank}, {r.job.spec.name}, round {index}"
            assert_right(pending.result(), right, what)
    ranks[0].kernel.destroy()
    last = ranks[-1]
    case, right = last.case(Call((3, 9)), "last")
    assert_right(call(last.kernel, last.packed, case), right, f"rank {rank}, the last")
    last.kernel.destroy()


def micro_batches(rank: int, world_size: int, job: Job, beside: bool, ahead: bool) -> set[bool]:
    """Two calls in flight, each with shared experts that start late: on a stream of their own, or
    within the call. ahead: both are run before the first one's result is waited for. Returns
    whether the shared experts ran on the caller's stream."""
    r = Rank(rank, world_size, job)
    gpu = r.problem.device.type == "cuda"
    where: set[bool] = set()

    def shared(x: Tensor) -> Tensor:
        if gpu:
            where.add(torch.cuda.current_stream() == mine)
            torch.cuda._sleep(2_000_000)
        return torch.sin(x)

    mine = torch.cuda.current_stream() if gpu else None
    for round_ in range(4):
        started = []
        for index, counts in enumerate(((9, 0), (4, 9))):
            case, right = r.case(Call(counts), (round_, index))
            extra: list[Any] = []
            if beside:
                side = ConcurrentExperts(shared, case.x)
                extra.append(side)
                meanwhile = side.run
            else:

                def meanwhile(x: Tensor = case.x, extra: list[Any] = extra) -> None:
                    extra.append(shared(x))

            started.append((
                case, right, extra,
                r.kernel.start(case.x, r.packed, case.routing, meanwhile=meanwhile),
            ))  # fmt: skip
        for *_, pending in started if ahead else ():
            pending.run()
        for index, (case, right, extra, pending) in enumerate(started):
            out = pending.result()
            more = extra[0].join() if beside else extra[0]
            # Tokens without an expert must stay exact zeros before the sum.
            want, out = right.reference() + torch.sin(case.x).float(), out + more
            assert_close(out, want, r.problem, f"rank {rank}, round {round_}, call {index}")
    r.kernel.destroy()
    return where


def job_for(name: str, device: str, world_size: int, experts: str = "torch", **changes: Any) -> Job:
    """A small layer behind the named dispatcher, of sizes that all of them take."""
    sizes: dict[str, Any] = {
        "num_experts": 8,
        "top_k": 2,
        "hidden_size": 128 if device == "cpu" else 2048,
        "intermediate_size": 128,
        "max_num_tokens": 16,
        "parallel": ParallelConfig(ep_size=world_size),
        "device": device,
    }
    problem = MoEProblem(**{**sizes, **changes})
    return Job(registry().dispatcher(name), problem, cases.seed(), experts)


def unwaiting(name: str, device: str) -> str:
    """Experts whose host does not wait for the GPU, on which a dead rank's tokens never come."""
    if device == "cpu":
        return "torch"
    rows = registry().dispatcher(name).format is ActivationFormat.STANDARD
    return "triton" if rows else "triton_batched"
