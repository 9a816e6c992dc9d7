"""The adapters of the core's own experts, judged by the same kit as a stranger's."""

from __future__ import annotations

from moekit.testing import AdapterConformance


class TestTorch(AdapterConformance):
    backend = "torch"


class TestReference(AdapterConformance):
    backend = "reference"
