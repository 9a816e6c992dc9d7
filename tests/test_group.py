"""moekit.group: all ranks go on together or none does, and buffers outlive no user."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from moekit.errors import PeerFailed
from moekit.group import Agreement, SharedBuffers
from moekit.testing.distributed import RankPool


@pytest.fixture(scope="module")
def pool():
    with RankPool(3) as ranks:
        yield ranks


def _agreement(timeout=20.0):
    return Agreement(dist.group.WORLD, timeout)


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
    return outcomes, len(agreement._old)


def test_one_failure_is_everybodys(pool):
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
    agreement, start = _agreement(1.0), time.monotonic()
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
        assert text.startswith("rank 1 did not come to 'combine' within 1 s")
        assert seconds < 5


def mix_up(rank, world_size):
    try:
        _agreement().agree("start a call" if rank else "finish its experts")
    except PeerFailed as error:
        return str(error)
    return "no error"


def test_calls_in_another_order(pool):
    for rank, text in enumerate(pool.run(mix_up)):
        step = "start a call" if rank else "finish its experts"
        assert text.startswith(f"rank {rank} is at '{step}', others are not")
        assert "in one order on all ranks" in text


def of_a_subgroup(rank, world_size):
    pair = dist.new_group([1, 2])
    for _ in range(2):
        if rank:
            Agreement(pair, 20.0).agree("meet")
        _agreement().agree("meet all")
    return True


def test_groups_do_not_mix(pool):
    assert pool.run(of_a_subgroup) == [True] * 3


def test_buffers_live_as_long_as_their_users():
    freed: list[str] = []
    buffers = SharedBuffers[str](freed.append)
    made = iter("ab")
    key = (torch.bfloat16, 128)
    assert buffers.acquire(key, lambda: next(made)) == "a"
    assert buffers.acquire(key, lambda: next(made)) == "a"
    assert buffers.acquire("other", lambda: next(made)) == "b"
    buffers.release(key)
    assert freed == []
    buffers.release(key)
    buffers.release(key)
    assert freed == ["a"]
    buffers.clear()
    buffers.clear()
    assert freed == ["a", "b"]
