"""The protocol of the flags: no order of the ranks may race, deadlock, or read a stale row."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from moekit_nvlink import transfer
from moekit_nvlink.kernels import assignments, combine, flags, reduce, rows
from moekit_nvlink.kernels.flags import (
    at,
    launch_dependents,
    raise_flags,
    wait_for,
    wait_for_kernel,
)
from nvlink_races import Deadlock, Race, World
from test_nvlink_kernels import FORMATS, KINDS, Call, Shape

from moekit.plugin import Unreduced

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch) -> None:
    monkeypatch.setattr(transfer.Tile, "few_programs", 3)


@dataclass
class Layer:
    """Ranks that make the same calls, each as fast as the others let it."""

    shape: Shape
    counts: Sequence[tuple[int, ...]]
    two: bool = False  # calls in flight
    seed: int = 0
    epoch: int = 0
    # Ranks whose experts leave the sum to the combine, in each call, as several layers' may.
    leave: Sequence[Sequence[int]] = ((),)

    def run(self) -> None:
        shape, host = self.shape, self.shape.host()
        world = World(len(host.ranks), self.seed)
        for place in range(1 + self.two):
            host.open()
            for rank, buffer in enumerate(host.sets[place]):
                world.watch(rank, host.layout, buffer)
                buffer.epoch.fill_(self.epoch)
                host.flags(buffer).fill_(((self.epoch << 32) + 2**63) % 2**64 - 2**63)
        draw = torch.Generator().manual_seed(self.seed)
        kinds = (KINDS[i % len(KINDS)] for i in range(len(self.counts)))
        calls = [Call(shape, host, n, kind, draw)
                 for n, kind in zip(self.counts, kinds, strict=True)]  # fmt: skip
        outs: list[dict[int, torch.Tensor]] = [{} for _ in host.ranks]
        world.run([self._flow(world, host, calls, outs[r], r) for r in range(len(host.ranks))])
        for number, call in enumerate(calls):
            call.check([each[number] for each in outs])

    def _flow(self, world, host, calls, outs, rank) -> Callable[[], None]:
        moves, batch = host.ranks[rank], rank // self.shape.copies

        def start(number: int):
            call, place = calls[number], number % 2 if self.two else 0
            steps, arrived = moves.send(
                host.sets[place][rank], call.xs[batch], None, call.routings[batch]
            )
            for step in steps():
                step()
            return number, arrived

        def finish(number: int, arrived) -> None:
            call, y = calls[number], moves.output(arrived.handle)
            y_here = y[: len(arrived.x)]
            reads = [
                t for t in (arrived.x, arrived.topk_ids, arrived.topk_weights) if t is not None
            ]

            left = None

            def experts() -> None:
                nonlocal left
                y.fill_(float("nan"))
                if rank in self.leave[number % len(self.leave)]:
                    left = unreduced(call, rank, arrived)
                else:
                    call.experts(rank, arrived, y_here)

            grads = [moves.router_gradients(arrived.handle)] if self.shape.training else []
            world.touch(experts, reads, [y, *grads])
            outs[number] = torch.full_like(call.xs[batch], float("nan"))
            if left is None:
                sums = call.grads[rank] if self.shape.training else None
                steps = moves.gather(arrived.handle, outs[number], sums)
            else:
                steps = moves.reduce(arrived.handle, left, outs[number])
            for step in steps:
                step()

        def flow() -> None:
            flight = []
            for number in range(len(calls)):
                flight.append(start(number))
                if len(flight) > self.two:
                    finish(*flight.pop(0))
            for each in flight:
                finish(*each)

        return flow


def unreduced(call: Call, rank: int, tokens) -> Unreduced:
    """Return rows of experts that return (e + 1) * x; NaN where no assignment has its row."""
    problem, tp = call.host.layer[rank], call.shape.tp
    slice_of = (2 * (rank % tp) + 1) / tp**2
    ids = tokens.topk_ids
    rows = tokens.x[:, None].float() * (ids + problem.local_experts.start + 1)[..., None]
    rows = (rows * slice_of).to(call.shape.dtype)
    rows[ids < 0] = float("nan")
    rows = rows.flatten(0, 1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(rank))
    places = order.argsort().int().view(ids.shape)
    places[ids < 0] = -(2**30)
    return Unreduced(rows[order], places.contiguous())


COUNTS = [(3, 0, 4), (0,), (4, 4, 4), (1, 3)]


def small(batched: bool, ep: int = 3, **more) -> Shape:
    return Shape(batched, ep, **{"hidden": 16, "capacity": 4, "programs": 2, **more})


@FORMATS
@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
def test_three_ranks(batched, two) -> None:
    Layer(small(batched), COUNTS, two).run()


@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
@pytest.mark.parametrize(
    "leave",
    [((0, 1, 2),), ((1,),), ((0, 1, 2), (), (1,), (2,))],
    ids=["all", "one rank", "in turn"],
)
def test_sums_are_left_to_the_combine(leave, two, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["moekit_nvlink.layout"], "REDUCED_FROM", 1)
    Layer(small(False), COUNTS, two, leave=leave).run()


@pytest.mark.parametrize(
    ("ep", "tp", "copies"), [(3, 1, 1), (4, 1, 2), pytest.param(2, 2, 1, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
def test_router_gradients(ep, tp, copies, two) -> None:
    Layer(small(False, ep, tp=tp, copies=copies, training=True), COUNTS, two).run()


def test_router_gradients_need_memory_that_no_dispatch_writes(monkeypatch) -> None:
    """A rank may send the next call's weights while another one of its batch reads gradients."""
    made = Shape.host

    def host(shape: Shape):
        host = made(shape)
        host.ranks = [
            replace(each, layout=replace(each.layout, grads=each.layout.weights))
            for each in host.ranks
        ]
        return host

    monkeypatch.setattr(Shape, "host", host)
    with pytest.raises(Race):
        Layer(small(False, 4, copies=2, training=True), [(4, 4)] * 4).run()


@pytest.mark.full
@FORMATS
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("ep", "tp", "copies"), [(2, 1, 1), (3, 1, 1), (2, 2, 2), (4, 1, 2), (8, 1, 1)]
)
def test_other_orders_and_groups(batched, seed, ep, tp, copies) -> None:
    shape = small(batched, ep, tp=tp, copies=copies, programs=1 + seed % 3)
    Layer(shape, COUNTS, seed % 2 == 1, seed).run()


@FORMATS
def test_eight_ranks(batched) -> None:
    Layer(small(batched, 8, top_k=2), [(2, 0, 1), (1, 2)], seed=1).run()


@FORMATS
@pytest.mark.parametrize("last", [2**31, pytest.param(2**32, marks=pytest.mark.full)])
def test_numbers_of_calls_wrap(batched, last) -> None:
    Layer(small(batched, 2), COUNTS, epoch=last - 3).run()


# -- faults that the detector must find ------------------------------------------------------------


@triton.jit
def _exchange(peers_ptr, rank, value, flags_at, PHASE: tl.constexpr, RANKS: tl.constexpr,
              RANKS_2: tl.constexpr, first=0, end=1, CHUNKS: tl.constexpr = 1,
              RAISED: tl.constexpr = 64, SEM: tl.constexpr = "release",
              SCOPE: tl.constexpr = "sys"):  # fmt: skip
    """Do as `raise_flags`, on the first RAISED ranks, with another order of memory."""
    r, c = tl.arange(0, RANKS_2), tl.arange(0, CHUNKS)
    peer = tl.load(peers_ptr + r, mask=r < RANKS, other=0)
    own = (peer + flags_at).to(tl.pointer_type(tl.int64)) + PHASE * RANKS + rank
    value += tl.zeros([RANKS_2], tl.int64)
    raised = ((r < RAISED) & (r < RANKS))[:, None] & ((c >= first) & (c < end))[None, :]
    tl.atomic_xchg(own[:, None] + (c * RANKS)[None, :], value[:, None], mask=raised, sem=SEM,
                   scope=SCOPE)  # fmt: skip


# The interpreter calls Python functions as it calls kernels' functions.
def relaxed_flags(*args, **more):
    _exchange(*args, **more, SEM="relaxed")


def flags_of_one_gpu(*args, **more):
    _exchange(*args, **more, SCOPE="gpu")


def flag_of_rank_0_only(*args, **more):
    _exchange(*args, **more, RAISED=1)


def flags_of_the_next_call(peers_ptr, rank, value, *args, **more):
    raise_flags(peers_ptr, rank, value + (1 << 32), *args, **more)


def flags_of_the_last_call(peers_ptr, rank, value, *args, **more):
    raise_flags(peers_ptr, rank, value - (1 << 32), *args, **more)


@triton.jit
def flags_of_all_chunks(peers_ptr, rank, value, flags_at, PHASE: tl.constexpr,
                        RANKS: tl.constexpr, RANKS_2: tl.constexpr, first=0, end=1,
                        CHUNKS: tl.constexpr = 1):  # fmt: skip
    raise_flags(peers_ptr, rank, value, flags_at, PHASE, RANKS, RANKS_2, first, CHUNKS, CHUNKS)


@triton.jit
def always_reached(flag, number):
    return flag == flag


@triton.jit
def acquires_nothing(flags, there):
    nothing = tl.zeros(there.shape, tl.int64)
    return tl.atomic_add(flags, nothing, mask=there, sem="relaxed", scope="sys")


@triton.jit
def waits_for_rank_0_only(
    peers_ptr, lost_ptr, error_ptr, rank, sources, there, number, spins, flags_at,
    PHASE: tl.constexpr, RANKS: tl.constexpr, chunk=0,
):  # fmt: skip
    return wait_for(peers_ptr, lost_ptr, error_ptr, rank, sources, there & (sources == 0), number,
                    spins, flags_at, PHASE, RANKS, chunk)  # fmt: skip


@triton.jit
def waits_without_barrier(
    peers_ptr, lost_ptr, error_ptr, rank, sources, there, number, spins, flags_at,
    PHASE: tl.constexpr, RANKS: tl.constexpr, chunk=0,
):  # fmt: skip
    own = at(peers_ptr, rank, flags_at, tl.int64) + (PHASE + chunk) * RANKS
    flag = tl.atomic_add(own, 0, sem="acquire", scope="sys")
    for r in tl.static_range(RANKS):
        flag = tl.atomic_add(own + r, 0, sem="acquire", scope="sys")
        while ((flag >> 32) < number) & (tl.sum((there & (sources == r)).to(tl.int32)) > 0):
            flag = tl.atomic_add(own + r, 0, sem="acquire", scope="sys")
    return flag + tl.zeros(there.shape, tl.int64), 1


@triton.jit
def last_without_barrier(counters_ptr, programs):
    last = tl.atomic_add(counters_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counters_ptr, 0)
    tl.debug_barrier()
    return last


@triton.jit
def last_without_second_barrier(counters_ptr, programs):
    tl.debug_barrier()
    last = tl.atomic_add(counters_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counters_ptr, 0)
    return last


@triton.jit
def last_without_order(counters_ptr, programs):
    tl.debug_barrier()
    last = tl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu") == programs - 1
    if last:
        tl.store(counters_ptr, 0)
    tl.debug_barrier()
    return last


@triton.jit
def first_is_last(counters_ptr, programs):
    tl.debug_barrier()
    last = tl.atomic_add(counters_ptr, 1, sem="acq_rel", scope="gpu") == 0
    if tl.program_id(0) == programs - 1:
        tl.store(counters_ptr, 0)
    tl.debug_barrier()
    return last


@triton.jit
def cached_number(epoch_ptr):
    return tl.load(epoch_ptr) + 1


@triton.jit
def waits_for_no_kernel(PDL: tl.constexpr):
    pass


@triton.jit
def launches_before_it_waits():
    launch_dependents(True)
    wait_for_kernel(True)


# Where the faults are; of `reduce`, the experts leave the sum to the combine.
ALL = (assignments, combine, rows, reduce)
FAULTS = [
    *(("raise_flags", fault, module)
      for fault in (relaxed_flags, flags_of_one_gpu, flags_of_the_next_call,
                    flags_of_the_last_call, flag_of_rank_0_only)
      for module in ALL),
    ("raise_flags", flags_of_all_chunks, reduce),
    ("reached", always_reached, flags),
    ("look_at", acquires_nothing, flags),
    *(("wait_for", fault, module)
      for fault in (waits_for_rank_0_only, waits_without_barrier) for module in ALL),
    *(("is_last", fault, module)
      for fault in (last_without_barrier, last_without_second_barrier, last_without_order,
                    first_is_last)
      for module in (assignments, rows, reduce)),
    *(("is_last", fault, combine)
      for fault in (last_without_barrier, last_without_order, first_is_last)),
    *(("call_number", cached_number, module) for module in (assignments, rows)),
    *(("wait_for_kernel", waits_for_no_kernel, module) for module in ALL),
    *(("wait_then_launch_dependents", launches_before_it_waits, module)
      for module in (assignments, rows)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fault", "module"), FAULTS,
    ids=[f"{module.__name__.rpartition('.')[2]}-{fault.__name__}" for _, fault, module in FAULTS],
)  # fmt: skip
def test_faults_are_found(name, fault, module, monkeypatch) -> None:
    monkeypatch.setattr(module, name, fault)
    leave: Sequence[Sequence[int]] = ((),)
    if module is reduce:
        monkeypatch.setattr(sys.modules["moekit_nvlink.layout"], "REDUCED_FROM", 1)
        leave = (range(3),)
    with pytest.raises((Race, Deadlock)):
        Layer(small(module is assignments, 3, programs=3), COUNTS, leave=leave).run()
