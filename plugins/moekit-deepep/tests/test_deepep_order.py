"""State that calls share in the library, counts and sets of flags, over the stand-in."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from rank_pools import rank_pool

if torch.cuda.is_available():
    pytest.skip("the library itself is tested", allow_module_level=True)

# First, because it puts the stand-in in the library's place.
from test_deepep_adapter import check, dispatcher_of, finish, problem_of, tokens_of  # noqa: I001
from moekit_deepep import dispatcher as adapter
from told_rows import told_rows


pool = rank_pool(2, timeout=60)


def call(dispatcher, count, seed):
    x, routing = tokens_of(count, seed)
    check(finish(dispatcher, dispatcher.prepare(x, routing, None), x.clone()), x, routing)


def fixed_and_counted(rank, ranks):
    fixed, counted = (
        dispatcher_of("deepep_ht_standin", problem_of(rank, max_num_tokens=most))
        for most in (16, None)
    )
    assert fixed.lease.value is counted.lease.value
    for turn in range(3):
        call(fixed, 3 + turn, turn)
        call(fixed, 5, turn)
        call(counted, 9, turn)
        call(counted, 2, turn)
    for dispatcher in (fixed, counted):
        dispatcher.destroy()


def test_the_host_waits_for_the_count_of_its_own_call(pool):
    """Calls of fixed size write a count that nobody reads, perhaps when a later one reads."""
    pool.run(fixed_and_counted)


def failed_capture(rank, ranks, kind):
    dispatcher = dispatcher_of("deepep_ll_standin", problem_of(rank))
    call(dispatcher, 4, rank)
    buffer = dispatcher.lease.value.buffer
    x, routing = tokens_of(3, rank)
    # Kernels do not run, and the host counts on.
    with mock.patch.object(adapter, "capturing", lambda x: True):
        buffer.captured = "whole"
        tokens = dispatcher.prepare(x, routing, None).result()
        buffer.captured = kind
        dispatcher.abandon(tokens)
        buffer.captured = ""
    call(dispatcher, 4, rank)
    dispatcher.abandon(dispatcher.prepare(x, routing, None).result())
    assert buffer.set == 1, "outside of a capture other ranks may not combine"
    call(dispatcher, 4, rank)
    dispatcher.destroy()


@pytest.mark.parametrize("kind", ["whole", "broken"])
def test_a_capture_that_fails_between_dispatch_and_combine(pool, kind):
    pool.run(failed_capture, kind)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("ht", [2, 10, 32, 2]), ("elastic", [2, 16, 32, 2]), ("ll", [32, 32, 32, 32])],
)
def test_rows_follow_max_tokens(pool, kind, rows):
    """Elastic rows are powers of two, as kernels are compiled for each number."""
    told = pool.run(told_rows, "deepep_standin", f"deepep_{kind}_standin", [1, 5, None, 1])
    assert told == [rows] * 2
