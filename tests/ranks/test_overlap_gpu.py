"""Two micro-batches in flight with shared experts beside them: right numbers, on another stream.

Over every dispatcher that runs here: GPUs, and gloo.
"""

from __future__ import annotations

import re

import pytest
from faults_on_ranks import job_for, micro_batches, out_of_order
from test_faults_gpu import EACH, RANKS, able, pools  # noqa: F401 (a fixture)


@pytest.mark.parametrize("ahead", [True, False], ids=["run", "started"])
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "within"])
@pytest.mark.parametrize(("device", "name"), EACH)
def test_micro_batches_with_shared_experts(
    pools,  # noqa: F811
    device: str,
    name: str,
    beside: bool,
    ahead: bool,
) -> None:
    """They start late on their stream: a call that did not wait for them would miss them."""
    for where in pools(device).run(micro_batches, job_for(name, device, RANKS), beside, ahead):
        assert where == (set() if device == "cpu" else {not beside})


@pytest.mark.parametrize("name", able("cpu"))
def test_ranks_that_run_calls_in_different_orders_are_told(pools, name: str) -> None:  # noqa: F811
    for rank, said in enumerate(pools("cpu").run(out_of_order, job_for(name, "cpu", RANKS))):
        call = r"'run the experts of a call of kernel \d+ \(started at step (\d+)\)'"
        others = rf"other ranks are at another step: {{{1 - rank}: {call}}}; start and run calls"
        found = re.match(rf"rank {rank} is at {call}, {others}", said)
        assert found, said
        assert (int(found[1]) < int(found[2])) == (rank == 0)
