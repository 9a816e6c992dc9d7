"""moekit's conformance kit: over the true library where it runs, else over the stand-in."""

import pytest

from moekit.testing import ExpertsConformance


@pytest.fixture(scope="class", autouse=True)
def _registry(request, backends):
    request.cls.backends = backends


class TestKTransformers(ExpertsConformance):
    backend = "ktransformers"
    device = "cpu"
