"""The ranks of a group: all ranks go on together or none does, and buffers outlive no user."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from fake_streams import Streams
from rank_events import GUARD, happened, wait_for
from rank_pools import rank_pool

from moekit.contract.shared_buffers import CallBuffers, SharedBuffers
from moekit.errors import InvalidInput, PeerFailed
from moekit.plugin import Transfers, exchange
from moekit.runtime.agreement import Agreement
from moekit.runtime.store import StoreLost, access

pool = rank_pool(3)


def _agreement(timeout=GUARD):
    """In a new group: what a test leaves unfinished does not reach the next one."""
    return Agreement(dist.new_group(), timeout)


@pytest.mark.parametrize("use", [Transfers, lambda group: exchange("meet", "", group)])
def test_a_dispatcher_that_does_not_resolve_its_group_learns_how(use) -> None:
    with pytest.raises(InvalidInput, match="group is None, expected .*resolve.problem, group"):
        use(None)


def go_on(rank, world_size):
    """Twenty steps, a fault on a changing rank in every third."""
    agreement, outcomes = _agreement(), []
    for step in range(20):
        fault = f"planted in {step}" if step % 3 == 2 and rank == step % world_size else None
        try:
            agreement.agree(f"step {step}", fault)
            outcomes.append("ok" if fault is None else "mine")
        except PeerFailed as error:
            outcomes.append(str(error))
    prefix = agreement._sequence._prefix
    keys = [f"{prefix}/{step}/{rank}" for step in range(agreement.step)]
    return outcomes, sum(dist.distributed_c10d._get_default_store().check([key]) for key in keys)


def test_one_failure_ends_the_step_on_all_ranks(pool):
    results = pool.run(go_on)
    for rank, (outcomes, kept) in enumerate(results):
        for step, outcome in enumerate(outcomes):
            culprit = step % 3
            if step % 3 != 2:
                assert outcome == "ok"
            elif rank == step % 3:
                assert outcome == "mine"
            else:
                assert f"rank {culprit} failed: planted in {step}" in outcome
        assert kept <= 2, "keys pile up in the store"


def stay_silent(rank, world_size):
    agreement, start = _agreement(5.0), time.monotonic()
    if rank == 1:
        return "silent", 0.0
    try:
        agreement.agree("combine")
    except PeerFailed as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


def test_a_silent_rank_is_named_in_time(pool):
    results = pool.run(stay_silent)
    for text, seconds in (results[0], results[2]):
        assert text.startswith("rank 1 did not come to 'combine' within 5 s")
        assert seconds < GUARD


def skip(rank, world_size):
    """Rank 1 leaves out a step that the others give up, and comes to the next one."""
    group, said = dist.new_group(), "no error"
    if rank == 1:
        wait_for("rank 0 left a step out")
        wait_for("rank 2 left a step out")
    else:
        try:
            Agreement(group, 5.0).agree("free the buffers")
        except PeerFailed as error:
            said = str(error)
        happened(f"rank {rank} left a step out")
    Agreement(group, GUARD).agree("start a call")
    return said


def test_a_rank_that_leaves_a_step_out_comes_to_the_next(pool):
    left_out = "rank 1 did not come to 'free the buffers'"
    for rank, said in enumerate(pool.run(skip)):
        assert said == "no error" if rank == 1 else said.startswith(left_out)


def mix_up(rank, world_size):
    try:
        _agreement().agree("start a call" if rank else "finish its experts")
    except PeerFailed as error:
        return str(error)
    return "no error"


def test_calls_in_another_order(pool):
    for rank, text in enumerate(pool.run(mix_up)):
        step = "start a call" if rank else "finish its experts"
        assert text.startswith(f"rank {rank} is at '{step}', other ranks are at another step")
        assert "in one order on all ranks" in text


def leave_half_way(rank, world_size, moving, silent):
    """In a new group, one rank fails, or stays silent, at a step; all go on to two more,
    one of them another kernel's. What each step came to, and the steps whose block was run."""
    group = dist.new_group(range(world_size))
    agreements = [Agreement(group, 5.0 if silent else GUARD) for _ in range(2)]
    outcomes, entered = [], []
    for step in range(3):
        if step == 0 and rank == 1 and silent:
            wait_for("rank 0 gave step 0 up")
            wait_for("rank 2 gave step 0 up")
        try:
            agreement, what = agreements[step // 2], f"step {step}"
            agreement.enter(what)
            entered.append(step)
            if step == 0 and rank == 1 and not silent:
                agreement.agree(what, "ValueError: planted")
                raise ValueError("planted")
            agreement.agree(what, moving=moving)
            outcomes.append("ok")
        except (PeerFailed, ValueError) as error:
            outcomes.append(str(error))
        if step == 0 and rank != 1 and silent:
            happened(f"rank {rank} gave step 0 up")
    return outcomes, entered


def test_tokens_left_in_flight_poison_the_group(pool):
    (others, entered), (culprit, _), _ = pool.run(leave_half_way, True, False)
    assert entered == [0], "a step that waits for the device would hang"
    assert culprit[0] == "planted" and others[0].startswith("rank 1 failed: ValueError: planted")
    for step in (1, 2):
        assert others[step].startswith("an earlier call was left half-way: rank 1 failed")
        assert "rank 0 failed: an earlier call was left half-way" in culprit[step]


def test_a_late_rank_does_not_continue_alone(pool):
    (others, _), (late, _), _ = pool.run(leave_half_way, True, True)
    assert others[0].startswith("rank 1 did not come to 'step 0' within 5 s")
    assert "gave up at 'step 0', where it waited 5 s for this rank (1)" in late[0]
    assert "an earlier call was left half-way" in late[1] and "half-way" in others[1]


def test_a_failure_without_tokens_in_flight_is_over(pool):
    for rank, (outcomes, entered) in enumerate(pool.run(leave_half_way, False, False)):
        assert outcomes[0] == "planted" if rank == 1 else "then all can call again" in outcomes[0]
        assert outcomes[1:] == ["ok", "ok"] and entered == [0, 1, 2]


def of_a_subgroup(rank, world_size):
    pair, everyone = dist.new_group([1, 2]), _agreement()
    for _ in range(2):
        if rank:
            Agreement(pair, 20.0).agree("meet")
        everyone.agree("meet all")
    return True


def test_groups_do_not_mix(pool):
    assert pool.run(of_a_subgroup) == [True] * 3


class Table:
    """A store whose host stops when it is told to."""

    def __init__(self):
        self.values, self.going_on = {}, threading.Event()
        self.going_on.set()

    def set(self, key, value):
        self.going_on.wait()
        self.values[key] = value

    def clone(self):
        return self


def test_a_store_that_stops_is_not_waited_for():
    table, start = Table(), time.monotonic()

    def work(client, job):
        client.set("a", b"1")
        job.go_on()
        client.set("b", b"2")

    table.going_on.clear()
    for _ in range(2):  # the second access finds the first one's thread held
        with pytest.raises(StoreLost, match="did not answer within 0.2 s"):
            access(table, work, 0.2)
    assert time.monotonic() - start < GUARD
    table.going_on.set()
    access(table, lambda client, job: client.set("c", b"3"), 5.0)
    assert table.values == {"a": b"1", "c": b"3"}, "work without a waiting caller must stop"


def test_buffers_live_as_long_as_their_leases():
    freed: list[str] = []
    buffers = SharedBuffers[str](freed.append)
    made, key = iter("abc"), (torch.bfloat16, 128)
    first, second = (buffers.lease(key, lambda: next(made)) for _ in range(2))
    assert first.value == second.value == "a"
    assert buffers.lease("other", lambda: next(made)).value == "b"
    first.release()
    first.release()
    assert second.held and not first.held and freed == []
    with pytest.raises(AssertionError, match="called after destroy"):
        first.value  # noqa: B018
    second.release()
    assert freed == ["a"]
    late = buffers.lease(key, lambda: next(made))
    assert late.value == "c"
    buffers.clear()
    buffers.clear()
    late.release()
    assert sorted(freed) == ["a", "b", "c"]


class StandInGroup:
    """Stands for a process group."""


def test_each_call_in_flight_has_a_buffer():
    made: list[torch.Tensor] = []

    def make() -> torch.Tensor:
        made.append(torch.zeros(1))
        return made[-1]

    with torch.inference_mode():
        buffers = CallBuffers(make, StandInGroup())
        first, second = buffers.take(), buffers.take()
    assert len(made) == buffers.in_flight == 2 and first is not second
    second += 1  # made in inference mode, and written outside of it
    with pytest.raises(InvalidInput, match="2 calls are in flight, which is the limit: take"):
        buffers.take()
    buffers.give_back(first)
    assert buffers.take() is first and len(made) == 2
    buffers.give_back(first)
    buffers.give_back(second)
    assert buffers.in_flight == 0 and buffers.take() is first


def test_calls_on_several_streams_run_in_order(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)
    number = lambda device: streams.current.stream_id  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", number, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", int, raising=False)
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", streams.is_current_stream_capturing
    )
    group = StandInGroup()
    buffers = CallBuffers(object, group, most=3)
    first = buffers.take()
    streams.current = streams.Stream()
    buffers.take()
    buffers.keep_order()
    assert streams.log == ["1 waits for 0"]
    CallBuffers(object, StandInGroup()).keep_order()
    streams.current = streams.Stream()
    CallBuffers(object, StandInGroup()).keep_order()
    assert streams.log == ["1 waits for 0"], "groups do not wait for each other"
    CallBuffers(object, group).keep_order()  # of a layer of other sizes
    assert streams.log == ["1 waits for 0", "2 waits for 1"]
    streams.log.clear()
    streams.current = streams.Stream()
    streams.captured = [streams.made]
    buffers.give_back(first)
    assert buffers.take() is first and not streams.log, "a graph is ordered by its replays"
    with pytest.raises(InvalidInput, match="3 calls in flight need another buffer.*captured"):
        buffers.take()
