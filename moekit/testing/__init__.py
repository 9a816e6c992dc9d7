"""The conformance kit: tests that every backend must pass.

This is a backend's whole test file::

    from moekit.testing import ExpertsConformance

    class TestAcme(ExpertsConformance):
        backend = "acme"

The kit tests what the backend's spec declares, and that composition refuses the rest with the
spec's reasons. Where the backend's device is missing, one test skips and says so. The kit needs
pytest: ``pip install 'moekit[testing]'``.
"""

from __future__ import annotations

from pkgutil import iter_modules

try:
    import pytest
except ImportError as error:
    raise ImportError(
        "moekit.testing needs pytest, which is an optional extra: pip install 'moekit[testing]'"
    ) from error

# Before these modules are imported, so that failing asserts show the values they compared.
pytest.register_assert_rewrite(*(f"{__name__}.{each.name}" for each in iter_modules(__path__)))

from moekit.backends.reference import oracle  # noqa: E402
from moekit.testing.adapters import AdapterConformance  # noqa: E402
from moekit.testing.cases import Case  # noqa: E402
from moekit.testing.compare import Tolerance, relative_error, tolerance  # noqa: E402
from moekit.testing.diagnose import assert_close  # noqa: E402
from moekit.testing.dispatchers import DispatcherConformance  # noqa: E402
from moekit.testing.experts import ExpertsConformance  # noqa: E402
from moekit.testing.gradient_ranks import DispatcherGradientConformance  # noqa: E402
from moekit.testing.gradients import GradientConformance  # noqa: E402
from moekit.testing.runner import run  # noqa: E402

__all__ = [
    "AdapterConformance",
    "Case",
    "DispatcherConformance",
    "DispatcherGradientConformance",
    "ExpertsConformance",
    "GradientConformance",
    "Tolerance",
    "assert_close",
    "oracle",
    "relative_error",
    "run",
    "tolerance",
]
