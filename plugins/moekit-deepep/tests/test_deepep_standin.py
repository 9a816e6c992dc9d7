"""The conformance kit with the library replaced by its semantics over gloo: judges what is ours.

Not on a GPU, where test_deepep_conformance.py does the same with the library itself.
"""

import pytest
import torch

from moekit.testing import DispatcherConformance, DispatcherGradientConformance

if torch.cuda.is_available():
    pytest.skip("the library itself is tested", allow_module_level=True)

import deepep_standin  # noqa: E402


class TestNormalStandIn(DispatcherConformance):
    backend = "deepep_ht_standin"
    backends = deepep_standin.registry()
    world_sizes = (1, 2, 4)


class TestLowLatencyStandIn(DispatcherConformance):
    backend = "deepep_ll_standin"
    backends = deepep_standin.registry()
    world_sizes = (1, 2)


class TestElasticStandIn(DispatcherConformance):
    backend = "deepep_elastic_standin"
    backends = deepep_standin.registry()
    world_sizes = (2,)  # one rank is `local`, which TestNormalStandIn tests


class TestNormalGradients(DispatcherGradientConformance):
    backend = "deepep_ht_standin"
    backends = deepep_standin.registry()
    world_sizes = (2, 4)


class TestElasticGradients(DispatcherGradientConformance):
    backend = "deepep_elastic_standin"
    backends = deepep_standin.registry()
    world_sizes = (2,)
