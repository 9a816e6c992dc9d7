"""The conformance kit on CPU processes that share memory: ranks wait for each other as on GPUs.

Not on a GPU, where test_nvlink_conformance.py does the same with symmetric memory.
"""

import pytest
import torch

from moekit.testing import DispatcherConformance, DispatcherGradientConformance
from moekit.testing.distributed import RankPool

if torch.cuda.is_available():
    pytest.skip("symmetric memory itself is tested", allow_module_level=True)

import nvlink_standin  # noqa: E402


class TestHighThroughput(DispatcherConformance):
    backend = "nvlink_ht_standin"
    backends = nvlink_standin.registry()
    world_sizes = (2, 4)


class TestGradients(DispatcherGradientConformance):
    backend = "nvlink_ht_standin"
    backends = nvlink_standin.registry()
    world_sizes = (2, 4)


class TestLowLatency(DispatcherConformance):
    backend = "nvlink_ll_standin"
    backends = nvlink_standin.registry()
    world_sizes = (2, 4)


@pytest.fixture(scope="module")
def three_ranks():
    with RankPool(3, "cpu", timeout=120) as pool:
        yield pool


@pytest.mark.parametrize("name", [spec.name for spec in nvlink_standin.specs()])
def test_calls_with_delays(three_ranks: RankPool, name: str) -> None:
    three_ranks.run(nvlink_standin.delayed_calls, name, 5)


@pytest.mark.parametrize("name", [spec.name for spec in nvlink_standin.specs()])
def test_refused_input_makes_nan_once(three_ranks: RankPool, name: str) -> None:
    three_ranks.run(nvlink_standin.refused_input, name)
