"""What a rank does in the dispatcher kit's tests. Everything here is picklable, and fails loudly.

Each function takes ``(rank, world_size, job, ...)``: run in rank processes for dispatchers that
move tokens, and one rank after the other in this process for those that do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moekit.errors import GroupMismatch, InvalidInput, MoekitError
from moekit.kernel import ModularKernel, Routing, Workspace
from moekit.plugins import DispatcherSpec
from moekit.problem import MoEProblem
from moekit.route import to_physical
from moekit.select import compose
from moekit.testing import cases
from moekit.testing.calls import call, kit_registry, pack, same_bits
from moekit.testing.cases import Case, make_case, random_weights, whole
from moekit.testing.compare import assert_close
from moekit.testing.experts import strided
from moekit.testing.memory import measure, poison, slack
from moekit.weights import ExpertWeights


@dataclass(frozen=True)
class Call:
    """Token counts of the ranks (fewer ranks take the last of them), and a routing."""

    counts: tuple[int, ...]
    kind: str = "random"


@dataclass(frozen=True)
class Job:
    """A dispatcher, the experts to compose it with, and the layer as rank 0 sees it."""

    spec: DispatcherSpec
    problem: MoEProblem
    seed: int
    experts: str = "torch"


class Rank:
    """One rank's kernel and data for a job."""

    def __init__(self, rank: int, world_size: int, job: Job) -> None:
        cases.use_seed(job.seed)
        self.rank, self.world_size, self.job = rank, world_size, job
        self.problem = job.problem.replace(parallel=replace(job.problem.parallel, ep_rank=rank))
        self.kernel = self.compose(self.problem)
        self.packed = pack(self.kernel, random_weights(self.problem))

    def compose(self, problem: MoEProblem) -> ModularKernel:
        backends = kit_registry(extra=[self.job.spec])
        assert backends.dispatcher(self.job.spec.name) == self.job.spec, "another of that name"
        return compose(
            problem,
            self.job.spec.name,
            self.job.experts,
            backends=backends,
            workspace=Workspace(),
            checked=True,
        )

    @property
    def alone(self) -> bool:
        """No token moves: ranks hold the same tokens, and each returns its partial sum."""
        return not self.problem.parallel.moves_tokens

    def tokens(self, call: Call) -> int:
        if self.alone:
            return call.counts[-1]
        return call.counts[(self.rank - self.world_size) % len(call.counts)]

    @cached_property
    def layer(self) -> tuple[MoEProblem, ExpertWeights]:
        """The logical experts on one rank: what the result must equal."""
        problem = whole(self.problem).replace(num_redundant_experts=0)
        return problem, random_weights(problem)

    def case(self, call: Call, index: object = 0) -> tuple[Case, Tensor]:
        """This rank's input for the index-th call, and the (T, H) fp32 it must get back."""
        problem, weights = self.layer
        key = (index, 0 if self.alone else self.rank)
        logical = make_case(problem, self.tokens(call), call.kind, key, weights)
        extra = self.problem.num_redundant_experts
        physical = logical.routing
        if extra:
            E = problem.num_experts
            replicas = torch.full((E, 2), -1)
            replicas[:, 0] = torch.arange(E)
            replicas[:extra, 1] = torch.arange(E, E + extra)
            physical = to_physical(logical.routing, replicas)
        mine = Case(self.problem, random_weights(self.problem), logical.x, physical)
        partial = self.alone and self.problem.parallel.ep_size > 1
        return mine, (mine if partial else logical).reference()


def calls(
    rank: int, world_size: int, job: Job, sequence: Iterable[Call], how: str = "plain"
) -> None:
    """Calls on one kernel, one after the other, each compared with the oracle.

    how: plain; strided (no input is contiguous); out (given, strided, poisoned all around);
    fresh (without out and without poison, all outputs still right at the end).
    """
    r = Rank(rank, world_size, job)
    results = []
    for index, wanted in enumerate(sequence):
        case, ref = r.case(wanted, index)
        T, H = case.x.shape
        if how == "strided":
            case = strided(case)
        if how == "out":
            wide = poison(torch.empty(T + 2, H + 16, dtype=case.x.dtype, device=case.x.device))
            out = call(r.kernel, r.packed, case, out=wide[1:-1, 8:-8]).clone()
            wide[1:-1, 8:-8] = float("nan")
            assert bool(torch.isnan(wide).all()), "wrote outside the given output"
        elif how == "fresh":
            out = r.kernel(case.x, r.packed, case.routing)
        else:
            out = call(r.kernel, r.packed, case)
        assert_close(out, ref, r.problem, f"rank {rank}, call {index} ({wanted})")
        results.append((out, ref))
    for index, (out, ref) in enumerate(results):
        assert_close(out, ref, r.problem, f"rank {rank}, call {index} after the later ones")
    r.kernel.destroy()


def in_flight(rank: int, world_size: int, job: Job, first: Call, second: Call) -> None:
    """Two calls are started before either is run; then run before either is waited for."""
    r = Rank(rank, world_size, job)
    for ahead in (False, True):
        made = [r.case(first, (ahead, 1)), r.case(second, (ahead, 2))]
        started = [r.kernel.start(case.x, r.packed, case.routing) for case, _ in made]
        for flying in started if ahead else ():
            flying.run()
        for index, ((_, ref), flying) in enumerate(zip(made, started, strict=True)):
            assert_close(flying.result(), ref, r.problem, f"rank {rank}, call {index}, {ahead=}")
    r.kernel.destroy()


def one_rank_fails(rank: int, world_size: int, job: Job, fault: str) -> None:
    """The last rank's input is bad: every rank gets a MoekitError, and the next call is right."""
    r = Rank(rank, world_size, job)
    good = Call((5, 3))
    culprit = r.alone or rank == world_size - 1
    for round_ in range(2):
        case, _ = r.case(good, round_)
        x, ids = case.x, case.routing.topk_ids
        if culprit and fault == "shape":
            x = x[:, :-1]
        if culprit and fault == "ids":
            ids = ids + r.problem.num_physical_experts
        if culprit and fault == "capacity":
            assert r.problem.max_num_tokens is not None
            case, _ = r.case(Call((r.problem.max_num_tokens + 1,)), round_)
            x, ids = case.x, case.routing.topk_ids
        try:
            r.kernel(x, r.packed, Routing(case.routing.topk_weights, ids))
        except MoekitError:
            pass
        else:
            raise AssertionError(f"rank {rank} got no error although the last rank's input is bad")
        case, ref = r.case(good, (round_, "after"))
        out = call(r.kernel, r.packed, case)
        assert_close(out, ref, r.problem, f"rank {rank}, the call after the failed one")
    r.kernel.destroy()


def experts_fail(rank: int, world_size: int, job: Job) -> None:
    """The last rank's experts raise: every rank gets a MoekitError, and the next call is right."""
    r = Rank(rank, world_size, job)
    apply, culprit = r.kernel.experts.apply, r.alone or rank == world_size - 1

    def broken(*args: object, **more: object) -> None:
        raise InvalidInput("experts that fail on purpose")

    for round_ in range(2):
        case, _ = r.case(Call((5, 3)), round_)
        if culprit:
            r.kernel.experts.apply = broken  # type: ignore[method-assign]
        try:
            r.kernel(case.x, r.packed, case.routing)
        except MoekitError as error:
            assert culprit or f"rank {world_size - 1} failed" in str(error), error
        else:
            raise AssertionError(f"rank {rank} got no error although the last rank's experts fail")
        r.kernel.experts.apply = apply  # type: ignore[method-assign]
        case, ref = r.case(Call((5, 3)), (round_, "after"))
        out = call(r.kernel, r.packed, case)
        assert_close(out, ref, r.problem, f"rank {rank}, the call after the failed one")
    r.kernel.destroy()


def group_mismatch(rank: int, world_size: int, job: Job, other: MoEProblem) -> None:
    """Composing for ``other``, of more or fewer ranks than the group has, raises on every rank."""
    r = Rank(rank, world_size, job)
    size = other.parallel.ep_size
    mine = replace(other.parallel, ep_rank=rank % size)
    try:
        r.compose(other.replace(parallel=mine))
    except GroupMismatch:
        pass
    else:
        raise AssertionError(f"a group of {world_size} ranks was taken for {size}")
    r.kernel.destroy()


def memory(rank: int, world_size: int, job: Job, num_tokens: int) -> None:
    """Peak of a call within kernel.memory(); what stays within buffer_bytes; destroy twice."""
    r = Rank(rank, world_size, job)
    case, _ = r.case(Call((num_tokens,)))
    out = torch.empty_like(case.x)
    device, stated = case.x.device, r.kernel.memory(num_tokens)
    r.kernel(case.x, r.packed, case.routing, out=out)  # libraries allocate at their first call
    r.kernel.workspace = Workspace()
    peak, _ = measure(device, lambda: r.kernel(case.x, r.packed, case.routing, out=out))
    assert peak <= stated.total + slack(device, stated.total), (
        f"rank {rank}: a call held {peak} bytes, stated are {stated.total}: {stated}; state the "
        "rest in buffer_bytes() or transient_bytes()"
    )
    r.kernel.destroy()
    kept: list[ModularKernel] = []

    def compose_and_call() -> None:
        kept.append(r.compose(r.problem))
        kept[0](case.x, r.packed, case.routing, out=out)

    _, live = measure(device, compose_and_call)
    buffers = kept[0].dispatcher.buffer_bytes() + kept[0].workspace.nbytes
    assert live <= buffers + slack(device, buffers), (
        f"rank {rank}: {live} bytes stay allocated, stated are {buffers}"
    )
    kept[0].destroy()
    kept[0].destroy()


def repeat(rank: int, world_size: int, job: Job, wanted: Call) -> None:
    """Equal calls give equal bits."""
    r = Rank(rank, world_size, job)
    case, _ = r.case(wanted)
    outs = [call(r.kernel, r.packed, case) for _ in range(4)]
    assert all(same_bits(outs[0], out) for out in outs), f"rank {rank}: equal calls, other bits"
    r.kernel.destroy()
