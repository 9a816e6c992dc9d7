"""moekit's conformance kit on Acme's backends, for every case that their specs do not exclude."""

from moekit.testing import DispatcherConformance, ExpertsConformance, FusedConformance


class TestAcme(ExpertsConformance):
    backend = "acme"


class TestAcmeSorted(DispatcherConformance):
    backend = "acme_sorted"


class TestAcmeFused(FusedConformance):
    backend = "acme_fused"
