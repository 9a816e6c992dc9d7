"""The backwards of the core's own backends, judged by the same kit as a stranger's."""

from __future__ import annotations

from moekit.testing import DispatcherGradientConformance, GradientConformance


class TestTorch(GradientConformance):
    backend = "torch"


class TestReference(GradientConformance):
    backend = "reference"


class TestLocal(DispatcherGradientConformance):
    backend = "local"
