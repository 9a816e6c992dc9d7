"""Run moekit's conformance kit on two processes over gloo, for backends that move tokens."""

from moekit.testing import DispatcherConformance, FusedRanksConformance


class TestAcmeAllToAll(DispatcherConformance):
    backend = "acme_all_to_all"
    world_sizes = (2,)


class TestAcmeFused(FusedRanksConformance):
    backend = "acme_fused"
    world_sizes = (2,)
