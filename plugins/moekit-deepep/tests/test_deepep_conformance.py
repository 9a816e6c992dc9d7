"""moekit's own judgement, on GPUs with the library itself; skipped with the reason elsewhere."""

from moekit.testing import DispatcherConformance


class TestNormal(DispatcherConformance):
    backend = "deepep_ht"
    world_sizes = (1, 2, 4)


class TestLowLatency(DispatcherConformance):
    backend = "deepep_ll"
    world_sizes = (1, 2, 4)


class TestElastic(DispatcherConformance):
    backend = "deepep_elastic"
    world_sizes = (1, 2, 4)
