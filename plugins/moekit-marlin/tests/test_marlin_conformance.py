"""moekit's conformance kit: on a GPU with the library; elsewhere what needs neither."""

from moekit.testing import ExpertsConformance


class TestMarlin(ExpertsConformance):
    backend = "marlin"


class TestMarlinBatched(ExpertsConformance):
    backend = "marlin_batched"
