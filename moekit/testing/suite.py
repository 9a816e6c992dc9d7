"""The tests that `moekit.testing.run` collects: both kits, for the backend that `run` names."""

from __future__ import annotations

import os

from moekit.discovery.registry import registry
from moekit.testing import DispatcherConformance, ExpertsConformance
from moekit.testing.runner import VARIABLE

_name = os.environ.get(VARIABLE, "")

if _name in registry().experts:

    class TestExperts(ExpertsConformance):
        backend = _name


if _name in registry().dispatchers:

    class TestDispatcher(DispatcherConformance):
        backend = _name
