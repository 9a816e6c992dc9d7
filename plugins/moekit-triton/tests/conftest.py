"""On the GPU when there is one, else in Triton's interpreter."""

import pytest
import torch
from triton_interpreter import device  # noqa: F401 (a fixture)


@pytest.fixture
def specialized() -> None:
    """Skip the test except on Hopper with a known triton: Gluon's kernels have no interpreter."""
    import triton
    from moekit_triton.capabilities import GLUON_VERSIONS

    known = any(triton.__version__.startswith(f"{version}.") for version in GLUON_VERSIONS)
    if not torch.cuda.is_available() or not known:
        pytest.skip(f"needs a GPU and triton {' or '.join(GLUON_VERSIONS)}")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
