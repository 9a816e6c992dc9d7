"""The conformance kit with the library replaced by its semantics over gloo: judges what is ours.

Not on a GPU, where test_nccl_conformance.py does the same with the library itself.
"""

import pytest
import torch

from moekit.testing import DispatcherConformance, DispatcherGradientConformance

if torch.cuda.is_available():
    pytest.skip("the library itself is tested", allow_module_level=True)

import nccl_standin  # noqa: E402


class TestHighThroughputStandIn(DispatcherConformance):
    backend = "nccl_ht_standin"
    backends = nccl_standin.registry()
    world_sizes = (1, 2, 4)


class TestLowLatencyStandIn(DispatcherConformance):
    backend = "nccl_ll_standin"
    backends = nccl_standin.registry()
    world_sizes = (1, 2)


class TestHighThroughputGradients(DispatcherGradientConformance):
    backend = "nccl_ht_standin"
    backends = nccl_standin.registry()
    world_sizes = (2, 4)
