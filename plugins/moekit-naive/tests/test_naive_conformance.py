"""moekit's own judgement of the naive dispatcher."""

from __future__ import annotations

from moekit.testing import DispatcherConformance


class TestNaive(DispatcherConformance):
    backend = "naive"
