"""On the GPU when there is one, else in Triton's interpreter."""

import pytest
import torch

from moekit.testing.device import device  # noqa: F401 (a fixture)


@pytest.fixture
def specialized() -> None:
    """Skip the test except on Hopper with triton 3.6: Gluon's kernels have no interpreter."""
    import triton

    if not torch.cuda.is_available() or not triton.__version__.startswith("3.6."):
        pytest.skip("needs a GPU and triton 3.6")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
