"""The device of kernel tests: a GPU if there is one, else the CPU and Triton's interpreter.

The interpreter must be chosen before triton is imported, so this comes first in a conftest.py:

    from moekit.testing.device import device  # noqa: F401
"""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("MOEKIT_TUNED", "")  # a table must not steer the choice in tests
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the current CUDA device, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
