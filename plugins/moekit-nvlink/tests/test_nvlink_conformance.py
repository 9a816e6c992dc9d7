"""moekit's conformance kit on the dispatchers; it needs GPUs that reach each other's memory."""

from __future__ import annotations

from moekit.testing import DispatcherConformance


class TestNvlinkHt(DispatcherConformance):
    backend = "nvlink_ht"


class TestNvlinkLl(DispatcherConformance):
    backend = "nvlink_ll"
