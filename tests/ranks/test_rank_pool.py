"""RankPool: results, exceptions, hangs and deaths of ranks, each reported and none waited for."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from moekit.testing import distributed
from moekit.testing.distributed import RankError, RankPool


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as ranks:
        yield ranks
    ranks.close()


def total(rank, world_size, start):
    x = start + rank
    dist.all_reduce(x)
    return {"sum": x, "threads": torch.get_num_threads(), "fp8": x.to(torch.float8_e4m3fn)[:1]}


def fail(rank, world_size, ranks):
    if rank in ranks:
        raise KeyError(f"planted on {rank}")
    return rank


def fail_while_peers_wait(rank, world_size):
    if rank == 0:
        raise KeyError("planted")
    dist.barrier()


def sleep(rank, world_size, seconds):
    if rank == 1:
        time.sleep(seconds)


def die(rank, world_size):
    if rank == 1:
        os._exit(7)


def environment(rank, world_size, name):
    return os.environ.get(name)


def leave_early(rank, world_size):
    """Return for how long rank 1 waits for rank 0, which comes 0.5 s later."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["rank 1 starts"])
        time.sleep(0.5)
    start = time.monotonic()
    store.set("rank 1 starts", "")
    distributed.wait_until_connected()
    return time.monotonic() - start


def unpicklable(rank, world_size):
    return lambda: None


def test_results_come_by_rank_and_by_value(pool):
    results = pool.run(total, torch.tensor([1.0, 2.0]))
    assert len(results) == 2
    for result in results:
        assert result["sum"].tolist() == [3.0, 5.0]
        assert result["threads"] == 1
        assert result["fp8"].dtype == torch.float8_e4m3fn and result["fp8"].float().item() == 3.0


def test_an_exception_carries_every_traceback_and_the_pool_lives_on(pool):
    with pytest.raises(RankError, match=r"fail failed on ranks \[0, 1\]") as caught:
        pool.run(fail, [0, 1])
    assert "planted on 0" in str(caught.value) and "planted on 1" in caught.value.tracebacks[1]
    with pytest.raises(RankError) as caught:
        pool.run(fail, [1])
    assert list(caught.value.tracebacks) == [1] and not caught.value.hung
    with pytest.raises(RankError, match="pickle") as caught:
        pool.run(unpicklable)
    assert str(caught.value).count("Traceback") == 1 and "ranks [0, 1] raised" in str(caught.value)
    assert not pool.closed
    assert pool.run(fail, []) == [0, 1]


def test_hangs_close_the_pool_and_name_the_ranks(monkeypatch):
    monkeypatch.setenv("MOEKIT_TEST_INHERITED", "yes")
    with RankPool(2) as ranks:
        assert ranks.run(environment, "MOEKIT_TEST_INHERITED") == ["yes", "yes"]
        ranks.timeout = 5.0
        with pytest.raises(RankError, match="rank 1 hangs") as caught:
            ranks.run(sleep, 3600)
        assert caught.value.hung == (1,) and "in sleep" in str(caught.value)
        with pytest.raises(RankError, match="closed: sleep left ranks"):
            ranks.run(fail, [])


def test_an_exception_that_peers_wait_for_closes_the_pool():
    with RankPool(2) as ranks:
        with pytest.raises(RankError, match="pool is now closed") as caught:
            ranks.run(fail_while_peers_wait)
        assert caught.value.hung == (1,) and "planted" in caught.value.tracebacks[0]
        assert ranks.closed


def test_a_dead_rank_is_reported():
    with RankPool(2) as ranks, pytest.raises(RankError, match="exit code 7") as caught:
        ranks.run(die)
    assert caught.value.died == {1: 7}


def where(rank, world_size):
    x = torch.ones(1)
    dist.all_reduce(x)  # over gloo, with no NCCL connected
    return x.to("cuda").device.index, int(x)


def test_a_rank_leaves_its_group_when_all_have_it(pool):
    """Without this, gloo fails peers that still connect, now and then, on a busy machine."""
    assert pool.run(leave_early)[1] > 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="shares GPUs")
def test_more_ranks_than_gpus_share_them():
    count = torch.cuda.device_count()
    with RankPool(count + 1, "cuda") as ranks:
        assert ranks.run(where) == [(r % count, count + 1) for r in range(count + 1)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has GPUs")
def test_no_gpus_to_share():
    with pytest.raises(RankError, match="torch sees no GPU here"):
        RankPool(2, "cuda")


def test_a_rank_that_died_between_tasks() -> None:
    with RankPool(2) as pool:
        pool._processes[1].kill()
        pool._processes[1].join()
        with pytest.raises(RankError, match="rank 1"):
            pool.run(fail, ())
        assert pool.closed
        with pytest.raises(RankError, match="closed: rank 1 is gone"):
            pool.run(fail, ())
