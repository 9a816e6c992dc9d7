"""moekit's own judgement, on GPUs with the library itself; skipped with the reason elsewhere."""

import pytest

from moekit.testing import DispatcherConformance, DispatcherGradientConformance

pytest.importorskip("deep_ep", reason="deep_ep is not installed")


class TestNormal(DispatcherConformance):
    backend = "deepep_ht"
    world_sizes = (1, 2, 4)


class TestLowLatency(DispatcherConformance):
    backend = "deepep_ll"
    world_sizes = (1, 2, 4)


class TestElastic(DispatcherConformance):
    backend = "deepep_elastic"
    world_sizes = (1, 2, 4)


class TestNormalGradients(DispatcherGradientConformance):
    backend = "deepep_ht"
    world_sizes = (2, 4)


class TestElasticGradients(DispatcherGradientConformance):
    backend = "deepep_elastic"
    world_sizes = (2, 4)
