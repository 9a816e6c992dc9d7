"""moekit's conformance kit: on a GPU with the library; on a CPU over the stand-in for it."""

import pytest
import torch

from moekit.testing import ExpertsConformance


@pytest.fixture(scope="class", autouse=True)
def _registry(request):
    if not torch.cuda.is_available():
        request.cls.backends = request.getfixturevalue("backends")


class TestMarlin(ExpertsConformance):
    backend = "marlin"


class TestMarlinBatched(ExpertsConformance):
    backend = "marlin_batched"
