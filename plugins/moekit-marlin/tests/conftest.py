"""Real library and GPU when there are both, else Triton's interpreter (which must be chosen before
triton is imported) and a stand-in for the operator."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import marlin_stand_in as stand_in  # noqa: E402
from moekit_marlin import library  # noqa: E402

import moekit  # noqa: E402

VLLM = library.VLLM
REAL = torch.cuda.is_available() and VLLM.folder() is not None and not VLLM.unsupported()
if not torch.cuda.is_available():
    library.operator = lambda: stand_in.moe_wna16_marlin_gemm


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def operator_device(device: torch.device) -> torch.device:
    """For tests that call the operator: the real one on a GPU, the stand-in on a CPU."""
    if device.type == "cuda" and not REAL:
        pytest.skip("; ".join(VLLM.unsupported()) or "vllm is not installed")
    return device


@pytest.fixture(scope="session")
def backends(operator_device: torch.device) -> moekit.Registry:
    return stand_in.registry()
