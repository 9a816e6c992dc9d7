"""The tests that `moekit.testing.run` collects, for the backend and the kits that `run` names."""

from __future__ import annotations

import os

from moekit.discovery.registry import registry
from moekit.testing import (
    DispatcherConformance,
    DispatcherGradientConformance,
    ExpertsConformance,
    GradientConformance,
)
from moekit.testing.runner import VARIABLE

_name, _, _gradients = os.environ.get(VARIABLE, "").partition(" ")

if _name in registry().experts:

    class TestExperts(GradientConformance if _gradients else ExpertsConformance):  # type: ignore
        backend = _name


if _name in registry().dispatchers:

    class TestDispatcher(  # type: ignore
        DispatcherGradientConformance if _gradients else DispatcherConformance
    ):
        backend = _name
