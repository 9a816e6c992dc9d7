"""The moving dispatcher under moekit's conformance kit, on two processes over gloo."""

from moekit.testing import DispatcherConformance


class TestAcmeAllToAll(DispatcherConformance):
    backend = "acme_all_to_all"
    world_sizes = (2,)
