"""moekit's conformance kit: on a GPU with the library; on a CPU over the stand-in for it."""

import marlin_stand_in
import torch

from moekit.testing import ExpertsConformance


class TestMarlin(ExpertsConformance):
    backend = "marlin"
    if not torch.cuda.is_available():
        backends = marlin_stand_in.registry()


class TestMarlinBatched(ExpertsConformance):
    backend = "marlin_batched"
    if not torch.cuda.is_available():
        backends = marlin_stand_in.registry()
