"""The tests that `moekit.testing.run` collects, for the backend and the kits that `run` names."""

from __future__ import annotations

import os
from typing import Any

from moekit.discovery.registry import registry
from moekit.testing import (
    DispatcherConformance,
    DispatcherGradientConformance,
    ExpertsConformance,
    GradientConformance,
)
from moekit.testing.runner import VARIABLE

_name, _, _gradients = os.environ.get(VARIABLE, "").partition(" ")

_experts: Any = GradientConformance if _gradients else ExpertsConformance
_dispatcher: Any = DispatcherGradientConformance if _gradients else DispatcherConformance

if _name in registry().experts:

    class TestExperts(_experts):  # type: ignore[misc]
        backend = _name


if _name in registry().dispatchers:

    class TestDispatcher(_dispatcher):  # type: ignore[misc]
        backend = _name
