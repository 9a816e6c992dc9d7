"""The conformance kit: what every backend, ours or a stranger's, is judged by.

A backend's whole test file::

    from moekit.testing import ExpertsConformance

    class TestAcme(ExpertsConformance):
        backend = "acme"

Tests are keyed on what the backend's spec declares; what it does not declare is skipped with the
spec's own reasons. Needs pytest: ``pip install 'moekit[testing]'``.
"""

from __future__ import annotations

try:
    import pytest
except ImportError as error:
    raise ImportError(
        "moekit.testing needs pytest, which is an optional extra: pip install 'moekit[testing]'"
    ) from error

# Before their import: the kit's asserts then show the values they compared.
pytest.register_assert_rewrite(
    *(
        f"moekit.testing.{name}"
        for name in (
            *("calls", "diagnose", "dispatchers", "experts", "experts_base", "interface"),
            *("arithmetic", "sizes", "threads", "ranks"),
        )
    )
)

from moekit.testing.compare import Tolerance, relative_error, tolerance  # noqa: E402
from moekit.testing.diagnose import assert_close  # noqa: E402
from moekit.testing.dispatchers import DispatcherConformance  # noqa: E402
from moekit.testing.experts import ExpertsConformance  # noqa: E402
from moekit.testing.runner import run  # noqa: E402

__all__ = [
    "DispatcherConformance",
    "ExpertsConformance",
    "Tolerance",
    "assert_close",
    "relative_error",
    "run",
    "tolerance",
]
