"""moekit's own judgement of the naive dispatcher."""

from __future__ import annotations

from moekit.testing import DispatcherConformance, DispatcherGradientConformance


class TestNaive(DispatcherConformance):
    backend = "naive"


class TestNaiveGradients(DispatcherGradientConformance):
    backend = "naive"
