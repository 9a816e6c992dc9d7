"""moekit's conformance kit; on the CPU in Triton's interpreter (see conftest)."""

from moekit.testing import AdapterConformance, ExpertsConformance, GradientConformance


class TestTriton(ExpertsConformance):
    backend = "triton"


class TestTritonBatched(ExpertsConformance):
    backend = "triton_batched"


class TestTritonGradients(GradientConformance):
    backend = "triton"


class TestTritonAdapters(AdapterConformance):
    backend = "triton"
