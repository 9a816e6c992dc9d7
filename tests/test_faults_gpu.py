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
    fault,
    job_for,
    leave,
    mismatch,
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


def test_gpus_are_tested_where_there_are_any() -> None:
    assert any(device == "cpu" for device, _ in EACH) or not able("cpu")
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs 2 CUDA devices; gloo alone was tested")
    assert any(device == "cuda" for device, _ in EACH)


# -- a rank that dies, or raises where nobody expects it ------------------------------------------

# GPUs take long to start: every place for one dispatcher, one for the others. Whoever dies in
# combine leaves a GPU waiting, and the host with it at its next synchronization: that ends by the
# library's timeout or NCCL's, so only gloo, which notices, is asked.
DEATHS = [
    (device, name, where)
    for device, name in EACH
    for where in ("before", "dispatch", "experts", "combine")
    if where == "dispatch" or (name == "naive" and (device == "cpu" or where != "combine"))
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
    error = caught.value
    assert "planted" in error.tracebacks[CULPRIT]
    if device == "cpu" and name == "flashinfer_allgather":
        assert error.hung == (0,), "gloo's transfers wait for the group's own timeout"
        return
    assert not error.hung, error
    assert "PeerFailed" in error.tracebacks[0] and f"rank {CULPRIT}" in error.tracebacks[0]


# -- ranks that differ ----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["hidden_size", "max_num_tokens", "dtype"])
@pytest.mark.parametrize(("device", "name"), EACH)
def test_other_sizes_are_found_at_construction(pools, device: str, name: str, what: str) -> None:
    job = job_for(name, device, RANKS)
    changes = {
        "hidden_size": 2 * job.problem.hidden_size,
        "max_num_tokens": 32,
        "dtype": torch.float16,
    }
    other = job.problem.replace(**{what: changes[what]})
    if reasons := job.spec.unsupported(other):
        pytest.skip("; ".join(reasons))
    for said in pools(device).run(mismatch, job, {what: changes[what]}):
        assert f"ranks disagree on {what}" in said and "ranks [1]" in said


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("destroys", [True, False], ids=["destroyed", "left"])
@pytest.mark.parametrize("device", DEVICES)
def test_processes_end(device: str, destroys: bool) -> None:
    """Of themselves, with and without `destroy`, after kernels of all dispatchers."""
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
