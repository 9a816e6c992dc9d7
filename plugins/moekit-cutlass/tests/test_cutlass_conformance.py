"""moekit's kits on the true libraries; where they cannot run they skip, saying why."""

from moekit.testing import ExpertsConformance, GradientConformance


class TestCutlass(ExpertsConformance):
    backend = "cutlass"


class TestCutlassBatched(ExpertsConformance):
    backend = "cutlass_batched"


class TestCutlassGradients(GradientConformance):
    backend = "cutlass"
