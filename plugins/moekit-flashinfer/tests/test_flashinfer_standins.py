"""The conformance kit with the library replaced by its semantics in torch: judges all that is ours.

Not on a GPU, where test_flashinfer_conformance.py does the same with the library itself.
"""

from __future__ import annotations

import flashinfer_registry
import flashinfer_standins
import pytest
import torch
from told_rows import told_rows

from moekit.testing import (
    DispatcherConformance,
    ExpertsConformance,
    FusedConformance,
    FusedRanksConformance,
)
from moekit.testing.distributed import RankPool

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the library itself is tested")


@pytest.fixture(autouse=True)
def _standin(monkeypatch):
    flashinfer_standins.install(monkeypatch.setattr)


class TestExperts(ExpertsConformance):
    backend = "flashinfer_cutlass"
    backends = flashinfer_registry.registry()


class TestOneSided(DispatcherConformance):
    backend = "standin_one_sided"
    backends = flashinfer_registry.registry()


class TestTwoSided(DispatcherConformance):
    backend = "standin_two_sided"
    backends = flashinfer_registry.registry()


class TestMega(FusedConformance):
    backend = "standin_mega"
    backends = flashinfer_registry.registry()


class TestMegaRanks(FusedRanksConformance):
    backend = "standin_mega"
    backends = flashinfer_registry.registry()


@pytest.mark.parametrize("name", ["standin_one_sided", "standin_two_sided", "flashinfer_allgather"])
def test_rows_follow_max_tokens(name):
    with RankPool(2) as pool:
        told = pool.run(told_rows, "flashinfer_registry", name, [1, 5, None, 1])
    assert told == [[2, 10, 32, 2]] * 2
