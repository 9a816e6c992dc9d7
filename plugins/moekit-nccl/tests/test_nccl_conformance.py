"""moekit's own judgement, on GPUs with the library itself; skipped with the reason elsewhere."""

import pytest
import torch

from moekit.testing import DispatcherConformance, DispatcherGradientConformance

if not torch.cuda.is_available():
    pytest.skip("needs GPUs; test_nccl_standin.py runs the kit here", allow_module_level=True)
pytest.importorskip("nccl.ep", reason="nccl-extensions is not installed")


class TestHighThroughput(DispatcherConformance):
    backend = "nccl_ht"
    world_sizes = (1, 2, 4)


class TestLowLatency(DispatcherConformance):
    backend = "nccl_ll"
    world_sizes = (1, 2, 4)


class TestHighThroughputGradients(DispatcherGradientConformance):
    backend = "nccl_ht"
    world_sizes = (2, 4)
