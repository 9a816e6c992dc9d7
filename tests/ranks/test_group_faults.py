"""Ranks that stop, die, come late or are interrupted: the others learn it, and can go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket

import pytest
from group_faults_on_ranks import (
    away_from,
    checked_differs,
    choosing_fails,
    interrupted,
    interrupted_waiting,
    late,
    lost_in_prepare,
    never_composes,
    no_tensor,
    one_group,
    serve,
    warmup_of_other_sizes,
)
from rank_events import GUARD
from rank_pools import rank_pool

from moekit.testing.distributed import RankPool

PROMPT = GUARD / 2  # seconds, where a rank without this error would wait for GUARD


pool = rank_pool(2)


def test_a_late_rank_hears_who_gave_up_and_all_recover(pool) -> None:
    waited, came_late = pool.run(late)
    assert [text for text, _ in (waited[0], came_late[0])] == ["right", "right"]
    for text, seconds in waited[1:3]:
        assert text.startswith("PeerFailed: rank 1 did not come to 'start a call of kernel")
        assert seconds < PROMPT
    text, seconds = came_late[1]
    assert text.startswith("PeerFailed: rank 0 gave up at 'start a call of kernel")
    assert seconds < PROMPT, "no wait for a step that is over"
    assert [text for text, _ in waited[3:]] == ["right", "right"]
    assert [text for text, _ in came_late[2:]] == ["right", "right"]


def test_a_file_is_the_store_where_a_rank_does_not_come(tmp_path) -> None:
    """Then all recover in another group, although one of them has used more groups of its name."""
    with RankPool(2) as ranks:
        (failed, first), (away, second) = ranks.run(away_from, str(tmp_path))
    assert failed.startswith("rank 1 did not come to 'choose backends' within 2 s")
    assert away == "away" and first == second == "right"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["check", "experts", "send"])
def test_all_hear_of_an_interrupt_and_recover(pool, where, kind) -> None:
    for rank, said in enumerate(pool.run(interrupted, where, kind)):
        by = f"{kind.__name__}: planted"
        assert said[0] == "right"
        assert said[1].startswith(by if rank == 1 else f"PeerFailed: rank 1 failed: {by}")
        assert said[2:] == ["right", "right"]


def test_a_signal_interrupts_a_rank_that_waits(pool) -> None:
    others, mine = pool.run(interrupted_waiting)
    assert mine[1][0].startswith("KeyboardInterrupt") and mine[1][1] < PROMPT
    assert others[1][0].startswith("PeerFailed: rank 1 failed: KeyboardInterrupt")
    assert others[1][1] < PROMPT
    assert (others[2][0], mine[2][0]) == ("right", "right")


@pytest.mark.parametrize("stopped", [True, False])
def test_a_rank_lost_in_its_dispatch_is_noticed_in_time(pool, stopped) -> None:
    """The group's own timeout, after which this would fail, is half an hour."""
    said = pool.run(lost_in_prepare, stopped)
    why = "rank 1 did not come to" if stopped else "rank 1 failed: ZeroDivisionError: planted"
    for rank, (first, second, third) in enumerate(said):
        assert first == "right"
        if rank != 1:
            assert second.startswith("PeerFailed") and why in second
        elif not stopped:
            assert second == "ZeroDivisionError: planted"
        assert third.startswith("PeerFailed"), "ranks no longer agree on where they stand"


def test_two_threads_that_call_one_kernel(pool) -> None:
    assert pool.run(one_group, 10) == [["right"] * 20] * 2


def test_the_others_hear_of_an_x_that_is_no_tensor(pool) -> None:
    others, mine = pool.run(no_tensor)
    assert mine == ["AttributeError: 'list' object has no attribute 'shape'", "right"]
    assert others[0].startswith(f"PeerFailed: rank 1 failed: {mine[0]}")
    assert others[1] == "right"


def test_checked_on_some_ranks_only(pool) -> None:
    for text, again, destroyed in pool.run(checked_differs):
        assert "ranks disagree on checked: True on ranks [0], False on ranks [1]" in text
        assert again == "right"
        assert destroyed == 1, "a dispatcher keeps its buffers for a kernel that nobody has"


def test_ranks_warm_up_with_the_same_calls(pool) -> None:
    """A rank with one expert more may have launch plans for other numbers of tokens."""
    for rank, (sizes, other) in enumerate(pool.run(warmup_of_other_sizes)):
        assert sizes == [5, 4, 3, 2, 1]
        assert other.startswith(f"rank {rank} is at 'warm up with {5 + rank} tokens'")


def test_a_rank_that_fails_to_choose(pool) -> None:
    (other, seconds), (own, _) = pool.run(choosing_fails)
    assert own == "ZeroDivisionError: a fault of moekit"
    assert "rank" in other and "a fault of moekit" in other and seconds < PROMPT


@pytest.mark.parametrize("again", [False, True])
def test_a_rank_that_does_not_compose(pool, again) -> None:
    (text, seconds), (late, late_seconds) = pool.run(never_composes, again)
    assert (
        text.startswith("rank 1 did not come to 'choose backends' within 1 s") and seconds < PROMPT
    )
    if again:
        assert late.startswith("rank 0 gave up at 'choose backends'") and late_seconds < PROMPT
        assert text.endswith("| right") and late.endswith("| right")


def test_the_process_that_hosts_the_store_stops_and_dies() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context, ranks = multiprocessing.get_context("spawn"), 2
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(rank, ranks, port, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)

    def answers(pipe, seconds):
        assert pipe.poll(seconds), f"no answer within {seconds} s"
        return pipe.recv()

    def call(*who, timeout):
        for rank in who:
            pipes[rank].send(timeout)
        return [answers(pipes[rank], GUARD) for rank in who]

    host = processes[0].pid
    assert host is not None
    try:
        assert [answers(pipe, GUARD) for pipe in pipes] == ["ready"] * ranks
        assert [text for text, _ in call(0, 1, timeout=GUARD)] == ["right"] * ranks

        os.kill(host, signal.SIGSTOP)
        for _ in range(2):
            ((text, seconds),) = call(1, timeout=1.0)
            assert text.startswith("PeerFailed: the store of the process group did not answer")
            assert "global rank 0) is stopped" in text and seconds < PROMPT
        os.kill(host, signal.SIGCONT)
        assert [text for text, _ in call(0, 1, timeout=GUARD)] == ["right"] * ranks

        os.kill(host, signal.SIGKILL)
        for _ in range(2):
            ((text, seconds),) = call(1, timeout=1.0)
            assert text.startswith("PeerFailed: the store of the process group is gone")
            assert "global rank 0) is stopped, died" in text and seconds < PROMPT
    finally:
        for process in processes:
            process.kill()
            process.join()
