"""The backward with stand-ins for quack, on the CPU; autograd of the oracle decides."""

import cutlass_standins
import pytest
import torch
from moekit_cutlass import training
from moekit_cutlass.library import FUSED
from moekit_cutlass.training import TrainableCutlass

import moekit
from moekit import ExpertWeights, Routing
from moekit.plugin import Dispatched, Wanted
from moekit.testing import GradientConformance, oracle
from moekit.testing.cases import make_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins are for the CPU")

SIZES = dict(num_experts=5, top_k=2, hidden_size=32, intermediate_size=24, device="cpu")
NAMES = frozenset(("w13", "w2"))
EVERYTHING = Wanted(True, True, NAMES)


@pytest.fixture(autouse=True, scope="module")
def standins():
    with cutlass_standins.installed():
        yield


class TestGradients(GradientConformance):
    backend = "cutlass"
    backends = cutlass_standins.registry()
