from moekit.testing.gradients import GradientConformance
class TestTorch(GradientConformance):
    backend="torch"
class TestReference(GradientConformance):
    backend="reference"
