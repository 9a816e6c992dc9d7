"""A rank that raises or dies, ranks that differ, and the end of kernels: over GPUs, and over gloo.

Every dispatcher that runs here, on 2 ranks. What the conformance kit has (bad input, failing
experts) is not repeated.
"""

from __future__ import annotations

import re
import time

import pytest
import torch
from faults_on_ranks import (
    CULPRIT,
    TIMEOUT,
    after_a_fault,
    fault,
    job_for,
    leave,
    side_by_side,
    unwaiting,
)

import moekit
from moekit.testing.distributed import RankError, RankPool

RANKS = 2
GPUS = torch.cuda.device_count() >= RANKS
DEVICES = ["cpu", *(["cuda"] if GPUS else [])]


def able(device: str, **changes) -> list[str]:
    """The dispatchers that can do the tests' problem there."""
    names = [n for n, s in moekit.registry().dispatchers.items() if s.moves_tokens]
    jobs = {name: job_for(name, device, RANKS, **changes) for name in names}
    return [name for name, job in jobs.items() if not job.spec.unsupported(job.problem)]


EACH = [(device, name) for device in DEVICES for name in able(device)]


@pytest.fixture(scope="module")
def pools():
    made: dict[str, RankPool] = {}

    def get(device: str) -> RankPool:
        if device not in made or made[device].closed:
            made[device] = RankPool(RANKS, device, timeout=60 if device == "cpu" else 180)
        return made[device]

    yield get
    for pool in made.values():
        pool.close()


# -- a rank that dies, or raises where nobody expects it ------------------------------------------

# GPUs take long to start: every place for one dispatcher, transfers for the others.
DEATHS = [
    (device, name, where)
    for device, name in EACH
    for where in ("before", "dispatch", "experts", "combine")
    if name == "naive" or where in ("dispatch", "combine")
]


@pytest.mark.parametrize(("device", "name", "where"), DEATHS)
def test_a_rank_that_dies_is_named(device: str, name: str, where: str) -> None:
    """The others raise within the timeout; nothing hangs, not even the end of their processes."""
    with RankPool(RANKS, device, timeout=60) as pool, pytest.raises(RankError) as caught:
        start = time.monotonic()
        experts = unwaiting(name, device)
        pool.run(fault, job_for(name, device, RANKS, experts), "dies", where)
    error, seconds = caught.value, time.monotonic() - start
    assert error.died == {CULPRIT: 3}, error
    assert not error.hung, error
    said = error.tracebacks[0]
    assert "PeerFailed" in said and f"rank {CULPRIT}" in said, said
    waited = int(re.search(r"after (\d+) s", said)[1])
    assert waited <= TIMEOUT + 3 and seconds < 60
    if where == "combine":
        assert "did not come to 'combine a call of kernel" in said, (
            "found out by waiting for its tokens"
        )


@pytest.mark.parametrize(("device", "name"), EACH)
def test_a_rank_that_raises_in_dispatch_is_named(device: str, name: str) -> None:
    """In a quantization on the way out, after all ranks agreed to start."""
    job = job_for(name, device, RANKS, unwaiting(name, device), quant="fp8_block")
    if reasons := job.spec.unsupported(job.problem):
        pytest.skip("; ".join(reasons))
    if "fp8_block" not in job.spec.wire_schemes or name == "deepep_ll":
        pytest.skip("the experts' quantization is not part of its dispatch")
    with RankPool(RANKS, device, timeout=60) as pool, pytest.raises(RankError) as caught:
        pool.run(fault, job, "raises", "quantize")
    blames_the_culprit(caught.value)


@pytest.mark.parametrize(("device", "name"), EACH)
def test_a_rank_that_raises_in_combine_is_named(device: str, name: str) -> None:
    """After all ranks' experts; the others' output is on its way then."""
    job = job_for(name, device, RANKS, unwaiting(name, device))
    with RankPool(RANKS, device, timeout=60) as pool, pytest.raises(RankError) as caught:
        pool.run(fault, job, "raises", "combine")
    blames_the_culprit(caught.value)


@pytest.mark.parametrize("name", able("cpu"))
def test_no_call_gets_what_a_failed_one_left(name: str) -> None:
    """The culprit's sockets hold what others sent to a combine that it never made."""
    with RankPool(RANKS) as pool:
        other, culprit = pool.run(after_a_fault, job_for(name, "cpu", RANKS))
    assert culprit[0] == "RuntimeError: planted"
    assert other[0].startswith(f"PeerFailed: rank {CULPRIT} failed: RuntimeError: planted")
    assert other[1].startswith("PeerFailed: an earlier call was left half-way")
    assert culprit[1].startswith("PeerFailed: rank 0 failed: an earlier call was left half-way")


def blames_the_culprit(error: RankError) -> None:
    """At once: `RankPool` gives the others 5 s."""
    assert "planted" in error.tracebacks[CULPRIT]
    assert not error.hung, error
    said = error.tracebacks[0]
    assert f"rank {CULPRIT} failed: RuntimeError: planted" in said and "PeerFailed" in said, said


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("destroys", [True, False], ids=["destroyed", "left"])
@pytest.mark.parametrize("device", DEVICES)
def test_processes_end(device: str, destroys: bool) -> None:
    """Processes end by themselves, with and without `destroy`, after kernels of all dispatchers."""
    pool = RankPool(RANKS, device, timeout=120)
    for name in able(device):
        pool.run(leave, job_for(name, device, RANKS), destroys)
    processes = pool._processes
    for pipe in pool._pipes:
        pipe.send_bytes(b"")
    for process in processes:
        process.join(30.0)
    codes = [process.exitcode for process in processes]
    pool.close()
    assert codes == [0] * RANKS, "None: it hung; negative: a signal"


@pytest.mark.parametrize("device", DEVICES)
def test_two_dispatchers_in_one_process(pools, device: str) -> None:
    names = able(device)
    if len(names) < 2:
        pytest.skip("needs two dispatchers")
    for first, second in zip(names, names[1:] + names[:1], strict=True):
        jobs = [job_for(name, device, RANKS) for name in (first, second)]
        pools(device).run(side_by_side, jobs)
