"""Two micro-batches in flight with shared experts beside them: right numbers, on another stream.

Over every dispatcher that runs here: GPUs, and gloo. What it saves: benchmarks/layer_dispatch.py.
"""

from __future__ import annotations

import pytest
from faults_on_ranks import job_for, micro_batches
from test_faults_gpu import EACH, RANKS, pools  # noqa: F401 (a fixture)


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "within"])
@pytest.mark.parametrize(("device", "name"), EACH)
def test_micro_batches_with_shared_experts(pools, device: str, name: str, beside: bool) -> None:  # noqa: F811
    """They start late on their stream: a call that did not wait for them would miss them."""
    for where in pools(device).run(micro_batches, job_for(name, device, RANKS), beside):
        assert where == (set() if device == "cpu" else {not beside})
