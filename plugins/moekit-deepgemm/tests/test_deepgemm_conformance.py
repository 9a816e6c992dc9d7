"""moekit's conformance kit, with the true library; skipped with the reason where there is none."""

from moekit.testing import ExpertsConformance, FusedRanksConformance


class TestDeepGemm(ExpertsConformance):
    backend = "deepgemm"


class TestDeepGemmBatched(ExpertsConformance):
    backend = "deepgemm_batched"


class TestMega(FusedRanksConformance):
    backend = "deepgemm_mega"
