"""The core's own backends, judged by the same kit as a stranger's."""

from __future__ import annotations

from moekit.testing import DispatcherConformance, ExpertsConformance


class TestTorch(ExpertsConformance):
    backend = "torch"


class TestReference(ExpertsConformance):
    backend = "reference"


class TestLocal(DispatcherConformance):
    backend = "local"


class TestBatchedReference(DispatcherConformance):
    backend = "batched_reference"
