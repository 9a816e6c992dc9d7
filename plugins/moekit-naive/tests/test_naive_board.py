"""The board through which ranks of one host exchange their sizes."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist
from moekit_naive import board
from moekit_naive.board import HostBoard, board_of
from rank_pools import rank_pool

from moekit.testing.distributed import RankPool


def many_steps(rank: int, world_size: int, steps: int) -> list[str]:
    found = board_of(dist.group.WORLD, 30.0)
    assert found is not None and found is board_of(dist.group.WORLD, 30.0)
    wrong = []
    for step in range(steps):
        if (step + rank) % 97 == 0:
            time.sleep(0.001)  # ranks that are late in turns
        want = [[step, -each, 2**62 - step] for each in range(world_size)]
        if (got := found.exchange([step, -rank, 2**62 - step])) != want:
            wrong.append(f"step {step}: {got}")
    return wrong


pair = rank_pool(2, timeout=30)


def test_all_ranks_read_all_records_at_every_step() -> None:
    with RankPool(4) as pool:
        assert pool.run(many_steps, 500) == [[]] * 4


def in_either_order(rank: int, world_size: int) -> list[bool]:
    groups = [dist.new_group() for _ in range(2)]
    dist.barrier()

    def make(number: int) -> bool:
        time.sleep(0.5 * (number == rank))
        return board_of(groups[number], 30.0) is not None

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(make, range(2)))


def test_threads_make_boards_of_two_groups_in_either_order(pair) -> None:
    """Ranks 0 and 1 each wait in another group: a lock for both groups would end in a deadlock."""
    assert pair.run(in_either_order) == [[True, True]] * 2


def test_a_rank_that_is_late_is_named(tmp_path) -> None:
    found = two_ranks(tmp_path, pid=os.getpid(), timeout=0.1)
    with pytest.raises(RuntimeError, match=r"rank 1 did not send its sizes within 0.1 s"):
        found.exchange([1, 2, 3])


def test_a_rank_that_has_ended_is_named(tmp_path) -> None:
    child = os.fork()
    if not child:
        signal.pause()
    found = two_ranks(tmp_path, pid=child, timeout=30.0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with pytest.raises(RuntimeError, match=rf"rank 1 \(process {child}\) has ended"):
        found.exchange([1, 2, 3])


def test_a_record_that_is_half_visible_is_not_read(tmp_path) -> None:
    found = two_ranks(tmp_path, pid=os.getpid(), timeout=0.1)
    other = HostBoard(found._memory, 1, [os.getpid()] * 2, 0.1)
    other._words[other_slot := (2 + 1) * board._SLOT] = 1  # the step's number without its record
    with pytest.raises(RuntimeError, match="did not send"):
        found.exchange([1, 2, 3])
    assert other._words[other_slot] == 1


def without_shared_memory(rank: int, world_size: int) -> bool:
    with mock.patch.object(board, "_place", lambda: f"host {rank}"):
        return board_of(dist.new_group(), 30.0) is None


def test_ranks_on_several_hosts_have_no_board(pair) -> None:
    assert pair.run(without_shared_memory) == [True, True]


def two_ranks(folder, pid: int, timeout: float) -> HostBoard:
    path = folder / "page"
    path.write_bytes(bytes(2 * 2 * board._SLOT * 8))
    memory = board._mapped(path, path.stat().st_size)
    assert memory is not None
    return HostBoard(memory, 0, [os.getpid(), pid], timeout)
