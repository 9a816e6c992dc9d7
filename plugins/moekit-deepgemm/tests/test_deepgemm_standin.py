"""The conformance kit with the library replaced by its semantics in torch: judges all that is ours.

Not for a GPU, where test_conformance.py does the same with the library itself.
"""

import pytest
import standin
import torch
from moekit_deepgemm import library

from moekit.testing import ExpertsConformance, FusedRanksConformance

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the library itself is tested")


@pytest.fixture(autouse=True)
def _no_library(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: standin)


class TestStandIn(ExpertsConformance):
    backend = "standin"
    backends = standin.registry()


class TestStandInBatched(ExpertsConformance):
    backend = "standin_batched"
    backends = standin.registry()


class TestStandInMega(FusedRanksConformance):
    backend = "standin_mega"
    backends = standin.registry()
