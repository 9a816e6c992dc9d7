"""moekit's conformance kit. The all-gather runs everywhere, the rest needs the true library."""

from __future__ import annotations

from moekit.testing import (
    DispatcherConformance,
    ExpertsConformance,
    FusedConformance,
    FusedRanksConformance,
)


class TestExperts(ExpertsConformance):
    backend = "flashinfer_cutlass"


class TestOneSided(DispatcherConformance):
    backend = "flashinfer_alltoall"


class TestTwoSided(DispatcherConformance):
    backend = "flashinfer_alltoall_two_sided"


class TestAllGather(DispatcherConformance):
    backend = "flashinfer_allgather"


class TestMegaAlone(FusedConformance):
    backend = "flashinfer_mega"


class TestMegaRanks(FusedRanksConformance):
    backend = "flashinfer_mega"
