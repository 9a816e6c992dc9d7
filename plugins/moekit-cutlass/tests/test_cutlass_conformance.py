"""moekit's conformance kit on the true libraries; where they cannot run it skips, saying why."""

from moekit.testing import ExpertsConformance


class TestCutlass(ExpertsConformance):
    backend = "cutlass"


class TestCutlassBatched(ExpertsConformance):
    backend = "cutlass_batched"
