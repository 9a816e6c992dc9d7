"""The functions that ranks run in the dispatcher kit's tests. All of them are picklable.

Each function takes a `Rank`, and `run` makes it. Where tokens move, `in_groups` does this in rank
processes. Elsewhere this process does it for one rank after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.contract import PackedWeights, Routing
from moekit.contract.specs import DispatcherSpec
from moekit.discovery.registry import registry
from moekit.errors import Unsupported
from moekit.kernel import ModularKernel
from moekit.problem import ActivationFormat, MoEProblem
from moekit.problem.weights import ExpertWeights
from moekit.runtime.workspace import Workspace
from moekit.selection.select import compose
from moekit.testing import cases
from moekit.testing.calls import (
    LEAVES_SUMS,
    Inputs,
    call,
    call_into_part,
    defaults,
    kit_registry,
    pack,
    same_bits,
    unchanged_process,
)
from moekit.testing.diagnose import assert_close
from moekit.testing.invariance import check_bits, rows_of
from moekit.testing.memory import beyond_stated, measure, poison, poisoned_allocations, slack

# Experts that compute with the activations that they get, and quantize none.
_UNROUNDED = ("torch", "reference", LEAVES_SUMS)

# Seconds that a collective of the kit's own groups may take before it raises.
_GROUP_SECONDS = 300.0


def sendable(spec: DispatcherSpec) -> DispatcherSpec | str:
    """Return the name of an installed dispatcher, whose spec may hold what cannot be pickled."""
    installed = (each for plugin in registry().plugins for each in plugin.backends)
    return spec.name if spec in installed else spec


@dataclass(frozen=True)
class Call:
    """The tokens of each batch (fewer batches take the last numbers), and a kind of routing."""

    counts: tuple[int, ...]
    kind: str = "random"


@dataclass(frozen=True)
class Members:
    """The processes of a pool that form one process group.

    Attributes:
        generation: the number of failed tests. They may leave messages in a group, so later tests
            make another one.
        copy: tells apart groups of the same ranks.
    """

    ranks: tuple[int, ...]
    generation: int = 0
    copy: int = 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, or None for the default one."""
        if len(self.ranks) == dist.get_world_size() and not (self.generation or self.copy):
            return None
        return _new_group(self)


@cache
def _new_group(members: Members) -> dist.ProcessGroup:
    seconds = timedelta(seconds=_GROUP_SECONDS)
    made: dist.ProcessGroup = dist.new_group(list(members.ranks), timeout=seconds)
    return made


@dataclass(frozen=True)
class Job:
    """A dispatcher, the experts to compose it with, and the layer as rank 0 sees it.

    Attributes:
        spec: the dispatcher's, or the name of an installed one.
    """

    spec: DispatcherSpec | str
    problem: MoEProblem
    seed: int
    experts: str = "torch"
    members: Members | None = None


@dataclass(frozen=True)
class Refused:
    """A rank's result if the dispatcher does not support the group, with its reason."""

    reason: str


Task = tuple[Callable[..., Any], Job, tuple[Any, ...]]


def in_groups(
    rank: int, world_size: int, groups: Sequence[Members], tasks: Sequence[Task]
) -> object:
    """Run each task in its group of processes, all groups at the same time.

    Args:
        groups: one for each task, and others that tasks use.
    """
    for members in groups:  # every process takes part in making every group
        _ = members.group
    for members, (function, job, args) in zip(groups, tasks, strict=False):
        if rank in members.ranks:
            place, job = members.ranks.index(rank), replace(job, members=members)
            try:
                return run(place, len(members.ranks), function, job, *args)
            except Unsupported as error:
                return Refused(str(error))
    return None


def run(rank: int, world_size: int, function: Callable[..., Any], job: Job, *args: Any) -> Any:
    """Return ``function(r, *args)`` for a rank of the job's group; raise the first fault it found.

    All ranks are refused alike: then they destroy the kernel, which they otherwise do at the end.
    """
    r = Rank(rank, world_size, job)
    try:
        result = function(r, *args)
    except Unsupported:
        r.destroy()
        raise
    r.finish()
    return result


class Rank:
    """One rank's kernel and data for a job.

    Attributes:
        checked: whether the kernel checks its calls. A function may change it at its begin.
    """

    def __init__(self, rank: int, world_size: int, job: Job) -> None:
        cases.use_seed(job.seed)
        name = job.spec if isinstance(job.spec, str) else job.spec.name
        self._backends = kit_registry(extra=() if isinstance(job.spec, str) else [job.spec])
        self.spec = self._backends.dispatcher(name)
        same = isinstance(job.spec, str) or job.spec.target == self.spec.target
        assert same, f"another backend named {name!r} is installed: choose another name"
        self.rank, self.world_size, self.job = rank, world_size, job
        parallel, tp = job.problem.parallel, job.problem.parallel.tp_size
        self.problem = job.problem.replace(
            parallel=replace(parallel, ep_rank=rank // tp, tp_rank=rank % tp)
        )
        # Consecutive ranks hold the same tokens where there are fewer batches than ranks.
        self.batch = rank * parallel.dp_size // world_size
        self.checked = True
        self._faults: list[str] = []

    @cached_property
    def kernel(self) -> ModularKernel:
        return self.compose(self.problem)

    def expect(self, right: bool, otherwise: str) -> None:
        """Record a fault for `finish`. Raising at once would let the other ranks wait."""
        if not right:
            self._faults.append(otherwise)

    def compare(self, out: Tensor, right: cases.Case, what: str) -> None:
        """Do `assert_close` with the result of ``right``, and record a failure as `expect` does."""
        what = f"rank {self.rank}, {what}"
        rounds = self.kernel._sends_quantized or self.job.experts not in _UNROUNDED
        try:
            assert_close(
                out, right.reference(), self.problem, what, case=right, rounds_activations=rounds
            )
        except AssertionError as error:
            self._faults.append(str(error))

    def finish(self) -> None:
        """Destroy the kernel, and raise the first recorded fault."""
        self.destroy()
        self.raise_first_fault()

    def destroy(self) -> None:
        if "kernel" in vars(self):
            self.kernel.destroy()

    def raise_first_fault(self) -> None:
        if self._faults:
            raise AssertionError(self._faults[0])

    def compose(self, problem: MoEProblem) -> ModularKernel:
        group = None if self.job.members is None else self.job.members.group
        with unchanged_process():
            return compose(
                problem,
                self.spec.name,
                self.job.experts,
                group=group,
                backends=self._backends,
                workspace=Workspace(),
                checked=self.checked,
            )

    @property
    def alone(self) -> bool:
        """Return whether no token moves: each rank returns a partial sum over the same tokens."""
        return not self.problem.parallel.moves_tokens

    def as_taken(self, routing: Routing) -> Routing:
        """Return ``routing`` with ids of the dtype that the dispatcher takes."""
        taken = self.spec.ids_dtype
        if taken == "any":
            return routing
        return Routing(routing.topk_weights, routing.topk_ids.to(getattr(torch, taken)))

    def tokens(self, call: Call) -> int:
        batches = self.problem.parallel.dp_size
        return call.counts[(self.batch - batches) % len(call.counts)]

    @cached_property
    def layer(self) -> tuple[MoEProblem, ExpertWeights]:
        """The logical experts on one rank, which define the right result."""
        problem = cases.whole(self.problem).replace(num_redundant_experts=0)
        return problem, cases.random_weights(problem)

    @cached_property
    def weights(self) -> ExpertWeights:
        """This rank's share of the experts, and of each expert's intermediate size."""
        return cases.random_weights(self.problem)

    @cached_property
    def packed(self) -> PackedWeights:
        return pack(self.kernel, self.weights)

    def case(self, call: Call, index: object = 0) -> tuple[cases.Case, cases.Case]:
        """Return this rank's input of the index-th call, and the call with the right result.

        It is the call of the whole layer, or of this rank's share if the result is a partial sum.
        """
        problem, weights = self.layer
        whole = cases.make_case(problem, self.tokens(call), call.kind, (index, self.batch), weights)
        mine = replace(whole, problem=self.problem, weights=self.weights).physical()
        if self.rank % 2:  # ranks may differ in the dtype of their ids
            ids = mine.routing.topk_ids.int()
            mine = replace(mine, routing=replace(mine.routing, topk_ids=ids))
        return mine, mine if self.alone and self.problem.parallel.num_ranks > 1 else whole


def calls(r: Rank, sequence: Iterable[Call], how: str = "plain") -> int:
    """Make calls on one kernel, one after the other, and compare each with the oracle.

    Return how many sums over K the experts left to the dispatcher, if they are `LeavesSums`.

    Args:
        how: plain; autocast; strided (no input is contiguous); out (given, strided, with poison
            around it); fresh (without out and without poison, and as engines call: with another
            default dtype, partly in inference mode, with parts of larger buffers, and on a GPU with
            input that is written late, partly on another stream).
            All outputs must still be right at the end.
    """
    device = cases.device_of(r.problem)
    results = []
    for index, wanted in enumerate(sequence):
        case, right = r.case(wanted, index)
        if how == "strided":
            case = cases.strided_inputs(case)
        if how == "out":
            out = call_into_part(r.kernel, r.packed, case)
        elif how == "fresh":
            packed = r.packed
            with late_stream(device, index % 4 < 2):
                case = Inputs(r.problem, len(case.x)).hold(case)
                with torch.inference_mode(index % 2 == 0), defaults(torch.float64, device):
                    out = r.kernel(case.x, packed, case.routing)
        else:
            with torch.autocast(device.type, torch.bfloat16, enabled=how == "autocast"):
                out = call(r.kernel, r.packed, case)
        r.compare(out, right, f"call {index} ({wanted})")
        results.append((out, right))
    for index, (out, right) in enumerate(results):
        r.compare(out, right, f"call {index} after the later ones")
    return getattr(r.kernel.experts, "left", 0)


def told_calls(r: Rank, sequence: Sequence[Call], capacities: Sequence[int]) -> None:
    """Compare calls that say their `max_tokens`, on kernels of several capacities, in bits."""
    most = [max(1, *wanted.counts[-r.problem.parallel.dp_size :]) for wanted in sequence]
    made = [r.case(wanted, index) for index, wanted in enumerate(sequence)]
    first: dict[int, Tensor] = {}
    for capacity in capacities:
        kernel = r.compose(r.problem.replace(max_num_tokens=capacity))
        for index, ((case, right), told) in enumerate(zip(made, most, strict=True)):
            routing = replace(case.routing, max_tokens=told)
            out = call(kernel, r.packed, replace(case, routing=routing))
            what = f"call {index} of at most {told} tokens, capacity {capacity}"
            r.compare(out, right, what)
            same = not r.spec.deterministic or torch.equal(out, first.setdefault(index, out))
            r.expect(same, f"rank {r.rank}, {what}: other bits than with the smallest capacity")
        kernel.destroy()


def outputs_beyond_float16(r: Rank, wanted: Call) -> None:
    """Let experts' outputs exceed 65504, and router weights bring them back into range."""
    problem, weights = r.layer
    factor = cases.output_factor(cases.make_case(problem, 32, "masked", "calibration", weights))
    mine, right = (cases.beyond_float16(case, factor) for case in r.case(wanted))
    out = call(r.kernel, pack(r.kernel, mine.weights), mine)
    r.compare(out, right, "outputs beyond the range of float16")


@contextmanager
def late_stream(device: torch.device, other: bool) -> Iterator[None]:
    """Let what follows run late on a GPU, on another stream than the current one if ``other``."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device) if other else before  # type: ignore[no-untyped-call]
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_LATE_CYCLES)  # type: ignore[no-untyped-call]
        yield
    before.wait_stream(stream)


# About a millisecond.
_LATE_CYCLES = 2_000_000

# Calls start (+), run their experts (>) and give their results (=); two of them are in flight.
_ORDERS = {
    "in turn": "+0 +1 =0 =1",
    "run ahead": "+0 +1 >0 >1 =0 +2 >2 =1 =2",
    "last first": "+0 +1 =1 +2 =0 =2",
}


def in_flight(r: Rank, first: Call, second: Call, orders: Iterable[str] = _ORDERS) -> None:
    """Have two calls in flight, and finish them in orders that ranks share."""
    for order in orders:
        made = [r.case(wanted, (order, i)) for i, wanted in enumerate((first, second, first))]
        flying = {}
        for step in _ORDERS[order].split():
            index = int(step[1])
            case, right = made[index]
            if step[0] == "+":
                flying[index] = r.kernel.start(case.x, r.packed, case.routing)
            elif step[0] == ">":
                flying[index].run()
            else:
                what = f"call {index} of those in flight, finished {order}"
                r.compare(flying[index].result(), right, what)


def long_run(r: Rank, wanted: Call) -> None:
    """Make 260 calls of one shape on an unchecked kernel, on ranks that are not in step.

    Where no token moves, 72 are enough. The data of a call differ from the six calls before
    it. No call leaves memory behind. After 72 calls, only those at which a counter of 7 or 8
    bits wraps are compared.
    """
    r.checked = False
    made = [r.case(wanted, index) for index in range(7)]
    device = made[0][0].x.device
    number = 0

    def some(count: int) -> None:
        nonlocal number
        for _ in range(count):
            case, right = made[number % len(made)]
            if (number + r.rank) % 11 == 0:
                time.sleep(0.002)
            number += 1
            if number > 72 and 4 <= number % 128 < 124:
                r.kernel(case.x, r.packed, case.routing)
                continue
            x, routing = case.x.clone(), case.routing
            routing = Routing(routing.topk_weights.clone(), routing.topk_ids.clone())
            out = poison(torch.empty_like(x))
            with poisoned_allocations():
                r.kernel(x, r.packed, routing, out=out)
            r.compare(out, right, f"call {number} of one shape")

    some(36)
    # The least of three counts: a library may allocate late, and its threads may free late.
    kept = min(measure(device, lambda: some(12))[1] for _ in range(3))
    r.expect(
        kept <= _KEPT,
        f"rank {r.rank}: 12 calls leave {kept} bytes allocated; a call must not keep its tensors",
    )
    if not r.alone:
        some(260 - number)


_KEPT = 2 * 1024


def layers(first: Rank, other: MoEProblem) -> None:
    """Call three layers in one group alternately, two of them in flight; two are alike.

    One of the two is destroyed early, twice. The other layer may have more and wider tokens.
    """
    problems = other, first.job.problem
    jobs = [replace(first.job, problem=problem) for problem in problems]
    made = [first, *(Rank(first.rank, first.world_size, job) for job in jobs)]
    kernels = [r.kernel for r in made]
    most = other.max_num_tokens or 16
    wanted = Call((4, 0, 7, 3)), Call((most, 0, 7, most)), Call((4, 0, 7, 3))
    for pair in ((0, 2), (0, 1)):
        flights = []
        for which in pair:
            r = made[which]
            mine, right = r.case(wanted[which], ("in flight", pair, which))
            flights.append((right, r.kernel.start(mine.x, r.packed, mine.routing)))
        for which, (right, flying) in zip(pair, flights, strict=True):
            made[which].compare(flying.result(), right, f"layer {which}, while both were in flight")
    for index, which in enumerate((0, 1, 2, 1, 0, 2, 1, 2)):
        if index == 5:
            kernels[0].destroy()
            kernels[0].destroy()
        r = made[which]
        mine, right = r.case(wanted[which], index)
        r.compare(call(r.kernel, r.packed, mine), right, f"call {index}, layer {which}")
    for r in reversed(made[1:]):
        r.finish()


def memory(r: Rank, num_tokens: int) -> None:
    """Hold a call's peak to kernel.memory(), what stays to buffer_bytes(), and destroy twice.

    Nothing stays after that.
    """
    case, _ = r.case(Call((num_tokens,), "hot"))
    out = torch.empty_like(case.x)
    device, call_it = case.x.device, partial(r.kernel, case.x, r.packed, case.routing, out=out)
    call_it()  # libraries allocate at their first call
    said = beyond_stated(r.kernel, num_tokens, call_it)
    rest = "state the rest in buffer_bytes() or transient_bytes()"
    r.expect(not said, f"rank {r.rank}: {said}; {rest}")
    r.kernel.destroy()
    kept: list[ModularKernel] = []

    def compose_and_call() -> None:
        kept.append(r.compose(r.problem))
        kept[0](case.x, r.packed, case.routing, out=out)

    def beyond_what_is_stated() -> int:
        live = measure(device, compose_and_call)[1]
        buffers = kept[0].dispatcher.buffer_bytes() + kept[0].workspace.nbytes
        kept[0].destroy()
        kept.pop().destroy()
        return live - buffers - slack(device, buffers)

    def compose_and_destroy() -> None:
        compose_and_call()
        kept.pop().destroy()

    # A library of a dispatcher may allocate late, and its threads may free late.
    times = 1 if r.alone else 3
    more = min(beyond_what_is_stated() for _ in range(times))
    r.expect(
        more <= 0,
        f"rank {r.rank}: {more} bytes too many stay allocated: state them in buffer_bytes()",
    )
    live = min(measure(device, compose_and_destroy)[1] for _ in range(times))
    r.expect(
        live <= slack(device, 0), f"rank {r.rank}: {live} bytes stay allocated after destroy()"
    )


def batch_invariant(r: Rank, sequence: Iterable[Call]) -> None:
    """Assert that tokens have the bits that each gets as the only token of one rank."""
    problem, weights = r.layer
    local = "local" if r.spec.format is ActivationFormat.STANDARD else "batched_reference"
    single = compose(problem, local, r.job.experts, workspace=Workspace(), backends=kit_registry())
    packed = pack(single, weights)
    for index, wanted in enumerate(sequence):
        mine, whole = r.case(wanted, index)
        out = call(r.kernel, r.packed, mine)
        r.compare(out, whole, f"call {index} ({wanted})")
        for token in range(len(out)):
            one = rows_of(whole, slice(token, token + 1))
            try:
                check_bits(
                    out[token : token + 1],
                    single(one.x, packed, one.routing),
                    f"call {index} ({wanted}), token {token} of rank {r.rank} of {r.world_size}, "
                    "compared with a call of this token on one rank",
                )
            except AssertionError as error:
                r.expect(False, str(error))


def repeat(r: Rank, wanted: Call) -> None:
    """Assert that equal calls give equal bits."""
    case, _ = r.case(wanted)
    outs = [call(r.kernel, r.packed, case) for _ in range(4)]
    same = all(same_bits(outs[0], out) for out in outs)
    r.expect(same, f"rank {r.rank}: equal calls give different bits")
